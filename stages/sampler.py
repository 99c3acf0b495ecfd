"""Choosing tokens from logits, on the last rank.

The order is that of transformers: the logits are divided by the temperature, then ``top_k`` keeps the k largest, then ``top_p``
keeps the fewest of what is left whose probabilities add up to at least p, then ``min_p`` drops what is less probable than min_p
times the most probable token. The most probable token always stays, and tokens that tie with the least of those kept stay
too, so that no result depends on how a sort breaks ties.

A draw is a pure function of the logits and of (seed, position): one uniform number from Philox with the seed as its key and
the position of the sampled token as its counter, looked up in the cumulative distribution in token-id order (float64).
Temperature 0 is greedy; of equal logits the lowest token id wins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from stages.plan import PlanRow, RowSampling
from stages.slots import NO_TOKEN

# top_p looks at this many of the largest logits first, and at the whole row only when they do not add up to p.
NUM_NUCLEUS_CANDIDATES = 256


@dataclass
class SamplerOutput:
    """A step's sampled tokens, one row for each of the plan's ``sampled_rows``.

    ``sampled_token_ids [num_reqs, max_sample_len] int64``, -1 past a row's tokens; ``num_sampled [num_reqs] int32``;
    ``num_rejected [num_reqs] int32``. ``failed_rows``: the rows whose logits had NaN, +inf or no finite value; they have
    ``num_sampled`` 0, and the other rows are not affected.
    """

    sampled_token_ids: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    failed_rows: list[PlanRow] = field(default_factory=list)

    @classmethod
    def empty(cls, num_reqs: int, max_sample_len: int) -> "SamplerOutput":
        return cls(
            torch.empty((num_reqs, max_sample_len), dtype=torch.int64),
            torch.empty(num_reqs, dtype=torch.int32),
            torch.empty(num_reqs, dtype=torch.int32),
        )


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
        output.num_sampled.fill_(1)
        output.num_rejected.zero_()
        output.failed_rows = []
        if not sampled:
            return output
        samplings = [self._sampling_of(row) for row in sampled]
        largest, token_ids = logits.max(dim=1)
        failed = [i for i, value in enumerate(largest.tolist()) if not math.isfinite(value)]
        random = [i for i, sampling in enumerate(samplings) if sampling.temperature > 0 and i not in failed]
        if random:
            drawn = _draw(
                logits[random],
                [samplings[i] for i in random],
                [sampled[i].start + sampled[i].num_tokens for i in random],
            )
            token_ids[random] = drawn
        if failed:
            token_ids[failed] = NO_TOKEN
            output.num_sampled[failed] = 0
            output.failed_rows = [sampled[i] for i in failed]
        output.sampled_token_ids[:, 0] = token_ids
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
    logits = logits.to(torch.float64)
    scaled = logits - logits.amax(dim=1, keepdim=True)  # the largest is 0, so a small temperature cannot overflow
    scaled /= torch.tensor([s.temperature for s in samplings], dtype=torch.float64)[:, None]
    weights = _truncated(scaled.exp(), samplings)
    cumulative = weights.cumsum(dim=1)
    uniforms = torch.tensor(
        [uniform(s.seed, position) for s, position in zip(samplings, positions, strict=True)], dtype=torch.float64
    )
    total = cumulative[:, -1:].contiguous()
    drawn = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
    # u * total rounded up to total would fall off the end: the last token that has weight is meant.
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(drawn, last).squeeze(1)


def _truncated(weights: torch.Tensor, samplings: Sequence[RowSampling]) -> torch.Tensor:
    """``weights [n, vocab]`` (the largest of each row is 1) with what top_k, top_p and min_p drop set to 0, in place."""
    vocab_size = weights.shape[1]
    threshold = torch.zeros(len(weights), dtype=torch.float64)
    top_k = [i for i, s in enumerate(samplings) if 0 < s.top_k < vocab_size]
    if top_k:
        ranks = torch.tensor([samplings[i].top_k for i in top_k])
        largest = weights[top_k].topk(int(ranks.max()), dim=1).values
        threshold[top_k] = largest.gather(1, ranks[:, None] - 1).squeeze(1)
        weights.masked_fill_(weights < threshold[:, None], 0)
    top_p = [i for i, s in enumerate(samplings) if s.top_p < 1]
    if top_p:
        threshold[top_p] = _nucleus_thresholds(weights[top_p], [samplings[i].top_p for i in top_p])
    threshold = threshold.maximum(torch.tensor([s.min_p for s in samplings], dtype=torch.float64))
    return weights.masked_fill_(weights < threshold[:, None], 0)


def _nucleus_thresholds(weights: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
    """For each row the least weight among the fewest largest that make up its share of the row's sum."""
    wanted = weights.sum(dim=1) * torch.tensor(shares, dtype=torch.float64)
    num_candidates = min(NUM_NUCLEUS_CANDIDATES, weights.shape[1])
    largest = weights.topk(num_candidates, dim=1).values
    sums = largest.cumsum(dim=1)
    thresholds = largest.gather(1, torch.searchsorted(sums, wanted[:, None]).clamp_(max=num_candidates - 1)).squeeze(1)
    for i in (sums[:, -1] < wanted).nonzero().flatten().tolist():
        ordered = weights[i].sort(descending=True).values
        count = int(torch.searchsorted(ordered.cumsum(dim=0), wanted[i]))
        thresholds[i] = ordered[min(count, len(ordered) - 1)]
    return thresholds
