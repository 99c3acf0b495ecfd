"""In place of torch's own process groups: gloo's, watched, and what stands in for NCCL's where there are no GPUs."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from stages.transport.process_group_backends import FOREVER, distributed
from stages.transport.process_group_links import LOOPBACK

SLEEPING_SECONDS = 0.05  # longer than messages take
DEADLINE_SECONDS = 30
BROKEN_TAG = 1 << 21


@dataclass
class SpyWork:
    work: Any
    spy: "SpyGroup"

    def wait(self, timeout: timedelta = FOREVER) -> None:
        with self.spy.waiting():
            self.work.wait(timeout)


class SpyGroup:
    """Tells for how long a thread has been waiting."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._since: dict[int, float] = {}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._since[threading.get_ident()] = time.monotonic()
        try:
            yield
        finally:
            del self._since[threading.get_ident()]

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> SpyWork:
        return SpyWork(self._group.recv(tensors, peer, tag), self)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> SpyWork:
        return SpyWork(self._group.send(tensors, peer, tag), self)

    def wait_for_sleeper(self) -> None:
        """Gloo tells of nothing: what waits for long waits for its peer."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not any(time.monotonic() - since > SLEEPING_SECONDS for since in list(self._since.values())):
            assert time.monotonic() < deadline, "nobody waits in this group"
            time.sleep(0.001)


class EmulatedNccl(SpyGroup):
    """``ProcessGroupNCCL``, as far as it is used here, for what emulated GPUs hold.

    As with NCCL, both sides name the same size, or something else than the message arrives.
    """

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(max_ctas=None)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        assert options._timeout == FOREVER  # pyright: ignore[reportAttributeAccessIssue]
        gloo = distributed.ProcessGroupGloo._Options()
        gloo._devices = [distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK, lazy_init=False)]
        gloo._threads = 1
        gloo._timeout = FOREVER
        super().__init__(distributed.ProcessGroupGloo(store, rank, size, gloo))
        self._rank, self._size = rank, size
        self._is_connected = False
        self.has_ended = False

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._is_connected = True

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> SpyWork:
        assert self._is_connected
        return super().send(tensors, peer, tag)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> SpyWork:
        return SpyWork(self._group.broadcast(tensors, options), self)

    def abort(self) -> None:
        self.has_ended = True
        with suppress(RuntimeError):
            word = torch.empty(1, dtype=torch.uint8)
            self._group.recv([word], (self._rank + 1) % self._size, BROKEN_TAG).wait(timedelta(milliseconds=1))

    def shutdown(self) -> None:
        self.has_ended = True
