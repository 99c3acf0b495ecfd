"""What a pipeline of toy stages must stand, whatever carries its messages. Each asserts what it is about."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing

from orchestrator.request import SamplingParams
from stages.assembly import Slice
from stages.plan import StepPlan
from stages.topology import StageInfo
from tests.local_pipeline import LocalPipeline
from tests.served_engine import Sizes
from tests.toy_model import toy_slices, toy_tokens

Pipelines = Callable[[Sequence[Slice], Sizes], AbstractAsyncContextManager[LocalPipeline]]


async def check_aborts_and_preemptions(open_pipeline: Pipelines, num_requests: int) -> None:
    """Every token that comes is right, and everything is given back, though most requests are cut short or computed again."""
    chance = random.Random(7)
    sizes = Sizes(max_num_seqs=8, num_blocks=24, block_size=4, max_model_len=64, max_num_batched_tokens=12)
    async with open_pipeline(toy_slices(3), sizes) as pipeline:

        async def one(i: int) -> None:
            prompt = [chance.randrange(1000) for _ in range(chance.randint(1, 30))]
            num_wanted = chance.choice([20, 20, chance.randint(1, 19)])
            tokens: list[int] = []
            params = SamplingParams(max_tokens=20, temperature=0.0)
            async with aclosing(pipeline.engine.generate(str(i), prompt, params)) as chunks:
                async for chunk in chunks:
                    tokens += chunk.token_ids
                    if len(tokens) >= num_wanted:
                        break
            assert tokens == toy_tokens(prompt, len(tokens), 3)
            assert len(tokens) >= num_wanted

        await asyncio.gather(*(one(i) for i in range(num_requests)))
        scheduler = pipeline.engine.scheduler
        assert scheduler.num_preemptions > 0, "the pool was meant to be too small"
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert scheduler.num_free_blocks == sizes.num_blocks


async def check_overlap(open_pipeline: Pipelines, num_stages: int, sizes: Sizes) -> None:
    """Every stage stops until all stages compute: that only happens when the pipeline really overlaps."""
    barrier = threading.Barrier(num_stages)
    first_full = 2 + num_stages - 1  # two steps are the probe's
    is_over = threading.Event()

    def meet(info: StageInfo, plan: StepPlan) -> None:
        # The first requests fill the pipeline one by one; from then on all stages must meet.
        if info.rank + plan.step_id >= first_full and not is_over.is_set():
            try:
                barrier.wait(timeout=20)
            except threading.BrokenBarrierError:
                assert is_over.is_set(), "the stages do not compute at the same time"

    async with open_pipeline(toy_slices(num_stages, meet), sizes) as pipeline:

        async def one(i: int) -> list[int]:
            tokens: list[int] = []
            async for chunk in pipeline.engine.generate(str(i), [i], SamplingParams(max_tokens=40, temperature=0.0)):
                tokens += chunk.token_ids
                if len(tokens) == 30:
                    is_over.set()
                    barrier.abort()
            return tokens

        answers = await asyncio.gather(*(one(i) for i in range(2 * num_stages)))
    assert answers == [toy_tokens([i], 40, num_stages) for i in range(2 * num_stages)]
