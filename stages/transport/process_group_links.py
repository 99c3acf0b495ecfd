"""The links of a rank over ``torch.distributed``: process groups of an epoch, found through a store that rank 0 opens.

A boundary has a group of its two ranks, and the tokens have one of all ranks. They are objects of ours, not torch's default
group, so that epochs come and go and leave no state. ``torch.distributed`` is loaded only where links are made.

Gloo knows no credits: a message waits at its sender until the receiver has posted where it goes. So the receiver posts all its
slots at once, each under a tag of its own, and posts a slot again when it is released: the ring of the other transports.
Nothing ends the wait of a gloo operation but its peer, or an error of its group. Such an error can be made: a receive that
nobody answers, waited for a millisecond, breaks every other wait of the group.
"""

import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from stages.cuda import CudaDevice
from stages.errors import TransportError
from stages.kernels import Kernels
from stages.topology import PPGroup
from stages.transport.links import LinkId, LinkSizes
from stages.transport.ring import SLOT_HEADER_BYTES, RingLayout
from stages.transport.verdict import Verdict

if TYPE_CHECKING:
    from torch.distributed import Store, Work

log = logging.getLogger(__name__)

Backend = Literal["gloo", "nccl"]
LOOPBACK = "127.0.0.1"
LINK_SECONDS = 20.0
_FOREVER = timedelta(days=3650)  # only the engine declares a loss: neither backend may end a wait by its own clock
_LAPSE = timedelta(milliseconds=1)
_LAPSE_TAG = 1 << 20  # behind the tags of slots
_WARM_UP_TAG = _LAPSE_TAG + 1
_WARM_UP_BYTES = 64


class Group(ABC):
    """Some ranks that exchange messages, which are uint8 tensors; peers are numbered within the group.

    On a GPU the current stream of torch does what is called here; elsewhere the calling thread does, and blocks. ``RuntimeError``
    when a connection broke.
    """

    rank: int
    size: int

    @abstractmethod
    def send(self, message: torch.Tensor, peer: int, tag: int) -> None: ...

    @abstractmethod
    def recv(self, message: torch.Tensor, peer: int, tag: int) -> None: ...

    @abstractmethod
    def broadcast(self, message: torch.Tensor, root: int) -> None:
        """``message`` is read on ``root`` and written on the others."""

    @abstractmethod
    def break_waits(self) -> None:
        """End what waits in any thread or stream, and what is called later. Raises nothing."""

    @abstractmethod
    def close(self) -> None:
        """After the last use. Waits for no peer. May be called twice."""


class GlooGroup(Group):
    def __init__(self, store: "Store", rank: int, size: int, device: Any, timeout: timedelta) -> None:
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # pyright: ignore[reportPrivateUsage]
        options._devices = [device]  # pyright: ignore[reportPrivateUsage]
        options._threads = 1  # pyright: ignore[reportPrivateUsage]  of collectives, which are not used
        options._timeout = timeout  # pyright: ignore[reportPrivateUsage]  for connecting
        self.rank, self.size = rank, size
        self._group: Any = ProcessGroupGloo(store, rank, size, options)
        self._is_broken = False

    def send(self, message: torch.Tensor, peer: int, tag: int) -> None:
        self._open().send([message], peer, tag).wait(_FOREVER)

    def recv(self, message: torch.Tensor, peer: int, tag: int) -> None:
        self.post(message, peer, tag).wait(_FOREVER)

    def post(self, slot: torch.Tensor, peer: int, tag: int) -> "Work":
        """Have a message that is no longer than ``slot`` go there; ``finish`` waits for it."""
        return self._open().recv([slot], peer, tag)

    def finish(self, work: "Work") -> None:
        work.wait(_FOREVER)

    def broadcast(self, message: torch.Tensor, root: int) -> None:
        if self.rank != root:
            self.recv(message, root, 0)
            return
        for peer in range(self.size):
            if peer != root:
                self.send(message, peer, 0)

    def break_waits(self) -> None:
        if self._group is None or self._is_broken:
            return
        self._is_broken = True
        unanswered = torch.empty(1, dtype=torch.uint8)
        try:
            self._group.recv([unanswered], (self.rank + 1) % self.size, _LAPSE_TAG).wait(_LAPSE)
        except RuntimeError:
            pass  # as it must

    def close(self) -> None:
        self._group = None

    def _open(self) -> Any:
        if self._group is None:
            raise RuntimeError("the group is closed")
        return self._group


