"""How the engine declares a loss, over scripted ranks and on a clock that a test sets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from orchestrator.engine import HEARTBEAT_SECONDS, Engine
from orchestrator.pipeline import Pipeline, agree_limits
from orchestrator.request import EngineState, SamplingParams
from stages.errors import StageFailed
from stages.plan import (
    Drain,
    Drained,
    EndEpoch,
    RankFailed,
    RowsFailed,
    SampledRow,
    StepDone,
    StepPlan,
    StepResult,
    encode,
    plan_hash,
)
from tests.orchestrator.scripted_ranks import ANSWER_SECONDS, ScriptedRanks, offer
from tests.served_engine import Sizes, engine_over, pipeline_config

NUM_RANKS = 3
LAST = NUM_RANKS - 1
EPOCH = 4
VOCAB_SIZE = 100
STEP_TIMEOUT = 10.0
TICK_SECONDS = 0.25  # less than any timer of the engine's
TURNS = 20  # of the loop, more than any answer needs


class Clock:
    """Takes the running loop's timers along."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self._offset = 0.0
        monkeypatch.setattr(self._loop, "time", lambda: self._time() + self._offset)

    async def advance(self, seconds: float) -> None:
        """A tick at a time, each time until everything has run."""
        for _ in range(round(seconds / TICK_SECONDS)):
            self._offset += TICK_SECONDS
            await take_turns()


async def take_turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Rig(ScriptedRanks):
    engine_: Engine
    serving: asyncio.Task[None]
    request: asyncio.Task[None]
    tokens: list[int]

    async def ask(self) -> None:
        self.tokens = []
        params = SamplingParams(max_tokens=3, temperature=0.0)
        async for chunk in self.engine_.generate("a", [1, 2], params):
            self.tokens += chunk.token_ids

    async def plan(self) -> StepPlan:
        """The next plan, as every rank gets it."""
        plans = await self.all_heard(StepPlan)
        assert plans == [plans[0]] * NUM_RANKS
        return plans[0]

    def finish(self, plan: StepPlan, *ranks: int) -> None:
        for rank in ranks:
            done = StepDone(plan.epoch, plan.step_id, rank, plan_hash(encode(plan)), True, 0.001, "")
            self.ranks[rank].send(done)

    def give_result(self, plan: StepPlan) -> None:
        rows = [SampledRow(row.slot, row.generation, [7], 0, []) for row in plan.sampled_rows]
        self.ranks[LAST].send(StepResult(plan.epoch, plan.step_id, rows))

    async def serve(self, num_steps: int) -> None:
        for _ in range(num_steps):
            plan = await self.plan()
            self.give_result(plan)
            self.finish(plan, *range(NUM_RANKS))

    async def end_of_epoch(self, rank: int, cause: str) -> None:
        """What the rank hears next."""
        assert await self.heard(rank, EndEpoch) == EndEpoch(EPOCH, cause)

    async def lost(self) -> StageFailed:
        """What the client and the worker are told of the loss."""
        async with asyncio.timeout(ANSWER_SECONDS):
            told, ended = await asyncio.gather(self.request, self.serving, return_exceptions=True)
        assert isinstance(told, StageFailed)
        assert ended is told
        assert self.engine_.state is EngineState.FAILED
        return told


@asynccontextmanager
async def serving() -> AsyncIterator[Rig]:
    """An engine that is ready, and has planned the first step of a request."""
    rig, sizes = Rig(NUM_RANKS), Sizes()
    offers = [offer(rank, NUM_RANKS, {}) for rank in range(NUM_RANKS)]
    limits = agree_limits(offers, pipeline_config("auto", sizes))
    pipeline = Pipeline(list(rig.engine.values()), offers, limits, "shared_memory", "", EPOCH)
    probed = asyncio.create_task(rig.serve(2))
    async with engine_over(pipeline, VOCAB_SIZE, sizes, STEP_TIMEOUT) as (rig.engine_, rig.serving):
        await probed

        rig.request = asyncio.create_task(rig.ask())
        yield rig
        if not rig.serving.done():
            await rig.request
            assert rig.tokens == [7, 7, 7]
            draining = asyncio.create_task(rig.engine_.drain())
            await rig.all_heard(Drain)
            rig.close()
            await draining
    rig.close()


