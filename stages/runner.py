"""Runs a stage's layers over the rows of a plan."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from stages.errors import one_line
from stages.kv_cache import AttentionStep, PagedKVCache
from stages.model.slice import StageModel
from stages.plan import MAX_SCORED_TOKENS, Limits, PlanRow, RowKind, StepPlan
from stages.slots import SlotTable
from stages.upload import upload

log = logging.getLogger(__name__)

MAX_FAILURES = 3


class StageRunner:
    """A stage's model, KV cache and sequence slots.

    ``prepare`` is called from the loop's thread in plan order, as soon as a plan is there; ``forward`` once for each prepared
    plan, in the same order, from the compute stream.
    """

    def __init__(self, model: StageModel, slots: SlotTable, limits: Limits) -> None:
        self.model = model
        self.slots = slots
        self.limits = limits
        self.cache = PagedKVCache(
            model.info.layers,
            limits.num_blocks,
            limits.block_size,
            model.num_kv_heads,
            model.head_dim,
            model.dtype,
            max_context_len=limits.max_model_len,
            device=model.device,
        )
        # On a GPU the slots' positions cannot be compared with the plan's without waiting for them.
        self._compares_positions = model.device.type == "cpu"
        self.output_width = model.vocab_size if model.info.is_last else model.hidden_size
        self._num_failures = 0  # steps in a row of which nothing could be computed
        self._row_errors: dict[int, list[tuple[int, int, str]]] = {}  # taken as soon as the step is heard of
        self._prepared: dict[int, _PreparedStep] = {}  # at most lane depth + 1: what may be unacknowledged

    def prepare(self, plan: StepPlan) -> None:
        """Apply the plan's frees, openings and blocks, and build its index tensors.

        ``ValueError`` when the plan breaks a rule: a row of a generation that is neither current nor new, blocks that do not
        exist or do not hold the row, tokens outside the vocabulary, more of anything than the limits say.
        """
        if plan.step_id in self._prepared:
            raise ValueError(f"step {plan.step_id}: prepared twice")
        for slot, generation in plan.freed:
            self.slots.free(slot, generation)
            self.cache.reset(slot)
        if plan.num_tokens > self.limits.max_num_batched_tokens:
            raise ValueError(
                f"step {plan.step_id}: {plan.num_tokens} tokens, the most are {self.limits.max_num_batched_tokens}"
            )
        if sum(len(row.scored) for row in plan.rows) > MAX_SCORED_TOKENS:
            raise ValueError(f"step {plan.step_id}: more than {MAX_SCORED_TOKENS} scored tokens")
        for row in plan.rows:
            if row.sampling is not None:
                self.slots.open(row.slot, row.generation)
            elif not self.slots.is_current(row.slot, row.generation):
                raise ValueError(f"slot {row.slot}: generation {row.generation} is not current, and the row does not open it")
            self._check(row)
            self.cache.extend(row.slot, row.blocks)
        self._prepared[plan.step_id] = _PreparedStep.build(plan, self.cache)

    @property
    def num_blocks_used(self) -> int:
        return self.cache.num_used

    @torch.inference_mode()
    def forward(self, plan: StepPlan, hidden: torch.Tensor | None) -> torch.Tensor:
        """Compute the plan's step.

        ``hidden [num_tokens, hidden_size]`` comes from the previous stage, None on the first. Returns hidden states of that
        shape, or on the last stage the logits ``[n, vocab_size]`` of the plan's ``sampled_rows``, followed by those of all
        ``scored`` tokens. The KV of every row is written, whether or not it needs a token. After an exception the next step can
        run.
        """
        step = self._prepared.pop(plan.step_id)
        if not plan.rows:
            return torch.empty(0, self.output_width, dtype=self.model.dtype, device=self.model.device)
        inputs = self._inputs(step, hidden)
        try:
            output = self._compute(step, inputs)
        except Exception as exc:
            if self.model.device.type != "cpu" or self._num_failures >= MAX_FAILURES:
                raise  # after an error of a GPU nothing can be tried again
            return self._compute_row_by_row(plan, hidden, exc)
        self._num_failures = 0
        return output

    def take_row_errors(self, step_id: int) -> list[tuple[int, int, str]]:
        """The rows of a computed step that failed: slot, generation, why. Once for each step."""
        return self._row_errors.pop(step_id, [])

    def _compute_row_by_row(self, plan: StepPlan, hidden: torch.Tensor | None, cause: Exception) -> torch.Tensor:
        """Find out whose fault an exception was: rows that fail by themselves get NaN, so that nothing is sampled for them, and
        the others what they should. ``cause`` is raised when no row of several can be computed."""
        outputs: list[torch.Tensor] = []
        scored: list[torch.Tensor] = []
        errors: list[tuple[int, int, str]] = []
        first = 0
        for row in plan.rows:
            alone = msgspec.structs.replace(plan, rows=[row])
            num_sampled = row.num_tokens if not self.model.info.is_last else int(row.needs_token)
            part = None if hidden is None else hidden[first : first + row.num_tokens]
            try:
                step = _PreparedStep.build(alone, self.cache)
                output = self._compute(step, self._inputs(step, part))
            except Exception as exc:  # noqa: BLE001  whatever it is, it is this row's
                errors.append((row.slot, row.generation, one_line(exc)))
                num_rows = num_sampled + (len(row.scored) if self.model.info.is_last else 0)
                output = torch.full((num_rows, self.output_width), math.nan, dtype=self.model.dtype)
            outputs.append(output[:num_sampled])
            scored.append(output[num_sampled:])
            first += row.num_tokens
        if len(errors) == len(plan.rows) > 1:
            raise cause
        log.error("step %d: %d of %d rows failed", plan.step_id, len(errors), len(plan.rows), exc_info=cause)
        # A stage that fails again and again, though with one row a step, is broken.
        self._num_failures = self._num_failures + 1 if len(errors) == len(plan.rows) else 0
        if errors:
            self._row_errors[plan.step_id] = errors
        return torch.cat([*outputs, *scored])

    def _inputs(self, step: "_PreparedStep", hidden: torch.Tensor | None) -> torch.Tensor:
        """What goes into the layers. What is wrong here is wrong between this rank and the plan, and nobody's row."""
        self._place(step)
        return self._input_ids(step) if self.model.info.is_first else self._hidden(step, hidden)

    def _compute(self, step: "_PreparedStep", inputs: torch.Tensor) -> torch.Tensor:
        step.attention.begin()
        return self.model.forward(inputs, step.positions, step.attention, step.logits_rows)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute the largest steps once, so that nothing is loaded or allocated for the first time while a stream waits for a
        peer. Before the first plan; it uses the blocks of slot 0 and leaves nothing behind but their values."""
        limits = self.limits
        length = min(limits.max_num_batched_tokens, limits.max_model_len, limits.num_blocks * limits.block_size)
        blocks = list(range(-(-length // limits.block_size)))
        self.cache.extend(0, blocks)
        num_decodes = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        for rows in (
            [PlanRow(0, 0, RowKind.PREFILL, 0, length, [0] * length, [], None, True, [0] * min(length, MAX_SCORED_TOKENS))],
            [PlanRow(0, 0, RowKind.DECODE, length - 1, 1, [], [], None, True)] * num_decodes,
        ):
            plan = StepPlan(0, 0, rows, [], [], 1, 1)
            step = _PreparedStep.build(plan, self.cache)
            hidden = torch.zeros(plan.num_tokens, self.model.hidden_size, dtype=self.model.dtype, device=self.model.device)
            step.attention.begin()
            inputs = step.token_ids if self.model.info.is_first else hidden
            self.model.forward(inputs, step.positions, step.attention, step.logits_rows)
        self.cache.reset(0)

    def _check(self, row: PlanRow) -> None:
        self.cache.check(row, len(self.cache.table(row.slot)))
        if row.num_tokens < 1 or row.start < 0 or row.start + row.num_tokens > self.limits.max_model_len:
            raise ValueError(
                f"slot {row.slot}: {row.num_tokens} tokens from {row.start} do not fit 0..{self.limits.max_model_len}"
            )
        if row.kind is RowKind.DECODE:
            if row.num_tokens != 1:
                raise ValueError(f"slot {row.slot}: a decode row has 1 token, not {row.num_tokens}")
            if row.scored:
                raise ValueError(f"slot {row.slot}: a decode row has no scored tokens")
        elif len(row.token_ids) != row.num_tokens:
            raise ValueError(f"slot {row.slot}: {len(row.token_ids)} token ids for {row.num_tokens} tokens")
        elif min(row.token_ids) < 0 or max(row.token_ids) >= self.model.vocab_size:
            raise ValueError(f"slot {row.slot}: token ids must be between 0 and {self.model.vocab_size - 1}")
        elif len(row.scored) > row.num_tokens:
            raise ValueError(f"slot {row.slot}: {len(row.scored)} scored tokens for {row.num_tokens} positions")
        elif row.scored and not 0 <= min(row.scored) <= max(row.scored) < self.model.vocab_size:
            raise ValueError(f"slot {row.slot}: scored tokens must be between 0 and {self.model.vocab_size - 1}")

    def _place(self, step: "_PreparedStep") -> None:
        """Read the decode rows' positions from the slots and compare them with the plan's; set the prefill rows'."""
        if step.prefill_slots is not None:
            self.slots.positions[step.prefill_slots] = step.prefill_ends
        if step.decode_slots is None or not self._compares_positions:
            return
        positions = self.slots.positions[step.decode_slots]
        for i in (positions != step.decode_starts).nonzero().flatten().tolist():
            row = step.decode_rows[i]
            # A row that a later plan has freed gets no more tokens: it computes on, for nobody, at the plan's position.
            if self.slots.is_current(row.slot, row.generation):
                raise ValueError(
                    f"slot {row.slot}, generation {row.generation}: the plan decodes at position {row.start}, "
                    f"the slot is at {int(positions[i])}"
                )
            positions[i] = row.start
        step.positions[step.decode_tokens] = positions

    def _input_ids(self, step: "_PreparedStep") -> torch.Tensor:
        if step.decode_slots is not None:
            ids = self.slots.last_tokens[step.decode_slots, 0]
            # They came in a message: an index outside the table must not reach the embedding.
            step.token_ids[step.decode_tokens] = ids.clamp_(0, self.model.vocab_size - 1)
        return step.token_ids

    def _hidden(self, step: "_PreparedStep", hidden: torch.Tensor | None) -> torch.Tensor:
        wanted = (step.attention.num_tokens, self.model.hidden_size)
        if hidden is None or hidden.shape != wanted:
            raise ValueError(f"hidden states {None if hidden is None else tuple(hidden.shape)}: must be {wanted}")
        return hidden


