"""Engine: owns every request, drives the scheduler from events, and moves plans out and tokens back.

The engine holds no GPU and loads no torch, so it survives its ranks. A lost rank ends the epoch: whoever is left breaks its
waits and says that it has; then whoever serves the ranks brings back a pipeline, and every unfinished request is computed again
from its prompt and its tokens so far. Its stream notices nothing but a pause.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol, cast

from metrics.engine import EngineMetrics
from orchestrator.control import Channel, ChannelClosed
from orchestrator.patience import Patience
from orchestrator.pipeline import Pipeline, end_epoch
from orchestrator.request import EngineState, NotReady, Request, SamplingParams, ServedModel, TokenChunk
from orchestrator.scheduler import Scheduler
from stages.errors import ControlError, RankLost, StageFailed, StagewireError
from stages.plan import Drain, Drained, RankFailed, RowsFailed, StepDone, StepPlan, StepResult, encode, plan_hash

log = logging.getLogger(__name__)

# After --step-timeout without progress whoever can still let go of an epoch does so within milliseconds.
DRAIN_SECONDS = 0.5
HEARTBEAT_SECONDS = 1.0  # at most: a quarter of --step-timeout, so that a rank that stops in an idle time is soon found


@dataclass(frozen=True)
class Loss:
    """An epoch ended because of ``cause``. The processes of the ranks ``lost`` must be replaced; the others have let go of the
    epoch and wait for the next. ``has_gained``: some request got a token in that epoch."""

    cause: StageFailed
    lost: frozenset[int]
    epoch: int
    has_gained: bool


Recover = Callable[[Loss], Awaitable[Pipeline]]
"""Brings back a pipeline of the same sizes with a newer epoch; ``StagewireError`` when there will be none."""


class Sight(Protocol):
    """What can be seen of the ranks' processes from outside."""

    def stopped(self) -> frozenset[int]:
        """The ranks whose processes are stopped, as by SIGSTOP."""
        ...

    def describe(self) -> Sequence[str]:
        """One line for each rank: how its process does, and what it was last seen doing."""
        ...


class Blind:
    """For ranks of which nothing can be seen."""

    def stopped(self) -> frozenset[int]:
        return frozenset()

    def describe(self) -> Sequence[str]:
        return ()


class _NoProgress(StagewireError):
    """No rank made progress on step ``step_id`` for as long as it may take."""

    def __init__(self, step_id: int, seconds: float) -> None:
        super().__init__(f"no progress on step {step_id} for {seconds:g} s (--step-timeout)")
        self.step_id = step_id


@dataclass(eq=False)
class _Step:
    """A step that some rank has not yet finished: the plan's hash and size, and the ranks still to report."""

    plan_hash: int
    num_tokens: int
    missing: set[int]


