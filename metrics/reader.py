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
``perf_counter_ns``, to which ``wall_offset_ns`` is added for Unix time. What follows from a rank's steps is there once somebody
has folded its records (``metrics.fold``). Counters of a dead rank stay as they were; those of states go on while its process
lives, also when it is stopped or hangs: the time since is added to the present state's.

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
    COMPUTED_FOLDED_WORD,
    COMPUTED_WORD,
    IDLE_UNTIL_WORD,
    INFO_LENGTH_WORD,
    INFO_VERSION_WORD,
    LANES_WORD,
    LAST_STEP_WORD,
    NEEDED_STEP_WORD,
    NUM_BEGUN_WORD,
    NUM_ENDED_WORD,
    NUM_PROCESSES_WORD,
    NUM_RECORDS,
    NUM_RECORDS_WORD,
    PROCESS_START_WORD,
    PROCESS_WORD,
    RECORD_WORDS,
    ROW_BYTES_WORD,
    SINCE_WORD,
    UNTIL_WORD,
    WALL_OFFSET_WORD,
    WORD_BYTES,
    Layout,
    Series,
    SpanKind,
)
from metrics.ledger import place_of, process_start
from metrics.steps import ATTACHED, FORWARD, NUM_LANES, RECV, SEND, TOKENS, UNLINKED, Clock, Span, StepRecord, account, spans_of

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
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._words = memoryview(self._map).cast("q")
        self._highest: dict[str, int] = {}

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self._fd)

    def fileno(self) -> int:
        return self._fd

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
        words = self._words
        if words[NUM_PROCESSES_WORD] == 0:
            return None
        return State(self._present_state(), max(words[UNTIL_WORD], words[SINCE_WORD + FORWARD]))

    def _present_state(self) -> str:
        """What the compute stream is at, from how many steps each lane has ended."""
        words = self._words
        if not words[LANES_WORD]:
            return "idle"
        begun = words[NUM_BEGUN_WORD]
        is_first = self.place.rank == 0
        if begun > words[NUM_ENDED_WORD + FORWARD]:
            if self._has(RECV) and words[NUM_ENDED_WORD + RECV] <= words[NUM_ENDED_WORD + FORWARD]:
                return "wait_input"
            if self._is_pending(TOKENS) and self._oldest_step(TOKENS) <= words[NEEDED_STEP_WORD]:
                return "wait_token"
            return "compute"
        if self._is_pending(TOKENS) and self.place.rank != self.place.world_size - 1:
            return "wait_token" if is_first else "wait_input"
        return "idle"

    def _has(self, lane: int) -> bool:
        return bool(self._words[LANES_WORD] >> lane & 1)

    def _is_pending(self, lane: int) -> bool:
        return self._has(lane) and self._words[NUM_BEGUN_WORD] > self._words[NUM_ENDED_WORD + lane]

    def _oldest_step(self, lane: int) -> int:
        """The step that a lane with something to do is at; steps are numbered one after another."""
        words = self._words
        return words[LAST_STEP_WORD] - (words[NUM_BEGUN_WORD] - words[NUM_ENDED_WORD + lane] - 1)

    def heard_at_ns(self) -> int:
        """When the rank last told of anything that ended or began; 0 when it never did."""
        return max(self._words[UNTIL_WORD], *self._words[SINCE_WORD : SINCE_WORD + NUM_LANES])

    def state_times(self) -> dict[str, int]:
        """Nanoseconds spent in each state up to now, for as far as the records are folded. They never go down, though the end
        of a state is heard of late: what was told too much of one is told too little of the present one, for a while."""
        times = {state: self._words[self.layout.find(STAGE_STATE, (state,)).first] for state in STATES}
        if self._words[UNTIL_WORD] and self.is_alive():
            for state, ns in self._open_times(time.perf_counter_ns()).items():
                times[state] += ns
        total, present = sum(times.values()), self._present_state()
        for state in times:
            if state != present:
                times[state] = max(times[state], self._highest.get(state, 0))
        times[present] = max(total - sum(times.values()) + times[present], self._highest.get(present, 0))
        self._highest = times.copy()
        return times

    def told_state_times(self) -> dict[str, int]:
        """The most that ``state_times`` has told; of states that it told anything of."""
        return self._highest.copy()

    def _open_times(self, now_ns: int) -> dict[str, int]:
        """How the time is spent that no record accounts for yet: since the last step of which everything has ended."""
        words = self._words
        waiting = "wait_token" if self.place.rank == 0 else "wait_input"
        until_ns, state = words[UNTIL_WORD], self._present_state()
        left = max(now_ns - until_ns, 0)
        times = {"compute": 0, "idle": 0, waiting: 0, state: 0}

        def give(state: str, ns: int) -> None:
            nonlocal left
            times[state] += min(max(ns, 0), left)
            left -= min(max(ns, 0), left)

        give("compute", words[COMPUTED_WORD] - words[COMPUTED_FOLDED_WORD])  # of steps whose tokens are to come
        give("idle", words[IDLE_UNTIL_WORD] - until_ns)
        if state == "idle":
            if self._has(TOKENS) and self.place.rank != self.place.world_size - 1:
                give(waiting, words[SINCE_WORD + TOKENS] - until_ns)
        elif state in ("compute", "wait_token"):
            since_ns = max(words[SINCE_WORD + FORWARD], words[SINCE_WORD + RECV] if self._has(RECV) else 0)
            give(state, now_ns - since_ns)
            state = waiting
        give(state, left)
        return times

    def doing(self) -> list[Doing]:
        """Of a dead rank: what it was doing when it died."""
        rank, last = self.place.rank, self.place.world_size - 1
        kinds: dict[int, SpanKind] = {RECV: "recv", FORWARD: "forward", SEND: "send"}
        kinds[TOKENS] = "token_broadcast" if rank == last else "token_receive"
        return [
            Doing(kind, self._oldest_step(lane), self._words[SINCE_WORD + lane])
            for lane, kind in kinds.items()
            if self._is_pending(lane)
        ]

    # ---- the last seconds -------------------------------------------------------------------------------------------

    def spans(self, since_ns: int = 0, most: int = 6 * NUM_RECORDS) -> list[Span]:
        """The spans that ended at ``since_ns`` or later, step by step: the newest ``most`` of those that are still kept."""
        words = self._words
        end = words[NUM_RECORDS_WORD]
        oldest = max(0, end - NUM_RECORDS)
        records: list[StepRecord] = []
        num_spans = 0
        # From the newest on, some at a time, so that a short time asks for few; and one more, for where its next one begins.
        while end > oldest and num_spans <= most:
            first = max(oldest, end - min(_RECORDS_AT_ONCE, most // 3 + 2), (end - 1) // NUM_RECORDS * NUM_RECORDS)
            _, found = self.records(first, end)
            records[:0] = found
            num_spans += 4 * len(found)
            end = first
            if found and _end_of(found[0]) < since_ns:
                break
        is_first, is_last = self.place.rank == 0, self.place.rank == self.place.world_size - 1
        spans: list[Span] = []
        clock: Clock | None = None
        for record in records:
            if record.step_id in (ATTACHED, UNLINKED):
                clock = Clock(record.begun_ns, record.begun_ns)
                continue
            clock = clock or Clock(record.begun_ns, record.begun_ns)
            stretches, clock = account(record, clock, is_first=is_first, is_last=is_last)
            if _end_of(record) >= since_ns:
                found = spans_of(
                    record, stretches, words[ROW_BYTES_WORD], rank=self.place.rank, world_size=self.place.world_size
                )
                spans += [span for span in found if span.end_ns >= since_ns]
        return spans[-most:] if most else []

    def records(self, first: int, end: int | None = None) -> tuple[int, list[StepRecord]]:
        """The records numbered ``first + 1`` to ``end``, by default to the newest, but not many at once; and the number before
        the first of them.

        Those that are not there any more, at the beginning, are left out.
        """
        words, base = self._words, self.layout.records_word
        newest = words[NUM_RECORDS_WORD]
        first = max(first, newest - NUM_RECORDS)
        ring_end = (first // NUM_RECORDS + 1) * NUM_RECORDS  # where the ring begins anew
        end = min(newest if end is None else end, ring_end, first + _RECORDS_AT_ONCE)
        if end <= first:
            return first, []
        offset = (base + first % NUM_RECORDS * RECORD_WORDS) * WORD_BYTES
        copied = self._map[offset : offset + (end - first) * RECORD_WORDS * WORD_BYTES]
        # What may have been written over meanwhile: all that made room for what is there now, and the one that makes room next
        # if that has begun.
        lost = words[NUM_RECORDS_WORD] - NUM_RECORDS + 1
        if lost > 0 and words[base + (lost - 1) % NUM_RECORDS * RECORD_WORDS] == lost:
            lost -= 1
        found: list[StepRecord] = []
        for number, (before, *fields, after) in enumerate(_RECORD.iter_unpack(copied), first + 1):
            if before == after == number > lost:
                found.append(StepRecord(*fields))
            elif not found:
                first = number
        return first, found


def _end_of(record: StepRecord) -> int:
    return max(record.forward_ended_ns, record.send_ended_ns, record.tokens_ended_ns, record.begun_ns)


_RECORD = struct.Struct(f"<{RECORD_WORDS}q")
_RECORDS_AT_ONCE = 1024
