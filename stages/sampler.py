"""Choosing tokens from logits, on the last rank.

The order is that of transformers: the logits are divided by the temperature, then ``top_k`` keeps the k largest, then ``top_p``
keeps the fewest of what is left whose probabilities add up to at least p, then ``min_p`` drops what is less probable than min_p
times the most probable token. The most probable token always stays, and tokens that tie with the least of those kept stay
too, so that no result depends on how a sort breaks ties.

A draw is a pure function of the logits and of (seed, position): one uniform number from Philox with the seed as its key and
the position of the sampled token as its counter, looked up in the cumulative distribution in token-id order (float64).
Temperature 0 is greedy; of equal logits the lowest token id wins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stages.device import Stream
from stages.plan import PlanRow, RowSampling
from stages.pp_handler import unpack_tokens
from stages.slots import NO_TOKEN, void
from stages.transport.links import token_slot_bytes
from stages.upload import upload

# top_p looks at this many of the largest logits first, and at the whole row only when they do not add up to p.
NUM_NUCLEUS_CANDIDATES = 256


@dataclass(frozen=True)
class SamplerOutput:
    """A step's sampled tokens, one row for each of the plan's ``sampled_rows``.

    ``sampled_token_ids [num_reqs, max_sample_len] int64``, -1 past a row's tokens; ``num_sampled [num_reqs] int32``;
    ``num_rejected [num_reqs] int32``. They are views of ``packed``, one after the other. A row whose logits had NaN, +inf or no
    finite value has ``num_sampled`` 0; the other rows are not affected.
    """

    sampled_token_ids: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    packed: torch.Tensor

    @classmethod
    def empty(cls, num_reqs: int, max_sample_len: int, device: torch.device | None = None) -> "SamplerOutput":
        packed = torch.empty(token_slot_bytes(num_reqs, max_sample_len), dtype=torch.uint8, device=device)
        return cls.over(packed, num_reqs, max_sample_len)

    @classmethod
    def over(cls, packed: torch.Tensor, num_reqs: int, max_sample_len: int) -> "SamplerOutput":
        return cls(*unpack_tokens(packed, num_reqs, max_sample_len), packed)


class SamplerOutputs:
    """Where sampled tokens are written, and how they reach the host: on a CPU they are there."""

    def next(self, num_reqs: int, max_sample_len: int) -> SamplerOutput:
        return SamplerOutput.empty(num_reqs, max_sample_len)

    def to_host(self, compute: Stream, output: SamplerOutput) -> SamplerOutput:
        """The output as the host can read it once ``compute`` has come by."""
        return output


class DeviceSamplerOutputs(SamplerOutputs):
    """On a GPU, with a copy in pinned memory. What is taken is used again ``max_steps`` steps later."""

    def __init__(self, device: torch.device, max_num_reqs: int, max_sample_len: int, max_steps: int) -> None:
        num_bytes = token_slot_bytes(max_num_reqs, max_sample_len)
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(max_steps)]
        is_pinned = device.type == "cuda"
        self._mirrors = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(max_steps)]
        self._index = -1

    def next(self, num_reqs: int, max_sample_len: int) -> SamplerOutput:
        self._index = (self._index + 1) % len(self._buffers)
        num_bytes = token_slot_bytes(num_reqs, max_sample_len)
        return SamplerOutput.over(self._buffers[self._index][:num_bytes], num_reqs, max_sample_len)

    def to_host(self, compute: Stream, output: SamplerOutput) -> SamplerOutput:
        mirror = self._mirrors[self._index][: len(output.packed)]
        compute.launch(lambda: void(mirror.copy_(output.packed, non_blocking=True)))
        return SamplerOutput.over(mirror, *output.sampled_token_ids.shape)


class Sampler:
    """Samples for ``num_slots`` sequence slots, remembering how each is sampled. Called in step order from one thread."""

    def __init__(self, vocab_size: int, num_slots: int) -> None:
        self.vocab_size = vocab_size
        self._samplings: list[tuple[int, RowSampling] | None] = [None] * num_slots

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, rows: Sequence[PlanRow], max_sample_len: int = 1, out: SamplerOutput | None = None
    ) -> SamplerOutput:
        """Sample one token for each of ``rows`` that needs one.

        ``rows`` are all rows of the step, so that the sampling of a row whose first chunk needs no token is seen too;
        ``logits [num_reqs, vocab_size]`` of any float dtype are those of the rows that need a token, in that order.
        ``out``, when given, is filled and returned. ``ValueError`` when a row's sampling was never given.
        """
        for row in rows:
            if row.sampling is not None:
                self._samplings[row.slot] = (row.generation, row.sampling)
        sampled = [row for row in rows if row.needs_token]
        if logits.shape != (len(sampled), self.vocab_size):
            raise ValueError(f"logits {tuple(logits.shape)}: must be {(len(sampled), self.vocab_size)}")
        output = out or SamplerOutput.empty(len(sampled), max_sample_len)
        if max_sample_len > 1:
            output.sampled_token_ids.fill_(NO_TOKEN)
        output.num_rejected.zero_()
        if not sampled:
            return output
        samplings = [self._sampling_of(row) for row in sampled]
        largest, token_ids = logits.max(dim=1)
        is_finite = largest.isfinite()
        random = [i for i, sampling in enumerate(samplings) if sampling.temperature > 0]
        if random:
            drawing = upload(random, torch.int64, logits.device)
            drawn = _draw(
                logits[drawing],
                [samplings[i] for i in random],
                [sampled[i].start + sampled[i].num_tokens for i in random],
            )
            token_ids.index_copy_(0, drawing, drawn)
        output.num_sampled.copy_(is_finite)
        output.sampled_token_ids[:, 0] = token_ids.masked_fill_(~is_finite, NO_TOKEN)
        return output

    def _sampling_of(self, row: PlanRow) -> RowSampling:
        known = self._samplings[row.slot]
        if known is None or known[0] != row.generation:
            raise ValueError(f"slot {row.slot}, generation {row.generation}: sampled before its sampling was given")
        return known[1]


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at ``position`` of a sequence with ``seed`` (any 64 bits)."""
    bits = np.random.Philox(key=seed % 2**64, counter=position).random_raw()
    return (int(bits) >> 11) * 2.0**-53


