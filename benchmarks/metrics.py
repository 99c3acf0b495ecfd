"""What it costs to be seen: ``python -m benchmarks.metrics``.

An observation and a step's record, by themselves. Steps a second of two stages with and without ledgers, in turns. And how
long the steps of eight sleeping stages take while the exporter is scraped once a second, and while it is not.
"""

import argparse
import asyncio
import os
import socket
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.report import cpu_environment, percentile, save, show
from metrics.catalog import SCHEDULE, Place, Writer
from metrics.ledger import LedgerWriter, create_ledger
from metrics.reader import LedgerReader
from metrics.recorder import StepRecorder
from metrics.steps import FORWARD, RECV, SEND, TOKENS
from orchestrator.engine import Engine
from orchestrator.launch import ChildProcess, Launcher, rank_environment
from orchestrator.request import SamplingParams
from stages.device import HostStream, Point
from stages.plan import PlanRow, RowKind, StepPlan
from stages.stage import Work
from tests.served_engine import Sizes, serving_engine
from tests.toy_model import VOCAB_SIZE

NUM_CALLS = 2_000  # a round takes a few milliseconds: short enough that the scheduler leaves some of them alone
NUM_ROUNDS = 200


def ns_per_call(run: Callable[[int], None]) -> float:
    """The quickest of some rounds: what else the machine does can only make one slower."""
    seconds: list[float] = []
    for _ in range(NUM_ROUNDS):
        started_at = time.perf_counter()
        run(NUM_CALLS)
        seconds.append(time.perf_counter() - started_at)
    return min(seconds) / NUM_CALLS * 1e9


class Observe:
    def __init__(self) -> None:
        writer = LedgerWriter(create_ledger(Place(writer=Writer.ENGINE, rank=-1, world_size=2)))
        self._histogram = writer.histogram(SCHEDULE)

    def __call__(self, count: int) -> None:
        observe = self._histogram.observe
        for _ in range(count):
            observe(123_456)


class RecordStep:
    """All that a middle rank's loop does for its record of a step of ``num_rows``."""

    def __init__(self, num_rows: int) -> None:
        self._recorder = StepRecorder(LedgerWriter(create_ledger(Place(writer=Writer.RANK, rank=1, world_size=3))))
        lanes = [RECV, FORWARD, SEND, TOKENS]
        self._recorder.linked(0, "shared_memory", lanes, num_slots=3, num_blocks=1024, row_bytes=2304, has_device_clock=False)
        rows = [PlanRow(slot, 0, RowKind.DECODE, 9, 1, [], [], None, True) for slot in range(num_rows)]
        self._plan = StepPlan(0, 5, rows, [], [4], 1, 2)
        self._works = self._reached_works()

    def __call__(self, count: int) -> None:
        recorder, plan, works = self._recorder, self._plan, self._works
        woke_ns = [1, 2, 3, 4]
        now = time.perf_counter_ns()
        forward = works[FORWARD]
        for _ in range(count):
            recorder.begin(plan, now)
            recorder.ended(RECV, now)
            recorder.forwarded(forward.start.reached_at_ns, forward.end.reached_at_ns)
            recorder.ended(FORWARD, now)
            recorder.ended(SEND, now)
            recorder.ended(TOKENS, now)
            recorder.finish(plan, now, works, woke_ns, 7, 0)

    @staticmethod
    def _reached_works() -> list[Work]:
        streams = [HostStream(name) for name in ("compute", "send", "tokens")]
        compute, send, tokens = (stream.record() for stream in streams)
        for stream in streams:
            stream.close()
        points: list[Point] = [compute, send, tokens]
        assert all(point.is_reached() for point in points)
        return [
            Work(compute, compute, (tokens,), send),
            Work(compute, compute),
            Work(compute, send),
            Work(compute, tokens),
        ]


# ---- pipelines ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def toy_pipeline(num_stages: int, seconds: float, ledgers: Sequence[int]) -> AsyncIterator[Engine]:
    launcher = Launcher()
    argv = [sys.executable, "-m", "tests.toy_rank", str(num_stages), str(seconds), "cpu", "--log-level", "warning"]
    groups = [[rank] for rank in range(num_stages)]
    try:
        await launcher.start(groups, lambda _: argv, rank_environment(os.environ, 1), dict(enumerate(ledgers)))
        async with serving_engine(launcher.channels, VOCAB_SIZE, "shared_memory", Sizes()) as (engine, _):
            yield engine
        await launcher.stop(10)
    finally:
        launcher.kill()


