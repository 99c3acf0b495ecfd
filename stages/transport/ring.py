"""The ring that every ring transport is made of: counters, slot headers, and the two ends of a link. No torch.

A link carries messages one way between two ranks, through K slots. Message n is written to slot n mod K:

    send n     wait ``free >= n + 1 - K``; write the slot; ``full := n + 1``
    receive n  wait ``full >= n + 1``; read the slot; ``free := n + 1``

Each counter has one writer. After each store the writer rings the waiter's doorbell, and the waiter looks at the counter
before it sleeps, so no wake-up can be lost and nobody polls.

The counter is stored after the payload, with ordinary stores: x86 makes them visible in that order (total store order).
Elsewhere the doorbell's system call orders them only for a waiter that slept, not for one that finds the counter before it
sleeps; across processes the ring is therefore offered on x86-64 only. Within one process the hand-over of the GIL orders them.
"""

# pyright: strict

import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from typing import NamedTuple, Protocol, TypeVar

from stages.device import Point
from stages.errors import ConfigError, HeaderMismatch, TransportError

SEQ_BITS = 48
SEQ_MASK = (1 << SEQ_BITS) - 1
_WORD_MASK = (1 << 64) - 1
_HALF = 1 << 63

CONTROL_BYTES = 4096  # a page before the slots: the two counters and the stamp
FULL_OFFSET = 0
FREE_OFFSET = 128  # apart from ``full``: the prefetcher pulls cache lines in pairs
STAMP_OFFSET = 256
SLOT_HEADER_BYTES = 64
ALIGNMENT = 64
MAX_TENSORS = 16  # a dtype code of the header has 4 of 64 bits

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The dtypes a boundary may carry, by torch's name, and their size."""
_DTYPE_CODES = {name: code for code, name in enumerate(DTYPE_BYTES, start=1)}
_DTYPE_NAMES = {code: name for name, code in _DTYPE_CODES.items()}


def counter_word(epoch: int, seq: int) -> int:
    """The 64-bit counter ``epoch ‖ seq``: 16 and 48 bits.

    ``seq`` counts without bound and carries into the epoch, so that one signed 64-bit compare orders counters across every
    wrap; an epoch would have to move 2**48 messages before a late store of it could satisfy a wait of the next one.
    """
    return ((epoch << SEQ_BITS) + seq) & _WORD_MASK


def poison_word(epoch: int) -> int:
    """What satisfies every wait of an epoch, however far its counters have carried."""
    return counter_word(epoch, 1 << 62)


def is_at_least(word: int, target: int) -> bool:
    """The signed cyclic ``>=`` of two counter words, as GPUs' stream waits compare them."""
    return (word - target) & _WORD_MASK < _HALF


def align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class RingLayout:
    """Where things are in a link's segment; ``slot_bytes`` is the payload a slot holds."""

    num_slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if self.num_slots < 1:
            raise ConfigError(f"ring slots {self.num_slots}: must be at least 1")

    @property
    def segment_bytes(self) -> int:
        return CONTROL_BYTES + self.num_slots * self.stride

    def slot_offset(self, seq: int) -> int:
        """Offset of the header of the slot that message ``seq`` uses; the payload is ``SLOT_HEADER_BYTES`` further."""
        return CONTROL_BYTES + seq % self.num_slots * self.stride

    @property
    def stride(self) -> int:
        return SLOT_HEADER_BYTES + align(self.slot_bytes)


class Stamp(NamedTuple):
    """What a segment says of itself, for the ranks to compare with what they were told."""

    magic: int
    epoch: int
    sender: int
    receiver: int
    num_slots: int
    slot_bytes: int
    start_seq: int


STAMP_MAGIC = int.from_bytes(b"SWlk", "little")
_STAMP = struct.Struct("<IIIIQQQ")


def stamp_segment(buffer: mmap, stamp: Stamp) -> None:
    """Make a zeroed segment an empty ring.

    The counters must be set before either rank sees them: in half of all epochs a zeroed word satisfies every wait.
    """
    _STAMP.pack_into(buffer, STAMP_OFFSET, *stamp)
    for offset in (FULL_OFFSET, FREE_OFFSET):
        struct.pack_into("<Q", buffer, offset, counter_word(stamp.epoch, stamp.start_seq))


def read_stamp(buffer: mmap) -> Stamp:
    return Stamp(*_STAMP.unpack_from(buffer, STAMP_OFFSET))


# ---- headers ------------------------------------------------------------------------------------------------------------


class BoundaryHeader(NamedTuple):
    """Heads a slot of hidden states. ``dtype`` packs the codes of all tensors, ``width`` adds their widths up, and ``schema``
    is a checksum over names, dtypes and widths. ``verdict`` is 0 once the sender or a rank before it saw a mismatch."""

    magic: int
    epoch: int
    step_id: int
    seq: int
    rows: int
    dtype: int
    width: int
    in_flight: int
    schema: int
    verdict: int


