"""Groups of ranks that exchange messages through ``torch.distributed``: by gloo from host memory, by NCCL from a GPU's.

They are objects of ours, not torch's default group, so that epochs come and go and leave no state.

Gloo knows no credits: a message waits at its sender until the receiver has posted where it goes. Nothing ends the wait of a
gloo operation but its peer, or an error of its group. Such an error can be made: a receive that nobody answers, waited for a
millisecond, breaks every other wait of the group. It closes the group's connections too, so the peer's waits break as well.
"""

import logging
import os
import re
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed

log = logging.getLogger(__name__)

distributed: Any = torch.distributed  # a build without a backend lacks its names

Backend = Literal["gloo", "nccl"]
FOREVER = timedelta(days=3650)  # only the engine declares a loss: neither backend may end a wait by its own clock
END_SECONDS = 5.0
_LAPSE = timedelta(milliseconds=1)
_LAPSE_TAG = 1 << 20  # behind those of slots


def gloo_obstacle() -> str:
    """Why this rank cannot use gloo; empty when it can."""
    return _backend_obstacle("gloo")


def nccl_obstacle() -> str:
    """The same for NCCL."""
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    return _backend_obstacle("nccl")


def _backend_obstacle(backend: Backend) -> str:
    has = distributed.is_available() and getattr(distributed, f"is_{backend}_available")()
    return "" if has else f"torch {torch.__version__} is built without {backend}"


class Group(ABC):
    """Some ranks that exchange messages, which are uint8 tensors; peers are numbered within the group.

    What is called here the current stream of torch does on a GPU, and elsewhere the calling thread, which blocks.
    ``RuntimeError`` when a connection broke.
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
    def set_timeout(self, timeout: timedelta) -> None:
        """How long an operation may block its thread."""

    @abstractmethod
    def close(self) -> None:
        """After the last use. May be called twice."""


class GlooGroup(Group):
    def __init__(self, store: Any, rank: int, size: int, device: Any, timeout: timedelta) -> None:
        """``timeout`` is for connecting, which this does, and for what is called before ``set_timeout``."""
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [device]
        options._threads = 1  # of collectives, which are not used
        options._timeout = timeout
        self.rank, self.size = rank, size
        self._group: Any = distributed.ProcessGroupGloo(store, rank, size, options)
        self._is_broken = False
        self._timeout = timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def send(self, message: torch.Tensor, peer: int, tag: int) -> None:
        self._open().send([message], peer, tag).wait(self._timeout)

    def recv(self, message: torch.Tensor, peer: int, tag: int) -> None:
        self.finish(self.post(message, peer, tag))

    def post(self, slot: torch.Tensor, peer: int, tag: int) -> Any:
        """Have a message that is no longer than ``slot`` go there; ``finish`` waits for it."""
        return self._open().recv([slot], peer, tag)

    def finish(self, work: Any) -> None:
        work.wait(self._timeout)

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
        with suppress(RuntimeError):
            self._group.recv([unanswered], (self.rank + 1) % self.size, _LAPSE_TAG).wait(_LAPSE)

    def close(self) -> None:
        self._group = None

    def _open(self) -> Any:
        if self._group is None:
            raise RuntimeError("the group is closed")
        return self._group


class NcclGroup(Group):
    """Its communicator is made here and no other later: torch would make one for each pair of ranks that sends."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, max_ctas: int | None = None) -> None:
        """``max_ctas`` bounds the blocks, and so the SMs, that an operation takes."""
        # torch's watchdog must not end the process when a peer is lost, nor when a receive waits long.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        if max_ctas is not None:
            options.config.max_ctas = max_ctas
        self.rank, self.size = rank, size
        self._group: Any = distributed.ProcessGroupNCCL(store, rank, size, options)
        self._group.eager_connect_single_device(device)
        self._ending: threading.Thread | None = None

    def send(self, message: torch.Tensor, peer: int, tag: int) -> None:
        self._group.send([message], peer, tag).wait()  # no timeout: with one the host would wait, not the stream

    def recv(self, message: torch.Tensor, peer: int, tag: int) -> None:
        self._group.recv([message], peer, tag).wait()

    def broadcast(self, message: torch.Tensor, root: int) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = root
        self._group.broadcast([message], options).wait()

    def set_timeout(self, timeout: timedelta) -> None:
        pass  # nothing blocks

    def break_waits(self) -> None:
        self._end("abort")

    def close(self) -> None:
        self._end("shutdown")  # waits for peers to come so far, too; what waits for them was broken before
        assert self._ending is not None
        self._ending.join(END_SECONDS)
        if self._ending.is_alive():
            log.warning("NCCL: a communicator did not end within %g s and is left behind", END_SECONDS)

    def _end(self, how: Literal["abort", "shutdown"]) -> None:
        """Once, and beside the loop: it may take a while."""
        if self._ending is None:
            self._ending = threading.Thread(target=self._run, args=(how,), name=f"nccl-{how}", daemon=True)
            self._ending.start()

    def _run(self, how: str) -> None:
        try:
            getattr(self._group, how)()
        except RuntimeError as exc:
            log.warning("NCCL: %s: %s", how, reason_of(exc))


def reason_of(exc: RuntimeError) -> str:
    """What torch says, in its first sentence and without the place in its source."""
    line = (str(exc).strip() or type(exc).__name__).splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". ")[0]
