"""Log-probabilities of sampled and of prompt tokens: the log-softmax of the model's own logits, in float32."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from stages.plan import PlanRow, ScoredRow, TokenLogprobs


@dataclass(frozen=True)
class StepLogprobs:
    """Those of one step, on the device or on the host.

    ``packed [m, 1 + 2 * num_top]`` int32: the bits of a token's own log-probability, then the ids of the most probable tokens,
    best first, then the bits of their log-probabilities. Its first rows belong to ``sampled``: for each the index among the
    plan's sampled rows, and how many top tokens are wanted. Then come those of ``scored``: one for each scored token of these
    plan rows, which come with the same number.
    """

    packed: torch.Tensor
    sampled: Sequence[tuple[int, int]]
    scored: Sequence[tuple[PlanRow, int]]

    def copied_to(self, buffer: torch.Tensor) -> "StepLogprobs":
        """With ``packed`` in ``buffer`` (int32, at least as many elements), once the device has come by."""
        packed = buffer[: self.packed.numel()].view(self.packed.shape)
        packed.copy_(self.packed, non_blocking=True)
        return replace(self, packed=packed)

    def of_sampled(self) -> dict[int, TokenLogprobs]:
        """By index among the sampled rows. To be called on the host."""
        values = self._values(0, len(self.sampled))
        return {i: _cut(value, num_top) for (i, num_top), value in zip(self.sampled, values, strict=True)}

    def of_scored(self) -> list[ScoredRow]:
        rows: list[ScoredRow] = []
        start = len(self.sampled)
        for row, num_top in self.scored:
            values = self._values(start, start + len(row.scored))
            start += len(row.scored)
            rows.append(ScoredRow(row.slot, row.generation, [_cut(value, num_top) for value in values]))
        return rows

    def _values(self, start: int, end: int) -> list[TokenLogprobs]:
        packed = self.packed[start:end]
        num_top = packed.shape[1] // 2
        own = packed[:, 0].contiguous().view(torch.float32).tolist()
        top_ids = packed[:, 1 : 1 + num_top].tolist()
        top = packed[:, 1 + num_top :].contiguous().view(torch.float32).tolist()
        return [TokenLogprobs(*value) for value in zip(own, top_ids, top, strict=True)]


def _cut(value: TokenLogprobs, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(value.logprob, value.top_token_ids[:num_top], value.top_logprobs[:num_top])


def pack_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """``StepLogprobs.packed`` of ``logits [m, vocab]`` of any float dtype and of ``token_ids [m]`` int64, which are clamped."""
    logits = logits.float()
    token_ids = token_ids.clamp(0, logits.shape[1] - 1)
    norms = logits.logsumexp(dim=1, keepdim=True)
    # The same arithmetic for both: a token that is the most probable one has exactly its log-probability.
    parts = [(logits.gather(1, token_ids[:, None]) - norms).view(torch.int32)]
    if num_top:
        num_top = min(num_top, logits.shape[1])
        values, ids = logits.max(dim=1, keepdim=True) if num_top == 1 else logits.topk(num_top, dim=1)
        parts += [ids.to(torch.int32), (values - norms).view(torch.int32)]
    return torch.cat(parts, dim=1)
