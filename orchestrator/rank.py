"""RankWorker: one rank's loop. It applies the engine's plans in order and reports how they went.

It decides nothing: what a rank does in a step, and when an epoch begins and ends, arrives on the control channel.
"""

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Protocol

from metrics.layout import SpanKind
from metrics.recorder import RecordedWork, StepRecorder
from metrics.steps import FORWARD, LANES, NUM_LANES
from orchestrator.control import Channel, ChannelClosed
from orchestrator.waiting import Waker
from stages.device import Point
from stages.errors import ControlError, CudaError, HeaderMismatch, PeerLost, StagewireError, one_line
from stages.plan import (
    Drain,
    Drained,
    EndEpoch,
    Epoch,
    Exported,
    Limits,
    Linked,
    LinkFailed,
    Peers,
    RowsFailed,
    StepDone,
    StepPlan,
    StepResult,
    encode,
    plan_hash,
)

log = logging.getLogger(__name__)


class Work(RecordedWork, Protocol):
    """Whose Points can be awaited, too."""

    @property
    def start(self) -> Point: ...
    @property
    def end(self) -> Point: ...


class Operation(Protocol):
    @property
    def kind(self) -> SpanKind: ...
    @property
    def peer(self) -> int: ...
    @property
    def enqueue(self) -> Callable[[StepPlan], Work]: ...


class Stage(Protocol):
    """What a RankWorker drives: ``stages.stage.Stage``, seen without torch."""

    @property
    def operations(self) -> Sequence[Operation]: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def has_device_clock(self) -> bool: ...
    @property
    def num_blocks_used(self) -> int: ...
    @property
    def num_stale_rows(self) -> int: ...
    def begin(self, plan: StepPlan) -> None: ...
    def result(self, plan: StepPlan) -> StepResult | None: ...
    def row_errors(self, plan: StepPlan) -> RowsFailed | None: ...
    def poison(self, cause: BaseException) -> None: ...
    def close(self) -> None: ...


