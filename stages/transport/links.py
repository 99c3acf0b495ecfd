"""The links of a rank: how large they are, in what order they are listed, and how they get from the engine to the ranks.

No torch: the engine makes the links of ``shared_memory``, since nothing in them has a name that a rank could find, and
sends each rank its file descriptors. Every link is three of them: the segment (a memfd, sealed against resizing), the
doorbell that wakes its receiver, and the one that wakes its sender (eventfds).
"""

import fcntl
import os
import platform
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Literal

from stages.errors import ConfigError, TransportError
from stages.plan import Limits, TensorSchema
from stages.topology import PPGroup
from stages.transport.ring import (
    DTYPE_BYTES,
    MAX_TENSORS,
    STAMP_MAGIC,
    Link,
    RingLayout,
    Stamp,
    align,
    read_stamp,
    stamp_segment,
)

FDS_PER_LINK = 3
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_TOKEN_ID_BYTES = 8
_TOKEN_COUNT_BYTES = 4


# ---- sizes --------------------------------------------------------------------------------------------------------------


def check_boundary(boundary: Sequence[TensorSchema]) -> None:
    """Raise ``ConfigError`` unless every tensor has a dtype that a ring can carry, a width and a name of its own."""
    if not 1 <= len(boundary) <= MAX_TENSORS:
        raise ConfigError(f"boundary of {len(boundary)} tensors: must have 1 to {MAX_TENSORS}")
    for tensor in boundary:
        if tensor.dtype not in DTYPE_BYTES:
            raise ConfigError(f"boundary tensor {tensor.name}: dtype {tensor.dtype}: must be one of {', '.join(DTYPE_BYTES)}")
        if tensor.width < 1:
            raise ConfigError(f"boundary tensor {tensor.name}: width {tensor.width}: must be at least 1")
    if len({tensor.name for tensor in boundary}) != len(boundary):
        raise ConfigError(f"boundary tensors {', '.join(tensor.name for tensor in boundary)}: names must differ")


def row_bytes(tensor: TensorSchema) -> int:
    return tensor.width * DTYPE_BYTES[tensor.dtype]


def tensor_offsets(boundary: Sequence[TensorSchema], max_rows: int) -> list[int]:
    """Where each tensor of a boundary starts in a slot's payload, and, last, where the payload ends."""
    offsets = [0]
    for tensor in boundary:
        offsets.append(offsets[-1] + align(max_rows * row_bytes(tensor)))
    return offsets


def boundary_slot_bytes(boundary: Sequence[TensorSchema], max_rows: int) -> int:
    """Payload of a boundary slot for up to ``max_rows`` rows."""
    return tensor_offsets(boundary, max_rows)[-1]


def token_slot_bytes(max_num_reqs: int, max_sample_len: int) -> int:
    """Payload of a token slot: ids ``[num_reqs, max_sample_len]`` int64, num_sampled and num_rejected ``[num_reqs]`` int32."""
    return max_num_reqs * (max_sample_len * _TOKEN_ID_BYTES + 2 * _TOKEN_COUNT_BYTES)


def schema_checksum(boundary: Sequence[TensorSchema]) -> int:
    return zlib.crc32(repr([(tensor.name, tensor.dtype, tensor.width) for tensor in boundary]).encode())


@dataclass(frozen=True)
class LinkSizes:
    """The two kinds of links: hidden states to the next rank, and tokens from the last rank to each other one."""

    boundary: RingLayout
    tokens: RingLayout


def link_sizes(boundary: Sequence[TensorSchema], limits: Limits) -> LinkSizes:
    """The sizes that engine and ranks derive alike. Token rings have lane depth + 1 slots."""
    check_boundary(boundary)
    return LinkSizes(
        RingLayout(limits.ring_slots, boundary_slot_bytes(boundary, limits.max_num_batched_tokens)),
        RingLayout(limits.lane_depth + 1, token_slot_bytes(limits.max_num_seqs, limits.max_sample_len)),
    )


# ---- order --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinkId:
    kind: Literal["boundary", "tokens"]
    sender: int
    receiver: int

    def __str__(self) -> str:
        return f"{self.kind} link from rank {self.sender} to rank {self.receiver}"


def link_ids(rank: int, world_size: int) -> list[LinkId]:
    """The links of a rank, in the order of its file descriptors.

    The boundary from the previous rank (unless first), the boundary to the next rank (unless last), then tokens: on the
    last rank the links to ranks 0, 1, …, on every other the one from the last rank. None without pipeline parallelism.
    """
    last = world_size - 1
    ids: list[LinkId] = []
    if rank > 0:
        ids.append(LinkId("boundary", rank - 1, rank))
    if rank < last:
        ids.append(LinkId("boundary", rank, rank + 1))
    receivers = range(last) if rank == last else [rank]
    return ids + [LinkId("tokens", last, receiver) for receiver in receivers]


class RankLinks:
    """The links of one rank in one epoch. Whoever uses a link closes it; ``close`` closes those that nobody took up."""

    def __init__(self, links: dict[LinkId, Link], group: PPGroup) -> None:
        boundaries = {link_id.receiver: link for link_id, link in links.items() if link_id.kind == "boundary"}
        self.from_prev = boundaries.get(group.rank)
        self.to_next = boundaries.get(group.rank + 1)
        self.tokens = [link for link_id, link in links.items() if link_id.kind == "tokens"]
        self._links = list(links.values())

    def close(self) -> None:
        """May be called twice, and after the links were closed one by one."""
        for link in self._links:
            link.close()


