"""Ranks with links, streams, transport and handler, all in this process, and what tests wait with."""

import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from stages.cuda import CudaDevice
from stages.device import HostStream, Point, Stream
from stages.kernels import Kernels
from stages.plan import TensorSchema
from stages.pp_handler import PPHandler
from stages.topology import PPGroup
from stages.transport.base import IntermediateTensors, PPTransport, StepShape
from stages.transport.device_links import DeviceLinks
from stages.transport.factory import TransportConfig, create_pp_handler, create_pp_transport
from stages.transport.links import (
    LinkSizes,
    RankLinks,
    boundary_slot_bytes,
    create_shared_links,
    shared_links_from_fds,
    token_slot_bytes,
)
from stages.transport.memory import MemoryHub
from stages.transport.process_group_backends import GlooGroup, distributed
from stages.transport.process_group_links import GroupGpu, ProcessGroupLinks
from stages.transport.ring import CONTROL_BYTES, Doorbell, Link, RingLayout
from tests.emulated_cuda import the_emulation
from tests.stages.transport.groups import EmulatedNccl, SpyGroup

HOST_KINDS = ("memory", "shared_memory")
INLINE = "copy_engine, inline"  # small messages are copied on the compute stream
RING_KINDS = (*HOST_KINDS, "copy_engine", INLINE)
EMULATED_NCCL = "nccl, emulated"
GROUP_KINDS = ("gloo", EMULATED_NCCL)
BUFFERING_KINDS = (*RING_KINDS, "gloo")
"""Those that take a message before the receiver asks for it."""
KINDS = (*RING_KINDS, *GROUP_KINDS)
HIDDEN = [TensorSchema("hidden_states", "float32", 8)]
SEVERAL = [
    TensorSchema("hidden_states", "float32", 8),
    TensorSchema("residual", "bfloat16", 12),
    TensorSchema("scale", "float16", 1),
]
MAX_ROWS = 32
MAX_REQS = 8
MAX_SAMPLE_LEN = 6
DEADLINE_SECONDS = 30
distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # libuv opens a pipe once, and keeps it


class SpyBell:
    """A doorbell that tells when a thread is about to sleep at it."""

    def __init__(self, bell: Doorbell) -> None:
        self._bell = bell
        self._sleepers = threading.Semaphore(0)

    def ring(self) -> None:
        self._bell.ring()

    def wait(self) -> None:
        self._sleepers.release()
        self._bell.wait()

    def close(self) -> None:
        self._bell.close()

    def wait_for_sleeper(self) -> None:
        assert self._sleepers.acquire(timeout=DEADLINE_SECONDS), "nobody waits at this doorbell"


Links = RankLinks | DeviceLinks | ProcessGroupLinks
_devices: list[CudaDevice] = []  # closed at the end of a test: what a rank lets go of, its peers may still write to


@dataclass
class Rank:
    group: PPGroup
    compute: Stream
    links: Links
    transport: PPTransport
    handler: PPHandler

    def begin(self, step_id: int, num_tokens: int = 1, num_in_flight: int = 1) -> None:
        self.transport.begin_step(StepShape(step_id, num_tokens, num_in_flight))
        self.handler.begin_step(step_id)

    def send(self, tensors: Mapping[str, torch.Tensor]) -> Point:
        return self.transport.send(IntermediateTensors(tensors, self.compute.record()), self.group)

    def recv(self) -> IntermediateTensors:
        return self.transport.recv(self.group)

    def poison(self, cause: BaseException) -> None:
        self.transport.poison(cause)
        self.handler.poison(cause)

    def close(self) -> None:
        self.transport.close()
        self.handler.close()
        self.compute.close()


def sizes_for(boundary: Sequence[TensorSchema], ring_slots: int, token_slots: int) -> LinkSizes:
    return LinkSizes(
        RingLayout(ring_slots, boundary_slot_bytes(boundary, MAX_ROWS)),
        RingLayout(token_slots, token_slot_bytes(MAX_REQS, MAX_SAMPLE_LEN)),
    )


