"""What the control plane costs: ``python -m benchmarks.control``.

Per step: from a decoded StepResult to the last byte of the next StepPlan written to every rank's socket, detokenising and SSE
excluded. The ranks are scripted and answer at once, so nothing else takes the interpreter's time.

Idle: CPU time of the engine and of real ranks while nothing is asked of them, heartbeats included.
"""

import argparse
import asyncio
import gc
import os
import socket
from pathlib import Path

import uvloop

from benchmarks.offline import engine_over, real_engine
from benchmarks.report import cpu_environment, percentile, save, show
from orchestrator.control import Channel, ChannelClosed, SocketChannel
from orchestrator.pipeline import Pipeline
from stages.model.source import locate_model
from stages.plan import Drain, Limits, SampledRow, StepDone, StepPlan, StepResult, encode, plan_hash

NUM_TOKENS = 200
PROMPT_TOKENS = 16


async def scripted_rank(rank: int, channel: Channel, *, is_last: bool) -> None:
    """Samples token 7 for every row that needs one."""
    try:
        while not isinstance(plan := await channel.receive(), Drain):
            assert isinstance(plan, StepPlan)
            if is_last:
                rows = [SampledRow(row.slot, row.generation, [7], 0, []) for row in plan.sampled_rows]
                channel.send(StepResult(plan.epoch, plan.step_id, rows))
            channel.send(StepDone(plan.epoch, plan.step_id, rank, plan_hash(encode(plan)), True, 0.001, ""))
    except ChannelClosed:
        pass
    await channel.aclose()


async def control_us(num_ranks: int, num_requests: int) -> list[float]:
    """With all requests decoding: each step has ``num_requests / num_ranks`` rows."""
    pairs = [socket.socketpair() for _ in range(num_ranks)]
    channels = [SocketChannel(ours, f"rank {rank}") for rank, (ours, _) in enumerate(pairs)]
    ranks = [
        asyncio.create_task(scripted_rank(rank, SocketChannel(theirs), is_last=rank == num_ranks - 1))
        for rank, (_, theirs) in enumerate(pairs)
    ]
    limits = Limits(
        max_num_seqs=num_requests, max_num_batched_tokens=512, max_model_len=512, max_sample_len=1, num_blocks=8192,
        block_size=16, lane_depth=num_ranks, ring_slots=3,
    )  # fmt: skip
    pipeline = Pipeline(channels, [], limits, "", "", 0)
    async with engine_over(pipeline, vocab_size=1000) as engine:
        await engine.answer("warm", [[1] * PROMPT_TOKENS] * num_requests, 20)
        engine.reset()
        await engine.answer("timed", [[1] * PROMPT_TOKENS] * num_requests, NUM_TOKENS)
        samples = engine.control_us
    await asyncio.gather(*ranks)
    for channel in channels:
        await channel.aclose()
    return samples


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def idle_shares(seconds: float) -> list[tuple[str, float]]:
    source = locate_model(None, "auto")
    assert source.is_converted, "start `stagewire serve` once: it converts the model"
    async with real_engine(source, 2, "float32") as (engine, launcher):
        await engine.answer("warm", [[1] * PROMPT_TOKENS] * 2, 8)
        await asyncio.sleep(1.0)
        pids = {"engine": os.getpid(), **{f"rank {rank}": pid for rank, pid in launcher.process_ids.items()}}
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        await asyncio.sleep(seconds)
        return [(name, (cpu_seconds(pid) - before[name]) / seconds) for name, pid in pids.items()]


async def run(args: argparse.Namespace) -> None:
    gc.collect()
    gc.freeze()  # as the worker does
    rows = []
    for num_ranks in (1, 2):
        samples = await control_us(num_ranks, 32 * num_ranks)
        rows.append(
            {
                "ranks": num_ranks,
                "rows": 32,
                "steps": len(samples),
                "p50 us": percentile(samples, 0.5),
                "p99 us": percentile(samples, 0.99),
            }
        )
    show("Control work of a step", rows)
    save(args.json, "control", rows, cpu_environment)
    idle = [{"process": name, "share of a core": f"{share:.2%}"} for name, share in await idle_shares(args.idle_seconds)]
    show(f"Idle for {args.idle_seconds:g} s", idle)
    save(args.json, "idle", idle, cpu_environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    args = parser.parse_args()
    print(cpu_environment())
    uvloop.run(run(args))


if __name__ == "__main__":
    main()
