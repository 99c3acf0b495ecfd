"""Whole pipelines over the copy engine on emulated GPUs: engine, scheduler, rank loops, stages, device links.

The ranks are threads with a loop each, which start at once, or processes, which reach each other's memory by CUDA IPC and can
be killed. ``test_gpu.py`` has the twins on GPUs.
"""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import msgspec
import pytest
import uvloop

from metrics.recorder import StepRecorder
from orchestrator.control import Channel, ChannelClosed, SocketChannel
from orchestrator.engine import Engine
from orchestrator.launch import Launcher, rank_environment
from orchestrator.pipeline import Pipeline
from orchestrator.rank_main import serve_rank
from orchestrator.request import SamplingParams
from stages.assembly import Gpu, Slice
from stages.errors import StageFailed
from stages.model.source import ModelSource
from stages.plan import (
    Drained,
    EndEpoch,
    Epoch,
    Exported,
    Hello,
    Linked,
    Message,
    Peers,
    PlanRow,
    RowKind,
    RowSampling,
    StepDone,
    StepPlan,
    StepResult,
)
from stages.topology import StageInfo
from tests.emulated_cuda import Operation, emulation
from tests.integration.test_parity import BLOCK_SIZE, PROMPTS, Case, model_slices, reference_tokens, run_prompts, sizes_for
from tests.ledgers import rank_ledgers
from tests.local_pipeline import LocalPipeline, emulated_gpu, slice_loader
from tests.served_engine import Sizes, assemble_ranks, engine_over, setup_for
from tests.stages.model_factory import write_tiny_model
from tests.stages.transport.harness import no_leaks, open_fds  # noqa: F401  every test here checks for leaks
from tests.toy_model import VOCAB_SIZE, toy_slices, toy_tokens
from tests.toy_scenarios import check_aborts_and_preemptions, check_overlap

pytestmark = pytest.mark.alone
LOOPS = ("uvloop",)
uvloop.new_event_loop().close()  # libuv opens a pipe with its first loop, and keeps it
ORDER_SECONDS = 20.0  # what a rank may take to do as it is told, on a busy machine


@asynccontextmanager
async def rank_threads(
    slices: Sequence[Slice], num_blocks: int = Sizes().num_blocks, recorders: Sequence[StepRecorder] | None = None
) -> AsyncIterator[dict[int, Channel]]:
    """Ranks that wait for their Setup, each a thread: a rank that connects its links blocks its loop until its peers do too."""
    gpus: list[Gpu] = []
    channels: dict[int, Channel] = {}

    def open_gpu(rank: int) -> Gpu:
        gpus.append(emulated_gpu(rank))
        return gpus[-1]

    async def serve(rank: int, sock: socket.socket) -> None:
        channel = SocketChannel(sock, peer="the engine")
        try:
            recorder = None if recorders is None else recorders[rank]
            await serve_rank(rank, channel, None, slice_loader(slices, num_blocks, open_gpu), recorder)
        except ChannelClosed:
            pass  # how a rank ends when the engine gave up
        finally:
            await channel.aclose()

    with ThreadPoolExecutor(len(slices), "rank") as pool:
        ends = []
        for rank in range(len(slices)):
            ours, theirs = socket.socketpair()
            channels[rank] = SocketChannel(ours, peer=f"rank {rank}")
            ends.append(pool.submit(lambda rank=rank, theirs=theirs: uvloop.run(serve(rank, theirs))))
        try:
            yield channels
        finally:
            for channel in channels.values():
                await channel.aclose()
    for gpu in gpus:
        gpu.device.close()
    for end in ends:
        end.result()


@asynccontextmanager
async def emulated_pipeline(slices: Sequence[Slice], sizes: Sizes | None = None) -> AsyncIterator[LocalPipeline]:
    sizes = sizes or Sizes()
    with rank_ledgers(len(slices)) as ledgers:
        async with rank_threads(slices, sizes.num_blocks, ledgers.recorders) as channels:
            linked = await assemble_ranks(channels, "copy_engine", sizes)
            async with engine_over(linked, slices[0].vocab_size, sizes) as (engine, serving):
                pipeline = LocalPipeline(engine, ledgers, serving)
                yield pipeline
        pipeline.operations.extend(ledgers.operations(rank) for rank in range(len(slices)))


# ---- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_stages", "ring_slots"), [(1, 3), (2, 1), (2, 3), (3, 2), (4, 4)])
async def test_every_token_is_right(num_stages: int, ring_slots: int) -> None:
    """With fewer slots than stages hidden states are sent from streams of their own, else from the compute stream."""
    prompts = [[random.Random(i).randrange(1000) for _ in range(1 + i * 7)] for i in range(16)]
    sizes = Sizes(max_num_batched_tokens=16, ring_slots=ring_slots)
    async with emulated_pipeline(toy_slices(num_stages), sizes) as pipeline:
        answers = await asyncio.gather(*(pipeline.tokens(str(i), prompt) for i, prompt in enumerate(prompts)))
    assert answers == [toy_tokens(prompt, 16, num_stages) for prompt in prompts]


