"""Ranks as the engine sees them: channels that a test, or a script, answers on. No torch."""

import asyncio
from collections.abc import Mapping
from typing import TypeVar

from orchestrator import __version__
from orchestrator.control import Channel, MemoryChannel, memory_channel_pair
from stages.plan import PROTOCOL_VERSION, Hello, Message, Offer, TensorSchema

ANSWER_SECONDS = 20.0

M = TypeVar("M", bound=Message)


def offer(rank: int, num_ranks: int, transports: Mapping[str, str]) -> Offer:
    return Offer(
        host_id="a",
        process_id=rank,
        device="cpu",
        transports=dict(transports),
        boundary=[TensorSchema("hidden_states", "float32", 4)],
        first_layer=rank,
        end_layer=rank + 1,
        num_layers=num_ranks,
        num_parameters=1,
        slice_bytes=1,
        load_growth_bytes=0,
        load_seconds=0.0,
        num_threads=1,
        block_size=16,
        block_bytes=1,
        max_blocks=512,
        tied_embeddings=False,
        embedding_checksum=0,
    )


def hello(rank: int, num_ranks: int, transports: Mapping[str, str]) -> Hello:
    return Hello(PROTOCOL_VERSION, __version__, rank, num_ranks, offer(rank, num_ranks, transports))


class ScriptedRanks:
    """``engine[rank]`` is the engine's end of a channel, ``ranks[rank]`` the other one."""

    def __init__(self, num_ranks: int) -> None:
        pairs = [memory_channel_pair((f"rank {rank}", "the engine")) for rank in range(num_ranks)]
        self.engine: dict[int, Channel] = {rank: pair[0] for rank, pair in enumerate(pairs)}
        self.ranks: list[Channel] = [pair[1] for pair in pairs]

    async def heard(self, rank: int, kind: type[M]) -> M:
        """The rank's next message, which must be a ``kind``."""
        async with asyncio.timeout(ANSWER_SECONDS):
            message = await self.ranks[rank].receive()
        assert isinstance(message, kind), message
        return message

    async def all_heard(self, kind: type[M]) -> list[M]:
        return [await self.heard(rank, kind) for rank in range(len(self.ranks))]

    def has_heard_nothing(self, rank: int) -> bool:
        channel = self.ranks[rank]
        assert isinstance(channel, MemoryChannel)
        return not channel._inbox

    def close(self) -> None:
        for channel in (*self.engine.values(), *self.ranks):
            channel.abort()
