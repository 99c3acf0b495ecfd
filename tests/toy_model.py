"""A model small enough to predict: the next token is a hash of all tokens so far, and every stage has a part in it.

Stage 0 keeps each sequence slot's hash, as a KV cache would; what it sends on is that hash; every later stage adds one.
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from stages.assembly import Slice
from stages.plan import Limits, RowKind, StepPlan, TensorSchema
from stages.slots import SlotTable
from stages.topology import StageInfo

VOCAB_SIZE = 1009
SLEEP_OVERSHOOT_SECONDS = 0.0003  # what time.sleep takes too long; the rest of a forward is spun
BOUNDARY = TensorSchema("hidden_states", "float32", 4)

OnForward = Callable[[StageInfo, StepPlan], None]


def toy_tokens(prompt: list[int], count: int, num_stages: int) -> list[int]:
    """What ``count`` greedy steps give after ``prompt``."""
    value = 17
    for token_id in prompt:
        value = _mix(value, token_id)
    token_ids: list[int] = []
    for _ in range(count):
        token_ids.append((value + num_stages - 1) % VOCAB_SIZE)
        value = _mix(value, token_ids[-1])
    return token_ids


def toy_slices(
    num_stages: int, on_forward: OnForward = lambda info, plan: None, forward_seconds: float | Sequence[float] = 0.0
) -> list[Slice]:
    """One slice for each stage.

    ``on_forward`` is called on the compute thread in each forward, which sleeps to take ``forward_seconds`` in all: of all
    stages, or of each.
    """
    seconds = [forward_seconds] * num_stages if isinstance(forward_seconds, float) else forward_seconds
    infos = [StageInfo(rank, num_stages, rank, rank + 1, num_stages) for rank in range(num_stages)]
    return [
        Slice(
            info,
            BOUNDARY,
            VOCAB_SIZE,
            lambda slots, limits, info=info: ToyRunner(info, slots, limits, on_forward, seconds[info.rank]),
        )
        for info in infos
    ]


def _mix(value: int, token_id: int) -> int:
    return (value * 31 + token_id + 1) % VOCAB_SIZE


class ToyRunner:
    def __init__(self, info: StageInfo, slots: SlotTable, limits: Limits, on_forward: OnForward, seconds: float) -> None:
        self._info = info
        self._slots = slots
        self._on_forward = on_forward
        self._seconds = seconds
        self._hashes = [0] * limits.max_num_seqs

    num_blocks_used = 0

    def prepare(self, plan: StepPlan) -> None:
        for slot, generation in plan.freed:
            self._slots.free(slot, generation)
        for row in plan.rows:
            if row.sampling is not None:
                self._slots.open(row.slot, row.generation)

    def forward(self, plan: StepPlan, hidden: torch.Tensor | None) -> torch.Tensor:
        ends_at = time.perf_counter() + self._seconds
        self._on_forward(self._info, plan)
        values = self._embed(plan) if hidden is None else [(int(value) + 1) % VOCAB_SIZE for value in hidden[:, 0].tolist()]
        out = self._logits(plan, values) if self._info.is_last else self._hidden(values)
        if (left := ends_at - time.perf_counter() - SLEEP_OVERSHOOT_SECONDS) > 0:
            time.sleep(left)
        while time.perf_counter() < ends_at:
            pass
        return out

    def take_row_errors(self, step_id: int) -> list[tuple[int, int, str]]:
        return []

    def _hidden(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, BOUNDARY.width)

    def _logits(self, plan: StepPlan, values: list[int]) -> torch.Tensor:
        logits = torch.zeros(len(plan.sampled_rows), VOCAB_SIZE)
        ends = accumulate(row.num_tokens for row in plan.rows)
        sampled = [end - 1 for end, row in zip(ends, plan.rows, strict=True) if row.needs_token]
        for i, end in enumerate(sampled):
            logits[i, values[end]] = 1.0
        return logits

    def _embed(self, plan: StepPlan) -> list[int]:
        values: list[int] = []
        for row in plan.rows:
            if row.start == 0:
                self._hashes[row.slot] = 17
            token_ids = row.token_ids if row.kind is RowKind.PREFILL else [int(self._slots.last_tokens[row.slot, 0])]
            for token_id in token_ids:
                self._hashes[row.slot] = _mix(self._hashes[row.slot], token_id)
                values.append(self._hashes[row.slot])
        return values