class NcclGroup(Group):
    """Its communicator is made here and no other later: torch would make one for each pair of ranks that sends."""

    def __init__(self, store: "Store", rank: int, size: int, device: torch.device, max_ctas: int | None = None) -> None:
        """``max_ctas`` bounds the blocks, and so the SMs, that an operation takes."""
        from torch.distributed import ProcessGroupNCCL

        # torch's watchdog must not end the process when a peer is lost, nor when a receive waits long.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        options = ProcessGroupNCCL.Options()
        options._timeout = _FOREVER  # pyright: ignore[reportPrivateUsage]
        if max_ctas is not None:
            options.config.max_ctas = max_ctas
        self.rank, self.size = rank, size
        self._group: Any = ProcessGroupNCCL(store, rank, size, options)
        self._group.eager_connect_single_device(device)

    def send(self, message: torch.Tensor, peer: int, tag: int) -> None:
        self._group.send([message], peer, tag).wait()  # no timeout: with one the host would wait, not the stream

    def recv(self, message: torch.Tensor, peer: int, tag: int) -> None:
        self._group.recv([message], peer, tag).wait()

    def broadcast(self, message: torch.Tensor, root: int) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = root
        self._group.broadcast([message], options).wait()

    def break_waits(self) -> None:
        if self._group is not None:
            try:
                self._group.abort()
            except RuntimeError as exc:
                log.warning("NCCL: %s", str(exc).splitlines()[0])

    def close(self) -> None:
        # Not ``shutdown``, which may wait for peers. Everything has run, or was broken.
        self.break_waits()
        self._group = None


@dataclass(frozen=True)
class GroupLink:
    """One end of a link: a rank's place in a group, and its peer's. ``start_seq`` is the number of the first message."""

    link_id: LinkId
    group: Group
    peer: int
    layout: RingLayout
    start_seq: int


@dataclass(frozen=True)
class GroupGpu:
    """The GPU of a rank, for links that carry what is on it."""

    device: CudaDevice
    torch_device: torch.device
    kernels: Kernels


