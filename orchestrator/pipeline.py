"""Assembles the ranks into a pipeline: their Hellos, the proof that they fit together, an epoch, their links.

What is decided from the Hellos is decided by plain functions; ``assemble`` only moves the messages.
"""

import asyncio
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import msgspec

from orchestrator.control import Channel, ChannelClosed, check_hello
from stages.errors import (
    ConfigError,
    ControlError,
    CopyEngineUnavailable,
    RankLost,
    StageFailed,
    StagewireError,
    TransportUnavailable,
)
from stages.plan import (
    Drained,
    EndEpoch,
    Epoch,
    Exported,
    Hello,
    Limits,
    Linked,
    LinkFailed,
    Loading,
    Message,
    Offer,
    Peers,
    RankFailed,
    Setup,
)
from stages.transport.choice import choose_transport
from stages.transport.links import create_links_for, link_sizes

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """What is wanted of a pipeline.

    ``max_model_len`` is a limit; ``is_max_model_len_given`` says that the user gave it, and then it is an error, not a
    reason to lower it, when the KV caches cannot hold it. ``kv_cache_bytes`` is what the user gave each rank, 0 for nothing.
    """

    wanted_transport: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    is_max_model_len_given: bool
    ring_slots: int
    kv_cache_bytes: int = 0
    start_timeout_seconds: float = 300.0
    max_sample_len: int = 1


class RanksMissing(StagewireError):
    """Ranks did not answer in time."""

    def __init__(self, ranks: Sequence[int], seconds: float) -> None:
        missing = ", ".join(map(str, ranks))
        super().__init__(f"the ranks were not ready within --start-timeout {seconds:g} s; still missing: {missing}")
        self.ranks = ranks


@dataclass(frozen=True)
class Pipeline:
    """Ranks that are linked and ready for plans; ``channels[rank]`` leads to each."""

    channels: Sequence[Channel]
    offers: Sequence[Offer]
    limits: Limits
    transport: str
    reason: str
    epoch: int


def ignore_loading(_message: Loading) -> None:
    """For whoever does not show how far loading is."""


async def assemble(
    channels: Mapping[int, Channel],
    setups: Sequence[Setup],
    config: PipelineConfig,
    on_loading: Callable[[Loading], None] = ignore_loading,
) -> Pipeline:
    """Have every rank load its slice and link up. Raises what the first rank to fail reported."""
    ordered = [channels[setup.rank] for setup in setups]
    for channel, setup in zip(ordered, setups, strict=True):
        channel.send(setup)
    deadline = asyncio.get_running_loop().time() + config.start_timeout_seconds
    hellos = await _each(ordered, deadline, config.start_timeout_seconds, Hello, on_loading=on_loading)
    for rank, hello in enumerate(hellos):
        check_hello(hello, rank, len(setups))
    offers = [hello.offer for hello in hellos]
    return await link(ordered, offers, agree_limits(offers, config), config, count(), deadline)


async def link(
    channels: Sequence[Channel],
    offers: Sequence[Offer],
    limits: Limits,
    config: PipelineConfig,
    epochs: Iterator[int],
    deadline: float,
) -> Pipeline:
    """Link ranks that have loaded, as the next of ``epochs``, one for each transport that is tried; raises what the first rank
    to fail reported. ``deadline`` is in the loop's time."""
    check_layers(offers)
    check_boundaries(offers)
    check_tied_embeddings(offers)
    for epoch in epochs:
        try:
            transport, reason = choose_transport(offers, config.wanted_transport)
        except TransportUnavailable:
            # Every rank finds the same, and says so in its log.
            await _link(channels, offers, epoch, "", config, limits, deadline)
            raise
        failed = await _link(channels, offers, epoch, transport, config, limits, deadline)
        if not failed:
            return Pipeline(channels, offers, limits, transport, reason, epoch)
        if config.wanted_transport != "auto":
            unavailable = CopyEngineUnavailable if transport == "copy_engine" else TransportUnavailable
            raise unavailable(f"--pp-transport {transport}: rank {failed[0].rank} cannot: {failed[0].reason}")
        offers = strike(offers, failed)
    raise AssertionError("epochs come to no end")


