"""The links of a rank over ``torch.distributed``: process groups of an epoch, found through a store that rank 0 opens.

A boundary has a group of its two ranks, and the tokens have one of all ranks.
"""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch

from stages.cuda import CudaDevice, CudaStream
from stages.errors import TransportError
from stages.kernels import Kernels
from stages.plan import Offer
from stages.topology import PPGroup
from stages.transport.links import LinkId, LinkSizes
from stages.transport.process_group_backends import FOREVER, Backend, GlooGroup, Group, NcclGroup, distributed, reason_of
from stages.transport.ring import RingLayout
from stages.transport.verdict import Verdict

LOOPBACK = "127.0.0.1"
LINK_SECONDS = 20.0
POLL_SECONDS = 0.0005
_PATTERN = 0xA5


def address_for(offers: Sequence[Offer]) -> str:
    """Where this host's ranks are reached by those that made the ``offers``: never from outside when all are on one host."""
    if all(offer.host_id == offers[0].host_id for offer in offers):
        return LOOPBACK
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as exc:
        raise TransportError(f"this host's name {name} has no address, by which ranks on others could reach it: {exc}") from exc


@dataclass(frozen=True)
class GroupLink:
    """One end of a link: the group that carries it, and the peer's number there."""

    link_id: LinkId
    group: Group
    peer: int
    layout: RingLayout


@dataclass(frozen=True)
class GroupGpu:
    """The GPU of a rank, for links that carry what is on it."""

    device: CudaDevice
    torch_device: torch.device
    kernels: Kernels

    def stream(self, name: str) -> CudaStream:
        """A new stream that torch's operations of a ``launch`` go to."""
        if self.torch_device.type == "cpu":
            return self.device.stream(name)
        made = self.device.stream(name, scope=lambda: torch.cuda.stream(as_torch))
        as_torch = torch.cuda.ExternalStream(made.handle, self.torch_device)
        return made


