"""Text, token ids and chat templates."""

from glm52_engine.tokenizer.tokenizer import Detokenizer, TemplateError, Tokenizer, decodable_bound

__all__ = ["Detokenizer", "TemplateError", "Tokenizer", "decodable_bound"]
