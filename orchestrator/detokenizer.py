"""Token ids to text as they come: no half characters, and nothing past a stop string."""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # of vocabularies that fall back to bytes
_WORD_START = "\u2581"  # how vocabularies of that kind write a space


class TextStream(ABC):
    """Tokens of one generation in, text out; text is given once it cannot change any more."""

    @abstractmethod
    def push(self, token_ids: Iterable[int]) -> str: ...

    @abstractmethod
    def flush(self) -> str:
        """The text of what is left, such as an unfinished character, which comes out as U+FFFD."""


class TextStreams:
    """Makes the text streams of one tokenizer; which kind they are is decided here, once."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self._is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._visible_bytes = _TokenBytes(backend, special_ids)
        self._all_bytes = _TokenBytes(backend, frozenset())

    def open(self, skip_special_tokens: bool) -> TextStream:
        if self._is_byte_level:
            return _ByteLevelStream(self._visible_bytes if skip_special_tokens else self._all_bytes)
        return _WindowStream(self._backend, self._special_ids if skip_special_tokens else frozenset())

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for by itself: maybe a part of a character, and of a special token its name."""
        if self._is_byte_level:
            return self._all_bytes[token_id]
        token = self._backend.id_to_token(token_id) or ""
        if found := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(found[1], 16)])
        return token.replace(_WORD_START, " ").encode()


class IncrementalDetokenizer:
    """A generation's text in deltas, ended by the first stop string.

    Text that may be the beginning of a stop string is held back. The stop string that is complete first ends the text
    just before it, the longest one when several are complete at once, so that the answer does not depend on how the text
    was cut into tokens. ``stopped_by`` is that string, after which nothing more comes out. The text of the first
    ``num_exempt_tokens`` is not searched. With ``includes_stop`` the text ends just after the stop string.
    """

    def __init__(
        self, stream: TextStream, stop: Sequence[str] = (), num_exempt_tokens: int = 0, includes_stop: bool = False
    ) -> None:
        self._stream = stream
        self._includes_stop = includes_stop
        self._stop = tuple(stop)
        self._first_chars = {text[0] for text in stop}
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self._num_exempt = num_exempt_tokens if stop else 0
        self.stopped_by: str | None = None

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens add, as far as it is certain."""
        exempt = ""
        if self._num_exempt:
            token_ids = list(token_ids)
            exempt = self._stream.push(token_ids[: self._num_exempt])
            num_pushed = min(self._num_exempt, len(token_ids))
            self._num_exempt -= num_pushed
            token_ids = token_ids[num_pushed:]
        text = self._stream.push(token_ids)
        return exempt + (self._until_stop(text) if self._stop and text else text)

    def flush(self) -> str:
        """The rest, after the last token."""
        text = self._stream.flush()
        if not self._num_exempt:
            text = self._until_stop(text)
        held, self._held = self._held, ""
        return text + held

    def _until_stop(self, text: str) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.stopped_by = min(found)
            self._held = ""
            return text[: end if self._includes_stop else start]
        end = self._safe_end(text)
        self._held = text[end:]
        return text[:end]

    def _safe_end(self, text: str) -> int:
        """Where the longest end of ``text`` starts that a stop string begins with."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_chars:
                end = text[start:]
                if any(stop.startswith(end) for stop in self._stop):
                    return start
        return len(text)


def _byte_alphabet() -> dict[str, int]:
    """The byte behind each character of byte-level BPE: printable bytes are themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class _TokenBytes(dict[int, bytes]):
    """Token id -> its bytes under byte-level BPE, worked out when first seen: a whole vocabulary takes a while."""

    def __init__(self, backend: tokenizers.Tokenizer, hidden: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._hidden else self._backend.id_to_token(token_id)
        found = b"" if token is None else self._bytes_of(token)  # a model's vocabulary may be padded past the tokenizer's
        self[token_id] = found
        return found

    @staticmethod
    def _bytes_of(token: str) -> bytes:
        try:
            return bytes([_BYTE_OF[char] for char in token])
        except KeyError:  # an added token, which is written as it is
            return token.encode()


class _ByteLevelStream(TextStream):
    """Byte-level BPE: text is the tokens' bytes, whatever their neighbours are."""

    def __init__(self, token_bytes: _TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        token_bytes = self._token_bytes
        return self._decoder.decode(b"".join([token_bytes[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream(TextStream):
    """Any other tokenizer, whose tokens may read differently beside each other.

    The tokens of the last piece of text are decoded again together with the new ones; what these add is the new text. It
    is held back while it ends in U+FFFD, which may be the beginning of a character, for a bounded number of tokens.
    """

    MAX_HELD_TOKENS = 8  # a character has at most four bytes, and a byte-fallback token is one

    def __init__(self, backend: tokenizers.Tokenizer, hidden: frozenset[int]) -> None:
        self._backend = backend
        self._hidden = hidden
        self._told: list[int] = []  # the tokens of the last piece of text
        self._new: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._hidden])

    def flush(self) -> str:
        return self._tell(self._added_text())

    def _push_one(self, token_id: int) -> str:
        self._new.append(token_id)
        text = self._added_text()
        is_open = not text or text.endswith("\ufffd")
        return "" if is_open and len(self._new) < self.MAX_HELD_TOKENS else self._tell(text)

    def _tell(self, text: str) -> str:
        self._told, self._new = self._new or self._told, []
        return text

    def _added_text(self) -> str:
        before = self._backend.decode(self._told, skip_special_tokens=False)
        return self._backend.decode(self._told + self._new, skip_special_tokens=False)[len(before) :]
