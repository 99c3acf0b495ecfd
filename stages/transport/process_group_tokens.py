"""Token return over NCCL: a group of all ranks of its own, and one packed message a step, in one broadcast."""

import torch

from stages.cuda import CudaStream
from stages.device import Point
from stages.pp_handler import (
    HasSampledTokens,
    PPHandler,
    SampledTokens,
    TokenMessages,
    check_tokens,
    token_ids_of,
    unpack_tokens,
)
from stages.topology import PPGroup
from stages.transport.links import token_slot_bytes
from stages.transport.process_group_gpu import GpuLane
from stages.transport.process_group_links import ProcessGroupLinks
from stages.transport.ring import pack_header


class _GpuHandler(PPHandler):
    receives_after_sending = True  # all ranks enqueue NCCL's operations in one order, or one could wait for another for ever

    def __init__(self, group: PPGroup, compute: CudaStream, links: ProcessGroupLinks) -> None:
        self._compute = compute
        self._messages = TokenMessages(group, links.sizes.tokens)
        self._root = group.last_rank
        self._tokens_group = links.tokens[0].group
        self._lane = GpuLane(links, [self._tokens_group], compute, [f"tokens-{group.rank}"])
        self._gpu, self._verdict = self._lane.gpu, self._lane.verdict
        self.stream = self._tokens = self._lane.streams[0]
        self._next_seq = links.start_seq
        self._stride = links.sizes.tokens.stride
        self._num_buffers = links.sizes.tokens.num_slots + 1

    def begin_step(self, step_id: int) -> None:
        self._lane.check()
        self._messages.step_id = step_id

    def poison(self, cause: BaseException) -> None:
        self._lane.poison(cause)

    def close(self) -> None:
        self._lane.close()

    def _begin(self, num_reqs: int, max_sample_len: int) -> tuple[int, bytes]:
        """The number of the next message, and its header."""
        self._lane.check_may_enqueue()
        self._messages.check_size(num_reqs, max_sample_len)
        seq = self._next_seq
        self._next_seq += 1
        return seq, pack_header(self._messages.header(seq, num_reqs, max_sample_len))

    def _new_buffers(self, count: int) -> list[torch.Tensor]:
        return [torch.empty(self._stride, dtype=torch.uint8, device=self._gpu.torch_device) for _ in range(count)]

    def _broadcast(self, message: torch.Tensor) -> None:
        """All of it, whatever the step fills: NCCL needs one size on all ranks."""
        group, root = self._tokens_group, self._root
        self._tokens.launch(lambda: group.broadcast(message, root))


class NcclTokenSender(_GpuHandler):
    """The last rank's: a kernel on compute packs the message, and a stream of its own broadcasts it."""

    def __init__(self, group: PPGroup, compute: CudaStream, links: ProcessGroupLinks) -> None:
        super().__init__(group, compute, links)
        self._buffers = self._new_buffers(self._num_buffers)
        self._word = torch.zeros(1, dtype=torch.int64, device=self._gpu.torch_device)  # the kernel's flag, read by nobody
        self._is_free: list[Point | None] = [None] * self._num_buffers
        self._sources: list[tuple[torch.Tensor, ...]] = [()] * self._num_buffers  # kept until a later message is packed

    def maybe_broadcast_sampled_tokens(
        self, sampler_output: torch.Tensor | HasSampledTokens, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> Point:
        compute, verdict = self._compute, self._verdict
        ids = token_ids_of(sampler_output)
        check_tokens(ids, num_sampled, num_rejected)
        num_reqs, width = ids.shape
        seq, header = self._begin(num_reqs, width)
        index = seq % self._num_buffers
        buffer = self._buffers[index]
        if (is_free := self._is_free[index]) is not None:
            compute.wait(is_free)
        ids, num_sampled, num_rejected = sources = ids.contiguous(), num_sampled.contiguous(), num_rejected.contiguous()
        self._sources[index] = sources
        self._gpu.kernels.send_tokens(
            compute.handle,
            (ids.data_ptr(), num_sampled.data_ptr(), num_rejected.data_ptr()),
            num_reqs,
            width,
            header,
            verdict.word,
            [buffer.data_ptr()],
            [self._word.data_ptr()],
            seq & 0xFFFFFFFF,
        )
        self._tokens.wait(compute.record(is_told=False))
        self._broadcast(buffer)
        sent = self._is_free[index] = self._tokens.record()
        self._lane.check_verdict_of(sent, self._messages.step_id)
        return sent

    def maybe_receive_sampled_tokens(self, num_reqs: int, max_sample_len: int = 1) -> None:
        return None


class NcclTokenReceiver(_GpuHandler):
    """Every other rank's."""

    def __init__(self, group: PPGroup, compute: CudaStream, links: ProcessGroupLinks) -> None:
        super().__init__(group, compute, links)
        (self._message,) = self._new_buffers(1)  # received and unpacked in the stream's order
        self._buffers = self._new_buffers(self._num_buffers)

    def maybe_broadcast_sampled_tokens(
        self, sampler_output: torch.Tensor | HasSampledTokens, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        return None

    def maybe_receive_sampled_tokens(self, num_reqs: int, max_sample_len: int = 1) -> SampledTokens:
        stream, verdict = self._tokens, self._verdict
        seq, header = self._begin(num_reqs, max_sample_len)
        num_bytes = token_slot_bytes(num_reqs, max_sample_len)
        packed = self._buffers[seq % self._num_buffers]
        self._broadcast(self._message)
        counts = packed.data_ptr() + num_reqs * max_sample_len * 8
        self._gpu.kernels.unpack_tokens(
            stream.handle,
            self._message.data_ptr(),
            header,
            verdict.word,
            verdict.report,
            num_reqs,
            max_sample_len,
            packed.data_ptr(),
            counts,
            counts + num_reqs * 4,
        )
        ready = stream.record()
        self._lane.check_verdict_of(ready, self._messages.step_id)
        return SampledTokens(unpack_tokens(packed[:num_bytes], num_reqs, max_sample_len), ready)
