"""The record that a rank, or the engine, writes into shared memory while it works. ``metrics.reader`` reads it.

A ledger is a memory file (memfd): it has no name that could be left behind, it lives as long as somebody holds it, and it
can be read when its writer hangs or is dead. A restarted rank is handed the same one and counts on.

One thread of one process writes, by plain stores of aligned 64-bit words: no lock, no allocation, no system call. A reader may
see an observation half written, its bucket without its sum; what would do harm so is told by construction: a step's record
carries its number twice, the infos have a version. A rank stores little more than a record of each step; the counters that
follow from it are added up, in the same memory, by whoever shows them (``metrics.fold``).

Times are ``time.perf_counter_ns()``, which on Linux is the same clock in all processes of a host.
"""

import fcntl
import json
import mmap
import os
import struct
import time
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from metrics.catalog import Kind, Metric, Place, Writer
from metrics.layout import (
    HEADER_WORDS,
    INFO_BYTES,
    INFO_LENGTH_WORD,
    INFO_VERSION_WORD,
    LAYOUT_WORD,
    MAGIC,
    MAGIC_WORD,
    NUM_PROCESSES_WORD,
    PROCESS_START_WORD,
    PROCESS_WORD,
    RANK_WORD,
    WALL_OFFSET_WORD,
    WORD_BYTES,
    WORLD_SIZE_WORD,
    WRITER_WORD,
    WRITERS,
    Layout,
    scaled_buckets,
)


class LedgerError(Exception):
    """A file is not a ledger, or not one that this version can read; ``str()`` is one line."""


def create_ledger(place: Place) -> int:
    """The descriptor of a new ledger, all zero. Not inheritable until the launcher passes it on; the caller owns it."""
    layout = Layout(place)
    name = f"stagewire-ledger-{place.writer}" + (f"-{place.rank}" if place.writer is Writer.RANK else "")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _lay_out(fd, layout)
        # A reader of a file that shrank would be killed by SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def create_ledger_at(path: Path, place: Place) -> int:
    """The same as a file, for a rank that was not started by an engine of its host. One that is there and fits is kept, so that
    its counters go on; another is replaced."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        layout = Layout(place)
        if not _fits(fd, layout):
            os.ftruncate(fd, 0)
            _lay_out(fd, layout)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lay_out(fd: int, layout: Layout) -> None:
    place = layout.place
    header = [0] * HEADER_WORDS
    header[LAYOUT_WORD] = layout.hash
    header[WRITER_WORD] = WRITERS.index(place.writer)
    header[RANK_WORD] = place.rank
    header[WORLD_SIZE_WORD] = place.world_size
    header[MAGIC_WORD] = MAGIC
    os.ftruncate(fd, layout.num_bytes)
    os.pwrite(fd, struct.pack(f"<{HEADER_WORDS}q", *header), 0)


def _fits(fd: int, layout: Layout) -> bool:
    head = os.pread(fd, HEADER_WORDS * WORD_BYTES, 0)
    if len(head) < HEADER_WORDS * WORD_BYTES or os.fstat(fd).st_size != layout.num_bytes:
        return False
    words = struct.unpack(f"<{HEADER_WORDS}q", head)
    return words[MAGIC_WORD] == MAGIC and words[LAYOUT_WORD] == layout.hash


def place_of(fd: int) -> Place:
    """Whose ledger it is; ``LedgerError`` when it is none, or has another layout than this version's."""
    head = os.pread(fd, HEADER_WORDS * WORD_BYTES, 0)
    if len(head) < HEADER_WORDS * WORD_BYTES:
        raise LedgerError(f"ledger: has {len(head)} bytes, its header alone takes {HEADER_WORDS * WORD_BYTES}")
    words = struct.unpack(f"<{HEADER_WORDS}q", head)
    if words[MAGIC_WORD] != MAGIC or not 0 <= words[WRITER_WORD] < len(WRITERS):
        raise LedgerError("ledger: is not one, its first words say otherwise")
    place = Place(writer=Writer(WRITERS[words[WRITER_WORD]]), rank=words[RANK_WORD], world_size=words[WORLD_SIZE_WORD])
    layout, num_bytes = Layout(place), os.fstat(fd).st_size
    if words[LAYOUT_WORD] != layout.hash or num_bytes != layout.num_bytes:
        raise LedgerError(
            f"ledger of {place.writer} {place.rank}: has layout {words[LAYOUT_WORD]:#x} of {num_bytes} bytes, this version has "
            f"{layout.hash:#x} of {layout.num_bytes}: another version of Stagewire writes it"
        )
    return place


