"""What the metrics say of pipelines whose stages take known times, and of ranks that hang or die.

Engine, ranks and exporter are processes of their own, as they are served.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import pairwise

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from metrics.catalog import STATES, Place, Writer
from metrics.fold import Folder
from metrics.ledger import create_ledger
from metrics.reader import LedgerReader
from orchestrator.engine import Engine
from orchestrator.launch import Launcher, rank_environment
from orchestrator.request import SamplingParams
from stages.errors import StagewireError
from tests.served_engine import Sizes, serving_engine
from tests.toy_model import VOCAB_SIZE

pytestmark = pytest.mark.alone
LOOPS = ("uvloop",)


@dataclass(frozen=True)
class Running:
    engine: Engine
    launcher: Launcher
    ledgers: list[int]
    readers: list[LedgerReader]
    serving: asyncio.Task[None]

    async def generate(self, num_requests: int, num_tokens: int) -> None:
        async def one(i: int) -> None:
            params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
            async for _ in self.engine.generate(f"{i} of {num_requests}", [i], params):
                pass

        await asyncio.gather(*(one(i) for i in range(num_requests)))


@asynccontextmanager
async def toy_pipeline(stage_seconds: Sequence[float]) -> AsyncIterator[Running]:
    num_ranks = len(stage_seconds)
    fds = [create_ledger(Place(writer=Writer.RANK, rank=rank, world_size=num_ranks)) for rank in range(num_ranks)]
    readers = [LedgerReader(os.dup(fd)) for fd in fds]
    launcher = Launcher()
    seconds = ",".join(map(str, stage_seconds))
    argv = [sys.executable, "-m", "tests.toy_rank", str(num_ranks), seconds, "cpu"]
    try:
        await launcher.start(
            [[rank] for rank in range(num_ranks)], lambda _: argv, rank_environment(os.environ, 1), dict(enumerate(fds))
        )
        async with serving_engine(launcher.channels, VOCAB_SIZE, "shared_memory", Sizes()) as (engine, serving):
            yield Running(engine, launcher, fds, readers, serving)
    finally:
        launcher.kill()
        for reader in readers:
            reader.close()
        for fd in fds:
            os.close(fd)


class Shares:
    """Of each rank's states, over a time."""

    def __init__(self, readers: Sequence[LedgerReader]) -> None:
        self._readers = readers
        self._folders = [Folder(reader) for reader in readers]
        self._before = self._times()

    def since(self) -> list[dict[str, float]]:
        now = self._times()
        spans = [(at - was_at, times, was) for (at, times), (was_at, was) in zip(now, self._before, strict=True)]
        self._before = now
        return [{state: (times[state] - was[state]) / passed for state in STATES} for passed, times, was in spans]

    def close(self) -> None:
        for folder in self._folders:
            folder.close()

    def _times(self) -> list[tuple[int, dict[str, int]]]:
        for folder in self._folders:
            assert folder.fold()
        return [(time.perf_counter_ns(), reader.state_times()) for reader in self._readers]


# Of each rank, the shares of its states that the stages' times imply: with one request, and with four in two lanes.
CASES = [
    (
        (0.04, 0.12),
        [
            (1, [{"compute": 0.25, "wait_token": 0.75}, {"compute": 0.75, "wait_input": 0.25}]),
            (4, [{"compute": 1 / 3, "wait_token": 2 / 3}, {"compute": 1.0}]),
        ],
    ),
    (
        (0.12, 0.04),
        [
            (1, [{"compute": 0.75, "wait_token": 0.25}, {"compute": 0.25, "wait_input": 0.75}]),
            (4, [{"compute": 1.0}, {"compute": 1 / 3, "wait_input": 2 / 3}]),
        ],
    ),
]
NUM_TRIES = 3  # the best of them: other work can only make a stage slower


@pytest.mark.parametrize(("stage_seconds", "loads"), CASES)
async def test_shares_are_what_the_stages_times_imply(
    stage_seconds: Sequence[float], loads: list[tuple[int, list[dict[str, float]]]]
) -> None:
    async with toy_pipeline(stage_seconds) as pipeline:
        await pipeline.generate(4, 3)
        await asyncio.sleep(0.1)
        shares = Shares(pipeline.readers)
        await asyncio.sleep(0.3)
        for of_rank in shares.since():
            assert of_rank["idle"] == pytest.approx(1, abs=0.01), "without load a stage is idle"
        for num_requests, implied in loads:
            errors: list[float] = []
            while not errors or (errors[-1] > 0.03 and len(errors) < NUM_TRIES):
                measured = await shares_under_load(pipeline, shares, num_requests)
                for of_rank in measured:
                    assert sum(of_rank.values()) == pytest.approx(1, abs=0.01)
                errors.append(max(map(error_of, measured, implied)))
            assert errors[-1] <= 0.03, (errors, measured)
        shares.close()
        for reader in pipeline.readers:
            forwards = [span for span in reader.spans() if span.kind == "forward"]
            assert len(forwards) > 30
            assert all(before.end_ns <= after.start_ns for before, after in pairwise(forwards))
        check_order(pipeline.readers)


