"""Ranks from epoch to epoch, told by a scripted engine."""

import asyncio
from collections.abc import Sequence

import pytest

from metrics.recorder import SpanLog
from orchestrator.control import Channel, memory_channel_pair
from orchestrator.pipeline import PipelineConfig, agree_limits
from orchestrator.rank import RankWorker
from stages.plan import (
    Drain,
    Drained,
    EndEpoch,
    Epoch,
    Linked,
    Message,
    PlanRow,
    RowKind,
    RowSampling,
    Setup,
    StepPlan,
    StepResult,
)
from stages.transport.links import create_links_for, link_sizes
from stages.transport.memory import MemoryHub
from tests.local_pipeline import slice_loader
from tests.served_engine import Sizes, setup_for
from tests.toy_model import BOUNDARY, toy_slices, toy_tokens

LOOPS = ("uvloop",)


async def answer(channel: Channel, kind: type[Message]) -> Message:
    """The next message of a kind; others are passed over."""
    while True:
        message = await asyncio.wait_for(channel.receive(), 10)
        if isinstance(message, kind):
            return message


@pytest.mark.parametrize("transport", ["memory", "shared_memory"])
async def test_a_rank_survives_its_epoch_and_serves_the_next(transport: str) -> None:
    num_ranks, sizes = 2, Sizes()
    hub, load = MemoryHub(), slice_loader(toy_slices(num_ranks), sizes.num_blocks)
    setups: Sequence[Setup] = [setup_for(rank, num_ranks, sizes, "none") for rank in range(num_ranks)]
    loaded = [load(setup, hub) for setup in setups]
    offers = [offer for _, offer in loaded]
    limits = agree_limits(
        offers,
        PipelineConfig(
            wanted_transport=transport,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
            is_max_model_len_given=True,
            ring_slots=sizes.ring_slots,
        ),
    )
    ours: list[Channel] = []
    async with asyncio.TaskGroup() as ranks:
        for rank, (assembly, _) in enumerate(loaded):
            channel, theirs = memory_channel_pair((f"rank {rank}", "the engine"))
            ours.append(channel)
            ranks.create_task(RankWorker(rank, theirs, assembly.open, SpanLog()).run())
        for epoch in range(3):
            fds: list[list[int]] = [[], []]
            if transport == "shared_memory":
                fds = create_links_for(num_ranks, link_sizes([BOUNDARY], limits), epoch)
            for channel, mine in zip(ours, fds, strict=True):
                channel.send(Epoch(epoch, offers, transport, limits, len(mine)), mine)
            for channel in ours:
                await answer(channel, Linked)
            row = PlanRow(0, 0, RowKind.PREFILL, 0, 3, [5, 6, 7], [], RowSampling(), True)
            plan = StepPlan(epoch, 0, [row], [], [], 1, 1)
            for channel in ours:
                channel.send(plan)
            result = await answer(ours[-1], StepResult)
            assert isinstance(result, StepResult)
            assert result.rows[0].token_ids == toy_tokens([5, 6, 7], 1, num_ranks)
            # A step that never ends: only one rank is told of it, and waits for the other.
            stuck = StepPlan(epoch, 1, [], [(0, 0)], [], 1, 1)
            ours[1].send(stuck)
            for channel in ours:
                channel.send(EndEpoch(epoch, "rank 0 is gone"))
            for channel in ours:
                drained = await answer(channel, Drained)
                assert isinstance(drained, Drained)
                assert drained.epoch == epoch
        for channel in ours:
            channel.send(Drain())
    for channel in ours:
        await channel.aclose()