async def generate(engine: Engine, name: str, num_requests: int, num_tokens: int) -> float:
    """Tokens a second."""

    async def one(i: int) -> None:
        async for _ in engine.generate(f"{name} {i}", [i], SamplingParams(max_tokens=num_tokens, temperature=0.0)):
            pass

    started_at = time.perf_counter()
    await asyncio.gather(*(one(i) for i in range(num_requests)))
    return num_requests * num_tokens / (time.perf_counter() - started_at)


def rank_ledgers(num_ranks: int) -> list[int]:
    return [create_ledger(Place(writer=Writer.RANK, rank=rank, world_size=num_ranks)) for rank in range(num_ranks)]


async def on_over_off(num_pairs: int, seconds: float) -> list[float]:
    """Throughput with ledgers over that without; both pipelines live side by side and take turns."""
    ledgers = rank_ledgers(2)
    ratios: list[float] = []
    async with toy_pipeline(2, seconds, ledgers) as measured, toy_pipeline(2, seconds, []) as unmeasured:
        for number in range(-1, num_pairs):
            rates: dict[bool, float] = {}
            for is_on in (True, False) if number % 2 else (False, True):
                engine = measured if is_on else unmeasured
                rates[is_on] = await generate(engine, f"{number}", 4, round(0.4 / seconds))
            if number >= 0:
                ratios.append(rates[True] / rates[False])
    return ratios


async def step_ms(num_stages: int, seconds: float, num_steps: int, is_scraped: bool) -> list[float]:
    """How long each forward took on each stage."""
    ledgers = rank_ledgers(num_stages)
    readers = [LedgerReader(os.dup(fd)) for fd in ledgers]
    with socket.create_server(("127.0.0.1", 0)) as sock:
        arguments = [argument for fd in ledgers for argument in ("--ledger", str(fd))]
        exporter = ChildProcess(
            [sys.executable, "-m", "metrics", "--listen-fd", str(sock.fileno()), *arguments],
            None,
            pass_fds=[sock.fileno(), *ledgers],
        )
        try:
            async with toy_pipeline(num_stages, seconds, ledgers) as engine:
                await generate(engine, "warm", num_stages, 5)
                scraping = asyncio.create_task(_scrape(sock.getsockname()[1])) if is_scraped else None
                started_ns = time.perf_counter_ns()
                await generate(engine, "timed", num_stages, num_steps)
                if scraping is not None:
                    scraping.cancel()
        finally:
            exporter.kill()
    spans = [span for reader in readers for span in reader.spans(started_ns) if span.kind == "forward"]
    return [(span.end_ns - span.start_ns) / 1e6 for span in spans]


async def _scrape(port: int) -> None:
    def get() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            response.read()

    while True:
        await asyncio.to_thread(get)
        await asyncio.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="What it costs to be seen.")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of runs with and without ledgers (default: 15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the tables to this file")
    args = parser.parse_args()
    rows = [{"what": "an observation of a histogram", "ns": round(ns_per_call(Observe()))}]
    rows += [
        {"what": f"everything of a step of {num_rows} rows, on a middle rank", "ns": round(ns_per_call(RecordStep(num_rows)))}
        for num_rows in (1, 32)
    ]
    ratios = uvloop.run(on_over_off(args.pairs, 0.002))
    throughput = [{"stages": 2, "forward ms": 2, "pairs": len(ratios), "on / off p50": f"{median(ratios):.4f}"}]
    throughput[0] |= {"least": f"{min(ratios):.4f}", "most": f"{max(ratios):.4f}"}
    steps = []
    for is_scraped in (False, True):
        samples = uvloop.run(step_ms(8, 0.02, 60, is_scraped))
        steps.append(
            {
                "scraped": "once a second" if is_scraped else "no",
                "steps": len(samples),
                "p50 ms": round(median(samples), 3),
                "p99 ms": round(percentile(samples, 0.99), 3),
            }
        )
    tables = [("Recording", rows), ("Ledgers on and off", throughput), ("Eight stages that sleep 20 ms", steps)]
    for title, table in tables:
        show(title, table)
        save(args.json, title, table, cpu_environment)


if __name__ == "__main__":
    main()
