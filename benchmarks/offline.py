"""An engine with its ranks as ``stagewire serve`` starts them, without HTTP and text: what others' offline runs compare to."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from orchestrator.config import ServeConfig
from orchestrator.engine import Engine
from orchestrator.launch import Launcher, rank_environment
from orchestrator.pipeline import Pipeline, PipelineConfig, assemble
from orchestrator.request import SamplingParams, ServedModel
from orchestrator.scheduler import Scheduler, SchedulerConfig
from stages.model.source import ModelSource, read_model_config
from stages.plan import Setup, StepDone, StepResult


class MeasuringEngine(Engine):
    """``forward_seconds``: of each rank, since the last ``reset``. ``control_us``: from each decoded result to the last byte of
    the plans that followed it at once."""

    def __init__(self) -> None:
        super().__init__(step_timeout_seconds=60.0)
        self.forward_seconds: list[float] = []
        self.control_us: list[float] = []
        self._written_at = 0

    def reset(self) -> None:
        self.forward_seconds = [0.0] * len(self._channels)
        self.control_us = []

    def _take_done(self, done: StepDone) -> None:
        self.forward_seconds[done.rank] += done.stage_seconds
        super()._take_done(done)

    def _take_result(self, result: StepResult) -> None:
        self._written_at = 0
        started = time.perf_counter_ns()
        super()._take_result(result)
        if self._written_at:
            self.control_us.append((self._written_at - started) / 1e3)

    def _send(self, channel, encoded_plan: bytes) -> None:
        super()._send(channel, encoded_plan)
        self._written_at = time.perf_counter_ns()

    async def answer(self, name: str, prompts: Sequence[list[int]], num_tokens: int) -> float:
        """Seconds that all prompts took together, each with ``num_tokens`` greedy tokens."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)

        async def one(i: int, prompt: list[int]) -> int:
            return sum([len(chunk.token_ids) async for chunk in self.generate(f"{name}-{i}", prompt, params)])

        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            counts = [tasks.create_task(one(i, prompt)) for i, prompt in enumerate(prompts)]
        seconds = time.perf_counter() - started
        assert all(count.result() == num_tokens for count in counts)
        return seconds


@asynccontextmanager
async def engine_over(
    pipeline: Pipeline, vocab_size: int, eos_token_ids: frozenset[int] = frozenset()
) -> AsyncIterator[MeasuringEngine]:
    limits = pipeline.limits
    scheduler = Scheduler(
        SchedulerConfig(
            num_stages=len(pipeline.channels),
            lane_depth=limits.lane_depth,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_waiting=256,
            eos_token_ids=eos_token_ids,
            epoch=pipeline.epoch,
        )
    )
    engine = MeasuringEngine()
    served = ServedModel(
        name="benchmark", max_model_len=limits.max_model_len, vocab_size=vocab_size, eos_token_ids=eos_token_ids, created=0
    )
    engine.open(pipeline, scheduler, served)
    engine.reset()
    serving = asyncio.create_task(engine.serve_ranks(), name="engine")
    try:
        await engine.probe()
        engine.admit()
        engine.reset()
        yield engine
        await engine.drain()
        await serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@asynccontextmanager
async def real_engine(
    source: ModelSource, num_ranks: int, dtype: str, max_model_len: int = 512, max_num_seqs: int = 64
) -> AsyncIterator[tuple[MeasuringEngine, Launcher]]:
    """Ranks in processes of their own, with as many threads as ``stagewire serve`` gives them."""
    config = ServeConfig(pipeline_parallel_size=num_ranks, dtype=dtype, cpu_binding="auto" if num_ranks > 1 else "none")
    num_threads = config.num_threads(num_ranks)
    launcher = Launcher()
    argv = [sys.executable, "-m", "orchestrator.rank_main", "--log-level", "warning"]
    await launcher.start([[rank] for rank in range(num_ranks)], lambda _: argv, rank_environment(os.environ, num_threads))
    try:
        setups = [
            Setup(
                rank=rank,
                world_size=num_ranks,
                model_name=source.name,
                model_path=str(source.path),
                load_format="auto",
                dtype=dtype,
                layer_split=[],
                num_threads=num_threads,
                cpus=config.cpus_of(rank, num_ranks),
                ranks_on_host=num_ranks,
                block_size=config.block_size,
                kv_cache_bytes=0,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
            )
            for rank in range(num_ranks)
        ]
        wanted = PipelineConfig(
            wanted_transport="auto",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            is_max_model_len_given=True,
            ring_slots=config.ring_slots,
        )
        pipeline = await assemble(launcher.channels, setups, wanted)
        async with engine_over(pipeline, read_model_config(source.path).vocab_size) as engine:
            yield engine, launcher
        await launcher.stop(10.0)
    finally:
        launcher.kill()
