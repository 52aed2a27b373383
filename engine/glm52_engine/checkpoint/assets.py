"""Tokenizer files of the presets, in the form that GLM checkpoints ship: byte-level, with GLM's special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BYTES = 256

RECIPE, WEIGHTS, MERGES = "recipe.json", "model.safetensors", "merges.txt"
"""What a training leaves, and a trained preset is made of."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "/nothink",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)

_KEPT_IN_TEXT = frozenset(SPECIAL_TOKENS[SPECIAL_TOKENS.index("/nothink") :])
"""Single tokens that are part of the text: reasoning and tool-call parsers look for them in the decoded output."""

EOS_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")

CHAT_TEMPLATE = """\
{#- messages: system, user, assistant (content, reasoning_content, tool_calls), tool. enable_thinking: default true. -#}
{%- macro text(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content -%}
    {%- for part in content if part.type == "text" -%}{{- part.text -}}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
[gMASK]<sop>
{%- if tools -%}
  {{- "<|system|>\\n# Tools\\nCall a function by its signature, one JSON object a line:\\n" -}}
  {%- for tool in tools -%}{{- tool | tojson -}}{{- "\\n" -}}{%- endfor -%}
  {{- "Form of a call: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>" -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == "user" -%}
    {{- "<|user|>\\n" -}}{{- text(message.content) -}}
  {%- elif message.role in ("system", "developer") -%}
    {{- "<|system|>\\n" -}}{{- text(message.content) -}}
  {%- elif message.role == "assistant" -%}
    {{- "<|assistant|>\\n<think>" -}}{{- message.reasoning_content or "" -}}{{- "</think>" -}}
    {{- text(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {{- "<tool_call>" -}}{{- function.name -}}
      {%- for key, value in function.arguments.items() -%}
        {{- "<arg_key>" -}}{{- key -}}{{- "</arg_key><arg_value>" -}}
        {{- value if value is string else value | tojson -}}{{- "</arg_value>" -}}
      {%- endfor -%}
      {{- "</tool_call>" -}}
    {%- endfor -%}
  {%- elif message.role == "tool" -%}
    {%- if loop.first or loop.previtem.role != "tool" -%}{{- "<|observation|>" -}}{%- endif -%}
    {{- "<tool_response>" -}}{{- text(message.content) -}}{{- "</tool_response>" -}}
  {%- else -%}
    {{- raise_exception("unknown role " ~ message.role) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "<|assistant|>\\n" -}}
  {%- if enable_thinking is defined and not enable_thinking -%}{{- "<think></think>" -}}{%- endif -%}
{%- endif -%}
"""

# Digits are grouped in threes and never merge with letters; a contraction, a word or a run of marks is one piece.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_alphabet() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary: itself where it is printable Latin-1."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def special_token_id(token: str, merges: int) -> int:
    """Bytes, then what merges make, then the special tokens; `merges`: how many there are."""
    return _BYTES + merges + SPECIAL_TOKENS.index(token)


def tokenizer_json(merges: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """A `tokenizer.json`: the 256 bytes (id = byte), one token per merge, and the special tokens behind them.

    merges: pairs in the byte alphabet, in the order in which they apply.
    """
    alphabet = _byte_alphabet()
    vocabulary = {alphabet[byte]: byte for byte in range(_BYTES)}
    vocabulary |= {left + right: _BYTES + place for place, (left, right) in enumerate(merges)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": special_token_id(token, len(merges)),
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token not in _KEPT_IN_TEXT,
            }
            for token in SPECIAL_TOKENS
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in merges],
        },
    }


def tokenizer_config(model_max_length: int) -> dict[str, Any]:
    """A `tokenizer_config.json`; model_max_length in tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