class TokenHeader(NamedTuple):
    """Heads a slot of sampled tokens; ``width`` is the step's max_sample_len."""

    magic: int
    epoch: int
    step_id: int
    seq: int
    num_reqs: int
    width: int
    verdict: int


Header = BoundaryHeader | TokenHeader
_H = TypeVar("_H", bound=Header)


BOUNDARY_MAGIC = int.from_bytes(b"SWbd", "little")
TOKEN_MAGIC = int.from_bytes(b"SWtk", "little")
_FORMATS: dict[type[Header], struct.Struct] = {
    BoundaryHeader: struct.Struct("<IIQQIQQIII"),
    TokenHeader: struct.Struct("<IIQQIII"),
}


pack_boundary_header = _FORMATS[BoundaryHeader].pack
"""``pack_header`` from the fields of a ``BoundaryHeader``."""


def pack_header(header: Header) -> bytes:
    """As it heads a slot; a multiple of 4 bytes, the verdict last."""
    return _FORMATS[type(header)].pack(*header)


def unpack_header(kind: type[_H], data: bytes | bytearray | memoryview) -> _H:
    """What ``pack_header`` packed; bytes behind it are ignored."""
    return kind(*_FORMATS[kind].unpack_from(data))


def header_of(data: bytes | bytearray | memoryview) -> Header:
    """A packed header of whichever kind its magic names."""
    return unpack_header(TokenHeader if int.from_bytes(data[:4], "little") == TOKEN_MAGIC else BoundaryHeader, data)


def pack_dtypes(dtypes: list[str]) -> int:
    return sum(_DTYPE_CODES[dtype] << 4 * i for i, dtype in enumerate(dtypes))


def check_header(expected: _H, got: _H, *, receiver: int, sender: int) -> None:
    """Raise ``HeaderMismatch`` unless rank ``sender`` sent what rank ``receiver`` expected."""
    if got == expected:
        return
    if got.magic == expected.magic and not got.verdict:
        raise HeaderMismatch(f"step {got.step_id}: rank {sender} reports a header mismatch, seen by itself or before it")
    for name, want, have in zip(expected._fields, expected, got, strict=True):
        if want != have:
            raise HeaderMismatch(
                f"step {expected.step_id}: header field {name}: rank {receiver} expected {_shown(name, want)}, "
                f"rank {sender} sent {_shown(name, have)}"
            )


def _shown(name: str, value: int) -> str:
    if name == "dtype":
        codes = [value >> 4 * i & 15 for i in range(MAX_TENSORS) if value >> 4 * i]
        return "+".join(_DTYPE_NAMES.get(code, "unknown") for code in codes)
    return hex(value) if name in ("magic", "schema") else str(value)


# ---- waiting ------------------------------------------------------------------------------------------------------------


class Doorbell(Protocol):
    """A binary event: a ring is kept until a wait takes it, several rings count as one. One thread waits at a time."""

    def ring(self) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class Poison:
    """Breaks the waits of one rank: once poisoned, each of them raises the cause, then and ever after."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cause: BaseException | None = None
        self._wakers: set[Callable[[], None]] = set()

    @property
    def is_set(self) -> bool:
        return self._cause is not None

    def set(self, cause: BaseException) -> None:
        """The first cause stays. Never blocks, never raises; any thread."""
        with self._lock:  # held while waking, so that no waker outlives its ``forget``
            if self._cause is None:
                self._cause = cause
                for wake in self._wakers:
                    wake()

    def check(self) -> None:
        if self._cause is not None:
            raise self._cause

    def watch(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` on ``set``; at once when that was already."""
        with self._lock:
            self._wakers.add(wake)
            if self._cause is not None:
                wake()

    def forget(self, wake: Callable[[], None]) -> None:
        with self._lock:
            self._wakers.discard(wake)

    def wait_for(self, point: Point) -> None:
        """Block until ``point`` is reached; raises its stream's error, or the cause."""
        if not point.is_reached():
            gate = threading.Lock()  # threading.Event costs five times as much, on every step's way
            gate.acquire()

            def open_gate() -> None:
                with suppress(RuntimeError):  # opened already: the point was reached and the epoch ended
                    gate.release()

            point.add_done_callback(open_gate)
            self.watch(open_gate)
            gate.acquire()
            self.forget(open_gate)
        self.check()
        point.is_reached()


# ---- ends ---------------------------------------------------------------------------------------------------------------


