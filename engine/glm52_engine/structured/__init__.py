"""Output that has to fit a JSON schema, a regular expression, a grammar or the form of tool calls.

A request's wish becomes the text of a grammar (`sources`, `tool_grammar`: pure) and is compiled once (`compiler`); then
it tells, token by token, what may come next (`matcher`). `masks` alone needs torch and is imported by its own name.
"""

from glm52_engine.structured.compiler import Grammar, GrammarCompiler
from glm52_engine.structured.errors import GrammarError
from glm52_engine.structured.matcher import Matcher
from glm52_engine.structured.tool_grammar import tool_calls

__all__ = ["Grammar", "GrammarCompiler", "GrammarError", "Matcher", "tool_calls"]