class _Export(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int


class ProcessGroupLinks:
    """The links of one rank in one epoch. ``connect`` with the exports of all ranks, then ``probe``, makes them ready.

    ``address`` is of this host, where its peers reach it. ``gpu`` is None for links between CPUs. Closed by the lanes that use
    them, once both are closed. ``max_seconds`` bounds ``connect``, which waits for every other rank.
    """

    def __init__(
        self,
        backend: Backend,
        group: PPGroup,
        sizes: LinkSizes,
        *,
        address: str = LOOPBACK,
        gpu: GroupGpu | None = None,
        start_seq: int = 0,
        max_seconds: float = LINK_SECONDS,
    ) -> None:
        from torch.distributed import TCPStore

        self.backend: Backend = backend
        self.pp_group = group
        self.sizes = sizes
        self.gpu = gpu
        self.open_lanes = 0
        self.from_prev: GroupLink | None = None
        self.to_next: GroupLink | None = None
        self.tokens: list[GroupLink] = []  # the last rank's: one to each other rank; else one, from the last rank
        self._address = address
        self._start_seq = start_seq
        self._timeout = timedelta(seconds=max_seconds)
        self._groups: list[Group] = []
        self._export = _Export("", 0)
        self._server: Store | None = None
        self._store: Store | None = None  # NCCL's threads look at it for as long as they live
        self.verdict = None if gpu is None else Verdict(gpu.device)
        if group.is_first_rank:
            with socket.create_server((address, 0)) as listener:
                port = listener.getsockname()[1]
                self._server = TCPStore(
                    address,
                    port,
                    is_master=True,
                    timeout=self._timeout,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
            self._export = _Export(address, port)

    # ---- linking ----------------------------------------------------------------------------------------------------

    def exports(self) -> bytes:
        """What the other ranks need for ``connect``: of rank 0, where the store is."""
        return msgspec.msgpack.encode(self._export)

    def connect(self, exports: Sequence[bytes]) -> None:
        """Make every group, from the exports of all ranks in their order. ``TransportError`` when that cannot be done."""
        try:
            self._connect(msgspec.msgpack.decode(exports[0], type=_Export))
        except RuntimeError as exc:  # torch's errors of stores and connections are
            raise TransportError(f"rank {self.pp_group.rank} cannot link over {self.backend}: {_first_line(exc)}") from None

    def _connect(self, where: _Export) -> None:
        from torch.distributed import PrefixStore, TCPStore

        group = self.pp_group
        store = self._server or TCPStore(
            where.host, where.port, is_master=False, timeout=self._timeout, wait_for_workers=False
        )
        self._store = store = PrefixStore(f"epoch {group.epoch}", store)
        # Only once everybody is there: what makes a group waits without end for a peer that will never come.
        store.set(f"rank {group.rank}", "here")
        store.wait([f"rank {rank}" for rank in range(group.world_size)], self._timeout)
        make = self._maker()
        if not group.is_first_rank:
            link_id = LinkId("boundary", group.rank - 1, group.rank)
            self.from_prev = self._link(link_id, make(PrefixStore(str(link_id), store), 1, 2, False), 0, self.sizes.boundary)
        if not group.is_last_rank:
            link_id = LinkId("boundary", group.rank, group.rank + 1)
            self.to_next = self._link(link_id, make(PrefixStore(str(link_id), store), 0, 2, False), 1, self.sizes.boundary)
        tokens = make(PrefixStore("tokens", store), group.rank, group.world_size, True)
        last = group.last_rank
        for receiver in range(last) if group.is_last_rank else [group.rank]:
            peer = receiver if group.is_last_rank else last
            self.tokens.append(self._link(LinkId("tokens", last, receiver), tokens, peer, self.sizes.tokens))

    def _maker(self) -> "Callable[[Store, int, int, bool], Group]":
        if self.backend == "gloo":
            from torch.distributed import ProcessGroupGloo

            device = ProcessGroupGloo.create_device(hostname=self._address, lazy_init=False)  # one thread for all groups

            def make_gloo(store: "Store", rank: int, size: int, is_small: bool) -> Group:
                return self._keep(GlooGroup(store, rank, size, device, self._timeout))

            return make_gloo
        assert self.gpu is not None, "nccl is for GPUs"
        torch_device = self.gpu.torch_device

        def make_nccl(store: "Store", rank: int, size: int, is_small: bool) -> Group:
            return self._keep(NcclGroup(store, rank, size, torch_device, 1 if is_small else None))

        return make_nccl

    def _keep(self, group: Group) -> Group:
        self._groups.append(group)
        return group

    def _link(self, link_id: LinkId, group: Group, peer: int, layout: RingLayout) -> GroupLink:
        return GroupLink(link_id, group, peer, layout, self._start_seq)

    def probe(self, timeout_seconds: float) -> None:
        """Send a real message each way over every link: what is made with the first message is made now.

        Every rank probes at the same time. ``TransportError`` when it does not arrive within ``timeout_seconds``.
        """

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of everything; waits for no peer. May be called twice."""
        while self._groups:
            self._groups.pop().close()
        self.from_prev = self.to_next = None
        self.tokens = []
        self._store = self._server = None
        if self.verdict is not None:
            self.verdict.close()