class Engine:
    """Serves requests over one pipeline at a time. All methods are called from one loop.

    ``open`` once, then ``serve_ranks`` for as long as it lives; ``generate`` while ``state`` admits requests.
    """

    def __init__(
        self, step_timeout_seconds: float = 10.0, metrics: EngineMetrics | None = None, sight: Sight | None = None
    ) -> None:
        """``step_timeout_seconds``: how long no rank may make progress while a step is under way that is not a long one.
        ``metrics`` is None where nothing is measured, ``sight`` where nothing is seen of the ranks' processes."""
        self._metrics = metrics
        self._num_preemptions = self._num_stale_rows = 0  # those that are counted
        self._step_timeout_seconds = step_timeout_seconds
        self._sight = sight or Blind()
        self._progress_at = 0.0  # of any rank, or the last sign that there was nothing to do, in the loop's time
        self._epoch = 0
        self.num_epochs = 0
        self.served_model: ServedModel | None = None
        self._scheduler: Scheduler | None = None
        self._channels: Sequence[Channel] = ()
        # A request's tokens on their way to its reader: at most one entry for each token it may generate, and one for an error.
        self._streams: dict[str, asyncio.Queue[TokenChunk | StagewireError]] = {}
        self._unfinished: dict[int, _Step] = {}
        self._patience = Patience(1, step_timeout_seconds)
        self.stage_seconds: list[float] = []  # what each rank's last forward took, sampling included
        self._is_admitted = False
        self._is_draining = False
        self._is_failed = False
        self._is_linked = False  # plans may be sent
        self._is_proven = False  # a step of this epoch went through
        self._has_gained = False  # a token in this epoch
        self._home = asyncio.Event()  # the ranks are sent home
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def state(self) -> EngineState:
        if self._is_failed:
            return EngineState.FAILED
        if self._is_draining:
            return EngineState.DRAINING
        if not self._is_admitted:
            return EngineState.STARTING
        return EngineState.READY if self._is_linked and self._is_proven else EngineState.RECOVERING

    @property
    def num_waiting(self) -> int:
        return 0 if self._scheduler is None else self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return 0 if self._scheduler is None else self._scheduler.num_running

    @property
    def scheduler(self) -> Scheduler:
        """For reading: its counters. ``RuntimeError`` before ``open``."""
        if self._scheduler is None:
            raise RuntimeError("the engine has no pipeline yet")
        return self._scheduler

    def unfinished_steps(self) -> dict[int, list[int]]:
        """Steps that some rank has not finished, and those ranks."""
        return {step_id: sorted(step.missing) for step_id, step in self._unfinished.items()}

    def _note_state(self) -> None:
        """After whatever may have changed the state."""
        if self._metrics is not None:
            self._metrics.is_ready.set(self.state is EngineState.READY)

    # ---- life -----------------------------------------------------------------------------------------------------

    def open(self, pipeline: Pipeline, scheduler: Scheduler, model: ServedModel) -> None:
        """Take over a linked pipeline. ``serve_ranks`` must run from now on."""
        self.stage_seconds = [0.0] * len(pipeline.channels)
        self._patience = Patience(len(pipeline.channels), self._step_timeout_seconds)
        self._scheduler = scheduler
        self.served_model = model
        if self._metrics is not None:
            self._metrics.lane_depth.set(scheduler.config.lane_depth)
        self._begin_epoch(pipeline)

    async def serve_ranks(self, recover: Recover | None = None) -> None:
        """Listen to every rank until all have been sent home and are gone.

        A lost rank ends the epoch, and ``recover`` gives the pipeline to go on with. Without it, or when it gives up, or while
        the first steps are made, a loss is the end: every request fails, and what it was is raised.
        """
        while (loss := await self._serve_epoch()) is not None:
            if recover is None or not (self._is_admitted or self._is_draining):
                self._fail(loss.cause)
                raise loss.cause
            pipeline = await self._recovered(recover, loss)
            if pipeline is None:
                return
            self._begin_epoch(pipeline)
            self._pump()

    async def _recovered(self, recover: Recover, loss: Loss) -> Pipeline | None:
        """None when the ranks were sent home meanwhile: nobody waits for the pipeline."""
        recovering = asyncio.ensure_future(recover(loss))
        going_home = asyncio.create_task(self._home.wait(), name="going home")
        try:
            await asyncio.wait({recovering, going_home}, return_when=asyncio.FIRST_COMPLETED)
            if not recovering.done():
                return None
            return recovering.result()
        except BaseException as exc:
            self._fail(exc if isinstance(exc, StagewireError) else StageFailed(-1, "the engine failed"))
            raise
        finally:
            for task in (recovering, going_home):
                task.cancel()
            await asyncio.gather(recovering, going_home, return_exceptions=True)

    def _begin_epoch(self, pipeline: Pipeline) -> None:
        self._channels = pipeline.channels
        self._epoch = pipeline.epoch
        self.num_epochs += 1
        self.scheduler.begin_epoch(pipeline.epoch)
        self._has_gained = self._is_proven = False
        self._is_linked = True
        self._note_state()
        self._progress_at = asyncio.get_running_loop().time()

    async def _serve_epoch(self) -> Loss | None:
        """One life of the set of ranks; None when they went home."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch_progress(), name="watch progress")
                async with asyncio.TaskGroup() as listening:
                    for rank, channel in enumerate(self._channels):
                        listening.create_task(self._listen(rank, channel), name=f"listen to rank {rank}")
                watching.cancel()
        except BaseExceptionGroup as group:
            self._is_linked = False
            self._note_state()
            cause = _first_cause(group)
            if not isinstance(cause, StageFailed | _NoProgress):
                self._fail(cause if isinstance(cause, StagewireError) else StageFailed(-1, "the engine failed"))
                raise cause from None
            return await self._lose_epoch(cause)
        return None

    async def _lose_epoch(self, cause: "StageFailed | _NoProgress") -> Loss:
        """Have every rank that is left break its waits and let go of its links, and tell who has to be replaced."""
        stopped = self._sight.stopped()
        seen = self._sight.describe()
        steps = self._unfinished.copy()
        # Whoever waits lets go at once, whoever computes when that is done; and after a time without progress nobody computes.
        patience_seconds = DRAIN_SECONDS
        if isinstance(cause, StageFailed):
            sizes = [step.num_tokens for step in steps.values()]
            patience_seconds = max(DRAIN_SECONDS, min(self._patience.allowed_seconds(sizes), self._step_timeout_seconds))
            stopped |= {cause.rank}
        stuck = await end_epoch(self._channels, self._epoch, str(cause), patience_seconds, hopeless=stopped)
        lost = stopped | stuck
        if isinstance(cause, _NoProgress):
            # All wait for the stuck one, also those before it, which get its tokens.
            lost = lost or {min(steps[cause.step_id].missing)}
            cause = StageFailed(min(lost), str(cause))
        log.error("epoch %d ended: %s", self._epoch, cause)
        for line in seen:
            log.error("%s", line)
        self._unfinished.clear()
        for request in self.scheduler.end_epoch():
            log.error("request %s was computed alone and failed: %s", request.request_id, cause)
            self._tell(request.request_id, cause)
        return Loss(cause, frozenset(lost), self._epoch, self._has_gained)

    async def _watch_progress(self) -> None:
        """Declare a rank lost that holds everybody up; and keep a step under way, so that one would be found."""
        loop = asyncio.get_running_loop()
        tick = self._step_timeout_seconds / 16
        warned_of = -1
        while True:
            before = loop.time()
            await asyncio.sleep(tick)
            now = loop.time()
            # Whatever kept this process from running may have kept the ranks' messages from being heard.
            self._progress_at += max(now - before - 2 * tick, 0.0)
            if self.state is EngineState.STARTING:  # what the first steps take is up to --start-timeout: they load
                continue
            if not self._unfinished:
                if now - self._progress_at >= min(HEARTBEAT_SECONDS, self._step_timeout_seconds / 4):
                    self._beat()
                continue
            waited = now - self._progress_at
            if waited < self._step_timeout_seconds:
                continue
            step_id = min(self._unfinished)
            allowed = self._patience.allowed_seconds([step.num_tokens for step in self._unfinished.values()])
            if waited >= allowed or self._sight.stopped():  # who is stopped is not slow
                self._is_linked = False
                raise _NoProgress(step_id, self._step_timeout_seconds if waited < allowed else allowed)
            if step_id != warned_of:
                warned_of = step_id
                num_tokens = self._unfinished[step_id].num_tokens
                log.warning("step %d of %d tokens is slow: may take up to %.1f s", step_id, num_tokens, allowed)

    def _beat(self) -> None:
        if self._is_linked and not self._home.is_set() and self.scheduler.num_in_flight == 0:
            self._send_plan(self.scheduler.heartbeat())

    def _fail(self, cause: StagewireError) -> None:
        """The end: no request is admitted, and every one that is open raises ``cause``."""
        self._is_failed = True
        self._note_state()
        self._fail_all(cause)

    async def probe(self) -> None:
        """Send one short request through every boundary and back; the pipeline works when this returns."""
        num_wanted = min(2, self.scheduler.config.max_model_len - 1)  # a prefill, and a decode that reads its token
        params = SamplingParams(max_tokens=num_wanted, temperature=0.0, ignore_eos=True)
        num_tokens = 0
        async for chunk in self._run(Request(request_id="probe", prompt_token_ids=[0], params=params, seed=0)):
            num_tokens += len(chunk.token_ids)
        if num_tokens != num_wanted:
            raise ControlError(f"the probe came back with {num_tokens} tokens, asked for {num_wanted}")

    def admit(self) -> None:
        """Open for requests."""
        self._is_admitted = True
        self._note_state()

    async def drain(self) -> None:
        """Admit nothing, finish everything, send the ranks home; ``serve_ranks`` returns when they have gone.

        Cancel it to stop waiting, then ``abort``.
        """
        self._is_draining = True
        self._note_state()
        await self._is_idle.wait()
        self._home.set()
        for channel in self._channels:
            with suppress(ChannelClosed):  # its listener knows
                channel.send(Drain())

    def abort(self, cause: StagewireError) -> None:
        """End every request now: its stream raises ``cause``. Admits nothing from now on."""
        self._is_draining = True
        self._note_state()
        self._fail_all(cause)

    # ---- requests -------------------------------------------------------------------------------------------------

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[TokenChunk, None]:
        """The request's tokens, as steps return them; the last chunk has a finish reason.

        Raises before the first chunk ``NotReady``, ``QueueFull``, or ``ConfigError`` for what can never be served; at any time
        ``StageFailed``. Closing the iterator aborts the request.
        """
        if not self.state.admits:
            raise NotReady(f"the worker is {self.state.value}")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = Request(request_id=request_id, prompt_token_ids=prompt_token_ids, params=params, seed=seed)
        async with aclosing(self._run(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _run(self, request: Request) -> AsyncGenerator[TokenChunk, None]:
        self.scheduler.add(request)
        stream: asyncio.Queue[TokenChunk | StagewireError] = asyncio.Queue()
        self._streams[request.request_id] = stream
        self._is_idle.clear()
        self._pump()
        try:
            while True:
                item = await stream.get()
                if isinstance(item, StagewireError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._streams.pop(request.request_id, None)
            self.scheduler.abort(request.request_id)
            self._pump()

    def _fail_all(self, cause: StagewireError) -> None:
        for request_id in self._streams:
            self.scheduler.abort(request_id)
            self._tell(request_id, cause)

    def _tell(self, request_id: str, what: TokenChunk | StagewireError) -> None:
        if (stream := self._streams.get(request_id)) is not None:
            stream.put_nowait(what)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Plan as many steps as there is work and room for, and send each to every rank."""
        scheduler = self.scheduler
        # A rank that lags behind the results may hold at most lane depth + 1 unfinished plans; planning stops, nothing blocks.
        while self._is_linked and len(self._unfinished) <= scheduler.config.lane_depth:
            started_at_ns = time.perf_counter_ns()
            plan = scheduler.schedule()
            if plan is None:
                break
            self._send_plan(plan)
            self._note_planned(plan, started_at_ns)
        if self._metrics is not None:
            self._measure(self._metrics)
        if not self._streams and scheduler.num_in_flight == 0:
            self._is_idle.set()

    def _note_planned(self, plan: StepPlan, at_ns: int) -> None:
        for row in plan.rows:
            if row.sampling is not None and (request := self.scheduler.request_at(row.slot)) is not None:
                request.planned_at_ns = request.planned_at_ns or at_ns
        if self._metrics is not None:
            self._metrics.schedule.observe(time.perf_counter_ns() - at_ns)

    def _measure(self, metrics: EngineMetrics) -> None:
        scheduler = self.scheduler
        metrics.requests_running.set(scheduler.num_running)
        metrics.requests_waiting.set(scheduler.num_waiting)
        metrics.steps_in_flight.set(scheduler.num_in_flight)
        if scheduler.num_preemptions != self._num_preemptions:
            metrics.preemptions.add(scheduler.num_preemptions - self._num_preemptions)
            self._num_preemptions = scheduler.num_preemptions
        if scheduler.num_stale_rows != self._num_stale_rows:
            metrics.stale_results.add(scheduler.num_stale_rows - self._num_stale_rows)
            self._num_stale_rows = scheduler.num_stale_rows

    def _send_plan(self, plan: StepPlan) -> None:
        payload = encode(plan)
        if not self._unfinished:
            self._progress_at = asyncio.get_running_loop().time()
        self._unfinished[plan.step_id] = _Step(plan_hash(payload), plan.num_tokens, set(range(len(self._channels))))
        for channel in self._channels:
            with suppress(ChannelClosed):  # its listener ends the epoch
                channel.send_encoded(payload, StepPlan.__name__)

    async def _listen(self, rank: int, channel: Channel) -> None:
        try:
            await self._take_messages(rank, channel)
        except Exception:
            self._is_linked = False  # at once: others may have heard something before they are cancelled
            raise

    async def _take_messages(self, rank: int, channel: Channel) -> None:
        while True:
            try:
                message = await channel.receive()
            except ChannelClosed:
                if self._home.is_set():
                    return
                raise RankLost(rank) from None
            except ControlError as exc:
                raise StageFailed(rank, str(exc)) from None
            if not self._is_linked:
                return  # the epoch is closed: nothing more is taken
            match message:
                case StepResult():
                    self._take_result(message)
                case RowsFailed():
                    self._take_failed_rows(rank, message)
                case StepDone():
                    self._take_done(message)
                case RankFailed():
                    raise StageFailed(rank, message.cause)
                case Drained():
                    pass
                case _:
                    raise StageFailed(rank, f"it sent an unexpected {type(message).__name__}")

    def _take_result(self, result: StepResult) -> None:
        self._progress_at = asyncio.get_running_loop().time()
        chunks = self.scheduler.update(result)
        self._has_gained |= bool(chunks)
        self._pump()  # first: the ranks wait for the plan, and tokens may be read while they compute
        for request, chunk in chunks:
            self._tell(request.request_id, chunk)

    def _take_failed_rows(self, rank: int, message: RowsFailed) -> None:
        for slot, generation, cause in message.rows:
            if (request := self.scheduler.fail(slot, generation)) is not None:
                log.error("step %d: request %s failed on stage %d: %s", message.step_id, request.request_id, rank, cause)
                self._tell(request.request_id, StageFailed(rank, cause))

    def _take_done(self, done: StepDone) -> None:
        self._progress_at = asyncio.get_running_loop().time()
        if done.error:
            raise StageFailed(done.rank, done.error)
        step = self._unfinished[done.step_id]
        if done.plan_hash != step.plan_hash:
            raise StageFailed(
                done.rank, f"it applied plan {done.plan_hash:#010x} for step {done.step_id}, not {step.plan_hash:#010x}"
            )
        self.stage_seconds[done.rank] = done.stage_seconds
        self._patience.learn(done.rank, step.num_tokens, done.stage_seconds)
        step.missing.discard(done.rank)
        if not step.missing:
            del self._unfinished[done.step_id]
            self._is_proven = True
            self._note_state()
            self._pump()


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first: BaseException = group.exceptions[0]
    return _first_cause(cast("BaseExceptionGroup[BaseException]", first)) if isinstance(first, BaseExceptionGroup) else first