def links_for(kind: str, world_size: int, sizes: LinkSizes, *, epoch: int, start_seq: int) -> Sequence[Links]:
    groups = [PPGroup(rank, world_size, epoch) for rank in range(world_size)]
    if kind in ("copy_engine", INLINE):
        emulated = the_emulation()
        device_links: list[DeviceLinks] = []
        for group in groups:
            _devices.append(emulated.device(group.rank))
            kernels = Kernels(emulated.driver)
            device_links.append(DeviceLinks(_devices[-1], torch.device("cpu"), kernels, group, sizes, start_seq))
        exports = [links.exports() for links in device_links]
        for links in device_links:
            links.connect(exports)
        return device_links
    if kind in GROUP_KINDS:
        return group_links(kind, groups, sizes, start_seq)
    if kind == "memory":
        hub = MemoryHub(start_seq)
        return [hub.join(group, sizes) for group in groups]
    fds = create_shared_links(
        world_size,
        epoch=epoch,
        boundary_slot_bytes=sizes.boundary.slot_bytes,
        token_slot_bytes=sizes.tokens.slot_bytes,
        ring_slots=sizes.boundary.num_slots,
        token_slots=sizes.tokens.num_slots,
        start_seq=start_seq,
    )
    return [shared_links_from_fds(rank_fds, group, sizes) for rank_fds, group in zip(fds, groups, strict=True)]


def group_links(kind: str, groups: Sequence[PPGroup], sizes: LinkSizes, start_seq: int) -> list[ProcessGroupLinks]:
    """Connected and probed, each in a thread of its own: that waits for the others."""
    links: list[ProcessGroupLinks] = []
    for group in groups:
        gpu = None
        if kind == EMULATED_NCCL:
            emulated = the_emulation()
            _devices.append(emulated.device(group.rank))
            gpu = GroupGpu(_devices[-1], torch.device("cpu"), Kernels(emulated.driver))
        links.append(ProcessGroupLinks("nccl" if gpu else "gloo", group, sizes, gpu=gpu, start_seq=start_seq))
    exports = [each.exports() for each in links]

    def connect(each: ProcessGroupLinks) -> None:
        each.connect(exports)
        each.probe(DEADLINE_SECONDS)

    nccl = mock.patch.object(distributed, "ProcessGroupNCCL", EmulatedNccl, create=True)
    with nccl, ThreadPoolExecutor(len(links)) as pool:
        for done in [pool.submit(connect, each) for each in links]:
            done.result()
    for each in links:
        for group in each._groups:
            if isinstance(group, GlooGroup):
                group._group = SpyGroup(group._group)
    return links


def build_rank(
    kind: str,
    group: PPGroup,
    links: Links,
    boundary: Sequence[TensorSchema] = HIDDEN,
    persistent: Mapping[str, torch.Tensor] | None = None,
) -> Rank:
    compute = compute_for(links, f"compute-{group.rank}")
    if isinstance(links, RankLinks):
        for link in [links.from_prev, links.to_next, *links.tokens]:
            if link is not None:
                link.full_bell, link.free_bell = SpyBell(link.full_bell), SpyBell(link.free_bell)
    config = TransportConfig(
        name=kind.split(",")[0],
        sends_on_compute=kind == INLINE,
        pp_group=group,
        boundary=boundary,
        max_rows=MAX_ROWS,
        ring_slots=ring_layout(links).num_slots,
        compute=compute,
        links=links,
    )
    transport, handler = create_pp_transport(config, persistent), create_pp_handler(config)
    assert transport is not None
    assert handler is not None
    return Rank(group, compute, links, transport, handler)


def compute_for(links: Links, name: str) -> Stream:
    if isinstance(links, DeviceLinks):
        return links.device.stream(name)
    if isinstance(links, ProcessGroupLinks) and links.gpu is not None:
        return links.gpu.stream(name)
    return HostStream(name)


def ring_layout(links: Links) -> RingLayout:
    end = links.to_next or links.from_prev
    assert end is not None
    return end.layout