ANY = (Operation.COPY, Operation.KERNEL, Operation.WAIT_EVENT, Operation.WRITE_VALUE, Operation.CALL)


@pytest.mark.parametrize(
    ("num_stages", "ring_slots", "late", "is_random"),
    [(3, 1, ANY, True), (4, 4, ANY, True), (4, 3, (Operation.COPY,), False), (3, 3, (Operation.CALL,), False)],
    ids=["anything in few slots", "anything", "copies", "forwards"],
)
async def test_tokens_are_right_whatever_is_late(
    num_stages: int, ring_slots: int, late: Sequence[Operation], is_random: bool
) -> None:
    """What has no order by itself comes in another one: copies after the next forwards, say."""
    delay_us = {"random_us": 3000} if is_random else {"fixed_us": 5000}
    with emulation() as emulated:
        async with emulated_pipeline(toy_slices(num_stages), Sizes(ring_slots=ring_slots)) as pipeline:
            emulated.delay(*late, **delay_us)
            answers = await asyncio.gather(*(pipeline.tokens(str(i), [i] * 9, max_tokens=12) for i in range(16)))
            emulated.delay(*late)
    assert answers == [toy_tokens([i] * 9, 12, num_stages) for i in range(16)]


async def test_aborts_and_preemptions_leave_no_trace() -> None:
    await check_aborts_and_preemptions(emulated_pipeline, 30)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return ModelSource("tiny", write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama"), None, "auto")


@pytest.fixture(scope="module")
def tiny_prompts() -> list[list[int]]:
    return [[3 + byte for byte in prompt.encode()][:120] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def tiny_wanted(tiny: ModelSource, tiny_prompts: list[list[int]]) -> list[list[int]]:
    return reference_tokens(tiny, tiny_prompts, 16)


@pytest.mark.parametrize("case", [Case(2, "copy_engine", 16, 16), Case(3, "copy_engine", 16, 512)], ids=str)
async def test_a_tiny_model(tiny: ModelSource, tiny_prompts: list[list[int]], tiny_wanted: list[list[int]], case: Case) -> None:
    sizes = sizes_for(case, tiny_prompts, 16)
    async with emulated_pipeline(model_slices(tiny, case.num_stages), sizes) as pipeline:
        assert await run_prompts(pipeline, tiny_prompts, case.num_concurrent, 16) == tiny_wanted
        assert pipeline.engine.scheduler.num_preemptions > 0, "the pool was meant to be too small"


async def test_a_slot_is_given_anew_while_a_token_of_its_last_owner_is_under_way(
    tiny: ModelSource, tiny_prompts: list[list[int]], tiny_wanted: list[list[int]]
) -> None:
    """Few slots and many aborts: the next step of a request is under way when it is aborted, and its slot is taken at once."""
    async with emulated_pipeline(model_slices(tiny, 3), Sizes(max_num_seqs=2, block_size=BLOCK_SIZE)) as pipeline:

        async def abort(i: int) -> None:
            params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
            async with aclosing(pipeline.engine.generate(f"aborted {i}", tiny_prompts[i], params)) as chunks:
                await anext(chunks)

        aborts = [abort(i) for i in range(8)]
        answers = [pipeline.tokens(str(i), tiny_prompts[i], max_tokens=4, ignore_eos=True) for i in range(8)]
        mixed = [work for pair in zip(aborts, answers, strict=True) for work in pair]
        got = await asyncio.gather(*mixed)
    assert got[1::2] == [tokens[:4] for tokens in tiny_wanted[:8]]


# ---- work -------------------------------------------------------------------------------------------------------------


async def test_every_piece_of_work_of_every_step_is_recorded() -> None:
    async with emulated_pipeline(toy_slices(3)) as pipeline:
        await pipeline.tokens("a", [1, 2, 3], max_tokens=5)
    num_steps = 2 + 5  # the probe's, and the request's
    kinds = [
        {"forward", "send", "token_receive"},
        {"recv", "forward", "send", "token_receive"},
        {"recv", "forward", "token_broadcast"},
    ]
    for spans, expected in zip(pipeline.operations, kinds, strict=True):
        assert {span.kind for span in spans} == expected
        assert len(spans) == num_steps * len(expected), "one of each kind for every step"
        assert all(0 < span.start_ns <= span.end_ns for span in spans)


@pytest.mark.parametrize(("num_stages", "ring_slots"), [(2, 1), (4, 4)])
async def test_as_many_steps_are_computed_at_once_as_there_are_stages(num_stages: int, ring_slots: int) -> None:
    await check_overlap(emulated_pipeline, num_stages, Sizes(ring_slots=ring_slots))


async def test_an_error_in_one_stage_reaches_every_stream_with_the_stage(caplog: pytest.LogCaptureFixture) -> None:
    def fail(info: StageInfo, plan: StepPlan) -> None:
        if info.rank == 1 and plan.step_id == 6:
            raise RuntimeError("no more memory\nand a second line")

    async with emulated_pipeline(toy_slices(3, fail)) as pipeline:
        answers = await asyncio.gather(*(pipeline.tokens(str(i), [i], max_tokens=50) for i in range(4)), return_exceptions=True)
        assert [str(answer) for answer in answers] == ["stage 1 failed: RuntimeError: no more memory"] * 4
        with pytest.raises(StageFailed):
            await pipeline.serving
    assert caplog.text.count("Traceback") == 1, "one failure is told once"


# ---- epochs -----------------------------------------------------------------------------------------------------------


M = TypeVar("M", bound=Message)


async def one_of(channel: Channel, *kinds: type[M]) -> M:
    """The rank's next message, which must be of one of ``kinds``."""
    async with asyncio.timeout(ORDER_SECONDS):
        message = await channel.receive()
    assert isinstance(message, kinds), message
    return message


async def end_epoch(pipeline: Pipeline, cause: str) -> None:
    """All ranks let go of it, with no other step done."""
    for channel in pipeline.channels:
        channel.send(EndEpoch(pipeline.epoch, cause))
    for rank, channel in enumerate(pipeline.channels):
        while isinstance(message := await one_of(channel, Drained, StepDone), StepDone):
            assert message.error, "what a rank that let go sends to one that was not told yet is no message"
        assert message == Drained(pipeline.epoch, rank)


async def next_epoch(last: Pipeline) -> Pipeline:
    """Link the ranks again, in the epoch after ``last``."""
    pipeline = replace(last, epoch=last.epoch + 1)
    for channel in pipeline.channels:
        channel.send(Epoch(pipeline.epoch, list(pipeline.offers), "copy_engine", pipeline.limits, 0))
    exports = [(await one_of(channel, Exported)).data for channel in pipeline.channels]
    for channel in pipeline.channels:
        channel.send(Peers(pipeline.epoch, exports))
    for rank, channel in enumerate(pipeline.channels):
        assert await one_of(channel, Linked) == Linked(pipeline.epoch, rank, "copy_engine", pipeline.reason)
    return pipeline


def step(epoch: int, step_id: int = 0, num_in_flight: int = 1) -> StepPlan:
    row = PlanRow(step_id, 0, RowKind.PREFILL, 0, 3, [1, 2, 3], [step_id], RowSampling(), True)
    return StepPlan(epoch, step_id, [row], [], [], 1, num_in_flight)


async def check_it_serves(pipeline: Pipeline, sizes: Sizes) -> None:
    """Serve some requests, and drain the ranks."""
    async with engine_over(pipeline, VOCAB_SIZE, sizes) as (engine, serving):
        local = LocalPipeline(engine, [], serving)
        answers = await asyncio.gather(*(local.tokens(str(i), [i, 5]) for i in range(8)))
    assert answers == [toy_tokens([i, 5], 16, len(pipeline.channels)) for i in range(8)]


@pytest.mark.parametrize("ring_slots", [1, 3])
async def test_ranks_that_wait_for_another_are_freed_and_serve_the_next_epoch(ring_slots: int) -> None:
    """In each epoch another rank gets no plans: the others come to wait for it, or for one that does."""
    num_stages, sizes = 3, Sizes(ring_slots=ring_slots)
    num_fds: list[int] = []
    async with rank_threads(toy_slices(num_stages)) as channels:
        pipeline = await assemble_ranks(channels, "copy_engine", sizes)
        for idle in range(num_stages):
            num_fds.append(len(open_fds()))
            for step_id in range(pipeline.limits.lane_depth + 1):
                for rank, channel in channels.items():
                    if rank != idle:
                        channel.send(step(pipeline.epoch, step_id))
            await end_epoch(pipeline, f"rank {idle} was lost")  # no step can be done before
            pipeline = await next_epoch(pipeline)
        assert num_fds == [num_fds[0]] * num_stages, "what an epoch had of the device is freed with the next"
        await check_it_serves(pipeline, sizes)


async def test_a_step_that_ranks_were_told_differently_has_no_result() -> None:
    """Rank 0 believes in another step than the others. Who finds that names both sides, and whoever comes after hears of it."""
    told, differently = step(0), step(0, num_in_flight=2)
    errors = await errors_of_a_step([told, differently, differently])
    assert errors == [
        "step 0: rank 2 reports a header mismatch, seen by itself or before it",
        "step 0: header field in_flight: rank 1 expected 2, rank 0 sent 1",
        "step 0: rank 1 reports a header mismatch, seen by itself or before it",
    ]


async def test_a_rank_that_expects_other_tokens_than_it_gets_says_so() -> None:
    row = msgspec.structs.replace(step(0).rows[0], needs_token=False)
    errors = await errors_of_a_step([msgspec.structs.replace(step(0), rows=[row]), step(0), step(0)])
    assert errors == ["step 0: header field num_reqs: rank 0 expected 0, rank 2 sent 1", "", ""]


async def errors_of_a_step(plans: Sequence[StepPlan]) -> list[str]:
    """Have each rank do its own version of a step; what they report of it. No result comes when the last rank reports an error.
    The next epoch serves."""
    sizes = Sizes()
    async with rank_threads(toy_slices(len(plans))) as channels:
        pipeline = await assemble_ranks(channels, "copy_engine", sizes)
        for channel, plan in zip(pipeline.channels, plans, strict=True):
            channel.send(plan)
        errors: list[str] = []
        for channel in pipeline.channels:
            message = await one_of(channel, StepDone, StepResult)
            if isinstance(message, StepResult):
                message = await one_of(channel, StepDone)
                assert isinstance(message, StepDone)
                assert not message.error, "it sent a result"
            assert isinstance(message, StepDone)
            assert message.verdict == (not message.error)
            errors.append(message.error)
        await end_epoch(pipeline, "a header mismatch")
        await check_it_serves(await next_epoch(pipeline), sizes)
    return errors


# ---- processes --------------------------------------------------------------------------------------------------------


async def start_ranks(launcher: Launcher, num_stages: int, *ranks: int) -> None:
    argv = [sys.executable, "-m", "tests.toy_rank", str(num_stages), "0", "emulated"]
    await launcher.start([[rank] for rank in ranks], lambda _: argv, rank_environment(os.environ, 1))


async def lose_a_rank(pipeline: Pipeline, victim: int, process_id: int, sizes: Sizes) -> None:
    """Kill the rank's process while it serves: every stream ends with its loss, after the others have let go of the epoch."""
    num_stages, num_seen = len(pipeline.channels), 0
    is_under_way = asyncio.Event()
    seen: list[list[int]] = [[] for _ in range(6)]

    async def one(engine: Engine, i: int) -> None:
        nonlocal num_seen
        async for chunk in engine.generate(str(i), [i], SamplingParams(max_tokens=200, temperature=0.0)):
            seen[i] += chunk.token_ids
            num_seen += len(chunk.token_ids)
            if num_seen >= 30:
                is_under_way.set()

    async with engine_over(pipeline, VOCAB_SIZE, sizes) as (engine, serving):
        streams = [asyncio.create_task(one(engine, i)) for i in range(len(seen))]
        await is_under_way.wait()
        os.kill(process_id, signal.SIGKILL)
        for ended in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(ended, StageFailed)
            assert ended.rank == victim
        with pytest.raises(StageFailed):
            await serving
    assert seen == [toy_tokens([i], len(tokens), num_stages) for i, tokens in enumerate(seen)], "what came was right"


async def test_a_killed_rank_is_replaced_and_the_others_serve_on() -> None:
    num_stages, sizes, victims = 3, Sizes(), (1, 2)
    first, spares = Launcher(), [Launcher() for _ in victims]
    try:
        await start_ranks(first, num_stages, *range(num_stages))
        for victim, spare in zip(victims, spares, strict=True):  # now: they start side by side
            await start_ranks(spare, num_stages, victim)
        pipeline = await assemble_ranks(first.channels, "copy_engine", sizes)
        for victim, spare in zip(victims, spares, strict=True):
            await lose_a_rank(pipeline, victim, first.process_ids[victim], sizes)
            channels, offers = list(pipeline.channels), list(pipeline.offers)
            channels[victim] = spare.channels[victim]
            channels[victim].send(setup_for(victim, num_stages, sizes))
            offers[victim] = (await one_of(channels[victim], Hello)).offer
            pipeline = await next_epoch(replace(pipeline, channels=channels, offers=offers))
        await check_it_serves(pipeline, sizes)
        assert [ended.returncode for ended in await first.stop(10)] == [0, -signal.SIGKILL, -signal.SIGKILL]
        for spare in spares:
            assert [ended.returncode for ended in await spare.stop(10)] == [0]
    finally:
        for launcher in (first, *spares):
            launcher.kill()


def test_a_worker_of_processes() -> None:
    """As it is served."""
    num_stages, num_requests, num_tokens = 2, 12, 24
    arguments = map(str, (num_stages, 0, num_requests, num_tokens, "copy_engine"))
    done = subprocess.run([sys.executable, "-m", "tests.toy_worker", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    assert run["tokens"] == [toy_tokens([i], num_tokens, num_stages) for i in range(num_requests)]
    assert run["exit_codes"] == [0] * num_stages
