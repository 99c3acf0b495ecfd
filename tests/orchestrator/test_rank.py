"""Ranks from epoch to epoch, told by a scripted engine; first over a stage whose work ends when a test says so."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from orchestrator.control import Channel, ChannelClosed, memory_channel_pair
from orchestrator.pipeline import agree_limits
from orchestrator.rank import RankWorker
from orchestrator.waiting import Waker
from stages.device import HostStream, Point
from stages.errors import CudaError, HeaderMismatch, PeerLost, TransportError, TransportUnavailable
from stages.model.weights import no_progress
from stages.plan import (
    Drain,
    Drained,
    EndEpoch,
    Epoch,
    Exported,
    Limits,
    Linked,
    LinkFailed,
    Message,
    Peers,
    PlanRow,
    RowKind,
    RowSampling,
    RowsFailed,
    StepDone,
    StepPlan,
    StepResult,
)
from stages.stage import Operation, Work
from stages.transport.links import close_fds, create_links_for, link_sizes
from stages.transport.memory import MemoryHub
from tests.local_pipeline import slice_loader
from tests.served_engine import Sizes, pipeline_config, setup_for
from tests.toy_model import BOUNDARY, toy_slices, toy_tokens

LOOPS = ("uvloop",)
ANSWER_SECONDS = 20.0
LIMITS = Limits(1, 1, 1, 1, 1, 1, 1, 1)


async def answer(channel: Channel) -> Message:
    async with asyncio.timeout(ANSWER_SECONDS):
        return await channel.receive()


@pytest.fixture
def awaited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Stream and error of every await of a rank that was broken."""
    raised: list[tuple[str, str]] = []

    class TellingWaker(Waker):
        async def reached(self, point: Point, deadline_seconds: float | None = None) -> None:
            try:
                await super().reached(point, deadline_seconds)
            except PeerLost as exc:
                raised.append((point.stream_name, str(exc)))
                raise

    monkeypatch.setattr("orchestrator.rank.Waker", TellingWaker)
    return raised


# ---- one rank over a scripted stage -----------------------------------------------------------------------------------


class FakeStage:
    """Two operations a step on a stream that waits for ``gate``; poison opens it."""

    def __init__(self, events: list[str]) -> None:
        self.gate = threading.Event()
        self.errors_at_begin: dict[int, Exception] = {}
        self.outcome: Callable[[StepPlan], StepResult | None] = lambda plan: None
        self._events = events
        self._cause: BaseException | None = None
        self._stream = HostStream("compute")
        self.operations = (Operation("recv", 2, self._enqueue), Operation("forward", -1, self._enqueue))

    def begin(self, plan: StepPlan) -> None:
        self._events.append(f"begin {plan.step_id}")
        if plan.step_id in self.errors_at_begin:
            raise self.errors_at_begin[plan.step_id]

    def _enqueue(self, plan: StepPlan) -> Work:
        start = self._stream.record()
        self._stream.launch(self._work)
        return Work(start, self._stream.record())

    def _work(self) -> None:
        self.gate.wait()
        if self._cause is not None:
            raise self._cause

    def result(self, plan: StepPlan) -> StepResult | None:
        return self.outcome(plan)

    def row_errors(self, plan: StepPlan) -> RowsFailed | None:
        return None

    def poison(self, cause: BaseException) -> None:
        self._events.append("poison")
        self._cause = cause
        self.gate.set()

    def close(self) -> None:
        self._events.append("close")
        self._stream.close()


@dataclass
class FakePending:
    stage: FakeStage
    events: list[str]
    exports: bytes | None = None
    error: TransportError | None = None
    transport: str = "copy_engine"
    reason: str = "the best that every rank offers; not this: rank 0: why"

    def connect(self, exports: Sequence[bytes]) -> FakeStage:
        self.events.append(f"connect {list(exports)}")
        if self.error is not None:
            raise self.error
        return self.stage

    def close(self) -> None:
        self.events.append("close links")


@dataclass
class Rig:
    """Rank 3, as the engine sees it. ``pendings`` are what its epochs open, in order; an error is raised instead."""

    channel: Channel
    running: asyncio.Task[None]
    pendings: list[FakePending | TransportError]
    events: list[str]

    def add(self, exports: bytes | None = None, error: TransportError | None = None) -> FakeStage:
        stage = FakeStage(self.events)
        self.pendings.append(FakePending(stage, self.events, exports, error))
        return stage

    async def link(self, epoch: int) -> None:
        self.channel.send(epoch_message(epoch))
        assert isinstance(await answer(self.channel), Linked)

    async def drain(self) -> None:
        self.channel.send(Drain())
        async with asyncio.timeout(ANSWER_SECONDS):
            await self.running


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch, awaited: list[tuple[str, str]]) -> AsyncIterator[Rig]:
    ours, theirs = memory_channel_pair(("rank 3", "the engine"))
    events: list[str] = []
    send = theirs.send

    def send_and_tell(message: Message) -> None:
        if isinstance(message, Drained):
            events.append("drained")
        send(message)

    monkeypatch.setattr(theirs, "send", send_and_tell)
    pendings: list[FakePending | TransportError] = []

    def open_stage(epoch: Epoch, fds: list[int]) -> FakePending:
        pending = pendings.pop(0)
        if isinstance(pending, TransportError):
            raise pending
        return pending

    running = asyncio.create_task(RankWorker(3, theirs, open_stage, None).run())
    rig = Rig(ours, running, pendings, events)
    yield rig
    ours.abort()
    theirs.abort()
    await asyncio.gather(running, return_exceptions=True)


