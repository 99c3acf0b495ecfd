"""Hidden states over ``torch.distributed``: gloo between CPUs, NCCL between GPUs, by one transport.

A message is a buffer: the header, then the tensors packed for the rows that the step has. What differs is who waits and who
compares headers, so that is left to the two sides: on a host threads, on a GPU streams.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from stages.cuda import CudaStream
from stages.device import Point, Stream
from stages.plan import TensorSchema
from stages.topology import PPGroup
from stages.transport.base import IntermediateTensors, StepShape
from stages.transport.boundary import BoundaryTransport
from stages.transport.links import tensor_offsets
from stages.transport.process_group_gpu import GpuSide
from stages.transport.process_group_host import HostSide
from stages.transport.process_group_links import ProcessGroupLinks
from stages.transport.ring import SLOT_HEADER_BYTES, BoundaryHeader

Moves = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Targets and what is copied into them."""


class _Side(Protocol):
    """One rank's part of its boundaries: where messages are made and received, and who waits for them."""

    @property
    def is_over(self) -> bool:
        """Poisoned or closed."""
        ...

    def check(self) -> None:
        """Raise the poison's cause."""

    def output(self, seq: int) -> torch.Tensor:
        """The buffer that message ``seq`` is made in."""
        ...

    def output_free(self, seq: int) -> Point | None:
        """The Point after which compute may write it; None when it may now."""
        ...

    def send(self, seq: int, num_bytes: int, header: BoundaryHeader, moves: Moves, ready: Point) -> Point:
        """Send message ``seq`` of ``num_bytes``, which is complete after ``ready`` and the ``moves``, apart from its header."""
        ...

    def recv(self, seq: int, num_bytes: int, header: BoundaryHeader) -> torch.Tensor:
        """Have compute wait for message ``seq`` and compare its header; the slot where it will be."""
        ...

    def received(self, step_id: int) -> Point:
        """The Point on compute after what ``recv`` enqueued there."""
        ...

    def release(self, stream: Stream, seq: int) -> None:
        """The slot of message ``seq`` may be filled again once ``stream`` comes by."""

    def move(self, moves: Moves) -> None: ...
    def poison(self, cause: BaseException) -> None: ...
    def close(self) -> None: ...


class ProcessGroupTransport(BoundaryTransport):
    """Hidden states over the boundary links of ``links``, which it takes over with the token handler.

    ``compute`` is the stream that forwards run on. On a host sends are made on ``send_stream``, None for one of its own; on a
    GPU always on one of its own. ``persistent`` holds a tensor ``[>= max_rows, width]`` for each of ``boundary``: what is
    received is then copied there, and the slot is free again at once.
    """

    def __init__(
        self,
        *,
        pp_group: PPGroup,
        boundary: Sequence[TensorSchema],
        max_rows: int,
        compute: Stream,
        links: ProcessGroupLinks,
        send_stream: Stream | None = None,
        persistent: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(pp_group, boundary, max_rows, persistent)
        self.name = links.backend
        self._check_slot_bytes(links.sizes.boundary.slot_bytes)
        self._compute = compute
        self._side: _Side
        if links.gpu is None:
            self._side = HostSide(links, compute, send_stream)
        else:
            assert isinstance(compute, CudaStream)
            self._side = GpuSide(links, links.gpu, compute)
        self._has_prev, self._has_next = links.from_prev is not None, links.to_next is not None
        self._seq_in = self._seq_out = links.start_seq

    def begin_step(self, step: StepShape) -> None:
        self._side.check()
        self._announce(step)

    def outputs(self, pp_group: PPGroup) -> Mapping[str, torch.Tensor]:
        self._side.check()
        step = self._announced(pp_group)
        seq = self._sending_seq()
        self.output_free = self._side.output_free(seq)
        if self.output_free is not None:
            self._compute.wait(self.output_free)
        return self._views(self._side.output(seq), step.num_tokens)

    def send(self, tensors: IntermediateTensors, pp_group: PPGroup) -> Point:
        self._side.check()
        step = self._announced(pp_group)
        seq = self._sending_seq()
        sources = self._checked(tensors, step.num_tokens)
        targets = self._views(self._side.output(seq), step.num_tokens)
        moves = [
            (target, source)
            for target, source in zip(targets.values(), sources, strict=True)
            if target.data_ptr() != source.data_ptr() or not source.is_contiguous()
        ]
        self._seq_out += 1
        return self._side.send(seq, self._num_bytes(step), self._header(step, seq), moves, tensors.ready)

    def recv(self, pp_group: PPGroup) -> IntermediateTensors:
        self._side.check()
        step = self._announced(pp_group)
        if not self._has_prev:
            raise ValueError("rank 0 receives from no rank")
        side, seq = self._side, self._seq_in
        self._seq_in += 1
        slot = side.recv(seq, self._num_bytes(step), self._header(step, seq))
        views = self._views(slot, step.num_tokens)
        if self._persistent is None:
            credit = self._credit(seq, lambda stream: self._give(seq, stream))
            return IntermediateTensors(views, side.received(step.step_id), credit)
        kept = {name: self._persistent[name][: step.num_tokens] for name in views}
        moves = list(zip(kept.values(), views.values(), strict=True))
        self._compute.launch(lambda: side.move(moves))
        side.release(self._compute, seq)
        return IntermediateTensors(kept, side.received(step.step_id))

    def poison(self, cause: BaseException) -> None:
        self._side.poison(cause)

    def close(self) -> None:
        self._side.close()

    def _sending_seq(self) -> int:
        """The number of the next message to send."""
        if not self._has_next:
            raise ValueError(f"rank {self._group.rank} is the last of {self._group.world_size} and sends to no rank")
        return self._seq_out

    def _views(self, buffer: torch.Tensor, num_rows: int) -> dict[str, torch.Tensor]:
        """The tensors ``[num_rows, width]`` of a message, in place."""
        return {
            schema.name: buffer[SLOT_HEADER_BYTES + offset :][: num_rows * self._row_bytes[schema.name]]
            .view(self._dtypes[schema.name])
            .view(num_rows, schema.width)
            for schema, offset in zip(self._boundary, self._offsets(num_rows)[:-1], strict=True)
        }

    def _give(self, seq: int, stream: Stream) -> None:
        if not self._side.is_over:  # else the slot is filled no more
            self._side.release(stream, seq)

    def _num_bytes(self, step: StepShape) -> int:
        return SLOT_HEADER_BYTES + self._offsets(step.num_tokens)[-1]

    def _offsets(self, num_rows: int) -> list[int]:
        return tensor_offsets(self._boundary, num_rows)