@dataclass(frozen=True)
class _PreparedStep:
    """A plan's tensors. The forward fills in the decode rows' ``positions`` and ``token_ids``, both ``[num_tokens] int64``."""

    attention: AttentionStep
    positions: torch.Tensor
    token_ids: torch.Tensor
    logits_rows: torch.Tensor
    decode_rows: Sequence[PlanRow]
    decode_tokens: torch.Tensor
    decode_slots: torch.Tensor | None
    decode_starts: torch.Tensor
    prefill_slots: torch.Tensor | None
    prefill_ends: torch.Tensor

    @classmethod
    def build(cls, plan: StepPlan, cache: PagedKVCache) -> "_PreparedStep":
        positions: list[int] = []
        token_ids: list[int] = []
        logits_rows: list[int] = []
        scored_rows: list[int] = []
        decode_tokens: list[int] = []
        decodes = [row for row in plan.rows if row.kind is RowKind.DECODE]
        prefills = [row for row in plan.rows if row.kind is RowKind.PREFILL]
        for row in plan.rows:
            if row.kind is RowKind.DECODE:
                decode_tokens.append(len(positions))
            if row.scored:
                scored_rows.extend(range(len(positions), len(positions) + len(row.scored)))
            positions.extend(range(row.start, row.start + row.num_tokens))
            token_ids.extend(row.token_ids if row.kind is RowKind.PREFILL else [0])
            if row.needs_token:
                logits_rows.append(len(positions) - 1)

        def indices(values: Sequence[int]) -> torch.Tensor:
            return upload(values, torch.int64, cache.device)

        return cls(
            attention=cache.prepare(plan.rows),
            positions=indices(positions),
            token_ids=indices(token_ids),
            logits_rows=indices(logits_rows + scored_rows),
            decode_rows=decodes,
            decode_tokens=indices(decode_tokens),
            decode_slots=indices([row.slot for row in decodes]) if decodes else None,
            decode_starts=indices([row.start for row in decodes]),
            prefill_slots=indices([row.slot for row in prefills]) if prefills else None,
            prefill_ends=indices([row.start + row.num_tokens - 1 for row in prefills]),
        )
