"""Text, token ids and chat templates; reasoning and tool calls in what comes back."""

from glm52_engine.tokenizer.answer import AnswerDelta, AnswerParser
from glm52_engine.tokenizer.reasoning import Thinking, thinking_after
from glm52_engine.tokenizer.tokenizer import Detokenizer, TemplateError, Tokenizer, decodable_bound, eos_token_ids
from glm52_engine.tokenizer.tool_calls import FUNCTION_NAME, CallDelta

__all__ = [
    "FUNCTION_NAME",
    "AnswerDelta",
    "AnswerParser",
    "CallDelta",
    "Detokenizer",
    "TemplateError",
    "Thinking",
    "Tokenizer",
    "decodable_bound",
    "eos_token_ids",
    "thinking_after",
]
