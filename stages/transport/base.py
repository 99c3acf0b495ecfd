"""The interface every transport offers to a stage, and what it carries."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from stages.device import Point, Stream
from stages.topology import PPGroup


@dataclass(frozen=True)
class StepShape:
    """What a plan says about a step's messages; header and buffer sizes follow from it, so no metadata is exchanged."""

    step_id: int
    num_tokens: int
    num_in_flight: int


@dataclass(frozen=True)
class IntermediateTensors:
    """Hidden states at a stage boundary: name -> tensor ``[rows, width]``, of the names, dtypes and widths agreed at start-up.

    Received ones are views of a ring slot: readable after ``ready`` in stream order, until ``release``.
    For sent ones ``ready`` is the Point after which the tensors hold their values.
    """

    tensors: Mapping[str, torch.Tensor]
    ready: Point
    _release: Callable[[Stream], None] | None = field(default=None, repr=False)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def release(self, stream: Stream) -> None:
        """Give the ring slot's credit back to the sender, after the work enqueued on ``stream`` so far. Once per receive."""
        if self._release is not None:
            self._release(stream)


class PPTransport(ABC):
    """Hidden states between neighbouring stages. Every call enqueues and returns; none waits for a peer."""

    name: str
    output_free: Point | None = None
    """The Point that compute waits for before it writes the last ``outputs``; None where it need not."""

    @abstractmethod
    def begin_step(self, step: StepShape) -> None:
        """Announce the step that the following ``recv`` and ``send`` belong to. Steps come in plan order."""

    @abstractmethod
    def outputs(self, pp_group: PPGroup) -> Mapping[str, torch.Tensor]:
        """Where to write what the announced step sends: ``[num_tokens, width]`` each, in the order of the compute stream.

        They are the transport's, and free again by then. To ``send`` exactly these costs no copy but the transfer itself.
        """

    def sends_inline(self, num_tokens: int) -> bool:
        """Whether the message of a step of ``num_tokens`` is sent in the order of the compute stream."""
        return False

    @abstractmethod
    def send(self, tensors: IntermediateTensors, pp_group: PPGroup) -> Point:
        """Send ``tensors`` (each ``[num_tokens, width]``) to ``pp_group.next_rank``.

        Returns the Point after which the source may be overwritten. Waits, in stream order, for ``tensors.ready`` and
        for a free slot.
        """

    @abstractmethod
    def recv(self, pp_group: PPGroup) -> IntermediateTensors:
        """The next step's tensors from ``pp_group.prev_rank``: views of the slot, to be used after ``.ready`` in stream order.

        The header is compared with the announced step; a difference is a ``HeaderMismatch`` that names both sides.
        """

    @abstractmethod
    def poison(self, cause: BaseException) -> None:
        """Local and immediate: every enqueued wait falls through with ``cause``, every later call raises it.

        Never blocks, never raises; callable from any thread.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the links. May be called twice. Waits for what is enqueued, which after ``poison`` is at once."""
