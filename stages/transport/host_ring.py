"""The ring transports of host memory: ``memory`` within one process, ``shared_memory`` between processes of one host."""

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import torch

from stages.device import HostStream, Point, Stream
from stages.errors import HeaderMismatch, TransportError
from stages.plan import TensorSchema
from stages.topology import PPGroup
from stages.transport.base import IntermediateTensors, StepShape
from stages.transport.boundary import BoundaryTransport
from stages.transport.links import RankLinks, row_bytes, tensor_offsets
from stages.transport.ring import Header, Link, Poison, RingLayout, RingReceiver, RingSender

NUM_OUTPUT_BUFFERS = 2  # compute writes one while the transport still reads the other


class HostEnd(Protocol):
    """One end of a link between hosts' memories. ``RingSender`` and ``RingReceiver`` say what the calls do."""

    def claim(self) -> int: ...
    def close(self) -> None: ...


class HostSender(HostEnd, Protocol):
    def wait_free(self, seq: int) -> int: ...
    def publish(self, seq: int, header: Header) -> None: ...


class HostReceiver(HostEnd, Protocol):
    def wait_full(self, seq: int, expected: Header) -> int: ...
    def release(self, seq: int) -> None: ...


class HostLink(Protocol):
    """A link whose slots are in memory that this rank reaches. Its end here waits with ``poison``, and closes the link."""

    @property
    def layout(self) -> RingLayout: ...
    def sender(self, poison: Poison) -> HostSender: ...
    def receiver(self, poison: Poison) -> HostReceiver: ...
    def payloads(self) -> list[memoryview]: ...


_E = TypeVar("_E", bound=HostEnd)


class HostLane:
    """The stream, the poison and the orderly end of whatever uses host links on one rank.

    ``stream`` is somebody else's, or None for one of its own.
    """

    def __init__(self, name: str, stream: Stream | None = None) -> None:
        self.poison = Poison()
        self.stream = HostStream(name) if stream is None else stream
        self._name = name
        self._owns_stream = stream is None
        self._ends: list[HostEnd] = []
        self._users: set[Stream] = set()  # of our links: streams that are not our own

    def own(self, end: _E) -> _E:
        """An end that waits with our ``poison``; ``close`` closes it."""
        self._ends.append(end)
        return end

    def note_use(self, stream: Stream) -> None:
        """Something that uses a link was enqueued on ``stream``; ``close`` waits for it."""
        if stream is not self.stream or not self._owns_stream:
            self._users.add(stream)

    def close(self) -> None:
        if self._owns_stream:
            self.stream.close()
        for stream in self._users:
            if not stream.is_closed:  # a closed one has run everything
                gate = threading.Event()
                stream.record().add_done_callback(gate.set)  # called when the stream failed, too
                gate.wait()
        self._users.clear()
        self.poison.set(TransportError(f"{self._name} is closed"))
        while self._ends:
            self._ends.pop().close()


