"""Engine: owns every request, drives the scheduler from events, and moves plans out and tokens back.

The engine holds no GPU and loads no torch, so it survives its ranks.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import cast

from metrics.engine import EngineMetrics
from orchestrator.control import Channel, ChannelClosed
from orchestrator.pipeline import Pipeline, failure
from orchestrator.request import EngineState, NotReady, Request, SamplingParams, ServedModel, TokenChunk
from orchestrator.scheduler import Scheduler
from stages.errors import ControlError, RankLost, StageFailed, StagewireError, one_line
from stages.plan import Drain, Drained, EndEpoch, RankFailed, StepDone, StepPlan, StepResult, encode, plan_hash

# After --step-timeout without progress whoever can still let go of an epoch does so within milliseconds.
DRAIN_SECONDS = 0.5


class _NoProgress(StagewireError):
    """No rank made progress on step ``step_id`` for --step-timeout."""

    def __init__(self, step_id: int, seconds: float) -> None:
        super().__init__(f"no progress on step {step_id} for {seconds:g} s (--step-timeout)")
        self.step_id = step_id


class Engine:
    """Serves requests over one pipeline. All methods are called from one loop.

    ``open`` once, then ``serve_ranks`` for as long as it lives; ``generate`` while ``state`` is READY.
    """

    def __init__(self, step_timeout_seconds: float = 10.0, metrics: EngineMetrics | None = None) -> None:
        """``step_timeout_seconds``: how long no rank may make progress while a step is under way. ``metrics`` is None where
        nothing is measured."""
        self._metrics = metrics
        self._num_preemptions = self._num_stale_rows = 0  # those that are counted
        self._state = EngineState.STARTING
        self._step_timeout_seconds = step_timeout_seconds
        self._progress_at = 0.0  # of any rank, in the loop's time
        self._epoch = 0
        self.served_model: ServedModel | None = None
        self._scheduler: Scheduler | None = None
        self._channels: Sequence[Channel] = ()
        # A request's tokens on their way to its reader: at most one entry for each token it may generate, and one for an error.
        self._streams: dict[str, asyncio.Queue[TokenChunk | StagewireError]] = {}
        # Steps that some rank has not yet finished: hash of the plan, and the ranks still to report.
        self._unfinished: dict[int, tuple[int, set[int]]] = {}
        self.stage_seconds: list[float] = []  # what each rank's last forward took, sampling included
        self._are_ranks_sent_home = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def state(self) -> EngineState:
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state = state
        if self._metrics is not None:
            self._metrics.is_ready.set(state is EngineState.READY)

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
        return {step_id: sorted(ranks) for step_id, (_, ranks) in self._unfinished.items()}

    # ---- life -----------------------------------------------------------------------------------------------------

    def open(self, pipeline: Pipeline, scheduler: Scheduler, model: ServedModel) -> None:
        """Take over a linked pipeline. ``serve_ranks`` must run from now on."""
        self._channels = pipeline.channels
        self._epoch = pipeline.epoch
        self.stage_seconds = [0.0] * len(pipeline.channels)
        self._scheduler = scheduler
        self.served_model = model
        if self._metrics is not None:
            self._metrics.lane_depth.set(scheduler.config.lane_depth)

    async def serve_ranks(self) -> None:
        """Listen to every rank until all have been sent home and are gone.

        A lost rank ends it too: the epoch is closed, every request fails, and ``StageFailed`` is raised.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch_progress(), name="watch progress")
                async with asyncio.TaskGroup() as listening:
                    for rank, channel in enumerate(self._channels):
                        listening.create_task(self._listen(rank, channel), name=f"listen to rank {rank}")
                watching.cancel()
        except BaseExceptionGroup as group:
            cause = _first_cause(group)
            self._close_epoch(cause)
            if isinstance(cause, _NoProgress):
                cause = StageFailed(await self._find_stuck_rank(cause.step_id), str(cause))
            self._fail_all(cause if isinstance(cause, StagewireError) else StageFailed(-1, "the engine failed"))
            raise cause from None

    async def _watch_progress(self) -> None:
        """Declare a rank lost that holds everybody up."""
        loop, timeout = asyncio.get_running_loop(), self._step_timeout_seconds
        while True:
            await asyncio.sleep(timeout / 8)
            # What the first steps take is up to --start-timeout: they load what later ones find.
            if self.state is EngineState.STARTING or not self._unfinished or loop.time() - self._progress_at < timeout:
                continue
            self.state = EngineState.FAILED
            raise _NoProgress(min(self._unfinished), timeout)

    def _close_epoch(self, cause: BaseException) -> None:
        """Have every rank that is left break its waits and let go of its links."""
        for channel in self._channels:
            with suppress(ControlError):  # that one is gone
                channel.send(EndEpoch(self._epoch, one_line(cause)))

    async def _find_stuck_rank(self, step_id: int) -> int:
        """The rank that held up a step, its epoch being closed: all wait for it, also those before it, which get its tokens.

        The first that does not let go of the epoch, or, when all do, the first that has not finished the step.
        """
        waits: list[asyncio.Task[None]] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS), asyncio.TaskGroup() as tasks:
                for rank, channel in enumerate(self._channels):
                    waits.append(tasks.create_task(_drained(channel), name=f"end of epoch on rank {rank}"))
        stuck = [rank for rank, wait in enumerate(waits) if wait.cancelled()]
        return stuck[0] if stuck else min(self._unfinished[step_id][1])

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
        self.state = EngineState.READY

    async def drain(self) -> None:
        """Admit nothing, finish everything, send the ranks home; ``serve_ranks`` returns when they have gone.

        Cancel it to stop waiting, then ``abort``.
        """
        self.state = EngineState.DRAINING
        await self._is_idle.wait()
        self._are_ranks_sent_home = True
        for channel in self._channels:
            with suppress(ChannelClosed):  # its listener knows
                channel.send(Drain())

    def abort(self, cause: StagewireError) -> None:
        """End every request now: its stream raises ``cause``. Admits nothing from now on."""
        self.state = EngineState.DRAINING
        self._fail_all(cause)

    # ---- requests -------------------------------------------------------------------------------------------------

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[TokenChunk, None]:
        """The request's tokens, as steps return them; the last chunk has a finish reason.

        Raises before the first chunk ``NotReady``, ``QueueFull``, or ``ConfigError`` for what can never be served; at any time
        ``StageFailed``. Closing the iterator aborts the request.
        """
        if self.state is not EngineState.READY:
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
        for request_id, stream in self._streams.items():
            self.scheduler.abort(request_id)
            stream.put_nowait(cause)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Plan as many steps as there is work and room for, and send each to every rank."""
        scheduler = self.scheduler
        # A rank that lags behind the results may hold at most lane depth + 1 unfinished plans; planning stops, nothing blocks.
        while self.state is not EngineState.FAILED and len(self._unfinished) <= scheduler.config.lane_depth:
            started_at_ns = time.perf_counter_ns()
            plan = scheduler.schedule()
            if plan is None:
                break
            payload = encode(plan)
            if not self._unfinished:
                self._progress_at = asyncio.get_running_loop().time()
            self._unfinished[plan.step_id] = (plan_hash(payload), set(range(len(self._channels))))
            for channel in self._channels:
                self._send(channel, payload)
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

    def _send(self, channel: Channel, encoded_plan: bytes) -> None:
        with suppress(ChannelClosed):  # its listener ends the epoch
            channel.send_encoded(encoded_plan, StepPlan.__name__)

    async def _listen(self, rank: int, channel: Channel) -> None:
        try:
            await self._take_messages(rank, channel)
        except Exception:
            self.state = EngineState.FAILED  # at once: others may have heard something before they are cancelled
            raise

    async def _take_messages(self, rank: int, channel: Channel) -> None:
        while True:
            try:
                message = await channel.receive()
            except ChannelClosed:
                if self._are_ranks_sent_home:
                    return
                raise RankLost(rank) from None
            if self.state is EngineState.FAILED:
                return  # the epoch is closed: nothing more is taken
            match message:
                case StepResult():
                    self._take_result(message)
                case StepDone():
                    self._take_done(message)
                case RankFailed():
                    raise failure(message)
                case Drained():
                    pass
                case _:
                    raise ControlError(f"rank {rank} sent an unexpected {type(message).__name__}")

    def _take_result(self, result: StepResult) -> None:
        self._progress_at = asyncio.get_running_loop().time()
        chunks = self.scheduler.update(result)
        self._pump()  # first: the ranks wait for the plan, and tokens may be read while they compute
        for request, chunk in chunks:
            if (stream := self._streams.get(request.request_id)) is not None:
                stream.put_nowait(chunk)

    def _take_done(self, done: StepDone) -> None:
        self._progress_at = asyncio.get_running_loop().time()
        if done.error:
            raise StageFailed(done.rank, done.error)
        expected_hash, missing = self._unfinished[done.step_id]
        if done.plan_hash != expected_hash:
            raise ControlError(
                f"rank {done.rank} applied plan {done.plan_hash:#010x} for step {done.step_id}, "
                f"the engine sent {expected_hash:#010x}"
            )
        self.stage_seconds[done.rank] = done.stage_seconds
        missing.discard(done.rank)
        if not missing:
            del self._unfinished[done.step_id]
            self._pump()


async def _drained(channel: Channel) -> None:
    """Return when a rank has let go of its epoch, or is gone."""
    with suppress(ControlError):
        while not isinstance(await channel.receive(), Drained | RankFailed):
            pass


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first: BaseException = group.exceptions[0]
    return _first_cause(cast("BaseExceptionGroup[BaseException]", first)) if isinstance(first, BaseExceptionGroup) else first