# ---- a rank that is gone ----------------------------------------------------------------------------------------------


async def test_the_end_of_a_rank_closes_the_epoch_for_the_others() -> None:
    async with serving() as rig:
        plan = await rig.plan()
        rig.ranks[1].abort()
        rig.give_result(plan)
        lost = await rig.lost()
        assert (lost.rank, str(lost)) == (1, "stage 1 failed: its process ended")
        for rank in (0, LAST):
            await rig.end_of_epoch(rank, str(lost))
            assert rig.has_heard_nothing(rank), "no step is planned after it"


@pytest.mark.parametrize("is_told_first", [False, True])
async def test_what_ranks_say_after_the_end_of_an_epoch_changes_nothing(is_told_first: bool) -> None:
    async with serving() as rig:
        plan = await rig.plan()
        rig.ranks[0].send(RankFailed(0, "out of memory", False))
        if is_told_first:
            await rig.end_of_epoch(1, "stage 0 failed: out of memory")
        rig.give_result(plan)
        rig.finish(plan, *range(NUM_RANKS))
        assert str(await rig.lost()) == "stage 0 failed: out of memory"
        assert rig.tokens == []


async def test_an_error_in_a_step_is_a_loss() -> None:
    async with serving() as rig:
        plan = await rig.plan()
        error = "step 2: rank 0 says 4 rows, rank 1 expects 5"
        rig.ranks[1].send(StepDone(EPOCH, plan.step_id, 1, plan_hash(encode(plan)), False, 0.0, error))
        assert str(await rig.lost()) == f"stage 1 failed: {error}"
        for rank in range(NUM_RANKS):
            await rig.end_of_epoch(rank, f"stage 1 failed: {error}")


async def test_a_rank_that_applied_another_plan_ends_the_epoch() -> None:
    async with serving() as rig:
        plan = await rig.plan()
        rig.ranks[1].send(StepDone(EPOCH, plan.step_id, 1, 1234, True, 0.0, ""))
        lost = await rig.lost()
        assert lost.rank == 1
        assert str(lost).startswith("stage 1 failed: it applied plan 0x000004d2 for step 2, not 0x")


# ---- a rank that is stuck ---------------------------------------------------------------------------------------------


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def until_closed(rig: Rig, clock: Clock) -> None:
    waited = 0.0
    while rig.has_heard_nothing(0):
        await clock.advance(TICK_SECONDS)
        waited += TICK_SECONDS
    assert STEP_TIMEOUT <= waited < STEP_TIMEOUT * 1.25


CAUSE = "no progress on step 2 for 10 s (--step-timeout)"


@pytest.mark.parametrize("stuck", range(NUM_RANKS))
async def test_the_rank_that_does_not_let_go_of_the_epoch_is_the_stuck_one(clock: Clock, stuck: int) -> None:
    """The others all wait for it: those before it for tokens."""
    async with serving() as rig:
        plan = await rig.plan()
        await until_closed(rig, clock)
        for rank in range(NUM_RANKS):
            await rig.end_of_epoch(rank, CAUSE)
            if rank != stuck:
                rig.ranks[rank].send(StepDone(EPOCH, plan.step_id, rank, 0, False, 0.0, "poisoned"))
                rig.ranks[rank].send(Drained(EPOCH, rank))
        await take_turns()
        assert not rig.request.done(), "the last one has a moment to answer"
        await clock.advance(1)
        lost = await rig.lost()
        assert (lost.rank, str(lost)) == (stuck, f"stage {stuck} failed: {CAUSE}")


