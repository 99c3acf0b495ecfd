"""Token return over the copy engine: one small kernel packs a step's message, one peer copy brings it to each other rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stages.cuda import CudaPoint, CudaStream
from stages.driver import Driver
from stages.errors import TransportError
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
from stages.transport.device_links import DeviceLane, DeviceLinks, DeviceReceiver, DeviceSender
from stages.transport.device_memory import bytes_at
from stages.transport.links import token_slot_bytes
from stages.transport.ring import SLOT_HEADER_BYTES, pack_header


class _CopyEngineHandler(PPHandler):
    """Over device links, which it takes over together with the transport. ``num_buffers`` messages fit into its own memory."""

    def __init__(
        self, group: PPGroup, links: DeviceLinks, ends: Sequence[DeviceSender | DeviceReceiver], num_buffers: int
    ) -> None:
        self._links = links
        self._messages = TokenMessages(group, ends[0].layout)
        self.stream = self._tokens = links.device.stream(f"tokens-{group.rank}")
        self._stride = ends[0].layout.stride
        self._buffers = links.device.driver.alloc(num_buffers * self._stride)
        self._lane = DeviceLane(links, [(self._tokens, end) for end in ends])

    def begin_step(self, step_id: int) -> None:
        self._lane.check()
        self._messages.step_id = step_id

    def poison(self, cause: BaseException) -> None:
        self._lane.poison(cause)

    def close(self) -> None:
        if not self._lane.is_closed:
            self._lane.close()
            self._tokens.close()
            self._links.device.retire(self._buffers)

    def _check_step(self, driver: Driver, num_reqs: int, max_sample_len: int) -> None:
        self._lane.check()
        self._messages.check_size(num_reqs, max_sample_len)
        if driver.is_capturing(self._tokens.handle):
            raise TransportError("a graph is being captured: token messages stay outside of graphs")


@dataclass
class _Message:
    """A buffer of the sender's. ``sources`` are what its packing reads, kept alive until it is packed anew."""

    address: int
    is_free: CudaPoint | None = None
    sources: tuple[torch.Tensor, ...] = ()


class CopyEngineTokenSender(_CopyEngineHandler):
    """The last rank's."""

    def __init__(self, group: PPGroup, compute: CudaStream, links: DeviceLinks) -> None:
        self._senders = links.token_senders
        num_buffers = self._senders[0].layout.num_slots
        super().__init__(group, links, self._senders, num_buffers)
        self._compute = compute
        self._lane.note_use(compute)
        self._sent = [_Message(self._buffers + i * self._stride) for i in range(num_buffers)]

    def maybe_broadcast_sampled_tokens(
        self, sampler_output: torch.Tensor | HasSampledTokens, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> CudaPoint:
        links, compute, stream = self._links, self._compute, self._tokens
        ids = token_ids_of(sampler_output)
        check_tokens(ids, num_sampled, num_rejected)
        num_reqs, width = ids.shape
        self._check_step(links.device.driver, num_reqs, width)
        sources = tuple(tensor.contiguous() for tensor in (ids, num_sampled, num_rejected))
        seqs = [sender.claim() for sender in self._senders]
        message = self._sent[seqs[0] % len(self._sent)]
        if message.is_free is not None:
            compute.wait(message.is_free)
        message.sources = sources
        header = pack_header(self._messages.header(seqs[0], num_reqs, width))
        ids_at, sampled_at, rejected_at = (tensor.data_ptr() for tensor in sources)
        links.kernels.pack_tokens(
            compute.handle, ids_at, sampled_at, rejected_at, num_reqs, width, message.address, header, links.verdict
        )
        stream.wait(compute.record())
        num_bytes = SLOT_HEADER_BYTES + token_slot_bytes(num_reqs, width)
        for sender, seq in zip(self._senders, seqs, strict=True):
            message.is_free = sender.send(stream, seq, message.address, num_bytes)
        assert message.is_free is not None, "the last rank of a pipeline has others"
        step_id = self._messages.step_id
        message.is_free.check = lambda: links.check_report(step_id)
        return message.is_free

    def maybe_receive_sampled_tokens(self, num_reqs: int, max_sample_len: int = 1) -> None:
        return None


class CopyEngineTokenReceiver(_CopyEngineHandler):
    """Every other rank's."""

    def __init__(self, group: PPGroup, links: DeviceLinks) -> None:
        assert links.token_receiver is not None, "every rank but the last receives tokens"
        self._receiver = links.token_receiver
        self._num_buffers = self._receiver.layout.num_slots + 1
        super().__init__(group, links, [self._receiver], self._num_buffers)

    def maybe_broadcast_sampled_tokens(
        self, sampler_output: torch.Tensor | HasSampledTokens, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        return None

    def maybe_receive_sampled_tokens(self, num_reqs: int, max_sample_len: int = 1) -> SampledTokens:
        links, receiver, stream = self._links, self._receiver, self._tokens
        self._check_step(links.device.driver, num_reqs, max_sample_len)
        seq = receiver.claim()
        header = pack_header(self._messages.header(seq, num_reqs, max_sample_len))
        address = self._buffers + seq % self._num_buffers * self._stride
        counts = address + num_reqs * max_sample_len * 8
        receiver.wait_full(stream, seq)
        links.kernels.unpack_tokens(
            stream.handle,
            receiver.slot(seq),
            header,
            links.verdict,
            links.report,
            num_reqs,
            max_sample_len,
            address,
            counts,
            counts + num_reqs * 4,
        )
        receiver.release(stream, seq)
        ready = stream.record()
        step_id = self._messages.step_id
        ready.check = lambda: links.check_report(step_id)
        packed = bytes_at(address, max(token_slot_bytes(num_reqs, max_sample_len), 1), links.torch_device)
        return SampledTokens(unpack_tokens(packed, num_reqs, max_sample_len), ready)