def _draw(logits: torch.Tensor, samplings: Sequence[RowSampling], positions: Sequence[int]) -> torch.Tensor:
    """Token ids ``[n]`` drawn from ``logits [n, vocab]``, every row by itself: nothing here mixes rows."""
    device = logits.device
    logits = logits.to(torch.float64)
    scaled = logits - logits.amax(dim=1, keepdim=True)  # the largest is 0, so a small temperature cannot overflow
    scaled /= upload([s.temperature for s in samplings], torch.float64, device)[:, None]
    weights = _truncated(scaled.exp(), samplings)
    cumulative = weights.cumsum(dim=1)
    uniforms = upload(
        [uniform(s.seed, position) for s, position in zip(samplings, positions, strict=True)], torch.float64, device
    )
    total = cumulative[:, -1:].contiguous()
    drawn = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
    # u * total rounded up to total would fall off the end: the last token that has weight is meant.
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(drawn, last).squeeze(1)


def _truncated(weights: torch.Tensor, samplings: Sequence[RowSampling]) -> torch.Tensor:
    """``weights [n, vocab]`` (the largest of each row is 1) with what top_k, top_p and min_p drop set to 0, in place."""
    vocab_size, device = weights.shape[1], weights.device
    threshold = torch.zeros(len(weights), dtype=torch.float64, device=device)
    top_k = [i for i, s in enumerate(samplings) if 0 < s.top_k < vocab_size]
    if top_k:
        rows = upload(top_k, torch.int64, device)
        ranks = [samplings[i].top_k for i in top_k]
        largest = weights[rows].topk(max(ranks), dim=1).values
        kept = largest.gather(1, upload(ranks, torch.int64, device)[:, None] - 1).squeeze(1)
        threshold.index_copy_(0, rows, kept)
        weights.masked_fill_(weights < threshold[:, None], 0)
    top_p = [i for i, s in enumerate(samplings) if s.top_p < 1]
    if top_p:
        rows = upload(top_p, torch.int64, device)
        shares = upload([samplings[i].top_p for i in top_p], torch.float64, device)
        threshold.index_copy_(0, rows, _nucleus_thresholds(weights[rows], shares))
    threshold = threshold.maximum(upload([s.min_p for s in samplings], torch.float64, device))
    return weights.masked_fill_(weights < threshold[:, None], 0)


def _nucleus_thresholds(weights: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """For each row the least weight among the fewest largest that make up its share ``[n]`` of the row's sum."""
    wanted = weights.sum(dim=1) * shares
    if not weights.is_cpu:  # sorted at once: to look at a few first would mean to wait for what they add up to
        return _least_of(weights.sort(dim=1, descending=True).values, wanted)
    num_candidates = min(NUM_NUCLEUS_CANDIDATES, weights.shape[1])
    largest = weights.topk(num_candidates, dim=1).values
    thresholds = _least_of(largest, wanted)
    for i in (largest.cumsum(dim=1)[:, -1] < wanted).nonzero().flatten().tolist():
        thresholds[i] = _least_of(weights[i : i + 1].sort(descending=True).values, wanted[i : i + 1])[0]
    return thresholds


def _least_of(ordered: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of each row ``[n, k]``, largest first, the last value that is needed to add up to ``wanted [n]``."""
    sums = ordered.cumsum(dim=1)
    last = torch.searchsorted(sums, wanted[:, None]).clamp_(max=ordered.shape[1] - 1)
    return ordered.gather(1, last).squeeze(1)
