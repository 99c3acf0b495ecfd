"""One rank from its Setup to a linked Stage: load the slice, say what it can do, build an epoch's parts."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stages.cuda import CudaDevice, CudaStream
from stages.device import HostStream, Stream
from stages.device_slots import DeviceSlotTable
from stages.driver import Driver
from stages.errors import ConfigError, CudaError, StagewireError, one_line
from stages.history import TokenHistory
from stages.kernels import Kernels
from stages.kv_cache import PagedKVCache
from stages.model.slice import StageModel, default_split, load_stage, resolve_dtype
from stages.model.source import ModelSource
from stages.model.weights import Progress
from stages.plan import Epoch, Limits, Offer, Setup, TensorSchema
from stages.runner import StageRunner
from stages.sampler import DeviceSamplerOutputs, Sampler, SamplerOutputs
from stages.slots import SlotTable
from stages.stage import Runner, Stage
from stages.topology import PPGroup, StageInfo, check_layer_split, stage_infos
from stages.transport.choice import NONE, choose_transport
from stages.transport.copy_engine import copy_engine_obstacle, nvlink_peers
from stages.transport.device_links import DeviceLinks
from stages.transport.factory import Links, TransportConfig, create_pp_handler, create_pp_transport
from stages.transport.links import (
    LinkSizes,
    close_fds,
    link_sizes,
    shared_links_from_fds,
    shared_memory_obstacle,
)
from stages.transport.memory import MemoryHub
from stages.transport.process_group_backends import gloo_obstacle, nccl_obstacle
from stages.transport.process_group_links import GroupGpu, ProcessGroupLinks, address_for
from stages.upload import CPU

KV_SHARE_OF_FREE_MEMORY = 0.5  # of what is available after loading, for all ranks of the host together
SHARE_OF_GPU_MEMORY = 0.85  # for all ranks on a GPU together
GPU_WORKSPACE_BYTES = 2 << 30  # of a rank: activations, libraries, rings
PROBE_SECONDS = 20.0


class PendingStage:
    """A stage of an epoch whose links may still have to be connected.

    ``exports`` is what the other ranks need for that, None when this rank's links need nothing of theirs. Then ``connect`` with
    what all ranks exported, in their order; ``close`` drops it instead. ``TransportError`` when the links do not work.
    """

    exports: bytes | None

    def __init__(self, transport: str, reason: str, links: Links | None, build: Callable[[], Stage]) -> None:
        self.transport = transport
        self.reason = reason
        self._links = links
        self._build = build
        self.exports = links.exports() if isinstance(links, DeviceLinks | ProcessGroupLinks) else None

    def connect(self, exports: Sequence[bytes]) -> Stage:
        try:
            if isinstance(self._links, DeviceLinks | ProcessGroupLinks):
                self._links.connect(exports)
                self._links.probe(PROBE_SECONDS)
            return self._build()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._links is not None:
            self._links.close()


@dataclass(frozen=True)
class Slice:
    """What a rank computes with, apart from any epoch: ``StageModel`` for a model, something simpler in tests.

    ``make_runner`` is called once an epoch.
    """

    info: StageInfo
    boundary: TensorSchema
    vocab_size: int
    make_runner: Callable[[SlotTable, Limits], Runner]


@dataclass(frozen=True)
class Gpu:
    """The GPU of a rank: its streams, torch's name for it, our kernels, and the stream that forwards run on (a handle, None
    for one of each epoch's own)."""

    device: CudaDevice
    torch_device: torch.device
    kernels: Kernels
    compute_handle: int | None = None

    def compute(self, rank: int) -> CudaStream:
        return self.device.stream(f"compute-{rank}", self.compute_handle)