async def test_when_all_let_go_it_is_the_first_that_has_not_finished_the_step(clock: Clock) -> None:
    async with serving() as rig:
        rig.finish(await rig.plan(), 0, LAST)
        await until_closed(rig, clock)
        for rank in range(NUM_RANKS):
            await rig.end_of_epoch(rank, CAUSE)
            rig.ranks[rank].send(Drained(EPOCH, rank))
        await take_turns()
        assert str(await rig.lost()) == f"stage 1 failed: {CAUSE}", "at once"


async def test_any_sign_of_progress_of_any_rank_counts(clock: Clock) -> None:
    almost = STEP_TIMEOUT - 2
    async with serving() as rig:
        first = await rig.plan()
        await clock.advance(almost)
        rig.finish(first, 1)
        await clock.advance(almost)
        rig.give_result(first)
        second = await rig.plan()
        await clock.advance(almost)
        rig.finish(first, LAST, 0)
        await clock.advance(almost)
        rig.give_result(second)
        rig.finish(second, *range(NUM_RANKS))
        await rig.serve(1)


async def test_an_idle_pipeline_is_asked_once_a_second_whether_it_lives(clock: Clock) -> None:
    async with serving() as rig:
        await rig.serve(3)
        await rig.request
        for _ in range(3):
            await clock.advance(HEARTBEAT_SECONDS + 0.8)
            plan = await rig.plan()
            assert plan.rows == []
            assert rig.has_heard_nothing(0), "one at a time"
            rig.give_result(plan)
            rig.finish(plan, *range(NUM_RANKS))
            await take_turns()
        rig.request = asyncio.create_task(rig.ask())
        await rig.serve(3)


async def test_a_rank_that_stops_in_an_idle_time_is_found(clock: Clock) -> None:
    async with serving() as rig:
        await rig.serve(3)
        await rig.request
        await clock.advance(HEARTBEAT_SECONDS + 0.8)
        plan = await rig.plan()
        rig.give_result(plan)
        rig.finish(plan, 0, LAST)
        await until_closed(rig, clock)
        for rank in (0, LAST):
            await rig.end_of_epoch(rank, "no progress on step 5 for 10 s (--step-timeout)")
            rig.ranks[rank].send(Drained(EPOCH, rank))
        await clock.advance(1)
        async with asyncio.timeout(ANSWER_SECONDS):
            (ended,) = await asyncio.gather(rig.serving, return_exceptions=True)
        assert str(ended) == "stage 1 failed: no progress on step 5 for 10 s (--step-timeout)"


async def test_the_first_steps_may_take_longer(clock: Clock) -> None:
    """They load what later ones find."""
    rig, sizes = Rig(NUM_RANKS), Sizes()
    offers = [offer(rank, NUM_RANKS, {}) for rank in range(NUM_RANKS)]
    pipeline = Pipeline(
        list(rig.engine.values()), offers, agree_limits(offers, pipeline_config("auto", sizes)), "shared_memory", "", EPOCH
    )

    async def probed() -> None:
        await clock.advance(5 * STEP_TIMEOUT)
        await rig.serve(2)

    probing = asyncio.create_task(probed())
    async with engine_over(pipeline, VOCAB_SIZE, sizes, STEP_TIMEOUT) as (engine, _):
        await probing
        assert engine.state is EngineState.READY
        draining = asyncio.create_task(engine.drain())
        await rig.all_heard(Drain)
        rig.close()
        await draining


async def test_a_row_that_a_stage_cannot_compute_fails_its_request_and_the_epoch_goes_on() -> None:
    async with serving() as rig:
        plan = await rig.plan()
        (row,) = plan.rows
        rig.ranks[1].send(RowsFailed(EPOCH, plan.step_id, 1, [(row.slot, row.generation, "IndexError: out of range")]))
        async with asyncio.timeout(ANSWER_SECONDS):
            (told,) = await asyncio.gather(rig.request, return_exceptions=True)
        assert str(told) == "stage 1 failed: IndexError: out of range"
        rig.give_result(plan)
        rig.finish(plan, *range(NUM_RANKS))
        rig.request = asyncio.create_task(rig.ask())
        await rig.serve(3)
