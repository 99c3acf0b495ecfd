"""Reads a ledger that somebody else writes, or wrote: what it says, as plain values.

    reader = LedgerReader(fd)                     or a path
    reader.identity                               whose it is, and which process writes it (that changes with a restart)
    reader.is_alive()                             whether that process lives
    reader.samples()                              every counter and gauge: {metric name: {label values: value}}
    reader.histograms()                           every histogram: {metric name: {label values: (cumulative counts, sum)}}
    reader.infos()                                {metric name: {label: value}}
    reader.state()                                what the stage is doing, and since when
    reader.doing()                                the operations begun and not ended
    reader.spans(since_ns, most)                  the spans that ended since then, oldest first

Values are in the metric's own unit (seconds where it is named so); times of spans, states and operations are of
``perf_counter_ns``, to which ``wall_offset_ns`` is added for Unix time. Counters of a dead rank stay as they were; those of
states go on while its process lives, also when it is stopped or hangs: the time since is added to the present state's.

A reader reads only; any number of them may read a ledger. Nothing here waits or raises for what the writer does meanwhile.
"""

import json
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from metrics.catalog import STAGE_STATE, STATES, Kind, LabelValues, Place, Writer
from metrics.layout import (
    DOING_WORD,
    INFO_LENGTH_WORD,
    INFO_VERSION_WORD,
    NO_STEP,
    NUM_PROCESSES_WORD,
    NUM_SPANS,
    NUM_SPANS_WORD,
    OPERATIONS,
    PROCESS_START_WORD,
    PROCESS_WORD,
    SPAN_KINDS,
    SPAN_WORDS,
    STATE_WORD,
    STATES_SINCE_WORD,
    WALL_OFFSET_WORD,
    WORD_BYTES,
    Layout,
    Series,
    SpanKind,
)
from metrics.ledger import place_of, process_start

_NANO = 1e-9
_NUM_TRIES = 3  # to read infos that are being written: that takes microseconds, and a stopped writer must not stop us


@dataclass(frozen=True, kw_only=True)
class Identity:
    """``process_id`` is 0 while no process has written the ledger yet; ``num_processes`` counts those that have."""

    place: Place
    process_id: int
    num_processes: int
    wall_offset_ns: int


class State(NamedTuple):
    """One of ``STATES``, and since when. While no process writes it: what the last one did when it was last heard of."""

    state: str
    since_ns: int


class Doing(NamedTuple):
    """An operation that is begun and not ended: the oldest of its kind. It may wait for what it needs."""

    kind: SpanKind
    step_id: int
    since_ns: int


class Span(NamedTuple):
    """``peer`` is the rank at the other end, -1 for none or all. ``size``: tokens of a forward, bytes of a transfer, else 0."""

    step_id: int
    kind: SpanKind
    peer: int
    start_ns: int
    end_ns: int
    size: int = 0


class HistogramValue(NamedTuple):
    """``counts`` of observations up to each bucket's bound, cumulative, the last of all observations; and their sum."""

    counts: tuple[int, ...]
    sum: float