async def end_epoch(
    channels: Sequence[Channel], epoch: int, cause: str, seconds: float, hopeless: Collection[int] = ()
) -> set[int]:
    """Have every rank poison its links and let go of an epoch, or of one it may be linking for; returns the ranks that did not
    say so within ``seconds``, or are gone. Those of ``hopeless`` are told, and not waited for."""
    waits: dict[int, asyncio.Task[bool]] = {}
    for channel in channels:
        with suppress(ControlError):  # that one is gone
            channel.send(EndEpoch(epoch, cause))
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
            for rank, channel in enumerate(channels):
                if rank not in hopeless:
                    waits[rank] = tasks.create_task(_has_drained(channel, epoch), name=f"end of epoch on rank {rank}")
    return {rank for rank, wait in waits.items() if wait.cancelled() or not wait.result()}


async def _has_drained(channel: Channel, epoch: int) -> bool:
    """Whether a rank has let go of an epoch; False when it is about to end, or has."""
    try:
        while not isinstance(message := await channel.receive(), RankFailed):
            if isinstance(message, Drained) and message.epoch == epoch:
                return True
    except ControlError:
        pass
    return False


def check_layers(offers: Sequence[Offer]) -> None:
    """Every layer is owned by exactly one rank, in order."""
    expected = 0
    for rank, offer in enumerate(offers):
        if offer.first_layer != expected or offer.end_layer <= offer.first_layer:
            raise ControlError(
                f"rank {rank} owns layers {offer.first_layer}..{offer.end_layer - 1}, must begin with layer {expected}"
            )
        expected = offer.end_layer
    if expected != offers[0].num_layers:
        raise ControlError(f"the ranks own {expected} layers, the model has {offers[0].num_layers}")


def check_boundaries(offers: Sequence[Offer]) -> None:
    """Every rank means the same tensors by a stage boundary."""
    for rank, offer in enumerate(offers):
        if offer.boundary != offers[0].boundary or offer.block_size != offers[0].block_size:
            raise ControlError(
                f"rank {rank} has boundary {offer.boundary} and KV blocks of {offer.block_size} tokens, "
                f"rank 0 {offers[0].boundary} and {offers[0].block_size}"
            )


def check_tied_embeddings(offers: Sequence[Offer]) -> None:
    """Tied embeddings are equal, bit by bit, on the first and the last stage."""
    first, last = offers[0], offers[-1]
    if first.tied_embeddings and first.embedding_checksum != last.embedding_checksum:
        raise ControlError(
            f"the tied embeddings differ: checksum {first.embedding_checksum:#010x} on rank 0, "
            f"{last.embedding_checksum:#010x} on rank {len(offers) - 1}"
        )


def agree_limits(offers: Sequence[Offer], config: PipelineConfig) -> Limits:
    """Sizes for all ranks; the rank with the least room for KV blocks decides their number."""
    num_blocks = min(offer.max_blocks for offer in offers)
    block_size = offers[0].block_size
    max_model_len = config.max_model_len
    if num_blocks * block_size < max_model_len:
        smallest = min(range(len(offers)), key=lambda rank: offers[rank].max_blocks)
        needed_bytes = -(-max_model_len // block_size) * offers[smallest].block_bytes
        if config.kv_cache_bytes and (config.is_max_model_len_given or num_blocks < 2):
            raise ConfigError(
                f"--kv-cache-memory-bytes {config.kv_cache_bytes}: must hold at least one request of {max_model_len} tokens "
                f"(--max-model-len), which takes {needed_bytes} bytes on rank {smallest}"
            )
        if config.is_max_model_len_given or num_blocks < 2:
            raise ConfigError(
                f"--max-model-len {max_model_len}: must fit the KV cache of rank {smallest}, whose free memory holds "
                f"{num_blocks * block_size} tokens"
            )
        max_model_len = num_blocks * block_size
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_sample_len=config.max_sample_len,
        num_blocks=num_blocks,
        block_size=block_size,
        lane_depth=len(offers),
        ring_slots=config.ring_slots,
    )


