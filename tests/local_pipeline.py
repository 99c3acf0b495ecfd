"""A whole pipeline in one process: the engine, and a RankWorker with a real Stage for every rank, on one loop."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch

from metrics.recorder import StepRecorder
from metrics.steps import Span
from orchestrator.control import Channel, ChannelClosed, SocketChannel, memory_channel_pair
from orchestrator.engine import Engine
from orchestrator.rank_main import LoadRank, serve_rank
from orchestrator.request import SamplingParams
from stages.assembly import Gpu, RankAssembly, Slice, gpu_transports, host_id, offered_transports
from stages.kernels import Kernels
from stages.model.weights import Progress
from stages.plan import Offer, Setup
from stages.transport.copy_engine import nvlink_peers
from stages.transport.memory import MemoryHub
from tests.emulated_cuda import Emulation
from tests.ledgers import RankLedgers, rank_ledgers
from tests.served_engine import Sizes, serving_engine


@dataclass(frozen=True)
class LocalPipeline:
    engine: Engine
    ledgers: RankLedgers
    serving: asyncio.Task[None]
    operations: list[list[Span]] = field(default_factory=list[list[Span]])
    """Of each rank, all that were recorded; there at the end."""

    async def tokens(self, name: str, prompt: list[int], **params: object) -> list[int]:
        """All tokens of one request; greedy unless ``params`` say otherwise."""
        sampling = SamplingParams(**({"max_tokens": 16, "temperature": 0.0} | params))  # type: ignore[arg-type]
        return [t async for chunk in self.engine.generate(name, prompt, sampling) for t in chunk.token_ids]


@asynccontextmanager
async def local_pipeline(
    slices: Sequence[Slice], transport: str = "memory", sizes: Sizes | None = None
) -> AsyncIterator[LocalPipeline]:
    """Start, serve, and drain at the end; a rank that ends with an error fails the test."""
    sizes = sizes or Sizes()
    ranks = ranks_in_threads if transport == "gloo" else ranks_on_this_loop
    with rank_ledgers(len(slices)) as ledgers:
        async with (
            ranks(slices, sizes, ledgers.recorders) as channels,
            serving_engine(channels, slices[0].vocab_size, transport, sizes) as (engine, serving),
        ):
            pipeline = LocalPipeline(engine, ledgers, serving)
            yield pipeline
        pipeline.operations.extend(ledgers.operations(rank) for rank in range(len(slices)))


@asynccontextmanager
async def ranks_on_this_loop(
    slices: Sequence[Slice], sizes: Sizes, recorders: Sequence[StepRecorder]
) -> AsyncIterator[dict[int, Channel]]:
    hub = MemoryHub()
    channels: dict[int, Channel] = {}
    async with asyncio.TaskGroup() as ranks:
        for rank, recorder in enumerate(recorders):
            channels[rank], theirs = memory_channel_pair((f"rank {rank}", "the engine"))
            ranks.create_task(_serve_rank(rank, theirs, slices, hub, sizes, recorder), name=f"rank {rank}")
        yield channels


@asynccontextmanager
async def ranks_in_threads(
    slices: Sequence[Slice], sizes: Sizes, recorders: Sequence[StepRecorder]
) -> AsyncIterator[dict[int, Channel]]:
    """For links that a rank waits for while it connects them: that blocks its loop until the others do, too."""
    channels: dict[int, Channel] = {}

    async def serve(rank: int, sock: socket.socket) -> None:
        await _serve_rank(rank, SocketChannel(sock, peer="the engine"), slices, None, sizes, recorders[rank])

    with ThreadPoolExecutor(len(slices), "rank") as pool:
        ends: list[Future[None]] = []
        for rank in range(len(slices)):
            ours, theirs = socket.socketpair()
            channels[rank] = SocketChannel(ours, peer=f"rank {rank}")
            ends.append(pool.submit(lambda rank=rank, theirs=theirs: asyncio.run(serve(rank, theirs))))
        try:
            yield channels
        finally:
            for channel in channels.values():
                await channel.aclose()
    for end in ends:
        end.result()


async def _serve_rank(
    rank: int, channel: Channel, slices: Sequence[Slice], hub: MemoryHub | None, sizes: Sizes, recorder: StepRecorder
) -> None:
    try:
        await serve_rank(rank, channel, hub, slice_loader(slices, sizes.num_blocks), recorder)
    except ChannelClosed:
        pass  # how a rank ends when the engine gave up; a drained one never sees it
    finally:
        await channel.aclose()


def emulated_gpu(ordinal: int) -> Gpu:
    """For one thread: it shares nothing of Python's with those of other ranks."""
    emulated = Emulation()
    return Gpu(emulated.device(ordinal), torch.device("cpu"), Kernels(emulated.driver))


def slice_loader(slices: Sequence[Slice], num_blocks: int, open_gpu: Callable[[int], Gpu] | None = None) -> LoadRank:
    """A loader that serves given slices, each with a KV pool of ``num_blocks``; on the GPU that ``open_gpu`` gives a rank."""

    def load(setup: Setup, hub: MemoryHub | None, progress: Progress) -> tuple[RankAssembly, Offer]:
        if setup.cpus:
            os.sched_setaffinity(0, setup.cpus)
        torch.set_num_threads(setup.num_threads)
        slice_ = slices[setup.rank]
        gpu = None if open_gpu is None else open_gpu(setup.rank)
        offer = Offer(
            host_id=host_id(),
            process_id=os.getpid(),
            device="cpu",
            transports=offered_transports(hub) if gpu is None else gpu_transports(gpu),
            boundary=[slice_.boundary],
            first_layer=slice_.info.first_layer,
            end_layer=slice_.info.end_layer,
            num_layers=slice_.info.num_layers,
            num_parameters=0,
            slice_bytes=0,
            load_growth_bytes=0,
            load_seconds=0.0,
            num_threads=setup.num_threads,
            block_size=setup.block_size,
            block_bytes=1,
            max_blocks=num_blocks,
            tied_embeddings=False,
            embedding_checksum=0,
            device_uuid="" if gpu is None else gpu.device.driver.device_uuid(setup.rank),
            nvlink_peers=[] if gpu is None else nvlink_peers(gpu.device.driver, setup.rank),
        )
        return RankAssembly(slice_, hub, gpu), offer

    return load
