"""Token return between GPUs of one host: one small kernel writes a step's message into every other rank's ring.

The message is a few kilobytes: a copy engine would take longer to start than the kernel takes in all. Receivers wait for its
word by a stream memory operation; no kernel ever waits.
"""

from collections import deque
from collections.abc import Sequence

import torch

from stages.cuda import CudaPoint, CudaStream
from stages.errors import TransportError
from stages.kernels import MAX_TARGETS
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
from stages.transport.ring import pack_header


class _CopyEngineHandler(PPHandler):
    """Over device links, which it takes over with the transport. ``waits``: its streams, each with what it waits for."""

    def __init__(
        self, group: PPGroup, links: DeviceLinks, waits: Sequence[tuple[CudaStream, DeviceSender | DeviceReceiver]]
    ) -> None:
        self._links = links
        self._messages = TokenMessages(group, waits[0][1].layout)
        self._lane = DeviceLane(links, waits)

    def begin_step(self, step_id: int) -> None:
        self._lane.check()
        self._messages.step_id = step_id

    def poison(self, cause: BaseException) -> None:
        self._lane.poison(cause)

    def _check_step(self, stream: CudaStream, num_reqs: int, max_sample_len: int) -> None:
        self._lane.check()
        self._messages.check_size(num_reqs, max_sample_len)
        if self._links.device.driver.is_capturing(stream.handle):
            raise TransportError("a graph is being captured: token messages stay outside of graphs")


class CopyEngineTokenSender(_CopyEngineHandler):
    """The last rank's. The kernel runs on the compute stream, right behind the sampler: the ring has a slot for every step that
    may be in flight and one more, so it never waits for a credit."""

    def __init__(self, group: PPGroup, compute: CudaStream, links: DeviceLinks) -> None:
        self._senders = links.token_senders
        if len(self._senders) > MAX_TARGETS:
            raise TransportError(f"token messages go to {MAX_TARGETS} other ranks at most, there are {len(self._senders)}")
        super().__init__(group, links, [(compute, end) for end in self._senders])
        self.stream = self._compute = compute
        # What the kernels under way read, kept alive until as many later ones have been enqueued as the ring has slots.
        self._sources: deque[tuple[torch.Tensor, ...]] = deque(maxlen=self._messages.layout.num_slots + 1)

    def maybe_broadcast_sampled_tokens(
        self, sampler_output: torch.Tensor | HasSampledTokens, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> CudaPoint:
        links, compute = self._links, self._compute
        ids = token_ids_of(sampler_output)
        check_tokens(ids, num_sampled, num_rejected)
        num_reqs, width = ids.shape
        self._check_step(compute, num_reqs, width)
        ids, num_sampled, num_rejected = sources = ids.contiguous(), num_sampled.contiguous(), num_rejected.contiguous()
        self._sources.append(sources)
        addresses = ids.data_ptr(), num_sampled.data_ptr(), num_rejected.data_ptr()
        seqs = [sender.claim() for sender in self._senders]
        seq = seqs[0]  # the same on all of them
        for sender in self._senders:
            sender.wait_free(compute, seq)
        header = pack_header(self._messages.header(seq, num_reqs, width))
        point, progress = compute.record_in_kernel()
        links.kernels.send_tokens(
            compute.handle,
            addresses,
            num_reqs,
            width,
            header,
            links.verdict.word,
            [sender.slot(seq) for sender in self._senders],
            [sender.full_word(seq) for sender in self._senders],
            self._senders[0].full_value(seq),
            progress,
        )
        step_id = self._messages.step_id
        point.set_check(lambda: links.verdict.check(step_id))
        return point

    def maybe_receive_sampled_tokens(self, num_reqs: int, max_sample_len: int = 1) -> None:
        return None

    def close(self) -> None:
        self._lane.close()
        self._sources.clear()


class CopyEngineTokenReceiver(_CopyEngineHandler):
    """Every other rank's."""

    def __init__(self, group: PPGroup, links: DeviceLinks) -> None:
        assert links.token_receiver is not None, "every rank but the last receives tokens"
        self._receiver = links.token_receiver
        self.stream = self._tokens = links.device.stream(f"tokens-{group.rank}")
        super().__init__(group, links, [(self._tokens, self._receiver)])
        self._stride = self._receiver.layout.stride
        self._num_buffers = self._receiver.layout.num_slots + 1
        self._buffers = links.device.driver.alloc(self._num_buffers * self._stride)

    def maybe_broadcast_sampled_tokens(
        self, sampler_output: torch.Tensor | HasSampledTokens, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        return None

    def maybe_receive_sampled_tokens(self, num_reqs: int, max_sample_len: int = 1) -> SampledTokens:
        links, receiver, stream = self._links, self._receiver, self._tokens
        self._check_step(stream, num_reqs, max_sample_len)
        seq = receiver.claim()
        header = pack_header(self._messages.header(seq, num_reqs, max_sample_len))
        address = self._buffers + seq % self._num_buffers * self._stride
        counts = address + num_reqs * max_sample_len * 8
        receiver.wait_full(stream, seq)
        links.kernels.unpack_tokens(
            stream.handle,
            receiver.slot(seq),
            header,
            links.verdict.word,
            links.verdict.report,
            num_reqs,
            max_sample_len,
            address,
            counts,
            counts + num_reqs * 4,
        )
        receiver.release(stream, seq)
        ready = stream.record()
        step_id = self._messages.step_id
        ready.set_check(lambda: links.verdict.check(step_id))
        packed = bytes_at(address, max(token_slot_bytes(num_reqs, max_sample_len), 1), links.torch_device)
        return SampledTokens(unpack_tokens(packed, num_reqs, max_sample_len), ready)

    def close(self) -> None:
        if not self._lane.is_closed:
            self._lane.close()
            self._tokens.close()
            self._links.device.retire(self._buffers)