def strike(offers: Sequence[Offer], failed: Sequence[LinkFailed]) -> list[Offer]:
    """The offers without the transports that failed, for the next try."""
    struck = list(offers)
    for failure in failed:
        transports = struck[failure.rank].transports | {failure.transport: failure.reason}
        struck[failure.rank] = msgspec.structs.replace(struck[failure.rank], transports=transports)
    return struck


def describe(pipeline: Pipeline) -> str:
    """The table that is shown at start: a line per rank."""
    lines = ["rank    layers  parameters    weights loaded in  RSS grew KV blocks  transport"]
    for rank, offer in enumerate(pipeline.offers):
        layers = f"{offer.first_layer}..{offer.end_layer - 1}"
        lines.append(
            f"{rank:>4} {layers:>9} {offer.num_parameters / 1e6:>9.1f} M {offer.slice_bytes / 2**20:>6.0f} MiB "
            f"{offer.load_seconds:>7.1f} s {offer.load_growth_bytes / 2**20:>5.0f} MiB {pipeline.limits.num_blocks:>9}  "
            f"{pipeline.transport}"
        )
    return "\n".join(lines)


async def _link(
    channels: Sequence[Channel],
    offers: Sequence[Offer],
    epoch: int,
    transport: str,
    config: PipelineConfig,
    limits: Limits,
    deadline: float,
) -> list[LinkFailed]:
    """Send one Epoch to every rank; returns the ranks that could not link, and then every rank has let go of the epoch."""
    fds_of: list[list[int]] = [[] for _ in offers]
    if transport == "shared_memory":
        fds_of = create_links_for(len(offers), link_sizes(offers[0].boundary, limits), epoch)
    try:
        for channel, fds in zip(channels, fds_of, strict=True):
            channel.send(Epoch(epoch, list(offers), config.wanted_transport, limits, len(fds)), fds)
    finally:
        for fd in (fd for fds in fds_of for fd in fds):
            os.close(fd)
    seconds = config.start_timeout_seconds
    answers = await _each(channels, deadline, seconds, Exported, Linked, LinkFailed)
    failed = [answer for answer in answers if isinstance(answer, LinkFailed)]
    exported = [answer.data for answer in answers if isinstance(answer, Exported)]
    if exported and not failed:
        for channel in channels:
            channel.send(Peers(epoch, exported))
        failed = [
            answer for answer in await _each(channels, deadline, seconds, Linked, LinkFailed) if isinstance(answer, LinkFailed)
        ]
    if failed:
        for channel in channels:
            channel.send(EndEpoch(epoch, failed[0].reason))
        await _each(channels, deadline, seconds, Drained)
    return failed


async def _each(
    channels: Sequence[Channel],
    deadline: float,
    seconds: float,
    *kinds: type[M],
    on_loading: Callable[[Loading], None] = ignore_loading,
) -> list[M]:
    """One message from every rank, of one of ``kinds``; the first failure of any rank is raised at once.

    ``deadline`` is in the loop's time, ``seconds`` what it was made from.
    """
    waits: list[asyncio.Task[M]] = []
    try:
        async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as tasks:
            for rank, channel in enumerate(channels):
                waits.append(tasks.create_task(receive_from(rank, channel, kinds, on_loading), name=f"answer of rank {rank}"))
    except TimeoutError:
        raise RanksMissing([rank for rank, wait in enumerate(waits) if wait.cancelled()], seconds) from None
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [wait.result() for wait in waits]


async def receive_from(
    rank: int, channel: Channel, kinds: tuple[type[M], ...], on_loading: Callable[[Loading], None] = ignore_loading
) -> M:
    """A rank's next message, one of ``kinds``; raises what the rank reports instead, or ``RankLost``."""
    try:
        while isinstance(message := await channel.receive(), Loading):
            on_loading(message)
    except ChannelClosed:
        raise RankLost(rank) from None
    if isinstance(message, kinds):
        return message
    if isinstance(message, RankFailed):
        raise failure(message)
    raise ControlError(f"rank {rank} sent {type(message).__name__}, expected {' or '.join(kind.__name__ for kind in kinds)}")


def failure(message: RankFailed) -> StagewireError:
    """What a rank's last message says, as an exception."""
    return ConfigError(message.cause) if message.is_config_error else StageFailed(message.rank, message.cause)
