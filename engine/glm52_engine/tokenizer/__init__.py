"""Text, token ids and chat templates."""

from glm52_engine.tokenizer.tokenizer import Detokenizer, TemplateError, Tokenizer, decodable_bound, eos_token_ids

__all__ = ["Detokenizer", "TemplateError", "Tokenizer", "decodable_bound", "eos_token_ids"]