def process_start(process_id: int) -> int:
    """When the kernel started a process, in clock ticks since boot; 0 when there is none. A zombie is none."""
    with suppress(OSError):
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        if fields[0] not in "ZX":
            return int(fields[19])
    return 0


# ---- writing ------------------------------------------------------------------------------------------------------------

Words = memoryview  # of signed 64-bit words


class Counter:
    """Goes up. Of a time, in nanoseconds."""

    __slots__ = ("_index", "_words")

    def __init__(self, words: Words, index: int) -> None:
        self._words = words
        self._index = index

    def add(self, amount: int = 1) -> None:
        self._words[self._index] += amount


class Gauge:
    """A value. Of a time, in nanoseconds."""

    __slots__ = ("_index", "_words")

    def __init__(self, words: Words, index: int) -> None:
        self._words = words
        self._index = index

    def set(self, value: int) -> None:
        self._words[self._index] = value


class Histogram:
    """Observations, counted by bucket. Of a time, in nanoseconds. One of these for each series: it keeps what it has written,
    which is quicker than to read it back."""

    __slots__ = ("_bounds", "_counts", "_first", "_sum", "_sum_word", "_words")

    def __init__(self, words: Words, first: int, bounds: tuple[int, ...]) -> None:
        self._words = words
        self._first = first
        self._bounds = bounds
        self._sum_word = first + len(bounds) + 1
        *self._counts, self._sum = words[first : self._sum_word + 1]

    def observe(self, value: int) -> None:
        words, bucket = self._words, bisect_left(self._bounds, value)
        words[self._first + bucket] = self._counts[bucket] = self._counts[bucket] + 1
        words[self._sum_word] = self._sum = self._sum + value


class LedgerWriter:
    """A process's hold of the ledger it writes: one at a time, from one thread. Takes ``fd`` over.

    Series are looked up once, when whoever writes them is made: ``KeyError`` for one that is not in the ledger.
    """

    def __init__(self, fd: int) -> None:
        try:
            self.layout = Layout(place_of(fd))
            self.memory = mmap.mmap(fd, self.layout.num_bytes)
        finally:
            os.close(fd)
        self.place = self.layout.place
        self.words: Words = memoryview(self.memory).cast("q")
        self._infos: dict[str, Mapping[str, str]] = {}
        self._attach()

    def _attach(self) -> None:
        words, now = self.words, time.perf_counter_ns()
        words[PROCESS_START_WORD] = process_start(os.getpid())
        words[PROCESS_WORD] = os.getpid()
        words[NUM_PROCESSES_WORD] += 1
        words[WALL_OFFSET_WORD] = time.time_ns() - now
        for series in self.layout.series.values():
            if series.metric.kind is Kind.GAUGE:
                words[series.first] = 0
        words[INFO_LENGTH_WORD] = 0
        if words[INFO_VERSION_WORD] % 2:
            words[INFO_VERSION_WORD] += 1

    def close(self) -> None:
        """Let go of it; nothing may be written through it any more."""
        self.words.release()
        self.memory.close()

    @property
    def num_processes(self) -> int:
        """How many have written this ledger, this one included."""
        return self.words[NUM_PROCESSES_WORD]

    def counter(self, metric: Metric, *values: str) -> Counter:
        return Counter(self.words, self.layout.find(metric, values).first)

    def gauge(self, metric: Metric, *values: str) -> Gauge:
        return Gauge(self.words, self.layout.find(metric, values).first)

    def histogram(self, metric: Metric, *values: str) -> Histogram:
        return Histogram(self.words, self.layout.find(metric, values).first, scaled_buckets(metric))

    def set_info(self, metric: Metric, **labels: str) -> None:
        """What an info says, a value for each of its labels. Rarely: it is written as text."""
        if tuple(labels) != metric.labels.names:
            raise ValueError(f"{metric.name}: has labels {', '.join(metric.labels.names)}, not {', '.join(labels)}")
        self._infos[metric.name] = labels
        text = json.dumps(self._infos).encode()
        if len(text) > INFO_BYTES:
            raise ValueError(f"{metric.name}: all infos together take {len(text)} bytes, the most are {INFO_BYTES}")
        words, offset = self.words, self.layout.info_offset
        words[INFO_VERSION_WORD] += 1
        self.memory[offset : offset + len(text)] = text
        words[INFO_LENGTH_WORD] = len(text)
        words[INFO_VERSION_WORD] += 1