def wait_for_sleeper(rank: Rank, what: str) -> None:
    """Until something of the rank waits for its peer in ``recv``, ``send`` or ``tokens``."""
    links = rank.links
    if isinstance(links, RankLinks):
        bell = {
            "recv": lambda: boundary_link(links).full_bell,
            "send": lambda: boundary_link(links).free_bell,
            "tokens": lambda: links.tokens[0].free_bell if rank.group.is_last_rank else links.tokens[0].full_bell,
        }[what]()
        assert isinstance(bell, SpyBell)
        bell.wait_for_sleeper()
        return
    if isinstance(links, ProcessGroupLinks):
        link = {"recv": links.from_prev, "send": links.to_next, "tokens": links.tokens[0]}[what]
        assert link is not None
        link.group._group.wait_for_sleeper()  # pyright: ignore[reportAttributeAccessIssue]
        return
    ends = {"recv": [links.from_prev], "send": [links.to_next], "tokens": [links.token_receiver, *links.token_senders]}
    memory = next(end for end in ends[what] if end is not None).memory
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not the_emulation().is_waiting(memory, CONTROL_BYTES):
        assert time.monotonic() < deadline, "nobody waits there"
        time.sleep(0.0001)


def full_word(rank: Rank) -> memoryview:
    """The counter that the first message of a receiving rank is told by, as its peer writes it."""
    if isinstance(rank.links, RankLinks):
        return memoryview(boundary_link(rank.links).buffer)[:8].cast("Q")
    assert isinstance(rank.links, DeviceLinks)
    assert rank.links.from_prev is not None
    return memoryview((ctypes.c_uint64 * 1).from_address(rank.links.from_prev.memory)).cast("B").cast("Q")


def boundary_link(links: Links) -> Link:
    assert isinstance(links, RankLinks)
    link = links.to_next or links.from_prev
    assert link is not None
    return link


@contextmanager
def pipeline(
    kind: str,
    world_size: int,
    boundaries: Sequence[Sequence[TensorSchema]] = (HIDDEN,),
    *,
    epochs: Sequence[int] = (1,),
    ring_slots: int = 3,
    token_slots: int = 4,
    start_seq: int = 0,
    persistent: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[list[Rank]]:
    """Ranks on common links; a rank beyond the end of ``boundaries`` has the last one. Poisoned and closed at the end."""
    sizes = sizes_for(max(boundaries, key=lambda boundary: boundary_slot_bytes(boundary, MAX_ROWS)), ring_slots, token_slots)
    links = links_for(kind, world_size, sizes, epoch=epochs[0], start_seq=start_seq)
    ranks: list[Rank] = []
    for rank, rank_links in enumerate(links):
        group = PPGroup(rank, world_size, epochs[min(rank, len(epochs) - 1)])
        boundary = boundaries[min(rank, len(boundaries) - 1)]
        ranks.append(build_rank(kind, group, rank_links, boundary, persistent if rank else None))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.poison(RuntimeError("the test is over"))
        for rank in ranks:
            rank.close()


def tensors_of(boundary: Sequence[TensorSchema], step_id: int, num_rows: int) -> dict[str, torch.Tensor]:
    """Values that tell steps, tensors and places apart, exact in every dtype."""
    return {
        schema.name: ((torch.arange(num_rows * schema.width) * 7 + step_id * 131 + schema.width) % 251)
        .to(getattr(torch, schema.dtype))
        .view(num_rows, schema.width)
        for schema in boundary
    }


def assert_same(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


def reach(point: Point) -> None:
    """Wait for a Point; raises its stream's error."""
    done = threading.Event()
    point.add_done_callback(done.set)
    if point.poller is None:
        assert done.wait(DEADLINE_SECONDS), "the point was not reached"
    else:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not done.is_set():
            assert time.monotonic() < deadline, "the point was not reached"
            point.poller.poll()
            time.sleep(0.0001)
    point.is_reached()


def open_fds() -> set[tuple[str, str]]:
    fds: set[tuple[str, str]] = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            fds.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
        except FileNotFoundError:  # the listing's own
            continue
    return fds


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves a file descriptor or a thread behind."""
    fds, threads = open_fds(), set(threading.enumerate())
    yield
    while _devices:
        _devices.pop().close()
    if open_fds() - fds:
        gc.collect()  # the traceback of an expected error holds the frames it went through, and what they hold
    assert open_fds() - fds == set()
    assert set(threading.enumerate()) - threads == set()
