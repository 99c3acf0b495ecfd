"""PPHandler: the sampled tokens go from the last rank to every other one, in one packed message a step, for every step."""

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from stages.device import Point, Stream
from stages.errors import TransportError
from stages.topology import PPGroup
from stages.transport.links import token_slot_bytes
from stages.transport.ring import SEQ_MASK, TOKEN_MAGIC, RingLayout, TokenHeader


class SampledTokens(tuple[torch.Tensor, torch.Tensor, torch.Tensor]):
    """``sampled_token_ids [num_reqs, max_sample_len]`` int64, ``num_sampled`` and ``num_rejected [num_reqs]`` int32.

    To be read after ``ready``. On a host the tensors belong to whoever received them; those on a GPU are overwritten by the
    message that comes as many steps later as the token ring has slots, and one.
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

    receives_after_sending = False
    """Whether a step's tokens may be received only once its hidden states are sent: then a receive that waits on the device
    holds up nothing that it waits for."""

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


class TokenMessages:
    """The messages of one rank: what a step's must be, and whether what a call gives fits."""

    def __init__(self, group: PPGroup, layout: RingLayout) -> None:
        self.group = group
        self.layout = layout
        self.step_id = -1

    def check_size(self, num_reqs: int, max_sample_len: int) -> None:
        if self.step_id < 0:
            raise ValueError("no step was announced with begin_step")
        needed = token_slot_bytes(num_reqs, max_sample_len)
        if needed > self.layout.slot_bytes:
            raise TransportError(
                f"step {self.step_id}: {num_reqs} requests of {max_sample_len} tokens need {needed} bytes, "
                f"but a token slot holds {self.layout.slot_bytes}"
            )

    def header(self, seq: int, num_reqs: int, max_sample_len: int) -> TokenHeader:
        return TokenHeader(TOKEN_MAGIC, self.group.epoch, self.step_id, seq & SEQ_MASK, num_reqs, max_sample_len, verdict=1)


def token_ids_of(sampler_output: torch.Tensor | HasSampledTokens) -> torch.Tensor:
    return sampler_output if isinstance(sampler_output, torch.Tensor) else sampler_output.sampled_token_ids


def check_tokens(ids: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:
    if ids.dim() != 2 or ids.dtype != torch.int64:
        raise TransportError(f"sampled_token_ids: {ids.dtype} {tuple(ids.shape)}, must be int64 [num_reqs, max_sample_len]")
    for name, counts in (("num_sampled", num_sampled), ("num_rejected", num_rejected)):
        if counts.shape != ids.shape[:1] or counts.dtype != torch.int32:
            raise TransportError(f"{name}: {counts.dtype} {tuple(counts.shape)}, must be int32 [{ids.shape[0]}]")


def unpack_tokens(packed: torch.Tensor, num_reqs: int, max_sample_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three tensors of a message, views of its bytes: ids, then num_sampled, then num_rejected."""
    ids_end = num_reqs * max_sample_len * 8
    counts = packed[ids_end : ids_end + num_reqs * 8].view(torch.int32)
    ids = packed[:ids_end].view(torch.int64).view(num_reqs, max_sample_len)
    return ids, counts[:num_reqs], counts[num_reqs:]
