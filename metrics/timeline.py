"""Spans as a timeline in the Trace Event format, which ui.perfetto.dev and chrome://tracing open.

A rank is a process and each of its streams a thread. A step is a flow from rank to rank along the forwards, its sampled tokens
another from the last rank to those that receive them. What a stream is at ends where the file was asked for, or the rank died.

The format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any

import msgspec

from metrics.layout import NO_PEER, NO_STEP, OPERATIONS, SPAN_KINDS, SpanKind
from metrics.steps import Span

_STREAMS = {"recv": "receive", "forward": "compute", "send": "send"} | {
    "token_broadcast": "token broadcast",
    "token_receive": "token receive",
}
_COMPUTE = list(_STREAMS).index("forward")
_STREAM_OF_KIND = {kind: list(_STREAMS).index(kind) if kind in OPERATIONS else _COMPUTE for kind in SPAN_KINDS}
_FLOWING = ("forward", "token_broadcast", "token_receive")
_NAMES = {kind: "compute" if kind == "forward" else kind.replace("_", " ") for kind in SPAN_KINDS}
_MAX_LANES = 16  # threads of one stream, whose spans may overlap when they are written by different clocks
_START = itemgetter(3)  # of a span
_EVENTS_IN_CHUNK = 2000  # some milliseconds to make: others are answered in between


class _Args(msgspec.Struct, omit_defaults=True, gc=False):
    """What a slice says when it is clicked, or what a name is."""

    step: int | None = None
    peer: int | None = None
    tokens: int = 0
    bytes: int = 0
    unfinished: bool = False
    name: str = ""
    sort_index: int | None = None


class _Event(msgspec.Struct, omit_defaults=True, gc=False):
    """One of the format's events: X a slice, M a name, s, t and f an arrow's start, stops and end. Times in microseconds."""

    ph: str
    name: str
    pid: int
    tid: int
    ts: float | None = None
    dur: float | None = None
    args: _Args | None = None
    cat: str = ""
    id: str = ""
    bp: str = ""


@dataclass(frozen=True)
class Ongoing:
    """What a stream is at, or was when its rank died."""

    kind: SpanKind
    step_id: int
    peer: int
    since_ns: int


@dataclass(frozen=True)
class RankTrack:
    """What is drawn of a rank: the spans of the window, and what it is at, which is drawn to ``until_ns``."""

    rank: int
    label: str
    spans: Sequence[Span]
    ongoing: Sequence[Ongoing] = ()
    until_ns: int = 0


def trace_chunks(tracks: Sequence[RankTrack], facts: dict[str, Any]) -> Iterator[bytes]:
    """The file, in pieces. ``facts`` go into it as they are. Times become microseconds, of the same clock."""
    yield b'{"displayTimeUnit":"ns","otherData":' + msgspec.json.encode(facts) + b',"traceEvents":['
    events = _events(tracks)
    separator = b"\n"
    while chunk := list(islice(events, _EVENTS_IN_CHUNK)):
        yield separator + msgspec.json.encode(chunk)[1:-1]
        separator = b",\n"
    yield b"\n]}\n"


def _events(tracks: Sequence[RankTrack]) -> Iterator[_Event]:
    flows = _Flows()
    for track in tracks:
        yield _naming("process_name", track.rank, 0, name=track.label)
        yield _naming("process_sort_index", track.rank, 0, sort_index=track.rank)
        threads = [_Thread(stream, name) for stream, name in enumerate(_STREAMS.values())]
        for span in sorted(track.spans, key=_START):
            tid = threads[_STREAM_OF_KIND[span.kind]].lane(span.start_ns, span.end_ns)
            if span.kind in _FLOWING:
                flows.add(track.rank, tid, span)
            yield _slice(track.rank, tid, span)
        for each in track.ongoing:
            thread = threads[_STREAM_OF_KIND[each.kind]]
            start_ns = max(each.since_ns, thread.free_from)
            span = Span(each.step_id, each.kind, each.peer, start_ns, max(track.until_ns, start_ns))
            yield _slice(track.rank, thread.lane(span.start_ns, span.end_ns), span, is_unfinished=True)
        for thread in threads:
            yield from thread.names(track.rank)
    yield from flows.events()


def _naming(what: str, pid: int, tid: int, name: str = "", sort_index: int | None = None) -> _Event:
    return _Event("M", what, pid, tid, args=_Args(name=name, sort_index=sort_index))


def _slice(rank: int, tid: int, span: Span, is_unfinished: bool = False) -> _Event:
    step_id, kind, peer, start_ns, end_ns, size = span
    num_tokens, num_bytes = (size, 0) if kind == "forward" else (0, size)
    args = _Args(
        None if step_id == NO_STEP else step_id, None if peer == NO_PEER else peer, num_tokens, num_bytes, is_unfinished
    )
    return _Event("X", _NAMES[kind], rank, tid, start_ns / 1000, (end_ns - start_ns) / 1000, args)


class _Thread:
    """The lanes of one stream: one, unless spans overlap, which a single one would show inside each other."""

    def __init__(self, stream: int, name: str) -> None:
        self._first_tid = 1 + stream * _MAX_LANES
        self._name = name
        self._ends: list[tuple[int, int]] = []  # a heap of (when a lane is free again, lane)

    @property
    def free_from(self) -> int:
        return max((end for end, _ in self._ends), default=0)

    def lane(self, start_ns: int, end_ns: int) -> int:
        """The thread of a span; they come by their start."""
        ends = self._ends
        if not ends or (ends[0][0] > start_ns and len(ends) < _MAX_LANES):
            number = len(ends)
            heapq.heappush(ends, (end_ns, number))
        else:
            number = ends[0][1]
            heapq.heapreplace(ends, (end_ns, number))
        return self._first_tid + number

    def names(self, pid: int) -> Iterator[_Event]:
        for number in range(len(self._ends)):
            tid = self._first_tid + number
            yield _naming("thread_name", pid, tid, name=self._name if number == 0 else f"{self._name} ({number + 1})")
            yield _naming("thread_sort_index", pid, tid, sort_index=tid)


_Place = tuple[int, int, int]  # time, rank, thread


class _Flows:
    """Arrows from slice to slice, which bind to the slices that enclose their ends. Of a step that is there twice, as after a
    loss, the later one counts."""

    def __init__(self) -> None:
        self._forwards: dict[int, dict[int, _Place]] = {}  # by step and rank
        self._broadcasts: dict[int, _Place] = {}  # by step
        self._receipts: dict[int, dict[int, _Place]] = {}

    def add(self, rank: int, tid: int, span: Span) -> None:
        step_id, kind, _, start_ns, end_ns, _ = span
        if kind == "forward":
            self._forwards.setdefault(step_id, {})[rank] = (start_ns, rank, tid)
        elif kind == "token_broadcast":
            self._broadcasts[step_id] = (start_ns, rank, tid)
        elif kind == "token_receive":  # its end: it begins to wait long before there is a broadcast
            self._receipts.setdefault(step_id, {})[rank] = (max(start_ns, end_ns - 1), rank, tid)

    def events(self) -> Iterator[_Event]:
        for step_id, forwards in self._forwards.items():
            yield from _flow("step", f"step {step_id}", sorted(forwards.values()))
        for step_id, broadcast in self._broadcasts.items():
            for rank, receipt in self._receipts.get(step_id, {}).items():
                if receipt > broadcast:
                    yield from _flow("tokens", f"tokens {step_id} to {rank}", [broadcast, receipt])


def _flow(name: str, flow_id: str, places: Sequence[_Place]) -> Iterator[_Event]:
    last = len(places) - 1
    if last < 1:
        return
    for i, (at_ns, rank, tid) in enumerate(places):
        ph = "s" if i == 0 else "t" if i < last else "f"
        yield _Event(ph, name, rank, tid, at_ns / 1000, cat=name, id=flow_id, bp="e" if i > 0 else "")
