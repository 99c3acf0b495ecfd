"""The copy-engine transport: hidden states between GPUs of one host, with no SM, no CPU wait and no metadata message.

One message, from one rank's forward to the next rank's:

    compute   ``outputs``: wait until the buffer is free again; write the header in front of it (``recv`` does it in passing)
              the forward writes the buffer
    send      wait for the slot; wait for the forward; one peer copy, header and tensors; store the slot's ``full`` word
    compute   (the receiver's) wait for ``full``; one small kernel compares the header; the forward reads the slot in place
              store the slot's ``free`` word at the sender

The two send streams take turns, so that one's flag overlaps with the other's copy. A small message is copied on the compute
stream itself, when a slot is sure to be free: the step from stream to stream would take longer than the copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from stages.cuda import CudaPoint, CudaStream
from stages.device import Point, Stream
from stages.driver import P2P_ACCESS_SUPPORTED, P2P_NATIVE_ATOMIC_SUPPORTED, Driver
from stages.errors import CudaError, TransportError
from stages.plan import TensorSchema
from stages.topology import PPGroup
from stages.transport.base import IntermediateTensors, StepShape
from stages.transport.boundary import BoundaryTransport
from stages.transport.device_links import DeviceLane, DeviceLinks, DeviceReceiver, DeviceSender
from stages.transport.device_memory import bytes_at
from stages.transport.links import tensor_offsets
from stages.transport.ring import SLOT_HEADER_BYTES

NUM_SEND_STREAMS = 2
MAX_INLINE_BYTES = 4 << 20  # of the tensors that are copied on the compute stream
NUM_OUTPUT_BUFFERS = 2  # compute writes one while the copy engine still reads the other


class CopyEngineTransport(BoundaryTransport):
    """Hidden states over device links, which it takes over. ``compute`` is the stream that forwards run on.

    ``persistent`` holds a tensor ``[>= max_rows, width]`` for each of ``boundary``: what is received is then copied there, and
    the slot's credit goes back at once. Under graph capture every call raises ``TransportError``: what it enqueues has the
    numbers of one step baked in.
    """

    name = "copy_engine"

    def __init__(
        self,
        *,
        pp_group: PPGroup,
        boundary: Sequence[TensorSchema],
        max_rows: int,
        compute: CudaStream,
        links: DeviceLinks,
        sends_on_compute: bool = False,
        persistent: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """``sends_on_compute``: no send will ever find its slot taken, so small ones need no stream of their own."""
        super().__init__(pp_group, boundary, max_rows, persistent)
        self._max_inline_bytes = MAX_INLINE_BYTES if sends_on_compute else -1
        self._num_rows = self._num_bytes = -1  # of the announced step's message
        self._links = links
        self._compute = compute
        self._driver = links.device.driver
        self._receiver = links.from_prev
        self._sender = links.to_next
        self._output: _Output | None = None
        self._in_views: list[_Views] = []
        self._outputs: list[_Output] = []
        self._send_streams: list[CudaStream] = []
        waits: list[tuple[CudaStream, DeviceSender | DeviceReceiver]] = []
        if self._receiver is not None:
            self._check_slot_bytes(self._receiver.layout.slot_bytes)
            self._in_views = [_Views(self._receiver.slot(slot), self) for slot in range(self._receiver.layout.num_slots)]
            waits.append((compute, self._receiver))
        if self._sender is not None:
            self._check_slot_bytes(self._sender.layout.slot_bytes)
            self._send_streams = [links.device.stream(f"send-{pp_group.rank}-{i}") for i in range(NUM_SEND_STREAMS)]
            stride = self._sender.layout.stride
            self._buffers = self._driver.alloc(NUM_OUTPUT_BUFFERS * stride)
            addresses = [self._buffers + i * stride for i in range(NUM_OUTPUT_BUFFERS)]
            self._outputs = [_Output(address, _Views(address, self)) for address in addresses]
            senders = [*self._send_streams, *([compute] if sends_on_compute else [])]
            waits += [(stream, self._sender) for stream in senders]
        self._lane = DeviceLane(links, waits)
        self._lane.note_use(compute)

    def begin_step(self, step: StepShape) -> None:
        self._lane.check()
        self._announce(step)
        self._output = None
        if step.num_tokens != self._num_rows:
            self._num_rows = step.num_tokens
            self._num_bytes = self._offsets(step.num_tokens)[-1]

    def sends_inline(self, num_tokens: int) -> bool:
        return self._offsets(num_tokens)[-1] <= self._max_inline_bytes

    def outputs(self, pp_group: PPGroup) -> Mapping[str, torch.Tensor]:
        self._lane.check()
        step = self._announced(pp_group)
        return self._opened_output(step).views.of(step.num_tokens)

    def send(self, tensors: IntermediateTensors, pp_group: PPGroup) -> Point:
        self._check()
        step = self._announced(pp_group)
        output, sender, ready = self._opened_output(step), self._sender, tensors.ready
        assert sender is not None, "else there is no output"
        mine = output.views.of(step.num_tokens)
        if any(tensors.tensors.get(name) is not tensor for name, tensor in mine.items()):
            sources = self._checked(tensors, step.num_tokens)
            self._compute.wait(ready)
            self._compute.launch(lambda: _copy_all(mine, sources))
            ready = self._compute.record(is_told=False)
        self._output = None
        is_inline = self._num_bytes <= self._max_inline_bytes
        stream = self._compute if is_inline else self._send_streams[output.seq % NUM_SEND_STREAMS]
        sender.wait_free(stream, output.seq)
        stream.wait(ready)
        sent = output.is_free = sender.copy(stream, output.seq, output.address, SLOT_HEADER_BYTES + self._num_bytes)
        sent.set_check(self._verdict_check(step.step_id))
        return sent

    def recv(self, pp_group: PPGroup) -> IntermediateTensors:
        self._check()
        receiver, step = self._receiver, self._announced(pp_group)
        if receiver is None:
            raise ValueError("rank 0 receives from no rank")
        seq = receiver.claim()
        output = None
        if self._sender is not None and self._output is None:
            output = self._open_output(step)
        receiver.wait_full(self._compute, seq)
        ready = self._boundary_kernel(receiver.slot(seq), self._header_bytes(step, seq), output)
        views = self._in_views[seq % len(self._in_views)].of(step.num_tokens)
        if self._persistent is None:
            ready.set_check(self._verdict_check(step.step_id))
            return IntermediateTensors(views, ready, self._credit(seq, lambda stream: self._give(receiver, seq, stream)))
        kept = {name: self._persistent[name][: step.num_tokens] for name in views}
        self._compute.launch(lambda: _copy_all(kept, list(views.values())))
        ready = self._compute.record()
        ready.set_check(self._verdict_check(step.step_id))
        receiver.release(self._compute, seq)
        return IntermediateTensors(kept, ready)

    def poison(self, cause: BaseException) -> None:
        self._lane.poison(cause)

    def close(self) -> None:
        if self._lane.is_closed:
            return
        self._lane.close()
        for stream in self._send_streams:
            stream.close()
        if self._outputs:
            self._links.device.retire(self._buffers)
        self._in_views, self._outputs = [], []

    def view(self, address: int, num_rows: int) -> dict[str, torch.Tensor]:
        """The tensors ``[num_rows, width]`` of a message whose header is at ``address``."""
        offsets = self._offsets(num_rows)
        payload = bytes_at(address + SLOT_HEADER_BYTES, offsets[-1] or 1, self._links.torch_device)
        return {
            schema.name: payload[offset : offset + num_rows * self._row_bytes[schema.name]]
            .view(self._dtypes[schema.name])
            .view(num_rows, schema.width)
            for schema, offset in zip(self._boundary, offsets[:-1], strict=True)
        }

    def _check(self) -> None:
        self._lane.check()
        if self._driver.is_capturing(self._compute.handle):
            raise TransportError(
                "a graph is being captured: transfers stay outside of graphs, their numbers differ in each step"
            )

    def _opened_output(self, step: StepShape) -> "_Output":
        output = self._output
        if output is None:
            output = self._open_output(step)
            self._boundary_kernel(0, b"", output)
        return output

    def _open_output(self, step: StepShape) -> "_Output":
        """The buffer of the announced step's message, free again by compute's order."""
        sender = self._sender
        if sender is None:
            raise ValueError(f"rank {self._group.rank} is the last of {self._group.world_size} and sends to no rank")
        seq = sender.claim()
        output = self._outputs[seq % NUM_OUTPUT_BUFFERS]
        self.output_free = output.is_free
        if output.is_free is not None:
            self._compute.wait(output.is_free)
        output.seq = seq
        output.header = self._header_bytes(step, seq)
        self._output = output
        return output

    def _boundary_kernel(self, got: int, expected: bytes, output: "_Output | None") -> CudaPoint:
        out, outgoing = (0, b"") if output is None else (output.address, output.header)
        verdict = self._links.verdict
        point, progress = self._compute.record_in_kernel()
        self._links.kernels.boundary(self._compute.handle, got, expected, out, outgoing, verdict.word, verdict.report, progress)
        return point

    def _verdict_check(self, step_id: int) -> Callable[[], None]:
        def check() -> None:
            self._links.verdict.check(step_id)
            if self._compute.error is not None:  # what was sent may never have been computed
                raise self._compute.error

        return check

    def _give(self, receiver: DeviceReceiver, seq: int, stream: Stream) -> None:
        if self._lane.cause is None:  # else nobody waits for the credit
            assert isinstance(stream, CudaStream)
            self._lane.note_use(stream)
            receiver.release(stream, seq)

    def _offsets(self, num_rows: int) -> list[int]:
        return tensor_offsets(self._boundary, num_rows)


class _Views:
    """The tensors over one message; those of the last number of rows are kept, since most steps have the same."""

    def __init__(self, address: int, transport: CopyEngineTransport) -> None:
        self._address = address
        self._transport = transport
        self._num_rows = -1
        self._tensors: dict[str, torch.Tensor] = {}

    def of(self, num_rows: int) -> dict[str, torch.Tensor]:
        if num_rows != self._num_rows:
            self._tensors = self._transport.view(self._address, num_rows)
            self._num_rows = num_rows
        return self._tensors


@dataclass
class _Output:
    """A buffer that a message is made in: its header, then its tensors."""

    address: int
    views: _Views
    seq: int = 0
    header: bytes = b""
    is_free: CudaPoint | None = None


def _copy_all(targets: Mapping[str, torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets.values(), sources, strict=True):
        target.copy_(source)


def nvlink_peers(driver: Driver, ordinal: int) -> list[str]:
    """UUIDs of the GPUs that ``ordinal`` reaches over NVLink.

    Told by native atomics, which NVLink has and PCIe lacks. Only there does a flag written after a copy arrive after it.
    """
    return [
        driver.device_uuid(peer)
        for peer in range(driver.device_count())
        if peer != ordinal
        and driver.can_access_peer(ordinal, peer)
        and all(driver.p2p_attribute(what, ordinal, peer) for what in (P2P_ACCESS_SUPPORTED, P2P_NATIVE_ATOMIC_SUPPORTED))
    ]


def copy_engine_obstacle(driver: Driver) -> str:
    """Why the current device cannot do it; empty when it can. Tried, not asked: the attribute can read 0 where it works."""
    try:
        memory, stream = driver.alloc(256), driver.create_stream()
        driver.memset_d32_async(memory, 0, 64, stream)
        driver.write_value64(stream, memory, 1)
        driver.wait_value64(stream, memory, 1)
        driver.synchronize(stream)
        driver.destroy_stream(stream)
        driver.free(memory)
    except CudaError as exc:
        return f"stream memory operations do not work: {exc}"
    return ""
