"""Token return over links of host memory."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from stages.device import Point, Stream
from stages.errors import HeaderMismatch
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
from stages.transport.host_ring import HostLane, HostLink, HostSender, copy_into, payloads
from stages.transport.links import token_slot_bytes
from stages.transport.ring import RingLayout, TokenHeader


class _HostHandler(PPHandler):
    """Over links of host memory; takes its token links over and closes them."""

    def __init__(self, group: PPGroup, layout: RingLayout, stream: Stream | None = None) -> None:
        self._messages = TokenMessages(group, layout)
        self._layout = layout
        self._lane = HostLane(f"tokens-{group.rank}", stream)
        self.stream = self._lane.stream

    def begin_step(self, step_id: int) -> None:
        self._lane.poison.check()
        self._messages.step_id = step_id

    def poison(self, cause: BaseException) -> None:
        self._lane.poison.set(cause)


class _Message(NamedTuple):
    """One step's tokens on their way to one rank."""

    sender: HostSender
    seq: int
    header: TokenHeader


class HostTokenSender(_HostHandler):
    """The last rank's: one message to each other rank, on ``send_stream``, None for one of its own."""

    def __init__(self, group: PPGroup, compute: Stream, links: Sequence[HostLink], send_stream: Stream | None = None) -> None:
        super().__init__(group, links[0].layout, send_stream)
        self._compute = compute
        self._senders = [self._lane.own(link.sender(self._lane.poison)) for link in links]
        self._slots = [payloads(link) for link in links]

    def maybe_broadcast_sampled_tokens(
        self, sampler_output: torch.Tensor | HasSampledTokens, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> Point:
        lane = self._lane
        ids = token_ids_of(sampler_output)
        check_tokens(ids, num_sampled, num_rejected)
        num_reqs, max_sample_len = ids.shape
        lane.poison.check()
        self._messages.check_size(num_reqs, max_sample_len)
        messages: list[_Message] = []
        for sender in self._senders:
            seq = sender.claim()
            messages.append(_Message(sender, seq, self._messages.header(seq, num_reqs, max_sample_len)))
        sampled = None if self.stream is self._compute else self._compute.record()

        def write() -> None:
            try:
                lane.poison.check() if sampled is None else lane.poison.wait_for(sampled)
            except HeaderMismatch:
                for message in messages:
                    message.sender.wait_free(message.seq)
                    message.sender.publish(message.seq, message.header._replace(verdict=0))
                raise
            for index, message in enumerate(messages):
                self._write(index, message, (ids, num_sampled, num_rejected))

        self.stream.launch(write)
        lane.note_use(self.stream)
        return self.stream.record()

    def maybe_receive_sampled_tokens(self, num_reqs: int, max_sample_len: int = 1) -> None:
        return None

    def close(self) -> None:
        self._lane.close()
        self._slots = []

    def _write(self, index: int, message: _Message, sources: Sequence[torch.Tensor]) -> None:
        header, seq = message.header, message.seq
        message.sender.wait_free(seq)  # no view before: the traceback of a broken wait must not keep the segment
        slot = self._slots[index][seq % self._layout.num_slots]
        for target, source in zip(unpack_tokens(slot, header.num_reqs, header.width), sources, strict=True):
            copy_into(target, source)
        message.sender.publish(seq, header)


class HostTokenReceiver(_HostHandler):
    """Every other rank's."""

    def __init__(self, group: PPGroup, link: HostLink) -> None:
        super().__init__(group, link.layout)
        self._receiver = self._lane.own(link.receiver(self._lane.poison))
        self._slots = payloads(link)

    def maybe_broadcast_sampled_tokens(
        self, sampler_output: torch.Tensor | HasSampledTokens, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        return None

    def maybe_receive_sampled_tokens(self, num_reqs: int, max_sample_len: int = 1) -> SampledTokens:
        receiver = self._receiver
        self._lane.poison.check()
        self._messages.check_size(num_reqs, max_sample_len)
        seq = receiver.claim()
        header = self._messages.header(seq, num_reqs, max_sample_len)
        num_bytes = token_slot_bytes(num_reqs, max_sample_len)
        packed = torch.empty(num_bytes, dtype=torch.uint8)

        def read() -> int:
            waited_until_ns = receiver.wait_full(seq, header)
            copy_into(packed, self._slots[seq % self._layout.num_slots][:num_bytes])
            receiver.release(seq)
            return waited_until_ns

        self.stream.launch(read)
        return SampledTokens(unpack_tokens(packed, num_reqs, max_sample_len), self.stream.record())

    def close(self) -> None:
        self._lane.close()
        self._slots = []