class _Export(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int


class ProcessGroupLinks:
    """The links of one rank in one epoch. ``connect`` with the exports of all ranks, then ``probe``, makes them ready.

    ``address`` is of this host, where its peers reach it. ``gpu`` is None for links between CPUs. Closed by what
    uses them, with the last of it. ``start_seq`` is the number of the first message. ``max_seconds`` bounds ``connect``, which
    waits for every other rank.
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
        self.backend: Backend = backend
        self.pp_group = group
        self.sizes = sizes
        self.gpu = gpu
        self._num_users = 0
        self._is_proven = False
        self.from_prev: GroupLink | None = None
        self.to_next: GroupLink | None = None
        self.tokens: list[GroupLink] = []  # the last rank's: one to each other rank; else one, from the last rank
        self._address = address
        self.start_seq = start_seq
        self._timeout = timedelta(seconds=max_seconds)
        self._groups: list[Group] = []
        self._export = _Export("", 0)
        self._server: Any = None
        self._gloo_device: Any = None
        self._store: Any = None  # NCCL's threads look at it for as long as they live
        self.verdict = None if gpu is None else Verdict(gpu.device, group)
        if group.is_first_rank:
            self._open_store()

    def _open_store(self) -> None:
        try:
            with socket.create_server((self._address, 0)) as listener:
                port = listener.getsockname()[1]
                self._server = distributed.TCPStore(
                    self._address,
                    port,
                    is_master=True,
                    timeout=self._timeout,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
        except (OSError, RuntimeError) as exc:
            raise TransportError(f"rank {self.pp_group.rank} cannot open a store at {self._address}: {exc}") from exc
        self._export = _Export(self._address, port)

    # ---- linking ----------------------------------------------------------------------------------------------------

    def exports(self) -> bytes:
        """What the other ranks need for ``connect``: of rank 0, where the store is."""
        return msgspec.msgpack.encode(self._export)

    def connect(self, exports: Sequence[bytes]) -> None:
        """Make every group, from the exports of all ranks in their order. ``TransportError`` when that cannot be done."""
        try:
            self._connect(msgspec.msgpack.decode(exports[0], type=_Export))
        except RuntimeError as exc:  # torch's errors of stores and connections are
            raise TransportError(f"rank {self.pp_group.rank} cannot link over {self.backend}: {reason_of(exc)}") from None

    def _connect(self, where: _Export) -> None:
        group, boundary = self.pp_group, self.sizes.boundary
        store = self._server
        if store is None:
            store = distributed.TCPStore(where.host, where.port, is_master=False, timeout=self._timeout, wait_for_workers=False)
        self._store = store = distributed.PrefixStore(f"epoch {group.epoch}", store)
        # Only once everybody is there: NCCL waits without end for a peer that never comes.
        store.set(f"rank {group.rank}", "here")
        store.wait([f"rank {rank}" for rank in range(group.world_size)], self._timeout)
        if self.backend == "gloo":  # one thread for all groups
            self._gloo_device = distributed.ProcessGroupGloo.create_device(hostname=self._address, lazy_init=False)
        if not group.is_first_rank:
            link_id = LinkId("boundary", group.rank - 1, group.rank)
            self.from_prev = GroupLink(link_id, self._make_group(str(link_id), 1, 2), 0, boundary)
        if not group.is_last_rank:
            link_id = LinkId("boundary", group.rank, group.rank + 1)
            self.to_next = GroupLink(link_id, self._make_group(str(link_id), 0, 2), 1, boundary)
        last = group.last_rank
        tokens = self._make_group("tokens", group.rank, group.world_size, max_ctas=1)
        for receiver in range(last) if group.is_last_rank else [group.rank]:
            peer = receiver if group.is_last_rank else last
            self.tokens.append(GroupLink(LinkId("tokens", last, receiver), tokens, peer, self.sizes.tokens))

    def _make_group(self, name: str, rank: int, size: int, max_ctas: int | None = None) -> Group:
        store = distributed.PrefixStore(name, self._store)
        if self.backend == "gloo":
            group: Group = GlooGroup(store, rank, size, self._gloo_device, self._timeout)
        else:
            assert self.gpu is not None, "nccl is for GPUs"
            group = NcclGroup(store, rank, size, self.gpu.torch_device, max_ctas)
        self._groups.append(group)
        return group

    def probe(self, timeout_seconds: float) -> None:
        """Send a full-size message over every link: what a backend makes with the first message, it makes now.

        Every rank probes at the same time. ``TransportError`` when something else arrives, or nothing within
        ``timeout_seconds``.
        """
        rounds = self._rounds()
        try:
            for group in self._groups:
                group.set_timeout(timedelta(seconds=timeout_seconds))
            if self.gpu is None:
                for one in rounds:
                    one.run()
            else:
                self._run_on_gpu(self.gpu, rounds, timeout_seconds)
            for group in self._groups:
                group.set_timeout(FOREVER)
            self._is_proven = True
        except RuntimeError as exc:
            raise TransportError(
                f"rank {self.pp_group.rank}: a message of the probe did not arrive: {reason_of(exc)}"
            ) from None
        for one in rounds:
            one.check(self.pp_group.rank)

    def _rounds(self) -> "list[_Round]":
        """What the probe sends, in the one order of a step: no rank waits for one that waits for it."""
        device = torch.device("cpu") if self.gpu is None else self.gpu.torch_device
        boundaries = [link for link in (self.from_prev, self.to_next) if link is not None]
        return [_Round(link, device) for link in (*boundaries, self.tokens[0])]

    def _run_on_gpu(self, gpu: GroupGpu, rounds: "Sequence[_Round]", timeout_seconds: float) -> None:
        stream = gpu.stream(f"probe-{self.pp_group.rank}")
        deadline = time.monotonic() + timeout_seconds
        try:
            for one in rounds:
                stream.launch(one.run)
            while not gpu.device.driver.is_idle(stream.handle):
                if time.monotonic() > deadline:
                    for group in self._groups:
                        group.break_waits()
                    raise TransportError(f"rank {self.pp_group.rank}: a message of the probe did not arrive in time")
                time.sleep(POLL_SECONDS)
            if stream.error is not None:
                raise stream.error
        finally:
            stream.close()

    # ---- the end ----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """One user more."""
        self._num_users += 1

    def leave(self) -> None:
        """One user less. The last one closes the links."""
        self._num_users -= 1
        if self._num_users == 0:
            self.close()

    def close(self) -> None:
        """Let go of everything. May be called twice. NCCL lets go once the peers do, for some seconds at most."""
        if not self._is_proven:
            for group in self._groups:
                group.break_waits()
        while self._groups:
            self._groups.pop().close()
        self.from_prev = self.to_next = None
        self.tokens = []
        self._store = self._server = self._gloo_device = None
        if self.verdict is not None:
            self.verdict.close()


class _Round:
    """One message of the probe: over a boundary, or from the last rank to all."""

    def __init__(self, link: GroupLink, device: torch.device) -> None:
        self._link = link
        self._group = link.group
        self._root = link.group.size - 1 if link.link_id.kind == "tokens" else 0
        is_root = self._root == self._group.rank
        self._message = torch.full((link.layout.stride,), _PATTERN if is_root else 0, dtype=torch.uint8, device=device)
        if link.link_id.kind == "tokens":
            self.run = lambda: self._group.broadcast(self._message, self._root)
        elif is_root:
            self.run = lambda: self._group.send(self._message, link.peer, 0)
        else:
            self.run = lambda: self._group.recv(self._message, link.peer, 0)

    def check(self, rank: int) -> None:
        wrong = int((self._message != _PATTERN).sum())
        if wrong:
            raise TransportError(
                f"{self._link.link_id}: rank {rank} found {wrong} of {len(self._message)} bytes of the probe changed"
            )
