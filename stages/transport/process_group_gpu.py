"""One rank's part of its boundaries over NCCL: streams wait, and kernels compare headers.

NCCL needs both sides to name one size; with two it hangs or ends early. The size follows from the plan, and that the plans are
the same is just what headers are for. So a message begins with a head of a fixed size, whatever it holds; the header is in it
and is compared before the rest, the tail, is received. Whoever waits for the message is told of a mismatch at once, whatever
becomes of the tail.
"""

import time
from collections.abc import Callable, Sequence

import torch

from stages.cuda import CudaStream
from stages.device import Point, Stream
from stages.errors import CudaError, HeaderMismatch, TransportError
from stages.transport.host_ring import NUM_OUTPUT_BUFFERS
from stages.transport.process_group_backends import Group
from stages.transport.process_group_links import POLL_SECONDS, GroupGpu, ProcessGroupLinks
from stages.transport.ring import BoundaryHeader, pack_header

HEAD_BYTES = 256 << 10  # NCCL takes no longer for it than for a header (benchmarks/README.md)


class GpuLane:
    """The poison and the orderly end of whatever uses some groups of a rank on a GPU. ``streams`` are the lane's own."""

    def __init__(self, links: ProcessGroupLinks, groups: Sequence[Group], compute: CudaStream, names: Sequence[str]) -> None:
        assert links.gpu is not None
        assert links.verdict is not None
        self.gpu: GroupGpu = links.gpu
        self.verdict = links.verdict
        self.streams = [self.gpu.stream(name) for name in names]
        self.cause: BaseException | None = None
        self.is_closed = False
        self._links = links
        self._groups = groups
        self._compute = compute
        self._users: set[CudaStream] = {compute, *self.streams}
        links.join()

    def check(self) -> None:
        if self.cause is not None:
            raise self.cause
        if self.is_closed:
            raise TransportError(f"the links of rank {self._links.pp_group.rank} are closed")

    def check_may_enqueue(self) -> None:
        self.check()
        if self.gpu.device.driver.is_capturing(self._compute.handle):
            raise TransportError(
                "a graph is being captured: transfers stay outside of graphs, their numbers differ in each step"
            )

    def note_use(self, stream: CudaStream) -> None:
        self._users.add(stream)

    def check_verdict_of(self, point: Point, step_id: int) -> None:
        """When ``point`` is reached, and before whoever awaits it is told: that no mismatch was seen up to this step, and that
        what was sent was computed."""
        point.set_check(self._verdict_check(step_id))  # pyright: ignore[reportAttributeAccessIssue]

    def poison(self, cause: BaseException) -> None:
        if self.cause is not None or self.is_closed:
            return
        self.cause = cause
        for stream in self._users:  # first: what is let through then computes on garbage
            stream.fail(cause)
        for group in self._groups:
            group.break_waits()

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        driver = self.gpu.device.driver
        try:
            for stream in self._users:
                while not stream.is_closed and not driver.is_idle(stream.handle):
                    time.sleep(POLL_SECONDS)
        except CudaError as exc:
            self.gpu.device.fail(exc)
        for stream in self.streams:
            stream.close()
        self._links.leave()

    def _verdict_check(self, step_id: int) -> Callable[[], None]:
        def check() -> None:
            self.verdict.check(step_id)
            if self._compute.error is not None:
                raise self._compute.error

        return check