async def shares_under_load(pipeline: Running, shares: "Shares", num_requests: int) -> list[dict[str, float]]:
    generating = asyncio.create_task(pipeline.generate(num_requests, 200))
    await asyncio.sleep(0.3)
    shares.since()
    await asyncio.sleep(1.8)
    measured = shares.since()
    generating.cancel()
    await asyncio.gather(generating, return_exceptions=True)
    return measured


def error_of(measured: dict[str, float], implied: dict[str, float]) -> float:
    """The largest difference of a share. What the engine and the wake-ups take lengthens the wait that it follows."""
    of_states = [
        abs(measured[state] + (measured["host"] if state.startswith("wait") else 0) - share) for state, share in implied.items()
    ]
    bubble = sum(measured[state] for state in ("wait_input", "wait_slot", "wait_token", "host"))
    wanted = sum(share for state, share in implied.items() if state != "compute")
    return max(*of_states, abs(bubble - wanted), measured["transfer"], measured["idle"])


def check_order(readers: Sequence[LedgerReader]) -> None:
    sends = {span.step_id: span for span in readers[0].spans() if span.kind == "send"}
    recvs = {span.step_id: span for span in readers[1].spans() if span.kind == "recv"}
    broadcasts = {span.step_id: span for span in readers[1].spans() if span.kind == "token_broadcast"}
    receipts = {span.step_id: span for span in readers[0].spans() if span.kind == "token_receive"}
    both = sends.keys() & recvs.keys()
    assert len(both) > 20
    slack_ns = 1_000_000  # between what a thread did and when it came to note the time
    assert all(sends[step].start_ns < recvs[step].end_ns for step in both)
    assert all(sends[step].end_ns <= recvs[step].end_ns + slack_ns for step in both), "a send ends before its receive ends"
    assert all(broadcasts[step].start_ns < receipts[step].end_ns for step in broadcasts.keys() & receipts.keys())


# ---- ranks that hang and die ----------------------------------------------------------------------------------------------


@contextmanager
def exporter_of(ledgers: Sequence[int]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        arguments = [argument for fd in ledgers for argument in ("--ledger", str(fd))]
        with subprocess.Popen(
            [sys.executable, "-m", "metrics", "--listen-fd", str(sock.fileno()), *arguments],
            pass_fds=[sock.fileno(), *ledgers],
        ) as process:
            try:
                yield url
            finally:
                process.terminate()


async def test_a_rank_that_hangs_and_one_that_died_show_where_they_stood() -> None:
    async with toy_pipeline((0.005, 0.005)) as pipeline:
        with exporter_of(pipeline.ledgers) as url:
            async with httpx.AsyncClient(base_url=url, timeout=10) as client:
                generating = asyncio.create_task(pipeline.generate(4, 100))
                await client.get("/metrics")
                await asyncio.sleep(0.2)
                victim = pipeline.launcher.process_ids[1]
                os.kill(victim, signal.SIGSTOP)
                await asyncio.sleep(0.2)
                await look(client, is_up=True)
                os.kill(victim, signal.SIGKILL)
                [lost] = await asyncio.gather(generating, return_exceptions=True)
                assert isinstance(lost, StagewireError)
                await asyncio.sleep(0.2)
                await look(client, is_up=False)
        with pytest.raises(StagewireError, match="stage 1 failed"):
            await pipeline.serving


async def look(client: httpx.AsyncClient, *, is_up: bool) -> None:
    seconds: dict[str, list[float]] = {"/metrics": [], "/trace?seconds=1": []}
    answers: dict[str, str] = {}
    for _ in range(5):
        for path, taken in seconds.items():
            started_at = time.perf_counter()
            response = await client.get(path)
            taken.append(time.perf_counter() - started_at)
            assert response.status_code == 200
            answers[path] = response.text
    assert min(seconds["/metrics"]) < 0.05, seconds
    assert min(seconds["/trace?seconds=1"]) < 0.05, seconds
    families = {family.name: family for family in parse_text(answers["/metrics"])}
    up = {sample.labels["rank"]: sample.value for sample in families["stagewire_rank_up"].samples}
    assert up == {"0": 1, "1": float(is_up)}
    events = json.loads(answers["/trace?seconds=1"])["traceEvents"]
    unfinished = [event for event in events if event.get("args", {}).get("unfinished") and event["pid"] == 1]
    assert unfinished, "what the stopped rank is at"
    assert max(event["dur"] for event in unfinished) > 100_000  # microseconds
    [label] = [event["args"]["name"] for event in events if event["name"] == "process_name" and event["pid"] == 1]
    assert label.endswith("(dead)") is not is_up
    if is_up:
        other = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        names = {sample.name for family in parse_openmetrics(other.text) for sample in family.samples}
        assert names == {sample.name for family in families.values() for sample in family.samples}
