"""What every transport knows of a stage boundary: what is sent there, and whether what it is given fits."""

from collections.abc import Callable, Mapping, Sequence

import torch

from stages.device import Stream
from stages.errors import TransportError
from stages.plan import TensorSchema
from stages.topology import PPGroup
from stages.transport.base import IntermediateTensors, PPTransport, StepShape
from stages.transport.links import boundary_slot_bytes, row_bytes, schema_checksum
from stages.transport.ring import BOUNDARY_MAGIC, SEQ_MASK, BoundaryHeader, pack_boundary_header, pack_dtypes


class BoundaryTransport(PPTransport):
    """Checks the calls of one rank against the boundary that was agreed on, and makes the headers of its messages."""

    def __init__(
        self,
        pp_group: PPGroup,
        boundary: Sequence[TensorSchema],
        max_rows: int,
        persistent: Mapping[str, torch.Tensor] | None,
    ) -> None:
        self._group = pp_group
        self._boundary = boundary
        self._max_rows = max_rows
        self._persistent = persistent
        self._dtypes: dict[str, torch.dtype] = {tensor.name: getattr(torch, tensor.dtype) for tensor in boundary}
        self._row_bytes = {tensor.name: row_bytes(tensor) for tensor in boundary}
        self._dtype_code = pack_dtypes([tensor.dtype for tensor in boundary])
        self._width = sum(tensor.width for tensor in boundary)
        self._schema = schema_checksum(boundary)
        self._step: StepShape | None = None
        self._check_persistent()

    def _announce(self, step: StepShape) -> None:
        if step.num_tokens > self._max_rows:
            raise TransportError(f"step {step.step_id}: {step.num_tokens} rows, but a ring slot holds {self._max_rows}")
        self._step = step

    def _announced(self, pp_group: PPGroup) -> StepShape:
        if pp_group != self._group:
            raise ValueError(f"transport of {self._group} was called with {pp_group}")
        if self._step is None:
            raise ValueError("no step was announced with begin_step")
        return self._step

    def _header(self, step: StepShape, seq: int) -> BoundaryHeader:
        return BoundaryHeader(
            magic=BOUNDARY_MAGIC,
            epoch=self._group.epoch,
            step_id=step.step_id,
            seq=seq & SEQ_MASK,
            rows=step.num_tokens,
            dtype=self._dtype_code,
            width=self._width,
            in_flight=step.num_in_flight,
            schema=self._schema,
            verdict=1,
        )

    def _header_bytes(self, step: StepShape, seq: int) -> bytes:
        """``_header``, packed: the way that costs a microsecond."""
        return pack_boundary_header(
            BOUNDARY_MAGIC,
            self._group.epoch,
            step.step_id,
            seq & SEQ_MASK,
            step.num_tokens,
            self._dtype_code,
            self._width,
            step.num_in_flight,
            self._schema,
            1,
        )

    def _checked(self, tensors: IntermediateTensors, num_rows: int) -> list[torch.Tensor]:
        """The tensors in the boundary's order; ``TransportError`` for one that is not what was agreed."""
        sources: list[torch.Tensor] = []
        for schema in self._boundary:
            source = tensors.tensors.get(schema.name)
            if source is None:
                raise TransportError(f"boundary tensor {schema.name} is missing, got {', '.join(tensors.tensors) or 'none'}")
            if tuple(source.shape) != (num_rows, schema.width) or source.dtype != self._dtypes[schema.name]:
                raise TransportError(
                    f"boundary tensor {schema.name}: {source.dtype} {tuple(source.shape)}, "
                    f"must be {self._dtypes[schema.name]} {(num_rows, schema.width)}"
                )
            sources.append(source)
        return sources

    def _check_slot_bytes(self, slot_bytes: int) -> None:
        needed = boundary_slot_bytes(self._boundary, self._max_rows)
        if slot_bytes < needed:
            raise TransportError(f"a ring slot has {slot_bytes} bytes, {self._max_rows} rows of the boundary need {needed}")

    def _credit(self, seq: int, give: Callable[[Stream], None]) -> Callable[[Stream], None]:
        """``give`` for the credit of message ``seq``, which can be given once only."""
        is_given = False

        def give_once(stream: Stream) -> None:
            nonlocal is_given
            if is_given:
                raise RuntimeError(f"message {seq} was released twice")
            is_given = True
            give(stream)

        return give_once

    def _check_persistent(self) -> None:
        if self._persistent is None:
            return
        for schema in self._boundary:
            tensor, dtype = self._persistent[schema.name], self._dtypes[schema.name]
            rows, *width = tensor.shape
            if rows < self._max_rows or width != [schema.width] or tensor.dtype != dtype or not tensor.is_contiguous():
                raise TransportError(
                    f"persistent tensor {schema.name}: {tensor.dtype} {tuple(tensor.shape)}, "
                    f"must be contiguous {dtype} [>= {self._max_rows}, {schema.width}]"
                )