class RankAssembly:
    """A loaded rank. ``hub`` is shared by the ranks of this process, and None when it serves one rank only. ``gpu`` is None for
    a rank on the CPU."""

    def __init__(self, slice_: Slice, hub: MemoryHub | None, gpu: Gpu | None = None) -> None:
        self._slice = slice_
        self._hub = hub
        self._gpu = gpu

    def open(self, epoch: Epoch, fds: Sequence[int]) -> PendingStage:
        """Begin to build the stage of an epoch; takes over ``fds``. ``TransportError`` when the links cannot be built."""
        group = PPGroup(self._slice.info.rank, self._slice.info.world_size, epoch.epoch)
        try:
            transport, reason = choose_transport(epoch.offers, epoch.wanted_transport)
        except StagewireError:
            close_fds(fds)
            raise
        links = self._links(transport, group, link_sizes([self._slice.boundary], epoch.limits), fds, epoch.offers)
        try:
            return PendingStage(transport, reason, links, lambda: self._build(epoch, group, transport, links))
        except BaseException:
            if links is not None:
                links.close()
            raise

    def _links(
        self, transport: str, group: PPGroup, sizes: LinkSizes, fds: Sequence[int], offers: Sequence[Offer]
    ) -> Links | None:
        if transport == "memory":
            assert self._hub is not None, "memory is offered only by a process with several ranks"
            return self._hub.join(group, sizes)
        if transport == "copy_engine":
            assert self._gpu is not None, "copy_engine is offered only by a rank on a GPU"
            return DeviceLinks(self._gpu.device, self._gpu.torch_device, self._gpu.kernels, group, sizes)
        if transport == "gloo":
            return ProcessGroupLinks(transport, group, sizes, address=address_for(offers))
        if transport == "nccl":
            assert self._gpu is not None, "nccl is offered only by a rank on a GPU"
            gpu = GroupGpu(self._gpu.device, self._gpu.torch_device, self._gpu.kernels)
            return ProcessGroupLinks(transport, group, sizes, address=address_for(offers), gpu=gpu)
        return None if transport == NONE else shared_links_from_fds(fds, group, sizes)

    def _build(self, epoch: Epoch, group: PPGroup, transport: str, links: Links | None) -> Stage:
        limits, gpu = epoch.limits, self._gpu
        max_steps = limits.lane_depth + 2  # one more than may be unacknowledged
        compute: Stream
        if gpu is None:
            compute = HostStream(f"compute-{group.rank}")
            slots, outputs = SlotTable(limits.max_num_seqs, limits.max_sample_len), SamplerOutputs()
        else:
            compute = gpu.compute(group.rank)
            slots = DeviceSlotTable(
                limits.max_num_seqs, limits.max_sample_len, gpu.device, gpu.torch_device, gpu.kernels, max_steps
            )
            outputs = DeviceSamplerOutputs(gpu.torch_device, limits.max_num_seqs, limits.max_sample_len, max_steps)
        history = None
        if group.is_last_rank:  # all of it now: on a GPU nothing is allocated while a stream may wait for a peer
            history = TokenHistory(limits.max_num_seqs, limits.max_model_len, CPU if gpu is None else gpu.torch_device)
        config = TransportConfig(
            name=transport,
            pp_group=group,
            boundary=[self._slice.boundary],
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
            boundary=self._slice.boundary,
            compute=compute,
            runner=self._slice.make_runner(slots, limits),
            sampler=Sampler(self._slice.vocab_size, limits.max_num_seqs, history),
            outputs=outputs,
            slots=slots,
            transport=create_pp_transport(config),
            handler=create_pp_handler(config),
        )


def load_rank(setup: Setup, hub: MemoryHub | None, progress: Progress) -> tuple[RankAssembly, Offer]:
    """Load a rank's slice of the model, telling ``progress``; ``ConfigError`` when the model or the split cannot be served."""
    if setup.cpus:
        os.sched_setaffinity(0, setup.cpus)  # before the first stream: threads inherit it
    torch.set_num_threads(setup.num_threads)
    gpu = None if setup.device == "cpu" else open_gpu(setup.device)
    source = ModelSource(setup.model_name, Path(setup.model_path), None, setup.load_format)
    dtype = resolve_dtype(setup.dtype, CPU if gpu is None else gpu.torch_device)
    split = setup.layer_split or default_split(source, dtype, setup.world_size, max_model_len=setup.max_model_len)
    info = stage_infos(split)[setup.rank]
    check_layer_split(split, info.num_layers, setup.world_size)
    model = load_stage(source, info, dtype, max_model_len=setup.max_model_len, progress=progress)
    if gpu is not None:
        model.move_to(gpu.torch_device)

    def make_runner(slots: SlotTable, limits: Limits) -> StageRunner:
        runner = StageRunner(model, slots, limits)
        if gpu is not None:
            runner.warm_up()
        return runner

    slice_ = Slice(info, model.boundary[0], model.vocab_size, make_runner)
    return RankAssembly(slice_, hub, gpu), _offer(setup, model, hub, gpu)