class PendingStage(Protocol):
    """A stage whose links may still have to be connected, and why its transport was chosen.

    ``exports``: what the other ranks need for that; None when ``connect`` needs nothing of theirs.
    """

    @property
    def transport(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def exports(self) -> bytes | None: ...
    def connect(self, exports: Sequence[bytes]) -> Stage: ...
    def close(self) -> None: ...


OpenStage = Callable[[Epoch, list[int]], PendingStage]
"""Begins the stage of an epoch from its message and the file descriptors that came with it, which it takes over."""


class RankWorker:
    """Serves one rank until the engine drains it or its channel closes."""

    def __init__(
        self, rank: int, channel: Channel, open_stage: OpenStage, recorder: StepRecorder | None, spin_us: int = 0
    ) -> None:
        """``recorder`` is None where nothing is recorded."""
        self._rank = rank
        self._channel = channel
        self._open_stage = open_stage
        self._recorder = recorder
        self._waker = Waker(asyncio.get_running_loop(), spin_us, None if recorder is None else recorder.wake_counts)
        self._epoch = -1
        self._limits: Limits  # of the epoch
        self._pending: PendingStage | None = None  # between Exported and Peers
        self._stage: Stage | None = None
        self._broken: Stage | None = None  # could not take up a plan, and takes up none after it
        self._tasks: asyncio.TaskGroup | None = None
        self._logged: Exception | None = None

    async def run(self) -> None:
        """Return after Drain, with everything that was planned finished. Raises ``ChannelClosed`` when the engine is gone."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self._follow_orders()
        except BaseExceptionGroup as group:
            # What goes wrong in a step is reported with it; what is raised here is the end of the channel.
            raise group.exceptions[0] from None
        finally:
            self._end_epoch(PeerLost(f"rank {self._rank} ends"))
            self._waker.close()

    async def _follow_orders(self) -> None:
        while True:
            try:
                message = await self._channel.receive()
            except ChannelClosed:
                self._end_epoch(PeerLost(f"rank {self._rank}: the engine is gone"))
                raise
            match message:
                case StepPlan():
                    self._start_step(message)
                case Epoch():
                    self._begin_epoch(message)
                case Peers():
                    self._connect(message.exports)
                case EndEpoch():
                    self._end_epoch(PeerLost(f"epoch {message.epoch} ended: {message.cause}"))
                    self._channel.send(Drained(message.epoch, self._rank))
                case Drain():
                    return
                case _:
                    raise ControlError(f"rank {self._rank}: the engine sent an unexpected {type(message).__name__}")

    def _begin_epoch(self, epoch: Epoch) -> None:
        if self._epoch >= 0:
            gc.collect()  # a stage refers to itself, and its KV cache must be gone before the next one is made
        self._epoch = epoch.epoch
        self._limits = epoch.limits
        fds = self._channel.take_fds(epoch.num_fds)
        try:
            pending = self._open_stage(epoch, fds)
        except StagewireError as exc:
            self._report_link_failure(epoch.wanted_transport, exc)
            return
        self._pending = pending
        if pending.exports is None:
            self._connect([])
        else:
            self._channel.send(Exported(epoch.epoch, self._rank, pending.exports))

    def _connect(self, exports: Sequence[bytes]) -> None:
        """Connect the links and prove them. Blocks: there is nothing else to do, and nothing is served yet."""
        pending, self._pending = self._pending, None
        if pending is None:
            return  # the epoch has ended meanwhile
        try:
            self._stage = pending.connect(exports)
        except StagewireError as exc:
            self._report_link_failure(pending.transport, exc)
            return
        log.info("rank %d: transport %s: %s", self._rank, pending.transport, pending.reason)
        if self._recorder is not None:
            self._recorder.linked(
                self._epoch,
                pending.transport,
                [LANES[operation.kind] for operation in self._stage.operations],
                num_slots=self._limits.ring_slots,
                num_blocks=self._limits.num_blocks,
                row_bytes=self._stage.row_bytes,
                has_device_clock=self._stage.has_device_clock,
            )
        self._channel.send(Linked(self._epoch, self._rank, pending.transport, pending.reason))

    def _report_link_failure(self, transport: str, cause: StagewireError) -> None:
        log.warning("rank %d: transport %s: %s", self._rank, transport, one_line(cause))
        self._channel.send(LinkFailed(self._epoch, self._rank, transport, one_line(cause)))

    def _end_epoch(self, cause: BaseException) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.close()
        if self._stage is not None:
            stage, self._stage, self._broken = self._stage, None, None
            stage.poison(cause)
            if self._recorder is not None:
                self._recorder.unlinked()
            stage.close()

    def _start_step(self, plan: StepPlan) -> None:
        """Enqueue everything this rank does in a step, then let one task for each piece of work await its end."""
        stage = self._stage
        if stage is None or stage is self._broken:
            return  # a plan that was under way when the epoch ended, or is about to
        assert self._tasks is not None
        step = _Step(stage, plan, len(stage.operations), perf_counter_ns())
        if self._recorder is not None:
            self._recorder.begin(plan, step.begun_ns)
        try:
            stage.begin(plan)
            for operation in stage.operations:
                step.works[LANES[operation.kind]] = operation.enqueue(plan)
        except CudaError:
            raise  # nothing can be done in this process any more
        except Exception as exc:  # noqa: BLE001  reported, as what goes wrong later is; the engine ends the epoch
            self._broken = stage
            self._report_failure(step, exc)
            return
        for operation in stage.operations:
            lane = LANES[operation.kind]
            self._tasks.create_task(self._follow(step, lane), name=f"{operation.kind} {plan.step_id}")

    async def _follow(self, step: "_Step", lane: int) -> None:
        work, recorder = step.works[lane], self._recorder
        assert work is not None
        try:
            if await self._waker.reached(work.end):
                step.woke_ns[lane] = perf_counter_ns()
            if lane == FORWARD:
                self._send_result(step)
                step.stage_seconds = work.end.seconds_since(work.start)
                if recorder is not None and self._stage is step.stage:
                    recorder.forwarded(work.start.reached_at_ns, work.end.reached_at_ns)
        except ChannelClosed:
            raise  # there is nobody to report to
        except Exception as exc:  # noqa: BLE001  the task's edge: whatever ended the work is reported
            if recorder is not None and lane != FORWARD:
                recorder.failed(lane, _kind_of_failure(exc))
            # At once: what else this step enqueued may wait for a peer that now gets nothing.
            self._report_failure(step, exc)
            return
        if recorder is not None and self._stage is step.stage:
            recorder.ended(lane, step.woke_ns[lane] or perf_counter_ns())
        step.num_left -= 1
        if step.num_left == 0:
            if recorder is not None and self._stage is step.stage:
                stage = step.stage
                recorder.finish(step.plan, step.begun_ns, step.works, step.woke_ns, stage.num_blocks_used, stage.num_stale_rows)
            self._send_done(step, error="")

    def _send_result(self, step: "_Step") -> None:
        failed = step.stage.row_errors(step.plan)
        if failed is not None and self._stage is step.stage:
            self._channel.send(failed)  # before anything of these rows can come out at the end
        result = step.stage.result(step.plan)
        if result is not None and self._stage is step.stage:
            self._channel.send(result)

    def _report_failure(self, step: "_Step", cause: Exception) -> None:
        if step.has_failed:
            return  # the work after it, which could only fail too
        step.has_failed = True
        # A lost peer is a consequence, told where it began; and a stream's error is the same one for all steps after it.
        if not isinstance(cause, PeerLost) and cause is not self._logged:
            self._logged = cause
            log.error("rank %d, step %d failed", self._rank, step.plan.step_id, exc_info=cause)
        self._send_done(step, error=one_line(cause))

    def _send_done(self, step: "_Step", error: str) -> None:
        if self._stage is not step.stage:
            return  # after the end of its epoch nothing more is reported of it
        plan = step.plan
        self._channel.send(
            StepDone(
                epoch=plan.epoch,
                step_id=plan.step_id,
                rank=self._rank,
                plan_hash=plan_hash(encode(plan)),
                verdict=not error,
                stage_seconds=step.stage_seconds,
                error=error,
            )
        )


def _kind_of_failure(cause: Exception) -> str:
    """As ``transfer_errors_total`` tells them apart."""
    match cause:
        case HeaderMismatch():
            return "header_mismatch"
        case PeerLost():
            return "peer_lost"
        case CudaError():
            return "device"
        case _:
            return "other"


@dataclass
class _Step:
    """A step in flight on this rank; done when ``num_left`` pieces of its work are."""

    stage: Stage
    plan: StepPlan
    num_left: int
    begun_ns: int
    works: list[Work | None] = field(default_factory=lambda: [None] * NUM_LANES)  # by lane
    woke_ns: list[int] = field(default_factory=lambda: [0] * NUM_LANES)
    stage_seconds: float = 0.0
    has_failed: bool = False
