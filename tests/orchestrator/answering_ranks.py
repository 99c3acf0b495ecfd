"""Ranks that answer every plan as a pipeline does, and can be lost; the token a request gets depends on all before it."""

import asyncio

from orchestrator.control import Channel, ChannelClosed, memory_channel_pair
from orchestrator.engine import Loss
from orchestrator.pipeline import Pipeline, agree_limits
from stages.errors import StagewireError
from stages.plan import Drain, Drained, EndEpoch, RankFailed, StepDone, StepPlan, encode, plan_hash
from tests.orchestrator.plan_checker import PlanChecker
from tests.orchestrator.scripted_ranks import offer
from tests.served_engine import Sizes, pipeline_config


class AnsweringRanks:
    """``pipeline()`` is the first; ``recover`` replaces what was lost, as ``Engine.serve_ranks`` wants it.

    ``stuck`` ranks answer nothing, not even the end of an epoch. ``deadly``: a prompt that ends the process of rank 0.
    """

    def __init__(self, num_ranks: int, sizes: Sizes, tasks: asyncio.TaskGroup) -> None:
        self._num_ranks = num_ranks
        self._sizes = sizes
        self._tasks = tasks
        self._channels: list[Channel] = []  # the ranks' ends
        self._engines: list[Channel] = []
        self.stuck: set[int] = set()
        self.deadly: list[int] = []
        self.losses: list[Loss] = []
        self.max_losses = 10**9
        offers = [offer(rank, num_ranks, {}) for rank in range(num_ranks)]
        self._offers = offers
        self._limits = agree_limits(offers, pipeline_config("auto", sizes))
        self._checker = PlanChecker(
            sizes.max_num_seqs, self._limits.num_blocks, self._limits.block_size, sizes.max_num_batched_tokens
        )
        for rank in range(num_ranks):
            self._start(rank)

    def _start(self, rank: int) -> None:
        ours, theirs = memory_channel_pair((f"rank {rank}", "the engine"))
        self._engines[rank : rank + 1] = [ours]
        self._channels[rank : rank + 1] = [theirs]
        self._tasks.create_task(self._serve(rank, theirs), name=f"rank {rank}")

    def pipeline(self, epoch: int = 0) -> Pipeline:
        return Pipeline(self._engines.copy(), self._offers, self._limits, "shared_memory", "", epoch)

    async def recover(self, loss: Loss) -> Pipeline:
        self.losses.append(loss)
        if len(self.losses) > self.max_losses:
            raise loss.cause
        await asyncio.sleep(0.001)
        for rank in loss.lost:
            self.stuck.discard(rank)
            self._engines[rank].abort()
            self._start(rank)
        self._checker.forget()
        return self.pipeline(loss.epoch + 1)

    def close(self) -> None:
        for channel in (*self._channels, *self._engines):
            channel.abort()

    def lose(self, rank: int, how: str) -> None:
        channel = self._channels[rank]
        try:
            match how:
                case "kill":
                    channel.abort()
                case "fail":
                    channel.send(RankFailed(rank, "out of memory", False))
                    channel.abort()
                case _:
                    channel.send(StepDone(0, 0, rank, 0, False, 0.0, "a header did not match"))
        except StagewireError:
            pass  # it is gone

    async def _serve(self, rank: int, channel: Channel) -> None:
        try:
            while True:
                message = await channel.receive()
                if rank in self.stuck:
                    continue
                match message:
                    case StepPlan():
                        self._step(rank, channel, message)
                    case EndEpoch():
                        channel.send(Drained(message.epoch, rank))
                    case Drain():
                        channel.abort()
                        return
                    case _:
                        raise AssertionError(message)
        except ChannelClosed:
            pass

    def _step(self, rank: int, channel: Channel, plan: StepPlan) -> None:
        if rank == 0 and self.deadly and any(row.token_ids[: len(self.deadly)] == self.deadly for row in plan.rows):
            channel.abort()
            return
        if rank == self._num_ranks - 1:
            channel.send(self._checker.apply(plan))
        channel.send(StepDone(plan.epoch, plan.step_id, rank, plan_hash(encode(plan)), True, 0.001, ""))