class Link:
    """One direction between two ranks, as one of them holds it: the segment, the stamp it was made with, the doorbells.

    ``full_bell`` wakes the receiver, ``free_bell`` the sender.
    """

    def __init__(self, buffer: mmap, full_bell: Doorbell, free_bell: Doorbell) -> None:
        self.stamp = read_stamp(buffer)
        self.layout = RingLayout(self.stamp.num_slots, self.stamp.slot_bytes)
        self.full_bell = full_bell
        self.free_bell = free_bell
        self._buffer: mmap | None = buffer

    @property
    def buffer(self) -> mmap:
        if self._buffer is None:
            raise TransportError(f"the link from rank {self.stamp.sender} to rank {self.stamp.receiver} is closed")
        return self._buffer

    def sender(self, poison: Poison) -> "RingSender":
        return RingSender(self, poison)

    def receiver(self, poison: Poison) -> "RingReceiver":
        return RingReceiver(self, poison)

    def payloads(self) -> list[memoryview]:
        """The payload of each slot, in place."""
        segment, layout = memoryview(self.buffer), self.layout
        starts = [layout.slot_offset(slot) + SLOT_HEADER_BYTES for slot in range(layout.num_slots)]
        return [segment[start : start + layout.slot_bytes] for start in starts]

    def close(self) -> None:
        """Close the doorbells and let go of the segment, which is unmapped with the last tensor that views it.

        It is never unmapped by force: a tensor made from it would then read freed memory.
        """
        if self._buffer is not None:
            self._buffer = None
            self.full_bell.close()
            self.free_bell.close()


class _End:
    """What both ends do: count messages and wait on the counter that the peer writes."""

    def __init__(self, link: Link, poison: Poison, bell: Doorbell, read_offset: int, write_offset: int) -> None:
        self.link = link
        self.layout = link.layout
        self._epoch = link.stamp.epoch
        self._poison = poison
        self._bell = bell
        self._peer_words = memoryview(link.buffer)[read_offset : read_offset + 8].cast("Q")
        self._own_words = memoryview(link.buffer)[write_offset : write_offset + 8].cast("Q")
        self._next_seq = link.stamp.start_seq
        poison.watch(bell.ring)

    def claim(self) -> int:
        """The number of the next message. Called in message order, by one thread."""
        seq = self._next_seq
        self._next_seq += 1
        return seq

    def close(self) -> None:
        """After the last use of this end; closes the link."""
        self._poison.forget(self._bell.ring)
        self._peer_words.release()
        self._own_words.release()
        self.link.close()

    def _wait(self, seq: int) -> None:
        target = counter_word(self._epoch, seq)
        while True:
            self._poison.check()
            if is_at_least(self._peer_words[0], target):
                return
            self._bell.wait()

    def _store(self, seq: int) -> None:
        self._own_words[0] = counter_word(self._epoch, seq)


class RingSender(_End):
    def __init__(self, link: Link, poison: Poison) -> None:
        super().__init__(link, poison, link.free_bell, FREE_OFFSET, FULL_OFFSET)

    def wait_free(self, seq: int) -> int:
        """Block until the slot of message ``seq`` may be written, and return when; raises the poison's cause."""
        self._wait(seq + 1 - self.layout.num_slots)
        return time.perf_counter_ns()

    def publish(self, seq: int, header: Header) -> None:
        """Write the header, after the payload was written, and let the receiver see message ``seq``."""
        _FORMATS[type(header)].pack_into(self.link.buffer, self.layout.slot_offset(seq), *header)
        self._store(seq + 1)
        self.link.full_bell.ring()


class RingReceiver(_End):
    def __init__(self, link: Link, poison: Poison) -> None:
        super().__init__(link, poison, link.full_bell, FULL_OFFSET, FREE_OFFSET)
        self._lock = threading.Lock()
        self._released: set[int] = set()  # out of order, waiting for an earlier one
        self._next_free = self._next_seq

    def wait_full(self, seq: int, expected: Header) -> int:
        """Block until message ``seq`` is there, compare its header, and return when it was there (``time.perf_counter_ns``);
        raises ``HeaderMismatch`` or the poison's cause."""
        self._wait(seq + 1)
        there_at_ns = time.perf_counter_ns()
        got = unpack_header(type(expected), memoryview(self.link.buffer)[self.layout.slot_offset(seq) :])
        check_header(expected, got, receiver=self.link.stamp.receiver, sender=self.link.stamp.sender)
        return there_at_ns

    def release(self, seq: int) -> None:
        """Give the credit of message ``seq`` back. Any thread; credits reach the sender in message order."""
        with self._lock:
            self._released.add(seq)
            before = self._next_free
            while self._next_free in self._released:
                self._released.remove(self._next_free)
                self._next_free += 1
            if self._next_free != before:
                self._store(self._next_free)
                self.link.free_bell.ring()
