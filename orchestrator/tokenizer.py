"""Text to token ids and back, and the chat template: what ``transformers`` would give, without loading it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orchestrator.detokenizer import IncrementalDetokenizer, TextStream, TextStreams
from stages.errors import ConfigError, one_line

_NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's tokenizer. ``encode`` and ``apply_chat_template`` may run in a thread of their own."""

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], chat_template: str | None) -> None:
        self.backend = backend
        self._special_tokens = special_tokens
        self._template = None if chat_template is None else _compile(chat_template)
        special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        self._text_streams = TextStreams(backend, special_ids)

    @staticmethod
    def from_directory(path: Path) -> "Tokenizer":
        """The tokenizer of a Hugging Face model directory; ``ConfigError`` when a file is missing or malformed."""
        config = _read_json(path / "tokenizer_config.json")
        special_tokens = _special_tokens({**_read_json(path / "special_tokens_map.json"), **config})
        return Tokenizer(_load_backend(path / "tokenizer.json", special_tokens), special_tokens, _chat_template(path, config))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written in it become their ids, as everywhere in this field.

        ``add_special_tokens`` adds what tokenizer.json puts around a prompt, such as a beginning-of-sequence token;
        ``add_bos_token`` of a tokenizer_config.json counts for nothing beside it, as in transformers.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        num_exempt_tokens: int = 0,
        includes_stop: bool = False,
    ) -> IncrementalDetokenizer:
        """For one generation, whose text ends at the first of ``stop`` (non-empty strings) past its exempt tokens."""
        return IncrementalDetokenizer(self.text_stream(skip_special_tokens), stop, num_exempt_tokens, includes_stop)

    def text_stream(self, skip_special_tokens: bool = True) -> TextStream:
        return self._text_streams.open(skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for by itself: maybe a part of a character, and of a special token its name."""
        return self._text_streams.token_bytes(token_id)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation. ``variables`` are given to the template as they are.

        ``ConfigError`` when the model has no template or the template refuses the messages.
        """
        text = self.render_chat_template(messages, add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)  # a template writes the special tokens itself

    def render_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, /, **variables: Any
    ) -> str:
        """The text of which ``apply_chat_template`` gives the ids."""
        if self._template is None:
            raise ConfigError("messages: the model has no chat template; use /v1/completions")
        context = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render({**context, "messages": messages, "add_generation_prompt": add_generation_prompt})
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as exc:
            # a template is a program: what it trips over in the messages comes out as any of these
            cause = str(exc) if isinstance(exc, jinja2.TemplateError) else one_line(exc)
            raise ConfigError(f"messages: the model's chat template refused them: {cause[:300]}") from exc


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file, empty when there is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as exc:
        raise ConfigError(f"{path}: must be JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return cast("dict[str, Any]", found)


def _content(token: object) -> str | None:
    """The text of a token that a config file gives as a string or as an object."""
    if isinstance(token, Mapping):
        token = cast("Mapping[str, object]", token).get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _content(config.get(name)) for name in _NAMED_SPECIAL_TOKENS}
    return {name: token for name, token in found.items() if token is not None}


def _load_backend(path: Path, special_tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ConfigError(f"{path}: not found; a model directory must have a tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as exc:  # the Rust side raises bare Exception
        raise ConfigError(f"{path}: not a tokenizer.json that can be read: {one_line(exc)}") from exc
    backend.no_truncation()  # a file may carry the settings of somebody's training run
    backend.no_padding()
    known_special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    unmarked = [
        token for token in special_tokens.values() if token not in known_special and backend.token_to_id(token) is not None
    ]
    marked = [tokenizers.AddedToken(token, special=True, normalized=False) for token in unmarked]
    backend.add_special_tokens(marked)  # pyright: ignore[reportUnknownMemberType]
    return backend


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the template of tokenizer_config.json; of several named ones the one called default."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {str(entry["name"]): entry["template"] for entry in cast("list[dict[str, Any]]", found)}
        found = named.get("default")
    return found if isinstance(found, str) else None


class _GenerationBlock(jinja2.ext.Extension):
    """Reads ``{% generation %}...{% endgeneration %}``, which marks text for training, as the text itself."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)  # local time, as templates expect


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _compile(template: str) -> jinja2.Template:
    # Sandboxed: the template is a program that came with the weights.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson  # pyright: ignore[reportUnknownMemberType]
    try:
        return environment.from_string(template, globals={"raise_exception": _raise_exception, "strftime_now": _strftime_now})
    except jinja2.TemplateError as exc:
        raise ConfigError(f"the model's chat template cannot be read: {exc}") from exc
