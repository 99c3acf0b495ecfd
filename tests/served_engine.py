"""An engine over ranks that somebody else runs. No torch."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from orchestrator.config import PipelineOptions
from orchestrator.control import Channel
from orchestrator.engine import Engine
from orchestrator.pipeline import Pipeline, PipelineConfig, assemble
from orchestrator.request import ServedModel
from orchestrator.scheduler import Scheduler, SchedulerConfig
from stages.plan import Setup


@dataclass(frozen=True, kw_only=True)
class Sizes:
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 64
    max_model_len: int = 256
    num_blocks: int = 512
    block_size: int = 16
    max_waiting: int = 256
    ring_slots: int = 3
    eos_token_ids: frozenset[int] = frozenset()


@asynccontextmanager
async def serving_engine(
    channels: Mapping[int, Channel], vocab_size: int, transport: str, sizes: Sizes, cpu_binding: str = "none"
) -> AsyncIterator[tuple[Engine, asyncio.Task[None]]]:
    """An engine over ranks that wait for their Setup at the other end of ``channels``; drains them at the end."""
    pipeline = await assemble_ranks(channels, transport, sizes, cpu_binding)
    try:
        async with engine_over(pipeline, vocab_size, sizes) as engine_and_serving:
            yield engine_and_serving
    finally:
        for channel in channels.values():
            await channel.aclose()


async def assemble_ranks(channels: Mapping[int, Channel], transport: str, sizes: Sizes, cpu_binding: str = "none") -> Pipeline:
    return await assemble(
        channels,
        [setup_for(rank, len(channels), sizes, cpu_binding) for rank in range(len(channels))],
        pipeline_config(transport, sizes),
    )


def pipeline_config(transport: str, sizes: Sizes) -> PipelineConfig:
    return PipelineConfig(
        wanted_transport=transport,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        is_max_model_len_given=True,
        ring_slots=sizes.ring_slots,
    )


@asynccontextmanager
async def engine_over(
    pipeline: Pipeline, vocab_size: int, sizes: Sizes, step_timeout_seconds: float = 10.0
) -> AsyncIterator[tuple[Engine, asyncio.Task[None]]]:
    """Ends with the ranks drained, or, when one was lost, as the engine left the others."""
    engine = Engine(step_timeout_seconds)
    scheduler = Scheduler(
        SchedulerConfig(
            num_stages=len(pipeline.channels),
            lane_depth=pipeline.limits.lane_depth,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
            num_blocks=pipeline.limits.num_blocks,
            block_size=sizes.block_size,
            max_waiting=sizes.max_waiting,
            eos_token_ids=sizes.eos_token_ids,
            epoch=pipeline.epoch,
        )
    )
    served = ServedModel(
        name="local",
        max_model_len=sizes.max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=sizes.eos_token_ids,
        created=0,
    )
    engine.open(pipeline, scheduler, served)
    serving = asyncio.create_task(engine.serve_ranks(), name="engine")
    try:
        await engine.probe()
        engine.admit()
        yield engine, serving
        if not serving.done():
            await engine.drain()
            await serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def setup_for(rank: int, world_size: int, sizes: Sizes, cpu_binding: str = "none") -> Setup:
    return Setup(
        rank=rank,
        world_size=world_size,
        model_name="local",
        model_path="",
        load_format="dummy",
        dtype="float32",
        layer_split=[],
        num_threads=1,
        cpus=PipelineOptions(cpu_binding=cpu_binding).cpus_of(rank, world_size),
        ranks_on_host=world_size,
        block_size=sizes.block_size,
        kv_cache_bytes=0,
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
    )
