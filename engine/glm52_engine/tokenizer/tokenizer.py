"""Text ↔ token ids of one checkpoint: `tokenizer.json`, `chat_template.jinja`, `generation_config.json`."""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox
import tokenizers

from glm52_engine.config import ConfigError
from glm52_engine.tokenizer.guard import Guard
from glm52_engine.tokenizer.marks import MARKS

_MISFITS = (
    jinja2.TemplateError,
    TypeError,
    AttributeError,
    KeyError,
    ValueError,
    OverflowError,
    RecursionError,
)
"""What a template raises for values that it did not expect."""


class TemplateError(ValueError):
    """These messages do not fit the chat template; the text goes to the client."""


class Tokenizer:
    """Thread-safe after construction.

    `eos_ids`: every id that ends a generation. `vocab_bound`: greatest decodable id + 1; the model's vocabulary is
    padded beyond it, and a sampled id from the padding would be no text at all. `template_variables`: what the chat
    template reads.
    """

    def __init__(self, raw: tokenizers.Tokenizer, *, template: str, eos_ids: frozenset[int]) -> None:
        self._raw = raw
        self.eos_ids = eos_ids
        vocab: dict[str, int] = raw.get_vocab(with_added_tokens=True)
        self.vocab_bound = max(vocab.values()) + 1
        self._bytes, self._special = _token_bytes(raw, vocab)
        self._added: dict[str, int] = {entry.content: token for token, entry in raw.get_added_tokens_decoder().items()}
        self._markers = re.compile("(" + "|".join(map(re.escape, sorted(self._added, key=len, reverse=True))) + ")")
        self._guard = Guard(self._added, [text for text, token in self._added.items() if token not in self._special])
        self._template, self.template_variables = _compile(template)

    @classmethod
    def load(cls, checkpoint: Path) -> Tokenizer:
        """Read a checkpoint directory; raises ConfigError naming the file."""
        path = checkpoint / "tokenizer.json"
        text = _read(path)
        _check_byte_level(path, text)
        try:
            raw = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path}: found no usable tokenizer ({error}); expected Hugging Face's format") from error
        template = _read(checkpoint / "chat_template.jinja")
        try:
            return cls(raw, template=template, eos_ids=eos_token_ids(checkpoint))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{checkpoint / 'chat_template.jinja'}: line {error.lineno}: {error.message}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it become their ids, none are added."""
        return _ids(self._raw, text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; what is no UTF-8 becomes U+FFFD. Raises ValueError for an id outside the vocabulary."""
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return "".join([detokenizer.push(token) for token in ids]) + detokenizer.flush()

    def token_bytes(self, token: int, *, skip_special: bool = True) -> bytes:
        """Bytes that one token adds to the text; a special token adds none unless asked for."""
        if skip_special and token in self._special:
            return b""
        try:
            return self._bytes[token]
        except KeyError:
            raise ValueError(f"token id {token} is not in the tokenizer's vocabulary") from None

    def id_of(self, token: str) -> int | None:
        """The id of a token that the vocabulary has under this very text, as special tokens have."""
        found: int | None = self._raw.token_to_id(token)
        return found

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of the tokens beside the byte-level vocabulary: turns, `<think>`, the marks of tool calls, ends."""
        return frozenset(self._raw.get_added_tokens_decoder())

    def vocabulary(self) -> list[bytes]:
        """Bytes of every id below `vocab_bound`; none for an id without a token."""
        return [self._bytes.get(token, b"") for token in range(self.vocab_bound)]

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        return Detokenizer(self, skip_special=skip_special)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Ids of a conversation's prompt; `variables` reach the template (GLM's: enable_thinking).

        Markers that the template writes become special tokens. The same characters in what a client wrote stay text,
        or a user could end their turn and speak as the system. Messages are OpenAI's; the arguments of a tool call
        may be a JSON string or an object. Raises TemplateError.
        """
        prompt, mark = self._render(messages, tools, {"add_generation_prompt": add_generation_prompt, **variables})
        if not mark:
            return self.encode(prompt)
        ids: list[int] = []
        # Text and markers by turns; a marker that holds the mark is not one.
        for place, piece in enumerate(self._markers.split(prompt)):
            if place % 2:
                ids.append(self._added[piece])
            else:
                ids += _ids(self._plain, piece.replace(mark, ""))
        return ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of what `encode_chat` encodes, in which a client's markers look like the template's."""
        prompt, mark = self._render(messages, tools, {"add_generation_prompt": add_generation_prompt, **variables})
        return prompt.replace(mark, "") if mark else prompt

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> tuple[str, str]:
        """The prompt, and the mark within each marker that is none."""
        try:
            guarded = self._guard.shield([_with_parsed_calls(message) for message in messages], tools)
            return self._template.render(messages=guarded.messages, tools=guarded.tools, **variables), guarded.mark
        except _MISFITS as error:
            raise TemplateError(f"the messages do not fit the chat template: {error}") from error

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer without any special token. Made when a client first writes one: it costs memory."""
        fields = json.loads(self._raw.to_str())
        return tokenizers.Tokenizer.from_str(json.dumps({**fields, "added_tokens": [], "post_processor": None}))


