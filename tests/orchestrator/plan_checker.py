"""A rank without tensors: applies plans as a rank does, holds them to the rules, and answers with made-up tokens.

The token a request gets is a function of all tokens before it, so that any mix-up of slots, positions or generations
changes what comes out.
"""

from dataclasses import dataclass, field

from stages.plan import MAX_SCORED_TOKENS, PlanRow, RowKind, SampledRow, ScoredRow, StepPlan, StepResult, TokenLogprobs


def next_token(token_ids: list[int]) -> int:
    value = 17
    for token_id in token_ids:
        value = (value * 31 + token_id + 1) % 1009
    return value


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def score(before: list[int], token_id: int) -> TokenLogprobs:
    """Made up of all tokens before it and of the token itself."""
    return TokenLogprobs(-float(next_token([*before, token_id])), [token_id], [0.0])


@dataclass
class _Seat:
    generation: int
    token_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class PlanChecker:
    """Applies plans in order; every rule that a plan must keep is asserted here."""

    def __init__(self, num_slots: int, num_blocks: int, block_size: int, max_tokens: int) -> None:
        self.num_slots = num_slots
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_tokens = max_tokens
        self.seats: dict[int, _Seat] = {}
        self.last_generation: dict[int, int] = {}
        self.last_step_id = -1
        self.may_skip = False
        self.block_owner: dict[int, int] = {}
        self.sampled_by: dict[tuple[int, int], int] = {}

    def forget(self) -> None:
        """A new epoch: the ranks hold nothing."""
        self.seats.clear()
        self.block_owner.clear()
        self.sampled_by.clear()
        self.may_skip = True

    def apply(self, plan: StepPlan) -> StepResult:
        assert plan.step_id == self.last_step_id + 1 or (self.may_skip and plan.step_id > self.last_step_id), (
            "a gap in the plans"
        )
        self.last_step_id, self.may_skip = plan.step_id, False
        for slot, generation in plan.freed:
            seat = self.seats.pop(slot)
            assert seat.generation == generation, "a slot is freed once, by its generation"
            for block in seat.blocks:
                assert self.block_owner.pop(block) == slot
        assert plan.num_tokens <= self.max_tokens
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "one row of a slot in a step"
        assert sum(len(row.scored) for row in plan.rows) <= MAX_SCORED_TOKENS
        sampled = [self._apply_row(plan, row) for row in plan.rows]
        scored = [
            ScoredRow(
                row.slot,
                row.generation,
                [score(self.seats[row.slot].token_ids[: row.start + 1 + i], token_id) for i, token_id in enumerate(row.scored)],
            )
            for row in plan.rows
            if row.scored
        ]
        return StepResult(plan.epoch, plan.step_id, [row for row in sampled if row is not None], scored)

    def _apply_row(self, plan: StepPlan, row: PlanRow) -> SampledRow | None:
        assert 0 <= row.slot < self.num_slots
        if row.sampling is not None:
            assert row.slot not in self.seats, "a slot is freed before it is given away"
            assert row.generation > self.last_generation.get(row.slot, -1), "generations grow"
            assert row.start == 0
            self.seats[row.slot] = _Seat(row.generation)
            self.last_generation[row.slot] = row.generation
        seat = self.seats[row.slot]
        assert seat.generation == row.generation
        for block in row.blocks:
            assert 0 <= block < self.num_blocks
            assert block not in self.block_owner, "a block belongs to one slot at a time"
            self.block_owner[block] = row.slot
        seat.blocks += row.blocks
        if row.kind is RowKind.PREFILL:
            assert row.start == len(seat.token_ids), "a prompt is prefilled without gaps or repeats"
            assert row.num_tokens == len(row.token_ids) > 0
            seat.token_ids += row.token_ids
        else:
            assert row.num_tokens == 1
            assert row.start == len(seat.token_ids) - 1, "a decode reads the last sampled token"
            assert self.sampled_by[row.slot, row.generation] in plan.needs_tokens_of
            assert not row.token_ids
        assert row.start + row.num_tokens <= len(seat.blocks) * self.block_size, "the row's positions have blocks"
        if not row.needs_token:
            return None
        token_id = next_token(seat.token_ids)
        seat.token_ids.append(token_id)
        self.sampled_by[row.slot, row.generation] = plan.step_id
        return SampledRow(row.slot, row.generation, [token_id], 0, [])