class GpuSide:
    """Receives on a stream of its own, so that a message comes while compute is busy with the one before, and sends on one."""

    def __init__(self, links: ProcessGroupLinks, gpu: GroupGpu, compute: CudaStream) -> None:
        self._kernels = gpu.kernels
        self._compute = compute
        self._from_prev, self._to_next = links.from_prev, links.to_next
        rank = links.pp_group.rank
        ends = [link for link in (links.from_prev, links.to_next) if link is not None]
        self._lane = GpuLane(links, [link.group for link in ends], compute, [f"recv-{rank}", f"send-{rank}"])
        self._recv_stream, self._send_stream = self._lane.streams
        self._verdict = self._lane.verdict
        layout = links.sizes.boundary
        self._head_bytes = min(HEAD_BYTES, layout.stride)

        def buffers(count: int) -> list[torch.Tensor]:
            return [torch.empty(layout.stride, dtype=torch.uint8, device=gpu.torch_device) for _ in range(count)]

        self._slots = buffers(0 if links.from_prev is None else layout.num_slots)
        self._is_taken = [False] * layout.num_slots
        self._is_read: list[Point | None] = [None] * layout.num_slots
        self._buffers = buffers(0 if links.to_next is None else NUM_OUTPUT_BUFFERS)
        self._is_free: list[Point | None] = [None] * NUM_OUTPUT_BUFFERS

    @property
    def is_over(self) -> bool:
        return self._lane.cause is not None or self._lane.is_closed

    def check(self) -> None:
        self._lane.check_may_enqueue()

    def output(self, seq: int) -> torch.Tensor:
        return self._buffers[seq % NUM_OUTPUT_BUFFERS]

    def output_free(self, seq: int) -> Point | None:
        return self._is_free[seq % NUM_OUTPUT_BUFFERS]

    def send(
        self,
        seq: int,
        num_bytes: int,
        header: BoundaryHeader,
        moves: Sequence[tuple[torch.Tensor, torch.Tensor]],
        ready: Point,
    ) -> Point:
        compute, stream, link, verdict = self._compute, self._send_stream, self._to_next, self._verdict
        assert link is not None, "else there is no output"
        buffer = self.output(seq)
        if (is_free := self.output_free(seq)) is not None:
            compute.wait(is_free)
        compute.wait(ready)
        if moves:
            compute.launch(lambda: self.move(moves))
        self._kernels.boundary(compute.handle, 0, b"", buffer.data_ptr(), pack_header(header), verdict.word, verdict.report)
        stream.wait(compute.record(is_told=False))
        for piece in self._pieces(buffer, num_bytes):
            stream.launch(lambda piece=piece: link.group.send(piece, link.peer, 0))
        sent = self._is_free[seq % NUM_OUTPUT_BUFFERS] = stream.record()
        self._lane.check_verdict_of(sent, header.step_id)
        return sent

    def recv(self, seq: int, num_bytes: int, header: BoundaryHeader) -> torch.Tensor:
        stream, link, verdict = self._recv_stream, self._from_prev, self._verdict
        assert link is not None
        index = seq % len(self._slots)
        slot = self._slots[index]
        if self._is_taken[index]:  # the Point of its release, which the stream would wait for, is yet to be recorded
            raise RuntimeError(f"message {seq - len(self._slots)} was not released: there is no slot for message {seq}")
        self._is_taken[index] = True
        if (is_read := self._is_read[index]) is not None:
            stream.wait(is_read)
        head, *tail = self._pieces(slot, num_bytes)
        stream.launch(lambda: link.group.recv(head, link.peer, 0))
        self._kernels.boundary(stream.handle, slot.data_ptr(), pack_header(header), 0, b"", verdict.word, verdict.report)
        for piece in tail:
            self._tell_of_mismatch(header.step_id)
            stream.launch(lambda piece=piece: link.group.recv(piece, link.peer, 0))
        self._compute.wait(stream.record(is_told=False))
        return slot

    def received(self, step_id: int) -> Point:
        ready = self._compute.record()
        self._lane.check_verdict_of(ready, step_id)
        return ready

    def release(self, stream: Stream, seq: int) -> None:
        assert isinstance(stream, CudaStream)
        self._lane.note_use(stream)
        self._is_taken[seq % len(self._slots)] = False
        self._is_read[seq % len(self._slots)] = stream.record(is_told=False)

    def move(self, moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in moves:
            target.copy_(source)

    def poison(self, cause: BaseException) -> None:
        self._lane.poison(cause)

    def close(self) -> None:
        self._lane.close()

    def _tell_of_mismatch(self, step_id: int) -> None:
        """Fail compute, which waits for the tail, once the head is there and is found wrong."""
        head = self._recv_stream.record()
        self._lane.check_verdict_of(head, step_id)

        def tell() -> None:
            try:
                head.is_reached()
            except HeaderMismatch as exc:
                self._compute.fail(exc)

        head.add_done_callback(tell)

    def _pieces(self, buffer: torch.Tensor, num_bytes: int) -> list[torch.Tensor]:
        """Head and, if there is one, tail of a message."""
        head_bytes = self._head_bytes
        return [buffer[:head_bytes], *([buffer[head_bytes:num_bytes]] if num_bytes > head_bytes else [])]
