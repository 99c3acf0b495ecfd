"""What an engine does when ranks are lost, over ranks that answer; and how often, how soon and why ranks are replaced."""

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from metrics.catalog import Place, Writer
from metrics.ledger import create_ledger
from orchestrator.engine import Engine
from orchestrator.patience import FACTOR, Patience
from orchestrator.recovery import LAST_BACKOFF_SECONDS, WINDOW_SECONDS, Restarts
from orchestrator.request import EngineState, NotReady, SamplingParams, ServedModel
from orchestrator.scheduler import Scheduler, SchedulerConfig
from orchestrator.sight import ProcessSight
from stages.errors import StageFailed
from tests.orchestrator.answering_ranks import AnsweringRanks
from tests.orchestrator.plan_checker import expected_tokens
from tests.served_engine import Sizes

NUM_RANKS = 3
SIZES = Sizes(max_num_seqs=6, max_num_batched_tokens=12, max_model_len=64, num_blocks=60, block_size=4)
STEP_TIMEOUT = 0.3


@asynccontextmanager
async def engine_and_ranks() -> AsyncIterator[tuple[Engine, AnsweringRanks, asyncio.Task[None]]]:
    engine = Engine(STEP_TIMEOUT)
    async with asyncio.TaskGroup() as tasks:
        ranks = AnsweringRanks(NUM_RANKS, SIZES, tasks)
        pipeline = ranks.pipeline()
        scheduler = Scheduler(
            SchedulerConfig(
                num_stages=NUM_RANKS,
                lane_depth=NUM_RANKS,
                max_num_seqs=SIZES.max_num_seqs,
                max_num_batched_tokens=SIZES.max_num_batched_tokens,
                max_model_len=SIZES.max_model_len,
                num_blocks=pipeline.limits.num_blocks,
                block_size=pipeline.limits.block_size,
                max_waiting=100,
                eos_token_ids=frozenset(),
            )
        )
        served = ServedModel(name="a", max_model_len=64, vocab_size=1009, eos_token_ids=frozenset(), created=0)
        engine.open(pipeline, scheduler, served)
        serving = asyncio.create_task(engine.serve_ranks(ranks.recover))
        await engine.probe()
        engine.admit()
        yield engine, ranks, serving
        if not serving.done():
            await engine.drain()
            await serving
        ranks.close()
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert scheduler.num_free_blocks == pipeline.limits.num_blocks


async def tokens_of(engine: Engine, name: str, prompt: list[int], count: int = 12) -> list[int]:
    tokens: list[int] = []
    async for chunk in engine.generate(name, prompt, SamplingParams(max_tokens=count, temperature=0.0)):
        tokens += chunk.token_ids
        await asyncio.sleep(0)
    return tokens


def at_risk(scheduler: Scheduler) -> bool:
    """Whether some request was in flight in the last loss and has had no token since."""
    return any(0 <= each.num_tokens_when_lost == each.num_tokens for each in scheduler._sequences.values())


@pytest.mark.parametrize("seed", range(5))
async def test_streams_go_on_whatever_rank_is_lost_however_and_whenever(seed: int) -> None:
    chance = random.Random(seed)
    async with engine_and_ranks() as (engine, ranks, _):
        prompts = [[chance.randrange(1000) for _ in range(chance.randint(1, 30))] for _ in range(20)]
        streams = [asyncio.create_task(tokens_of(engine, str(i), prompt, 30)) for i, prompt in enumerate(prompts)]
        while not all(stream.done() for stream in streams):
            if len(ranks.losses) < 12 and not at_risk(engine.scheduler):
                ranks.lose(chance.randrange(NUM_RANKS), chance.choice(["kill", "fail", "error"]))
            for _ in range(chance.choice([1, 5, 30])):
                await asyncio.sleep(0)
        for prompt, stream in zip(prompts, streams, strict=True):
            assert stream.result() == expected_tokens(prompt, 30)
        assert len(ranks.losses) >= 3
        assert [loss.epoch for loss in ranks.losses] == list(range(len(ranks.losses)))
        assert engine.state is EngineState.READY


async def test_only_the_stuck_rank_is_replaced() -> None:
    async with engine_and_ranks() as (engine, ranks, _):
        stream = asyncio.create_task(tokens_of(engine, "a", [1, 2, 3]))
        ranks.stuck.add(1)
        assert await stream == expected_tokens([1, 2, 3], 12)
        (loss,) = ranks.losses
        assert loss.lost == {1}
        assert loss.cause.rank == 1
        assert "no progress on step" in str(loss.cause)


async def test_a_stuck_rank_is_found_in_an_idle_time() -> None:
    async with engine_and_ranks() as (engine, ranks, _):
        ranks.stuck.add(2)
        began = time.monotonic()
        while engine.state is EngineState.READY:
            await asyncio.sleep(0.005)
        assert time.monotonic() - began < STEP_TIMEOUT + 0.25 * STEP_TIMEOUT + 1
        while engine.state is not EngineState.READY:
            await asyncio.sleep(0.005)
        assert [loss.lost for loss in ranks.losses] == [{2}]
        assert await tokens_of(engine, "a", [1]) == expected_tokens([1], 12)