def payloads(link: HostLink) -> list[torch.Tensor]:
    """The payload of each slot, ``[slot_bytes]`` uint8, in place."""
    return [torch.frombuffer(payload, dtype=torch.uint8) for payload in link.payloads()]


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)`` for equal shapes and dtypes and a contiguous target, on the calling thread.

    torch would split a large copy over an OpenMP team of the calling thread's own, whose idle members spin.
    """
    assert target.nbytes == source.nbytes
    if source.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)  # releases the GIL
    else:
        target.copy_(source)


class HostRingTransport(BoundaryTransport):
    """Hidden states over host rings. Receiving waits on ``compute``, sending on ``send_stream``, None for one of its own.

    Takes the boundary links of ``links`` over and closes them. ``persistent`` holds a tensor ``[>= max_rows, width]`` for each
    of ``boundary``: what is received is then copied there, and the slot's credit goes back at once.
    """

    def __init__(
        self,
        *,
        name: str,
        pp_group: PPGroup,
        boundary: Sequence[TensorSchema],
        max_rows: int,
        compute: Stream,
        links: RankLinks,
        send_stream: Stream | None = None,
        persistent: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(pp_group, boundary, max_rows, persistent)
        self.name = name
        self._compute = compute
        for link in (links.from_prev, links.to_next):
            if link is not None:
                self._check_slot_bytes(link.layout.slot_bytes)
        self._lane = HostLane(f"send-{pp_group.rank}", send_stream)
        self._sender = None if links.to_next is None else self._lane.own(links.to_next.sender(self._lane.poison))
        self._receiver = None if links.from_prev is None else self._lane.own(links.from_prev.receiver(self._lane.poison))
        self._out_slots = self._slots(links.to_next)
        self._in_slots = self._slots(links.from_prev)
        self._buffers = (
            []
            if links.to_next is None
            else [
                {tensor.name: torch.empty(max_rows, tensor.width, dtype=self._dtypes[tensor.name]) for tensor in boundary}
                for _ in range(NUM_OUTPUT_BUFFERS)
            ]
        )
        self._num_sent = 0
        self._is_free: list[Point | None] = [None] * NUM_OUTPUT_BUFFERS

    def begin_step(self, step: StepShape) -> None:
        self._lane.poison.check()
        self._announce(step)

    def outputs(self, pp_group: PPGroup) -> Mapping[str, torch.Tensor]:
        self._lane.poison.check()
        step = self._announced(pp_group)
        self._sending_end()
        index = self._num_sent % NUM_OUTPUT_BUFFERS
        self.output_free = self._is_free[index]
        if self.output_free is not None:
            self._compute.wait(self.output_free)
        return {name: tensor[: step.num_tokens] for name, tensor in self._buffers[index].items()}

    def send(self, tensors: IntermediateTensors, pp_group: PPGroup) -> Point:
        self._lane.poison.check()
        lane, sender, step = self._lane, self._sending_end(), self._announced(pp_group)
        sources = self._checked(tensors, step.num_tokens)
        seq = sender.claim()
        header = self._header(step, seq)

        def write() -> int:  # takes the views after its waits: the traceback of a broken one must not keep the segment
            try:
                lane.poison.wait_for(tensors.ready)
            except HeaderMismatch:
                sender.wait_free(seq)
                sender.publish(seq, header._replace(verdict=0))
                raise
            waited_until_ns = sender.wait_free(seq)
            for target, source in zip(self._slot_rows(self._out_slots, seq, step).values(), sources, strict=True):
                copy_into(target, source)
            sender.publish(seq, header)
            return waited_until_ns

        lane.stream.launch(write)
        lane.note_use(lane.stream)
        sent = lane.stream.record()
        self._is_free[self._num_sent % NUM_OUTPUT_BUFFERS] = sent
        self._num_sent += 1
        return sent

    def recv(self, pp_group: PPGroup) -> IntermediateTensors:
        self._lane.poison.check()
        lane, receiver, step = self._lane, self._receiver, self._announced(pp_group)
        if receiver is None:
            raise ValueError("rank 0 receives from no rank")
        seq = receiver.claim()
        header = self._header(step, seq)
        lane.note_use(self._compute)
        if self._persistent is None:
            self._compute.launch(lambda: receiver.wait_full(seq, header))
            rows = self._slot_rows(self._in_slots, seq, step)
            credit = self._credit(seq, lambda stream: self._give(receiver, seq, stream))
            return IntermediateTensors(rows, self._compute.record(), credit)
        kept = {schema.name: self._persistent[schema.name][: step.num_tokens] for schema in self._boundary}

        def read() -> int:
            waited_until_ns = receiver.wait_full(seq, header)
            for name, source in self._slot_rows(self._in_slots, seq, step).items():
                copy_into(kept[name], source)
            receiver.release(seq)
            return waited_until_ns

        self._compute.launch(read)
        return IntermediateTensors(kept, self._compute.record())

    def poison(self, cause: BaseException) -> None:
        self._lane.poison.set(cause)

    def close(self) -> None:
        self._lane.close()
        self._in_slots = self._out_slots = []

    def _sending_end(self) -> RingSender:
        if self._sender is None:
            raise ValueError(f"rank {self._group.rank} is the last of {self._group.world_size} and sends to no rank")
        return self._sender

    def _give(self, receiver: RingReceiver, seq: int, stream: Stream) -> None:
        if not self._lane.poison.is_set:  # else nobody waits for the credit, and the link may be closed
            stream.launch(lambda: receiver.release(seq))
            self._lane.note_use(stream)

    @staticmethod
    def _slot_rows(slots: list[dict[str, torch.Tensor]], seq: int, step: StepShape) -> dict[str, torch.Tensor]:
        return {name: tensor[: step.num_tokens] for name, tensor in slots[seq % len(slots)].items()}

    def _slots(self, link: Link | None) -> list[dict[str, torch.Tensor]]:
        """The tensors ``[max_rows, width]`` of each slot, in place."""
        offsets = tensor_offsets(self._boundary, self._max_rows)
        return [
            {
                schema.name: payload[offset : offset + self._max_rows * row_bytes(schema)]
                .view(self._dtypes[schema.name])
                .view(self._max_rows, schema.width)
                for schema, offset in zip(self._boundary, offsets[:-1], strict=True)
            }
            for payload in ([] if link is None else payloads(link))
        ]