class LedgerReader:
    """Takes a descriptor over; opens a path. ``LedgerError`` when that is no ledger, or another version's."""

    def __init__(self, source: int | str | Path) -> None:
        fd = source if isinstance(source, int) else os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.layout = Layout(place_of(fd))
            self._map = mmap.mmap(fd, self.layout.num_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("q")
        self._highest: dict[str, int] = {}

    def close(self) -> None:
        self._words.release()
        self._map.close()

    @property
    def place(self) -> Place:
        return self.layout.place

    @property
    def identity(self) -> Identity:
        words = self._words
        return Identity(
            place=self.place,
            process_id=words[PROCESS_WORD],
            num_processes=words[NUM_PROCESSES_WORD],
            wall_offset_ns=words[WALL_OFFSET_WORD],
        )

    def is_alive(self) -> bool:
        """Whether the process that writes lives, stopped or not. Only from its own host and process namespace."""
        started = self._words[PROCESS_START_WORD]
        return started != 0 and process_start(self._words[PROCESS_WORD]) == started

    # ---- values -----------------------------------------------------------------------------------------------------

    def samples(self) -> dict[str, dict[LabelValues, float]]:
        """Every counter and gauge that the ledger has, in the catalogue's order."""
        found: dict[str, dict[LabelValues, float]] = {}
        for series in self.layout.series.values():
            if series.metric.name == STAGE_STATE.name:
                found.setdefault(STAGE_STATE.name, {})
            elif series.metric.kind is not Kind.HISTOGRAM:
                scale = _NANO if series.metric.is_time else 1
                found.setdefault(series.metric.name, {})[series.values] = self._words[series.first] * scale
        if self.place.writer is Writer.RANK:
            found[STAGE_STATE.name] = {(state,): ns * _NANO for state, ns in self.state_times().items()}
        return found

    def histograms(self) -> dict[str, dict[LabelValues, HistogramValue]]:
        found: dict[str, dict[LabelValues, HistogramValue]] = {}
        for series in self.layout.series.values():
            if series.metric.kind is Kind.HISTOGRAM:
                found.setdefault(series.metric.name, {})[series.values] = self._histogram(series)
        return found

    def _histogram(self, series: Series) -> HistogramValue:
        num_buckets = len(series.metric.buckets)
        words = self._words[series.first : series.first + num_buckets + 2].tolist()
        counts: list[int] = []
        total = 0
        for count in words[:-1]:
            total += count
            counts.append(total)
        return HistogramValue(tuple(counts), words[-1] * (_NANO if series.metric.is_time else 1))

    def infos(self) -> dict[str, dict[str, str]]:
        """What the infos say; none while the writer is caught writing them."""
        words, offset = self._words, self.layout.info_offset
        for _ in range(_NUM_TRIES):
            version, length = words[INFO_VERSION_WORD], words[INFO_LENGTH_WORD]
            text = self._map[offset : offset + length]
            if length and version % 2 == 0 and words[INFO_VERSION_WORD] == version:
                return cast("dict[str, dict[str, str]]", json.loads(text))
        return {}

    # ---- now --------------------------------------------------------------------------------------------------------

    def state(self) -> State | None:
        """None before any process wrote."""
        index = self._words[STATE_WORD]
        if index < 0:
            return None
        times = self._written_state_times()
        return State(STATES[index], self._words[STATES_SINCE_WORD] + sum(times.values()))

    def state_times(self) -> dict[str, int]:
        """Nanoseconds spent in each state up to now. They never go down, though the end of a state is heard of late."""
        index, times = self._words[STATE_WORD], self._written_state_times()
        if index >= 0 and self.is_alive():
            # The states' times add up to what has passed: whatever of it is not yet written is the present state's.
            passed = time.perf_counter_ns() - self._words[STATES_SINCE_WORD]
            times[STATES[index]] += max(passed - sum(times.values()), 0)
        for state, ns in times.items():
            self._highest[state] = times[state] = max(ns, self._highest.get(state, 0))
        return times

    def _written_state_times(self) -> dict[str, int]:
        return {state: self._words[self.layout.find(STAGE_STATE, (state,)).first] for state in STATES}

    def doing(self) -> list[Doing]:
        """Of a dead rank: what it was doing when it died."""
        found: list[Doing] = []
        for i, kind in enumerate(OPERATIONS):
            step_id, since_ns = self._words[DOING_WORD + 2 * i], self._words[DOING_WORD + 2 * i + 1]
            if step_id != NO_STEP:
                found.append(Doing(kind, step_id, since_ns))
        return found

    # ---- the last seconds -------------------------------------------------------------------------------------------

    def spans(self, since_ns: int = 0, most: int = NUM_SPANS) -> list[Span]:
        """The spans that ended at ``since_ns`` or later, in the order in which they were written: the newest ``most`` of those
        that are still kept."""
        found: list[Span] = []
        num_older = 0
        end = self._words[NUM_SPANS_WORD]
        oldest = max(0, end - NUM_SPANS)
        # From the newest on, some at a time, so that a short time asks for few. Spans are written as they are heard of, which
        # is not quite in the order of their ends: what ended long before is not looked for any further.
        while end > oldest and num_older <= _OUT_OF_ORDER:
            first = max(oldest, end - _SPANS_AT_ONCE, (end - 1) // NUM_SPANS * NUM_SPANS)  # up to where the ring begins anew
            for step_id, kind, peer, start_ns, end_ns, size in reversed(self._copy_spans(first, end)):
                if end_ns < since_ns:
                    num_older += 1
                    continue
                if len(found) == most:
                    return found[::-1]
                found.append(Span(step_id, SPAN_KINDS[kind], peer, start_ns, end_ns, size))
            end = first
        return found[::-1]

    def _copy_spans(self, first: int, end: int) -> list[tuple[int, ...]]:
        """Of the spans numbered first + 1 to end, which lie one after another, those that are whole."""
        words, base = self._words, self.layout.spans_word
        offset = (base + first % NUM_SPANS * SPAN_WORDS) * WORD_BYTES
        copied = self._map[offset : offset + (end - first) * SPAN_WORDS * WORD_BYTES]
        # What may have been written over meanwhile: all that made room for what is there now, and the one that makes room next
        # if that has begun.
        lost = words[NUM_SPANS_WORD] - NUM_SPANS + 1
        if lost > 0 and words[base + (lost - 1) % NUM_SPANS * SPAN_WORDS] == lost:
            lost -= 1
        found: list[tuple[int, ...]] = []
        for number, (before, step_id, kind, peer, start_ns, end_ns, size, after) in enumerate(
            _SPAN.iter_unpack(copied), first + 1
        ):
            if before == after == number > lost:
                found.append((step_id, kind, peer, start_ns, end_ns, size))
        return found


_SPAN = struct.Struct(f"<{SPAN_WORDS}q")
_SPANS_AT_ONCE = 1024
_OUT_OF_ORDER = 256  # spans by which one may be written late: more than are in flight on any rank