async def test_the_request_that_ends_its_rank_gets_the_error_and_nobody_else() -> None:
    async with engine_and_ranks() as (engine, ranks, _):
        ranks.deadly = [7, 7, 7]
        streams = [asyncio.create_task(tokens_of(engine, str(i), [i, i, i, i])) for i in range(12)]
        answers = await asyncio.gather(*streams, return_exceptions=True)
        for i, answer in enumerate(answers):
            if i == 7:
                assert str(answer) == "stage 0 failed: its process ended"
            else:
                assert answer == expected_tokens([i] * 4, 12)
        assert len(ranks.losses) == 3


async def test_requests_are_queued_while_ranks_are_replaced_and_a_client_may_leave() -> None:
    async with engine_and_ranks() as (engine, ranks, _):
        async with aclosing(engine.generate("gone", [5], SamplingParams(max_tokens=50, temperature=0.0))) as chunks:
            await anext(chunks)
            ranks.lose(0, "kill")
            while engine.state is EngineState.READY:
                await asyncio.sleep(0)
            assert engine.state is EngineState.RECOVERING
            waiting = asyncio.create_task(tokens_of(engine, "new", [6]))
            await asyncio.sleep(0)
        assert await waiting == expected_tokens([6], 12)


async def test_when_it_is_given_up_every_stream_gets_the_cause() -> None:
    async with engine_and_ranks() as (engine, ranks, serving):
        ranks.max_losses = 0
        streams = [asyncio.create_task(tokens_of(engine, str(i), [i], 40)) for i in range(3)]
        await asyncio.sleep(0)
        ranks.lose(1, "kill")
        (ended,) = await asyncio.gather(serving, return_exceptions=True)
        answers = await asyncio.gather(*streams, return_exceptions=True)
        assert {str(answer) for answer in (ended, *answers)} == {"stage 1 failed: its process ended"}
        assert isinstance(ended, StageFailed)
        assert engine.state is EngineState.FAILED
        with pytest.raises(NotReady):
            await tokens_of(engine, "b", [1])


async def test_an_engine_that_drains_meanwhile_finishes_what_is_open_first() -> None:
    async with engine_and_ranks() as (engine, ranks, serving):
        stream = asyncio.create_task(tokens_of(engine, "a", [3]))
        await asyncio.sleep(0)
        ranks.lose(2, "fail")
        await engine.drain()
        assert await stream == expected_tokens([3], 12)
        await serving


# ---- how often --------------------------------------------------------------------------------------------------------


def test_restarts_of_no_use_come_slower_and_slower() -> None:
    restarts = Restarts(100)
    assert [restarts.take(at, was_of_use=False) for at in range(5)] == [0, 0.5, 1, 2, 4]
    assert restarts.take(5, was_of_use=True) == 0
    pauses = [restarts.take(6, was_of_use=False) for _ in range(20)]
    assert pauses[-1] == LAST_BACKOFF_SECONDS


def test_no_more_restarts_within_an_hour_than_are_allowed() -> None:
    restarts = Restarts(2)
    assert restarts.take(0, was_of_use=True) == 0
    assert restarts.take(WINDOW_SECONDS / 2, was_of_use=True) == 0
    assert restarts.take(WINDOW_SECONDS - 1, was_of_use=True) is None
    assert restarts.take(WINDOW_SECONDS, was_of_use=True) == 0, "the first is forgotten"
    assert Restarts(0).take(0, was_of_use=True) is None


# ---- how soon ---------------------------------------------------------------------------------------------------------


def test_long_steps_get_more_time_and_short_ones_do_not() -> None:
    patience = Patience(2, 2.0)
    assert patience.allowed_seconds([1]) == 2.0, "nothing is known"
    for stage in (0, 1):
        patience.learn(stage, 4, 0.02)
        patience.learn(stage, 512, 1.0)
    assert patience.allowed_seconds([4, 4]) == 2.0
    assert patience.allowed_seconds([512]) == FACTOR * 2.0
    assert patience.allowed_seconds([512, 4]) == pytest.approx(FACTOR * 2.04)
    assert patience.expected_seconds(0, 2000) == 2.0, "of the nearest size, scaled up"
    assert patience.expected_seconds(0, 1) == 0.02, "never down"
    for _ in range(200):
        patience.learn(0, 512, 0.5)
    assert patience.expected_seconds(0, 512) == pytest.approx(0.5), "what was once slow is forgotten"


# ---- what is seen -----------------------------------------------------------------------------------------------------


def test_stopped_spinning_and_waiting_processes_are_told_apart() -> None:
    ledger = create_ledger(Place(writer=Writer.RANK, rank=0, world_size=3))
    programs = ["while True: pass", "import time; time.sleep(60)", "import time; time.sleep(60)"]
    processes = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    sight = ProcessSight(lambda: {rank: process.pid for rank, process in enumerate(processes)}, [ledger])
    try:
        processes[2].send_signal(signal.SIGSTOP)
        while sight.stopped() != {2}:
            time.sleep(0.01)
        deadline = time.monotonic() + 20
        while True:
            sight.stopped()
            lines = sight.describe()
            if "spinning" in lines[0] and "waiting (" in lines[1]:
                break
            assert time.monotonic() < deadline, lines
            time.sleep(0.05)
        assert lines[2] == f"rank 2, process {processes[2].pid}: stopped; last seen in no step"
    finally:
        for process in processes:
            process.kill()
            process.wait()
        assert "gone" in sight.describe()[0]
        sight.close()
