"""One rank from its Setup to a linked Stage: load the slice, say what it can do, build an epoch's parts."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stages.device import HostStream
from stages.kv_cache import PagedKVCache
from stages.model.slice import StageModel, default_split, load_stage, resolve_dtype
from stages.model.source import ModelSource
from stages.plan import Epoch, Limits, Offer, Setup, TensorSchema
from stages.runner import StageRunner
from stages.sampler import Sampler
from stages.slots import SlotTable
from stages.stage import Runner, Stage
from stages.topology import PPGroup, StageInfo, check_layer_split, stage_infos
from stages.transport.choice import NONE, choose_transport
from stages.transport.factory import TransportConfig, create_pp_handler, create_pp_transport
from stages.transport.links import RankLinks, link_sizes, shared_links_from_fds, shared_memory_obstacle
from stages.transport.memory import MemoryHub

KV_SHARE_OF_FREE_MEMORY = 0.5  # of what is available after loading, for all ranks of the host together


@dataclass(frozen=True)
class OpenedStage:
    stage: Stage
    transport: str
    reason: str


@dataclass(frozen=True)
class Slice:
    """What a rank computes with, apart from any epoch: ``StageModel`` for a model, something simpler in tests.

    ``make_runner`` is called once an epoch.
    """

    info: StageInfo
    boundary: TensorSchema
    vocab_size: int
    make_runner: Callable[[SlotTable, Limits], Runner]


class RankAssembly:
    """A loaded rank. ``hub`` is shared by the ranks of this process, and None when it serves one rank only."""

    def __init__(self, slice_: Slice, hub: MemoryHub | None) -> None:
        self._slice = slice_
        self._hub = hub

    def open(self, epoch: Epoch, fds: Sequence[int]) -> OpenedStage:
        """Build the stage of an epoch; takes over ``fds``. ``TransportError`` when the links cannot be built."""
        transport, reason = choose_transport(epoch.offers, epoch.wanted_transport)
        group = PPGroup(self._slice.info.rank, self._slice.info.world_size, epoch.epoch)
        sizes = link_sizes([self._slice.boundary], epoch.limits)
        links = None
        if transport == "memory":
            assert self._hub is not None, "memory is offered only by a process with several ranks"
            links = self._hub.join(group, sizes)
        elif transport != NONE:
            links = shared_links_from_fds(fds, group, sizes)
        try:
            return OpenedStage(self._build(epoch, group, transport, links), transport, reason)
        except BaseException:
            if links is not None:
                links.close()
            raise

    def _build(self, epoch: Epoch, group: PPGroup, transport: str, links: RankLinks | None) -> Stage:
        boundary, limits = self._slice.boundary, epoch.limits
        slots = SlotTable(limits.max_num_seqs, limits.max_sample_len)
        runner = self._slice.make_runner(slots, limits)
        compute = HostStream(f"compute-{group.rank}")
        config = TransportConfig(
            name=transport,
            pp_group=group,
            boundary=[boundary],
            max_rows=limits.max_num_batched_tokens,
            ring_slots=limits.ring_slots,
            compute=compute,
            # With a slot for every step in flight no send ever waits, and a rank's cores are busy computing: handing the
            # copy to another thread costs more than the copy.
            sends_on_compute=limits.ring_slots >= limits.lane_depth,
            links=links,
        )
        return Stage(
            group=group,
            limits=limits,
            boundary=boundary,
            compute=compute,
            runner=runner,
            sampler=Sampler(self._slice.vocab_size, limits.max_num_seqs),
            slots=slots,
            transport=create_pp_transport(config),
            handler=create_pp_handler(config),
        )


def load_rank(setup: Setup, hub: MemoryHub | None) -> tuple[RankAssembly, Offer]:
    """Load a rank's slice of the model; ``ConfigError`` when the model or the split cannot be served."""
    if setup.cpus:
        os.sched_setaffinity(0, setup.cpus)  # before the first stream: threads inherit it
    torch.set_num_threads(setup.num_threads)
    source = ModelSource(setup.model_name, Path(setup.model_path), None, setup.load_format)
    dtype = resolve_dtype(setup.dtype)
    split = setup.layer_split or default_split(source, dtype, setup.world_size, max_model_len=setup.max_model_len)
    info = stage_infos(split)[setup.rank]
    check_layer_split(split, info.num_layers, setup.world_size)
    model = load_stage(source, info, dtype, max_model_len=setup.max_model_len)
    slice_ = Slice(info, model.boundary[0], model.vocab_size, lambda slots, limits: StageRunner(model, slots, limits))
    return RankAssembly(slice_, hub), _offer(setup, model, hub)


def _offer(setup: Setup, model: StageModel, hub: MemoryHub | None) -> Offer:
    block_bytes = PagedKVCache.block_bytes(
        len(model.info.layers), setup.block_size, model.num_kv_heads, model.head_dim, model.dtype
    )
    return Offer(
        host_id=host_id(),
        process_id=os.getpid(),
        device="cpu",
        transports=offered_transports(hub),
        boundary=model.boundary,
        first_layer=model.info.first_layer,
        end_layer=model.info.end_layer,
        num_layers=model.info.num_layers,
        num_parameters=model.num_parameters,
        slice_bytes=model.slice_bytes,
        load_growth_bytes=model.load_growth_bytes,
        load_seconds=model.load_seconds,
        num_threads=setup.num_threads,
        block_size=setup.block_size,
        block_bytes=block_bytes,
        max_blocks=_max_blocks(setup, block_bytes),
        tied_embeddings=model.tied_embeddings,
        embedding_checksum=model.embedding_checksum,
    )


def offered_transports(hub: MemoryHub | None) -> dict[str, str]:
    """Each transport a CPU rank could use: '' when it can, else why not."""
    return {
        "copy_engine": "computes on a CPU",
        "nccl": "computes on a CPU",
        "shared_memory": shared_memory_obstacle(),
        "memory": "" if hub is not None else "serves its ranks in processes of their own",
    }


def host_id() -> str:
    """The same for processes that can share memory: the kernel's boot id."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _max_blocks(setup: Setup, block_bytes: int) -> int:
    """As many as ``--kv-cache-memory-bytes`` holds; by default enough for every request at full length, memory permitting."""
    blocks_per_request = -(-setup.max_model_len // setup.block_size)
    if setup.kv_cache_bytes:
        return setup.kv_cache_bytes // block_bytes
    share = int(_available_bytes() * KV_SHARE_OF_FREE_MEMORY) // setup.ranks_on_host
    return min(setup.max_num_seqs * blocks_per_request, share // block_bytes)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")
