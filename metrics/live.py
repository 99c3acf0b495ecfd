"""What ``/pipeline`` and ``/trace`` show: where every rank stands, and how the last minutes went."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from metrics.catalog import (
    CONFIG_INFO,
    EPOCH,
    GENERATED_TOKENS,
    PROMPT_TOKENS,
    RANK_RESTARTS,
    READY,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    STAGE_INFO,
    STATES,
    STEPS_IN_FLIGHT,
    Metric,
    Writer,
)
from metrics.fold import Folder
from metrics.layout import NO_PEER, NO_STEP, SPAN_KINDS, SpanKind
from metrics.processes import process_status
from metrics.reader import LedgerReader
from metrics.timeline import Ongoing, RankTrack

SAMPLE_SECONDS = 0.5
NUM_SAMPLES = 240  # two minutes: what one looks at
_MAX_PAGE_SPANS = 400  # of a rank: the page draws the newest steps, about twenty of them
_ENGINE_SAMPLES = (GENERATED_TOKENS, PROMPT_TOKENS, REQUESTS_RUNNING, REQUESTS_WAITING, STEPS_IN_FLIGHT)


class RankView:
    """One rank as its ledger shows it, and when its process was first seen dead."""

    def __init__(self, reader: LedgerReader) -> None:
        self.reader = reader
        self.rank = reader.place.rank
        self._was_alive = False
        self._died_at_ns = 0

    def look(self, now_ns: int) -> bool:
        """Whether its process lives. To be called often: death is not written by the dead."""
        is_alive = self.reader.is_alive()
        if self._was_alive and not is_alive:
            self._died_at_ns = now_ns
        self._was_alive = is_alive
        return is_alive

    def stood_until_ns(self, now_ns: int) -> int:
        """Up to when what it is at lasted: now, or when it was seen dead, or when it was last heard of."""
        if self.look(now_ns):
            return now_ns
        return self._died_at_ns or self.reader.heard_at_ns()

    def ongoing(self) -> list[Ongoing]:
        """What each of its streams is at; of compute also what it waits for."""
        doing = {
            each.kind: Ongoing(each.kind, each.step_id, self._peer(each.kind), each.since_ns) for each in self.reader.doing()
        }
        if (state := self.reader.state()) is not None:
            forward = doing.get("forward")
            kind = "forward" if state.state == "compute" else cast("SpanKind", state.state)
            doing["forward"] = Ongoing(kind, forward.step_id if forward else NO_STEP, self._peer(kind), state.since_ns)
        return list(doing.values())

    def _peer(self, kind: SpanKind) -> int:
        """The rank that an operation is with, or that a wait is for."""
        rank, last = self.rank, self.reader.place.world_size - 1
        if kind in ("recv", "wait_input"):
            return rank - 1 if rank > 0 else NO_PEER
        if kind in ("send", "wait_slot"):
            return rank + 1 if rank < last else NO_PEER
        return last if kind in ("token_receive", "wait_token") and rank < last else NO_PEER

    def track(self, since_ns: int, now_ns: int) -> RankTrack:
        """For a timeline of what ended at ``since_ns`` or later."""
        until_ns = self.stood_until_ns(now_ns)
        device = self.reader.infos().get(STAGE_INFO.name, {}).get("device", "")
        label = f"rank {self.rank}" + (f" on {device}" if device else "") + ("" if until_ns == now_ns else " (dead)")
        return RankTrack(self.rank, label, self.reader.spans(since_ns), self.ongoing(), until_ns)

    def describe(self, now_ns: int) -> dict[str, Any]:
        """How it stands, for the page."""
        until_ns = self.stood_until_ns(now_ns)
        is_alive = until_ns == now_ns
        status = process_status(self.reader.identity.process_id) if is_alive else None
        values = self.reader.samples()
        state = self.reader.state()
        return {
            "rank": self.rank,
            "process_id": self.reader.identity.process_id,
            "is_alive": is_alive,
            "is_stopped": status is not None and status.is_stopped,
            "resident_bytes": 0 if status is None else status.resident_bytes,
            "is_ready": bool(values[READY.name][()]),
            "epoch": int(values[EPOCH.name][()]),
            "num_restarts": int(values[RANK_RESTARTS.name][()]),
            "info": self.reader.infos().get(STAGE_INFO.name, {}),
            "state": None if state is None else state.state,
            "seconds_since_heard": max(0, now_ns - self.reader.heard_at_ns()) / 1e9,
            "seconds_dead": (now_ns - until_ns) / 1e9,
            "ongoing": [
                {"kind": each.kind, "step": each.step_id, "peer": each.peer, "seconds": max(0, until_ns - each.since_ns) / 1e9}
                for each in self.ongoing()
            ],
        }


@dataclass(frozen=True)
class _Sample:
    at_ns: int
    state_ns: list[list[int]]  # by rank, as STATES
    engine: list[float]  # as _ENGINE_SAMPLES


class PipelineView:
    """All ledgers of a pipeline; looked at twice a second, so that a page that is opened late shows what was before."""

    def __init__(self, readers: Sequence[LedgerReader]) -> None:
        ranks = [reader for reader in readers if reader.place.writer is Writer.RANK]
        self.ranks = [RankView(reader) for reader in sorted(ranks, key=lambda reader: reader.place.rank)]
        self._folders = [Folder(reader) for reader in ranks]
        self._engine = next((reader for reader in readers if reader.place.writer is Writer.ENGINE), None)
        self._samples: deque[_Sample] = deque(maxlen=NUM_SAMPLES)

    def sample(self) -> None:
        now_ns = time.perf_counter_ns()
        for view in self.ranks:
            view.look(now_ns)
        self.fold()
        values = {} if self._engine is None else self._engine.samples()
        self._samples.append(
            _Sample(
                now_ns,
                [[times[state] for state in STATES] for times in (view.reader.state_times() for view in self.ranks)],
                [values[metric.name][()] if metric.name in values else 0.0 for metric in _ENGINE_SAMPLES],
            )
        )

    def fold(self) -> None:
        """Have the counters say what the ranks have recorded up to now."""
        for folder in self._folders:
            folder.fold()

    def page_data(self, since_ns: int) -> dict[str, Any]:
        """What the page asks for again and again: ``since_ns`` is the time of the last sample that it has."""
        now_ns = time.perf_counter_ns()
        return {
            "states": STATES,
            "kinds": SPAN_KINDS,
            "engine_samples": [metric.name for metric in _ENGINE_SAMPLES],
            "config": self._info(CONFIG_INFO),
            "now_ns": now_ns,
            "ranks": [view.describe(now_ns) for view in self.ranks],
            "samples": [
                {"at_ns": each.at_ns, "state_ns": each.state_ns, "engine": each.engine}
                for each in self._samples
                if each.at_ns > since_ns
            ],
            # A flat list is the quickest to write and to read: kind, step, peer, start and duration in nanoseconds.
            "spans": [
                [
                    (SPAN_KINDS.index(kind), step_id, peer, start_ns, end_ns - start_ns)
                    for step_id, kind, peer, start_ns, end_ns, _ in spans
                ]
                for spans in (view.reader.spans(most=_MAX_PAGE_SPANS) for view in self.ranks)
            ],
        }

    def tracks(self, seconds: float) -> list[RankTrack]:
        """For a timeline of the last ``seconds`` in which anything was recorded."""
        now_ns = time.perf_counter_ns()
        newest_ns = max((view.reader.heard_at_ns() for view in self.ranks), default=now_ns)
        since_ns = min(newest_ns, now_ns) - round(seconds * 1e9)
        return [view.track(since_ns, now_ns) for view in self.ranks]

    def facts(self) -> dict[str, Any]:
        """What a timeline's reader wants to know beside it."""
        wall_offset_ns = max((view.reader.identity.wall_offset_ns for view in self.ranks), default=0)
        return {"clock": "CLOCK_MONOTONIC", "unix_seconds_minus_clock": wall_offset_ns / 1e9, "config": self._info(CONFIG_INFO)}

    def _info(self, metric: Metric) -> dict[str, str]:
        return {} if self._engine is None else self._engine.infos().get(metric.name, {})
