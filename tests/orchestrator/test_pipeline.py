"""How ranks become a pipeline: links in two phases, and what follows when some rank cannot."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from orchestrator.pipeline import Pipeline
from stages.errors import CopyEngineUnavailable, RankLost, StageFailed, TransportUnavailable
from stages.plan import Drained, EndEpoch, Epoch, Exported, Linked, LinkFailed, Peers, RankFailed, Setup
from stages.transport.links import close_fds
from tests.orchestrator.scripted_ranks import ANSWER_SECONDS, ScriptedRanks, hello
from tests.served_engine import Sizes, assemble_ranks

BEST = {"copy_engine": "", "nccl": "not built in", "shared_memory": "", "gloo": "not built in"}
NUM_RANKS = 3
EVERYBODY = tuple(range(NUM_RANKS))
TURNS = 20  # of the loop, more than any answer needs


class Rig(ScriptedRanks):
    def begin(self, transport: str) -> None:
        self.assembling = asyncio.create_task(assemble_ranks(self.engine, transport, Sizes()))

    async def say_hello(self) -> None:
        await self.all_heard(Setup)
        for rank, channel in enumerate(self.ranks):
            channel.send(hello(rank, NUM_RANKS, BEST))

    async def hear_epoch(self, number: int) -> list[Epoch]:
        epochs: list[Epoch] = []
        for rank, channel in enumerate(self.ranks):
            epochs.append(await self.heard(rank, Epoch))
            close_fds(channel.take_fds(epochs[-1].num_fds))
        assert {epoch.epoch for epoch in epochs} == {number}
        return epochs

    def export(self, epoch: int, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].send(Exported(epoch, rank, f"end {rank}".encode()))

    def link(self, epoch: int, transport: str, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].send(Linked(epoch, rank, transport, ""))

    async def hear_end(self, epoch: int, cause: str) -> None:
        assert await self.all_heard(EndEpoch) == [EndEpoch(epoch, cause)] * NUM_RANKS

    def drain(self, epoch: int, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].send(Drained(epoch, rank))

    async def assembled(self) -> Pipeline:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await self.assembling

    async def take_turns(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig(NUM_RANKS)
    yield rig
    rig.close()
    await asyncio.gather(rig.assembling, return_exceptions=True)


async def test_ends_that_ranks_make_are_told_to_all_once_all_have_made_theirs(rig: Rig) -> None:
    rig.begin("auto")
    await rig.say_hello()
    epochs = await rig.hear_epoch(0)
    assert [epoch.num_fds for epoch in epochs] == [0] * NUM_RANKS
    rig.export(0, 2, 0)
    await rig.take_turns()
    assert all(rig.has_heard_nothing(rank) for rank in EVERYBODY)
    rig.export(0, 1)
    assert await rig.all_heard(Peers) == [Peers(0, [b"end 0", b"end 1", b"end 2"])] * NUM_RANKS
    rig.link(0, "copy_engine", 1, 2)
    await rig.take_turns()
    assert not rig.assembling.done()
    rig.link(0, "copy_engine", 0)
    pipeline = await rig.assembled()
    assert (pipeline.transport, pipeline.epoch) == ("copy_engine", 0)


async def test_a_transport_whose_ends_the_engine_makes_takes_one_phase(rig: Rig) -> None:
    rig.begin("shared_memory")
    await rig.say_hello()
    epochs = await rig.hear_epoch(0)
    assert all(epoch.num_fds > 0 for epoch in epochs)
    rig.link(0, "shared_memory", *EVERYBODY)
    assert (await rig.assembled()).transport == "shared_memory"


@pytest.mark.parametrize("phase", ["export", "connect"])
async def test_a_rank_that_cannot_link_strikes_the_transport_for_all(rig: Rig, phase: str) -> None:
    rig.begin("auto")
    await rig.say_hello()
    await rig.hear_epoch(0)
    failure = LinkFailed(0, 1, "copy_engine", "the device's memory is full")
    if phase == "connect":
        rig.export(0, *EVERYBODY)
        await rig.all_heard(Peers)
        rig.link(0, "copy_engine", 0, 2)
    else:
        rig.export(0, 0, 2)
    rig.ranks[1].send(failure)
    await rig.hear_end(0, failure.reason)  # the next thing that any of them hears: no Peers came
    rig.drain(0, 0, 1)
    await rig.take_turns()
    assert all(rig.has_heard_nothing(rank) for rank in EVERYBODY), "the next epoch waits until all have let go of this one"
    rig.drain(0, 2)
    epochs = await rig.hear_epoch(1)
    assert epochs[0].offers[1].transports["copy_engine"] == failure.reason
    assert epochs[0].offers[0].transports["copy_engine"] == ""
    rig.link(1, "shared_memory", *EVERYBODY)
    pipeline = await rig.assembled()
    assert (pipeline.transport, pipeline.epoch) == ("shared_memory", 1)
    assert f"not copy_engine: rank 1: {failure.reason}" in pipeline.reason


@pytest.mark.parametrize("phase", ["export", "connect"])
async def test_an_explicit_choice_that_fails_on_one_rank_fails_on_all(rig: Rig, phase: str) -> None:
    rig.begin("copy_engine")
    await rig.say_hello()
    await rig.hear_epoch(0)
    if phase == "connect":
        rig.export(0, *EVERYBODY)
        await rig.all_heard(Peers)
        rig.link(0, "copy_engine", 0, 1)
    else:
        rig.export(0, 0, 1)
    rig.ranks[2].send(LinkFailed(0, 2, "copy_engine", "the probe did not arrive"))
    await rig.hear_end(0, "the probe did not arrive")
    rig.drain(0, *EVERYBODY)
    with pytest.raises(CopyEngineUnavailable) as raised:
        await rig.assembled()
    assert str(raised.value) == "--pp-transport copy_engine: rank 2 cannot: the probe did not arrive"


async def test_an_explicit_choice_that_is_impossible_is_told_to_all(rig: Rig) -> None:
    """Every rank finds the same from the offers, and says so in its log."""
    rig.begin("gloo")
    await rig.say_hello()
    epochs = await rig.hear_epoch(0)
    assert {epoch.wanted_transport for epoch in epochs} == {"gloo"}
    for rank, channel in enumerate(rig.ranks):
        channel.send(LinkFailed(0, rank, "gloo", "rank 0: not built in"))
    await rig.hear_end(0, "rank 0: not built in")
    rig.drain(0, *EVERYBODY)
    with pytest.raises(TransportUnavailable, match="--pp-transport gloo: rank 0: not built in"):
        await rig.assembled()


async def test_a_rank_that_ends_while_links_are_made_ends_the_start(rig: Rig) -> None:
    rig.begin("auto")
    await rig.say_hello()
    await rig.hear_epoch(0)
    rig.export(0, 0, 1)
    rig.ranks[2].abort()
    with pytest.raises(RankLost, match="stage 2 failed: its process ended"):
        await rig.assembled()


async def test_a_rank_that_fails_between_the_phases_says_why(rig: Rig) -> None:
    rig.begin("auto")
    await rig.say_hello()
    await rig.hear_epoch(0)
    rig.export(0, *EVERYBODY)
    await rig.all_heard(Peers)
    rig.ranks[1].send(RankFailed(1, "cuIpcOpenMemHandle: out of memory", False))
    with pytest.raises(StageFailed, match="stage 1 failed: cuIpcOpenMemHandle: out of memory"):
        await rig.assembled()