class Detokenizer:
    """Text of a stream of ids, held back until it is whole UTF-8; one per request."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Text that became complete with this token, often empty in the middle of a character."""
        return self._decoder.decode(self._tokenizer.token_bytes(token, skip_special=self._skip_special))

    def flush(self) -> str:
        """What is left at the end of the stream: U+FFFD for a character that never became whole."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _ids(raw: tokenizers.Tokenizer, text: str) -> list[int]:
    # `encode` would hold Python's lock for as long as it takes, which is seconds for a long prompt: no other thread,
    # and no event loop, would run. This call lets go of it, and takes half the time, since it keeps no offsets.
    ids: list[int] = raw.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _with_parsed_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """OpenAI sends arguments as a string of JSON, templates iterate over an object."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def decodable_bound(checkpoint: Path) -> int:
    """Greatest decodable id + 1 of a checkpoint's tokenizer, without compiling its template."""
    path = checkpoint / "tokenizer.json"
    try:
        raw = json.loads(_read(path))
        ids = [*raw["model"]["vocab"].values(), *(token["id"] for token in raw.get("added_tokens", []))]
        return int(max(ids)) + 1
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: found no vocabulary ({error!r}); expected Hugging Face's format") from error


def _token_bytes(raw: tokenizers.Tokenizer, vocab: dict[str, int]) -> tuple[dict[int, bytes], frozenset[int]]:
    """The bytes of every id: added tokens stand for their own text, the others are spelt in the byte alphabet."""
    to_byte = _byte_of_character()
    added = raw.get_added_tokens_decoder()
    table = {
        token: text.encode() if token in added else bytes(to_byte[character] for character in text)
        for text, token in vocab.items()
    }
    # A file may call the marks of tool calls special; without them no call could be read.
    return table, frozenset(token for token, entry in added.items() if entry.special and entry.content not in MARKS)


def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies spell printable Latin-1 bytes as themselves, the rest from U+0100 on in byte order."""
    visible = {byte for byte in range(256) if chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD)}
    hidden = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


def _check_byte_level(path: Path, text: str) -> None:
    try:
        decoder = json.loads(text)["decoder"]
        kind = decoder["type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: decoder: missing ({error!r}); expected ByteLevel") from error
    if kind != "ByteLevel":
        # Bytes are looked up per token; any other decoder would make text that this lookup does not.
        raise ConfigError(f"{path}: decoder.type: found {kind!r}; expected 'ByteLevel'")


def eos_token_ids(checkpoint: Path) -> frozenset[int]:
    """`generation_config.json` decides, as everywhere; without it config.json does."""
    path = checkpoint / "generation_config.json"
    if not path.exists():
        path = checkpoint / "config.json"
    try:
        value = json.loads(_read(path))["eos_token_id"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: eos_token_id: missing ({error!r}); expected a list of token ids") from error
    ids = value if isinstance(value, list) else [value]
    if not ids or not all(type(token) is int for token in ids):
        raise ConfigError(f"{path}: eos_token_id: found {value!r}; expected a list of token ids")
    return frozenset(ids)


def _compile(template: str) -> tuple[jinja2.Template, frozenset[str]]:
    # A checkpoint is data: its template must not reach Python's internals.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    names = jinja2.meta.find_undeclared_variables(environment.parse(template))
    return environment.from_string(template), frozenset(names)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # jinja2's own filter escapes < > & for HTML, which a model would see as noise.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected it in the checkpoint") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 ({error}); expected text") from error