def epoch_message(epoch: int, transport: str = "auto") -> Epoch:
    return Epoch(epoch, [], transport, LIMITS, 0)


def step(epoch: int, step_id: int) -> StepPlan:
    return StepPlan(epoch, step_id, [], [], [], 1, 1)


async def test_the_end_of_an_epoch_breaks_its_awaits_and_is_told(rig: Rig, awaited: list[tuple[str, str]]) -> None:
    rig.add()
    second = rig.add()
    await rig.link(0)
    rig.channel.send(step(0, 0))
    rig.channel.send(step(0, 1))
    rig.channel.send(EndEpoch(0, "stage 1 failed: its process ended"))
    assert await answer(rig.channel) == Drained(0, 3), "nothing is reported of what was under way"
    assert rig.events == ["connect []", "begin 0", "begin 1", "poison", "close", "drained"]
    rig.events.clear()
    rig.channel.send(step(0, 2))  # it was under way when the epoch ended
    await rig.link(1)
    rig.channel.send(step(1, 0))
    second.gate.set()
    done = await answer(rig.channel)
    assert isinstance(done, StepDone)
    assert (done.epoch, done.step_id, done.verdict) == (1, 0, True)
    assert awaited == [("compute", "epoch 0 ended: stage 1 failed: its process ended")] * 4
    await rig.drain()
    assert rig.events == ["connect []", "begin 0", "poison", "close"]