def make_stamp(link_id: LinkId, layout: RingLayout, epoch: int, start_seq: int) -> Stamp:
    return Stamp(STAMP_MAGIC, epoch, link_id.sender, link_id.receiver, layout.num_slots, layout.slot_bytes, start_seq)


# ---- shared memory ------------------------------------------------------------------------------------------------------


def shared_memory_obstacle() -> str:
    """Why this host cannot do ``shared_memory``; empty when it can."""
    if sys.platform != "linux":
        return f"needs Linux's memfds and eventfds, this is {sys.platform}"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"needs the store order of x86-64, this is {platform.machine()}"
    return ""


class EventBell:
    """A doorbell that rings in another process. Owns its file descriptor; the read releases the GIL."""

    _ONE = (1).to_bytes(8, sys.byteorder)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def ring(self) -> None:
        os.write(self._fd, self._ONE)

    def wait(self) -> None:
        os.read(self._fd, 8)  # not os.eventfd_read, which a signal ends with an error

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def create_shared_links(
    world_size: int,
    *,
    epoch: int,
    boundary_slot_bytes: int,
    token_slot_bytes: int,
    ring_slots: int,
    token_slots: int,
    start_seq: int = 0,
) -> list[list[int]]:
    """The file descriptors for each rank, in the order of ``link_ids``; empty lists for ``world_size`` 1.

    Every descriptor is listed once and belongs to the caller, who closes a rank's list once it is sent. ``OSError`` when
    the process is out of descriptors or memory; nothing is left then.
    """
    layouts = {"boundary": RingLayout(ring_slots, boundary_slot_bytes), "tokens": RingLayout(token_slots, token_slot_bytes)}
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    opened: list[int] = []
    made: dict[LinkId, list[int]] = {}
    try:
        for rank, fds in enumerate(ranks):
            for link_id in link_ids(rank, world_size):
                if link_id in made:  # the second end takes the originals
                    fds += made.pop(link_id)
                    continue
                stamp = make_stamp(link_id, layouts[link_id.kind], epoch, start_seq)
                made[link_id] = _open_link(stamp, opened)
                for fd in made[link_id]:
                    opened.append(os.dup(fd))
                    fds.append(opened[-1])
    except BaseException:
        close_fds(opened)
        raise
    return ranks


def create_links_for(world_size: int, sizes: LinkSizes, epoch: int) -> list[list[int]]:
    """``create_shared_links`` for the sizes that ``link_sizes`` gives."""
    return create_shared_links(
        world_size,
        epoch=epoch,
        boundary_slot_bytes=sizes.boundary.slot_bytes,
        token_slot_bytes=sizes.tokens.slot_bytes,
        ring_slots=sizes.boundary.num_slots,
        token_slots=sizes.tokens.num_slots,
    )


def shared_links_from_fds(fds: Sequence[int], group: PPGroup, sizes: LinkSizes) -> RankLinks:
    """A rank's links from the descriptors it was sent. Takes them over: after an error, too, they are closed.

    ``TransportError`` when their number, a segment's size, or what a segment says of itself is not what this rank expects.
    """
    ids = link_ids(group.rank, group.world_size)
    links: dict[LinkId, Link] = {}
    rest = list(fds)
    try:
        if len(fds) != FDS_PER_LINK * len(ids):
            raise TransportError(
                f"rank {group.rank} was sent {len(fds)} file descriptors of links, expected {FDS_PER_LINK * len(ids)}"
            )
        for link_id in ids:
            layout = sizes.boundary if link_id.kind == "boundary" else sizes.tokens
            buffer = _map_segment(rest[0], link_id, layout, group.epoch)
            os.close(rest.pop(0))  # the mapping has its own
            full_bell, free_bell = EventBell(rest.pop(0)), EventBell(rest.pop(0))
            links[link_id] = Link(buffer, full_bell, free_bell)
    except BaseException:
        close_fds(rest)
        for link in links.values():
            link.close()
        raise
    return RankLinks(links, group)


def _open_link(stamp: Stamp, opened: list[int]) -> list[int]:
    """Segment and doorbells of a new link; they are put in ``opened`` one by one."""
    size = RingLayout(stamp.num_slots, stamp.slot_bytes).segment_bytes
    memfd = os.memfd_create("stagewire-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    opened.append(memfd)
    os.ftruncate(memfd, size)
    # A peer that could shrink the segment could kill this rank with SIGBUS.
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, _SEALS)
    with mmap(memfd, size) as buffer:
        stamp_segment(buffer, stamp)
    fds = [memfd]
    for _ in range(FDS_PER_LINK - 1):
        opened.append(os.eventfd(0, os.EFD_CLOEXEC))
        fds.append(opened[-1])
    return fds


def _map_segment(fd: int, link_id: LinkId, layout: RingLayout, epoch: int) -> mmap:
    size = os.fstat(fd).st_size
    if size != layout.segment_bytes:
        raise TransportError(f"{link_id}: the segment has {size} bytes, expected {layout.segment_bytes}")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise TransportError(f"{link_id}: the segment is not sealed against resizing")
    buffer = mmap(fd, size)
    stamp = read_stamp(buffer)
    expected = make_stamp(link_id, layout, epoch, stamp.start_seq)
    for name, want, have in zip(Stamp._fields, expected, stamp, strict=True):
        if want != have:
            raise TransportError(f"{link_id}: the segment's {name} is {have}, expected {want}")
    return buffer


def close_fds(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
