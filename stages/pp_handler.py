"""PPHandler: the sampled tokens go from the last rank to every other one, in one packed message a step, for every step."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from stages.device import Point, Stream
from stages.errors import HeaderMismatch, TransportError
from stages.topology import PPGroup
from stages.transport.host_ring import HostLane, copy_into, payloads
from stages.transport.links import token_slot_bytes
from stages.transport.ring import SEQ_MASK, TOKEN_MAGIC, Link, RingLayout, RingSender, TokenHeader


class SampledTokens(tuple[torch.Tensor, torch.Tensor, torch.Tensor]):
    """``sampled_token_ids [num_reqs, max_sample_len]`` int64, ``num_sampled`` and ``num_rejected [num_reqs]`` int32.

    To be read after ``ready``. The tensors belong to whoever received them.
    """

    ready: Point

    def __new__(cls, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], ready: Point) -> "SampledTokens":
        tokens = super().__new__(cls, tensors)
        tokens.ready = ready
        return tokens

    @property
    def sampled_token_ids(self) -> torch.Tensor:
        return self[0]

    @property
    def num_sampled(self) -> torch.Tensor:
        return self[1]

    @property
    def num_rejected(self) -> torch.Tensor:
        return self[2]


class HasSampledTokens(Protocol):
    @property
    def sampled_token_ids(self) -> torch.Tensor: ...


class PPHandler(ABC):
    """Token return on one rank. Every call enqueues and returns; none waits for a peer."""

    stream: Stream
    """The ``tokens`` stream, which the messages are sent or received on."""

    @abstractmethod
    def begin_step(self, step_id: int) -> None:
        """Announce the step that the following broadcast or receive belongs to. Steps come in plan order."""

    @abstractmethod
    def maybe_broadcast_sampled_tokens(
        self, sampler_output: torch.Tensor | HasSampledTokens, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> Point | None:
        """Send a step's tokens to every other rank; None unless this is the last rank.

        ``sampler_output`` is, or has, ``sampled_token_ids [num_reqs, max_sample_len]`` int64; the others are ``[num_reqs]``
        int32. They are read after what is enqueued on the compute stream now, and may be overwritten after the Point.
        """

    @abstractmethod
    def maybe_receive_sampled_tokens(self, num_reqs: int, max_sample_len: int = 1) -> SampledTokens | None:
        """Receive a step's tokens; None on the last rank. Other counts than were sent are a ``HeaderMismatch``."""

    @abstractmethod
    def poison(self, cause: BaseException) -> None:
        """Local and immediate: every enqueued wait falls through with ``cause``, every later call raises it.

        Never blocks, never raises; callable from any thread.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the links. May be called twice. Waits for what is enqueued, which after ``poison`` is at once."""


class _HostHandler(PPHandler):
    """Over host rings; takes its token links over and closes them."""

    def __init__(self, group: PPGroup, layout: RingLayout, stream: Stream | None = None) -> None:
        self._group = group
        self._layout = layout
        self._lane = HostLane(f"tokens-{group.rank}", stream)
        self.stream = self._lane.stream
        self._step_id = -1

    def begin_step(self, step_id: int) -> None:
        self._lane.poison.check()
        self._step_id = step_id

    def poison(self, cause: BaseException) -> None:
        self._lane.poison.set(cause)

    def _check_message(self, num_reqs: int, max_sample_len: int) -> None:
        self._lane.poison.check()
        if self._step_id < 0:
            raise ValueError("no step was announced with begin_step")
        needed = token_slot_bytes(num_reqs, max_sample_len)
        if needed > self._layout.slot_bytes:
            raise TransportError(
                f"step {self._step_id}: {num_reqs} requests of {max_sample_len} tokens need {needed} bytes, "
                f"but a token slot holds {self._layout.slot_bytes}"
            )

    def _header(self, seq: int, num_reqs: int, max_sample_len: int) -> TokenHeader:
        return TokenHeader(TOKEN_MAGIC, self._group.epoch, self._step_id, seq & SEQ_MASK, num_reqs, max_sample_len, verdict=1)


class _Message(NamedTuple):
    """One step's tokens on their way into the ring of one rank."""

    sender: RingSender
    seq: int
    header: TokenHeader


class HostTokenSender(_HostHandler):
    """The last rank's: one ring write to each other rank, on ``send_stream``, None for one of its own."""

    def __init__(self, group: PPGroup, compute: Stream, links: Sequence[Link], send_stream: Stream | None = None) -> None:
        super().__init__(group, links[0].layout, send_stream)
        self._compute = compute
        self._senders = [self._lane.sender(link) for link in links]
        self._slots = [payloads(link) for link in links]

    def maybe_broadcast_sampled_tokens(
        self, sampler_output: torch.Tensor | HasSampledTokens, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> Point:
        lane = self._lane
        ids = sampler_output if isinstance(sampler_output, torch.Tensor) else sampler_output.sampled_token_ids
        _check(ids, num_sampled, num_rejected)
        num_reqs, max_sample_len = ids.shape
        self._check_message(num_reqs, max_sample_len)
        messages: list[_Message] = []
        for sender in self._senders:
            seq = sender.claim()
            messages.append(_Message(sender, seq, self._header(seq, num_reqs, max_sample_len)))
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
        for target, source in zip(_unpack(slot, header.num_reqs, header.width), sources, strict=True):
            copy_into(target, source)
        message.sender.publish(seq, header)


class HostTokenReceiver(_HostHandler):
    """Every other rank's."""

    def __init__(self, group: PPGroup, link: Link) -> None:
        super().__init__(group, link.layout)
        self._receiver = self._lane.receiver(link)
        self._slots = payloads(link)

    def maybe_broadcast_sampled_tokens(
        self, sampler_output: torch.Tensor | HasSampledTokens, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        return None

    def maybe_receive_sampled_tokens(self, num_reqs: int, max_sample_len: int = 1) -> SampledTokens:
        receiver = self._receiver
        self._check_message(num_reqs, max_sample_len)
        seq = receiver.claim()
        header = self._header(seq, num_reqs, max_sample_len)
        num_bytes = token_slot_bytes(num_reqs, max_sample_len)
        packed = torch.empty(num_bytes, dtype=torch.uint8)

        def read() -> None:
            receiver.wait_full(seq, header)
            copy_into(packed, self._slots[seq % self._layout.num_slots][:num_bytes])
            receiver.release(seq)

        self.stream.launch(read)
        return SampledTokens(_unpack(packed, num_reqs, max_sample_len), self.stream.record())

    def close(self) -> None:
        self._lane.close()
        self._slots = []


def _check(ids: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:
    if ids.dim() != 2 or ids.dtype != torch.int64:
        raise TransportError(f"sampled_token_ids: {ids.dtype} {tuple(ids.shape)}, must be int64 [num_reqs, max_sample_len]")
    for name, counts in (("num_sampled", num_sampled), ("num_rejected", num_rejected)):
        if counts.shape != ids.shape[:1] or counts.dtype != torch.int32:
            raise TransportError(f"{name}: {counts.dtype} {tuple(counts.shape)}, must be int32 [{ids.shape[0]}]")


def _unpack(packed: torch.Tensor, num_reqs: int, max_sample_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three tensors of a message, views of its bytes: ids, then num_sampled, then num_rejected."""
    ids_end = num_reqs * max_sample_len * 8
    counts = packed[ids_end : ids_end + num_reqs * 8].view(torch.int32)
    ids = packed[:ids_end].view(torch.int64).view(num_reqs, max_sample_len)
    return ids, counts[:num_reqs], counts[num_reqs:]