async def test_a_rank_whose_engine_is_gone_lets_go_of_its_links(rig: Rig) -> None:
    rig.add()
    await rig.link(0)
    rig.channel.send(step(0, 0))
    rig.channel.abort()
    with pytest.raises(ChannelClosed):
        await asyncio.wait_for(asyncio.shield(rig.running), ANSWER_SECONDS)
    assert rig.events[-2:] == ["poison", "close"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_rank_that_made_its_ends_waits_for_those_of_the_others(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "orchestrator.rank")
    rig.add(exports=b"mine")
    rig.channel.send(epoch_message(0))
    assert await answer(rig.channel) == Exported(0, 3, b"mine")
    assert rig.events == []
    rig.channel.send(Peers(0, [b"theirs", b"mine"]))
    reason = "the best that every rank offers; not this: rank 0: why"
    assert await answer(rig.channel) == Linked(0, 3, "copy_engine", reason)
    assert rig.events == ["connect [b'theirs', b'mine']"]
    assert f"rank 3: transport copy_engine: {reason}" in caplog.text
    await rig.drain()


async def test_a_try_that_ends_before_the_others_answered_leaves_no_end_behind(rig: Rig) -> None:
    rig.add(exports=b"mine")
    rig.add()
    rig.channel.send(epoch_message(0))
    assert isinstance(await answer(rig.channel), Exported)
    rig.channel.send(EndEpoch(0, "rank 1 cannot"))
    assert await answer(rig.channel) == Drained(0, 3)
    assert rig.events == ["close links", "drained"]
    rig.channel.send(Peers(0, [b"late"]))
    await rig.link(1)
    assert rig.events == ["close links", "drained", "connect []"]
    await rig.drain()


async def test_a_rank_that_ends_between_the_phases_leaves_no_end_behind(rig: Rig) -> None:
    rig.add(exports=b"mine")
    rig.channel.send(epoch_message(0))
    assert isinstance(await answer(rig.channel), Exported)
    await rig.drain()
    assert rig.events == ["close links"]


async def test_a_rank_that_cannot_link_says_so_and_tries_again(rig: Rig) -> None:
    rig.pendings.append(TransportUnavailable("not enough memory\nat all"))
    rig.add(exports=b"mine", error=TransportError("the probe did not arrive"))
    rig.add()
    rig.channel.send(epoch_message(0, "shared_memory"))
    assert await answer(rig.channel) == LinkFailed(0, 3, "shared_memory", "not enough memory")
    rig.channel.send(EndEpoch(0, "not enough memory"))
    assert await answer(rig.channel) == Drained(0, 3)
    rig.channel.send(epoch_message(1))
    assert isinstance(await answer(rig.channel), Exported)
    rig.channel.send(Peers(1, [b"mine"]))
    assert await answer(rig.channel) == LinkFailed(1, 3, "copy_engine", "the probe did not arrive")
    rig.channel.send(EndEpoch(1, "the probe did not arrive"))
    assert await answer(rig.channel) == Drained(1, 3)
    await rig.link(2)
    await rig.drain()


async def test_a_broken_gpu_ends_the_rank(rig: Rig) -> None:
    stage = rig.add()
    await rig.link(0)
    stage.errors_at_begin[1] = CudaError("cuMemcpyAsync: an illegal memory access", 700)
    rig.channel.send(step(0, 0))
    rig.channel.send(step(0, 1))
    with pytest.raises(CudaError, match="illegal memory access"):
        await asyncio.wait_for(asyncio.shield(rig.running), ANSWER_SECONDS)
    assert rig.events == ["connect []", "begin 0", "begin 1", "poison", "close"]


async def test_a_result_that_is_in_doubt_is_not_sent(rig: Rig) -> None:
    stage = rig.add()
    await rig.link(0)

    def doubtful(plan: StepPlan) -> StepResult:
        if plan.step_id == 1:
            raise HeaderMismatch("step 1: rank 2 says 4 rows, rank 3 expects 5")
        return StepResult(0, plan.step_id, [])

    stage.outcome = doubtful
    stage.gate.set()
    rig.channel.send(step(0, 0))
    assert await answer(rig.channel) == StepResult(0, 0, [])
    assert isinstance(await answer(rig.channel), StepDone)
    rig.channel.send(step(0, 1))
    done = await answer(rig.channel)
    assert isinstance(done, StepDone)
    assert (done.step_id, done.verdict) == (1, False)
    assert done.error == "step 1: rank 2 says 4 rows, rank 3 expects 5"
    await rig.drain()


# ---- two ranks over real links ----------------------------------------------------------------------------------------


@asynccontextmanager
async def ranks_on_links(transport: str) -> AsyncIterator[tuple[list[Channel], Callable[[int], None]]]:
    """The engine's channels, and what begins an epoch."""
    num_ranks, sizes = 2, Sizes()
    hub, load = MemoryHub(), slice_loader(toy_slices(num_ranks), sizes.num_blocks)
    loaded = [load(setup_for(rank, num_ranks, sizes), hub, no_progress) for rank in range(num_ranks)]
    offers = [offer for _, offer in loaded]
    limits = agree_limits(offers, pipeline_config(transport, sizes))
    channels: list[Channel] = []

    def begin(epoch: int) -> None:
        fds: list[list[int]] = [[] for _ in channels]
        if transport == "shared_memory":
            fds = create_links_for(num_ranks, link_sizes([BOUNDARY], limits), epoch)
        for channel, mine in zip(channels, fds, strict=True):
            channel.send(Epoch(epoch, offers, transport, limits, len(mine)), mine)
            close_fds(mine)

    async with asyncio.TaskGroup() as ranks:
        for rank, (assembly, _) in enumerate(loaded):
            channel, theirs = memory_channel_pair((f"rank {rank}", "the engine"))
            channels.append(channel)
            ranks.create_task(RankWorker(rank, theirs, assembly.open, None).run())
        yield channels, begin
        for channel in channels:
            channel.send(Drain())
    for channel in channels:
        await channel.aclose()


def prefill(epoch: int, step_id: int) -> StepPlan:
    row = PlanRow(step_id, 0, RowKind.PREFILL, 0, 3, [5, 6, 7], [], RowSampling(), True)
    return StepPlan(epoch, step_id, [row], [], [], 1, 1)


@pytest.mark.parametrize("transport", ["memory", "shared_memory"])
async def test_a_rank_survives_its_epoch_and_serves_the_next(transport: str, awaited: list[tuple[str, str]]) -> None:
    """Each epoch serves a step, and then ends while one rank waits for the other, which gets no plan."""
    streams = ["tokens-0", "compute-1"]
    async with ranks_on_links(transport) as (channels, begin):
        for epoch in range(4):
            begin(epoch)
            for channel in channels:
                assert isinstance(await answer(channel), Linked)
            for channel in channels:
                channel.send(prefill(epoch, 0))
            result = await answer(channels[1])
            assert isinstance(result, StepResult)
            assert (result.epoch, result.rows[0].token_ids) == (epoch, toy_tokens([5, 6, 7], 1, 2))
            for channel in channels:
                done = await answer(channel)
                assert isinstance(done, StepDone)
                assert (done.epoch, done.error) == (epoch, "")
            waiting = epoch % 2
            channels[waiting].send(prefill(epoch, 1))
            for channel in channels:
                channel.send(EndEpoch(epoch, "the other one is gone"))
            for rank, channel in enumerate(channels):
                assert await answer(channel) == Drained(epoch, rank)
            assert (streams[waiting], f"epoch {epoch} ended: the other one is gone") in awaited
            awaited.clear()