def open_gpu(name: str) -> Gpu:
    """The GPU that ``cuda:N`` names, with torch on a stream of ours; ``ConfigError`` when there is none."""
    try:
        device = torch.device(name)
        if not torch.cuda.is_available():
            raise ConfigError(f"--device {name}: this torch ({torch.__version__}) finds no GPU")
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("highest")  # float32 means it: TF32 would change the tokens
        cuda = CudaDevice(Driver(), device.index)
    except (RuntimeError, CudaError) as exc:
        raise ConfigError(f"--device {name}: {one_line(exc)}") from exc
    handle = cuda.driver.create_stream()
    torch.cuda.set_stream(torch.cuda.ExternalStream(handle, device))
    return Gpu(cuda, device, Kernels(cuda.driver), handle)


def _offer(setup: Setup, model: StageModel, hub: MemoryHub | None, gpu: Gpu | None) -> Offer:
    block_bytes = PagedKVCache.block_bytes(
        len(model.info.layers), setup.block_size, model.num_kv_heads, model.head_dim, model.dtype
    )
    driver = None if gpu is None else gpu.device.driver
    ordinal = 0 if gpu is None else gpu.device.ordinal
    return Offer(
        host_id=host_id(),
        process_id=os.getpid(),
        device="cpu" if driver is None else driver.device_name(ordinal),
        transports=offered_transports(hub) if gpu is None else gpu_transports(gpu),
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
        max_blocks=_max_blocks(setup, block_bytes, _kv_bytes(setup, model, gpu)),
        tied_embeddings=model.tied_embeddings,
        embedding_checksum=model.embedding_checksum,
        device_uuid="" if driver is None else driver.device_uuid(ordinal),
        nvlink_peers=[] if driver is None else nvlink_peers(driver, ordinal),
    )


def offered_transports(hub: MemoryHub | None) -> dict[str, str]:
    """Each transport a CPU rank could use: '' when it can, else why not."""
    return {
        "copy_engine": "computes on a CPU",
        "nccl": "computes on a CPU",
        "gloo": gloo_obstacle(),
        "shared_memory": shared_memory_obstacle(),
        "memory": "" if hub is not None else "serves its ranks in processes of their own",
    }


def gpu_transports(gpu: Gpu) -> dict[str, str]:
    """The same for a rank on a GPU."""
    return {
        "copy_engine": copy_engine_obstacle(gpu.device.driver),
        "nccl": nccl_obstacle(),
        "gloo": "computes on a GPU",
        "shared_memory": "computes on a GPU",
        "memory": "computes on a GPU",
    }


def host_id() -> str:
    """The same for processes that can share memory: the kernel's boot id."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _max_blocks(setup: Setup, block_bytes: int, kv_bytes: int) -> int:
    """As many as ``--kv-cache-memory-bytes`` holds; by default enough for every request at full length, memory permitting."""
    blocks_per_request = -(-setup.max_model_len // setup.block_size)
    if setup.kv_cache_bytes:
        return setup.kv_cache_bytes // block_bytes
    return min(setup.max_num_seqs * blocks_per_request, kv_bytes // block_bytes)


def _kv_bytes(setup: Setup, model: StageModel, gpu: Gpu | None) -> int:
    """What this rank's KV cache may take of the memory where it computes."""
    if gpu is None:
        return int(_available_bytes() * KV_SHARE_OF_FREE_MEMORY) // setup.ranks_on_host
    _, total = gpu.device.driver.memory_info()
    share = int(total * SHARE_OF_GPU_MEMORY) // setup.ranks_on_device
    return max(0, share - model.slice_bytes - GPU_WORKSPACE_BYTES)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")
