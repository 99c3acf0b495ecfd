"""The one place that decides what each step computes. Plain state: no I/O, no clock, no asyncio.

In: ``add``, ``abort``, ``update(StepResult)``, ``end_epoch``, ``begin_epoch``. Out: ``schedule() -> StepPlan | None``.

Continuous batching with chunked prefill. A request's tokens up to its first sampled one are *prefilled* in chunks; then it
*decodes*, one position a step. A request is in at most one step in flight. So that all stages have work, a step takes
at most ceil(active / stages) rows, and up to ``lane_depth`` steps are in flight.

KV blocks are numbered; every rank holds a pool of ``num_blocks`` and applies the same plans in the same order. That is
why a block or a sequence slot may be given to somebody else while a step that still writes to it is in flight: on every
rank the earlier step's writes come first.

When ranks are lost, nothing of what they all held is used again: ``end_epoch`` puts every unfinished request back to
waiting, and it is prefilled again, prompt and tokens so far, as after a preemption. One that was in flight in two losses
and got no token in between is a *suspect*: suspects are computed first and alone, one after the other, each until it gets
a token. One that is lost even so has failed.
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.request import FinishReason, QueueFull, Request, TokenChunk
from stages.errors import ConfigError, ControlError, StageFailed
from stages.plan import (
    MAX_SCORED_TOKENS,
    NO_LOGPROBS,
    PlanRow,
    RowKind,
    RowSampling,
    SampledRow,
    ScoredRow,
    StepPlan,
    StepResult,
)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """``lane_depth`` steps in flight, ``max_num_batched_tokens`` tokens per step, ``max_model_len`` tokens per request,
    ``num_blocks`` KV blocks of ``block_size`` tokens on each rank, ``max_waiting`` requests not yet admitted."""

    num_stages: int
    lane_depth: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_waiting: int
    eos_token_ids: frozenset[int]
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ConfigError(
                f"--max-model-len {self.max_model_len}: the KV cache holds {self.num_blocks * self.block_size} tokens and "
                "must hold at least one request of that length"
            )


@dataclass(eq=False)
class _Sequence:
    """A request and its place on the ranks. ``slot`` is -1 while it waits."""

    request: Request
    arrival: int
    slot: int = -1
    generation: int = -1
    blocks: list[int] = field(default_factory=list[int])
    num_computed: int = 0  # tokens whose KV entries are computed or planned
    is_prefilling: bool = True
    is_in_flight: bool = False
    scores_from: int = 0  # in flight: the position of the first of the scored tokens
    token_step_id: int = -1  # the step that sampled its last token
    num_tokens_when_lost: int = -1  # when ranks were last lost while it was in flight

    @property
    def num_tokens(self) -> int:
        return len(self.request.token_ids)


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.epoch = config.epoch
        self.num_preemptions = 0
        self.num_stale_rows = 0
        self._next_step_id = 0
        self._next_arrival = 0
        self._sequences: dict[str, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # by arrival: the first has the highest priority
        self._suspects: list[_Sequence] = []  # by arrival: the first is computed, alone
        self._seats: list[_Sequence | None] = [None] * config.max_num_seqs
        self._generations = [0] * config.max_num_seqs
        self._free_slots = deque(range(config.max_num_seqs))
        self._free_blocks = deque(range(config.num_blocks))
        self._freed: list[tuple[int, int]] = []
        self._in_flight: dict[int, list[_Sequence]] = {}

    # ---- what the engine asks -------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free_blocks)

    def requests(self) -> list[Request]:
        """Every unfinished request, by arrival."""
        return [sequence.request for sequence in sorted(self._sequences.values(), key=lambda s: s.arrival)]

    def request_at(self, slot: int) -> Request | None:
        """Whose sequence slot it is now."""
        sequence = self._seats[slot]
        return None if sequence is None else sequence.request

    def add(self, request: Request) -> None:
        """Queue a request. ``QueueFull`` above ``max_waiting``; ``ConfigError`` when it can never be served."""
        if len(self._waiting) >= self.config.max_waiting:
            raise QueueFull(f"the queue is full: {len(self._waiting)} requests wait (--max-queue {self.config.max_waiting})")
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens == 0:
            raise ConfigError("prompt: has no tokens, must have at least 1")
        if num_prompt_tokens + min(request.params.max_tokens, 1) > self.config.max_model_len:
            raise ConfigError(
                f"prompt: has {num_prompt_tokens} tokens, must leave room for at least one more in the context of "
                f"{self.config.max_model_len} (--max-model-len)"
            )
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is in use")
        sequence = _Sequence(request, self._next_arrival)
        self._next_arrival += 1
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> bool:
        """Forget a request at once, wherever it is; a token of it still in flight is dropped. False when it is not there."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._remove(sequence)
        return True

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be planned now: no work, all of it in flight, or lanes full."""
        if len(self._in_flight) >= self.config.lane_depth:
            return None
        picked = self._pick_suspect(self._suspects[0]) if self._suspects else self._pick_rows()
        return self._plan(picked) if picked else None

    def heartbeat(self) -> StepPlan:
        """A step without rows, which still goes through every boundary and back. Only while none is in flight."""
        return self._plan([])

    def end_epoch(self) -> list[Request]:
        """Ranks are lost: no step in flight comes back. Every unfinished request waits to be computed again; returns those that
        have failed: they were computed alone, because they were suspects, and are forgotten."""
        lost = [sequence for sequences in self._in_flight.values() for sequence in sequences if sequence.slot >= 0]
        self._in_flight.clear()
        for sequence in reversed(self._running.copy()):
            sequence.is_in_flight = False
            self._leave_seat(sequence)
            self._waiting.appendleft(sequence)
        self._waiting = deque(sorted(self._waiting, key=lambda s: s.arrival))
        self._freed.clear()  # new ranks, or old ones with new tables: no slot is taken
        failed = [sequence.request for sequence in lost if sequence in self._suspects]
        for sequence in lost:
            if sequence in self._suspects:
                self._remove(sequence)
            elif sequence.num_tokens == sequence.num_tokens_when_lost:
                insort(self._suspects, sequence, key=lambda s: s.arrival)
            sequence.num_tokens_when_lost = sequence.num_tokens
        return failed

    def begin_epoch(self, epoch: int) -> None:
        """From now on plans are of ``epoch``; its ranks hold nothing yet."""
        self.epoch = epoch

    def _plan(self, picked: Sequence[tuple[_Sequence, PlanRow]]) -> StepPlan:
        step_id = self._next_step_id
        self._next_step_id += 1
        self._in_flight[step_id] = [sequence for sequence, _ in picked]
        freed, self._freed = self._freed, []
        needs = {s.token_step_id for s, row in picked if row.kind is RowKind.DECODE}
        return StepPlan(
            epoch=self.epoch,
            step_id=step_id,
            rows=[row for _, row in picked],
            freed=freed,
            needs_tokens_of=sorted(needs),
            max_sample_len=1,
            num_in_flight=len(self._in_flight),
        )

    def fail(self, slot: int, generation: int) -> Request | None:
        """Forget the request whose row a stage could not compute; None when it has left its seat already."""
        if (sequence := self._sequence_of(slot, generation)) is None:
            return None
        self._remove(sequence)
        return sequence.request

    def update(self, result: StepResult) -> list[tuple[Request, TokenChunk | StageFailed]]:
        """Apply what a step sampled; returns the tokens for each request that got some, in row order, or why it failed.

        Rows of a sequence that was aborted or preempted meanwhile are dropped and counted in ``num_stale_rows``.
        """
        sequences = self._in_flight.pop(result.step_id, None)
        if sequences is None:
            raise ControlError(f"a result came for step {result.step_id}, which is not in flight")
        for sequence in sequences:
            sequence.is_in_flight = False
        for scored in result.scored:  # first: they come before the token that follows the prompt
            if (sequence := self._sequence_of(scored.slot, scored.generation)) is not None:
                self._add_prompt_logprobs(sequence, scored)
        chunks: list[tuple[Request, TokenChunk | StageFailed]] = []
        for row in result.rows:
            sequence = self._sequence_of(row.slot, row.generation)
            if sequence is None:
                self.num_stale_rows += 1
                continue
            if row.error:
                self._remove(sequence)
                chunks.append((sequence.request, StageFailed(self.config.num_stages - 1, row.error)))
            else:
                chunks.append((sequence.request, self._append(sequence, row, result.step_id)))
        return chunks

    # ---- choosing rows --------------------------------------------------------------------------------------------

    def _pick_suspect(self, suspect: _Sequence) -> list[tuple[_Sequence, PlanRow]]:
        """The next chunk of a suspect, when nothing is in flight; its place is made if there is none."""
        if self._in_flight:
            return []
        if suspect.slot < 0:
            num_blocks = self._num_blocks_for(suspect.num_tokens + 1)
            while not self._free_slots or len(self._free_blocks) < num_blocks:
                self._preempt(self._running[-1])
            self._waiting.remove(suspect)
            self._admit(suspect)
        max_tokens = self.config.max_num_batched_tokens
        if _num_unscored(suspect):
            max_tokens = min(max_tokens, MAX_SCORED_TOKENS)
        return [(suspect, self._prefill_row(suspect, max_tokens))]

    def _pick_rows(self) -> list[tuple[_Sequence, PlanRow]]:
        max_rows = self._max_rows()
        max_tokens = self.config.max_num_batched_tokens
        num_reserved = self._num_reserved_for_prefill(min(max_rows, max_tokens))
        picked: list[tuple[_Sequence, PlanRow]] = []
        # Decodes first: they are short, and somebody reads along. The one that has waited longest goes first, so that
        # none starves when a step has not room for all.
        for sequence in sorted((s for s in self._running if not s.is_prefilling), key=lambda s: s.token_step_id):
            if min(max_rows - len(picked), max_tokens) <= num_reserved:
                break
            if sequence.is_in_flight or sequence.slot < 0:  # preempted by an earlier one of this loop
                continue
            if self._grow(sequence):
                picked.append((sequence, self._decode_row(sequence)))
                max_tokens -= 1
        max_scored = MAX_SCORED_TOKENS
        while len(picked) < max_rows and max_tokens > 0 and max_scored > 0 and (sequence := self._next_prefill()) is not None:
            row = self._prefill_row(sequence, min(max_tokens, max_scored) if _num_unscored(sequence) else max_tokens)
            picked.append((sequence, row))
            max_tokens -= row.num_tokens
            max_scored -= len(row.scored)
        return picked

    def _max_rows(self) -> int:
        """ceil(active / stages): with more, the rows convoy in one step and the other stages stand idle."""
        num_active = len(self._running)
        num_free_blocks = len(self._free_blocks)
        for sequence, _ in zip(self._waiting, self._free_slots, strict=False):
            num_free_blocks -= self._num_blocks_for(sequence.num_tokens + 1)
            if num_free_blocks < 0:
                break
            num_active += 1
        return max(1, -(-num_active // self.config.num_stages))

    def _num_reserved_for_prefill(self, room: int) -> int:
        """How much of a step's room decodes must leave, so that they cannot keep a prompt waiting for ever."""
        if not self._can_prefill():
            return 0
        return 1 if room > 1 else self._next_step_id % 2  # the only place is taken in turns

    def _can_prefill(self) -> bool:
        return any(s.is_prefilling and not s.is_in_flight for s in self._running) or self._can_admit()

    def _can_admit(self) -> bool:
        if not self._waiting or not self._free_slots:
            return False
        return self._num_blocks_for(self._waiting[0].num_tokens + 1) <= len(self._free_blocks)

    def _next_prefill(self) -> _Sequence | None:
        """A sequence to prefill: one under way, else the longest waiting one if there is room for all its tokens."""
        for sequence in self._running:
            if sequence.is_prefilling and not sequence.is_in_flight:
                return sequence
        return self._admit(self._waiting.popleft()) if self._can_admit() else None

    def _admit(self, sequence: _Sequence) -> _Sequence:
        """Give a waiting sequence a slot and the blocks of all its tokens and of the one it will sample."""
        sequence.slot = self._free_slots.popleft()
        sequence.generation = self._generations[sequence.slot]
        sequence.num_computed = 0
        sequence.is_prefilling = True
        self._seats[sequence.slot] = sequence
        insort(self._running, sequence, key=lambda s: s.arrival)
        return sequence

    def _grow(self, sequence: _Sequence) -> bool:
        """Make sure the next position of a decoding sequence has a block, preempting younger sequences for it.

        False when it must wait: nothing is free and the only younger sequences are in flight, or it was the youngest
        and gave up its own place.
        """
        if self._num_blocks_for(sequence.num_computed + 1) <= len(sequence.blocks):
            return True
        while not self._free_blocks:
            younger = [s for s in self._running if s.arrival > sequence.arrival]
            if not younger:
                self._preempt(sequence)
                return False
            victim = next((s for s in reversed(younger) if not s.is_in_flight), None)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _decode_row(self, sequence: _Sequence) -> PlanRow:
        start = sequence.num_computed
        sequence.num_computed += 1
        sequence.is_in_flight = True
        return PlanRow(
            sequence.slot,
            sequence.generation,
            RowKind.DECODE,
            start,
            num_tokens=1,
            token_ids=[],
            blocks=self._take_blocks(sequence, sequence.num_computed),
            sampling=None,
            needs_token=True,
        )

    def _prefill_row(self, sequence: _Sequence, max_tokens: int) -> PlanRow:
        start = sequence.num_computed
        num_tokens = min(max_tokens, sequence.num_tokens - start)
        is_last_chunk = start + num_tokens == sequence.num_tokens
        sequence.num_computed += num_tokens
        sequence.is_in_flight = True
        request = sequence.request
        # The token after each position of the chunk, as far as it is in the prompt. After a preemption some may be known.
        scored = request.prompt_token_ids[start + 1 : start + num_tokens + 1] if _num_unscored(sequence) else []
        sequence.scores_from = start + 1
        return PlanRow(
            sequence.slot,
            sequence.generation,
            RowKind.PREFILL,
            start,
            num_tokens,
            token_ids=request.token_ids[start : start + num_tokens],
            # All blocks come with the first chunk: a prefill once begun never waits for memory.
            blocks=self._take_blocks(sequence, sequence.num_tokens + 1),
            sampling=self._row_sampling(request) if start == 0 else None,
            needs_token=is_last_chunk,
            scored=scored,
        )

    def _row_sampling(self, request: Request) -> RowSampling:
        params = request.params
        num_prompt_tokens = len(request.prompt_token_ids)
        banned = set[int]()
        if params.min_tokens:
            banned.update(params.stop_token_ids)
            if not params.ignore_eos:
                banned.update(self.config.eos_token_ids)
        return RowSampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=request.seed,
            num_prompt_tokens=num_prompt_tokens,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=list(params.logit_bias.items()),
            banned_token_ids=sorted(banned),
            banned_until=num_prompt_tokens + params.min_tokens if banned else 0,
            num_logprobs=NO_LOGPROBS if params.num_logprobs is None else params.num_logprobs,
            num_prompt_logprobs=NO_LOGPROBS if params.num_prompt_logprobs is None else params.num_prompt_logprobs,
        )

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self.config.max_model_len) // self.config.block_size)

    def _take_blocks(self, sequence: _Sequence, num_tokens: int) -> list[int]:
        """Move to the sequence the blocks it lacks to hold ``num_tokens``; returns them."""
        missing = self._num_blocks_for(num_tokens) - len(sequence.blocks)
        blocks = [self._free_blocks.popleft() for _ in range(missing)]
        sequence.blocks += blocks
        return blocks

    # ---- leaving --------------------------------------------------------------------------------------------------

    def _append(self, sequence: _Sequence, row: SampledRow, step_id: int) -> TokenChunk:
        request, params = sequence.request, sequence.request.params
        is_first = request.num_generated == 0
        prompt_logprobs = request.prompt_logprobs if is_first else ()
        planned_at_ns = request.planned_at_ns if is_first else 0
        sequence.is_prefilling = False
        sequence.token_step_id = step_id
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        if params.max_tokens == 0:  # the prompt is computed, which is all that was asked for
            self._remove(sequence)
            return TokenChunk([], FinishReason.LENGTH, prompt_logprobs=prompt_logprobs, planned_at_ns=planned_at_ns)
        new_token_ids: list[int] = []
        finish_reason: FinishReason | None = None
        stop_token_id: int | None = None
        for token_id in row.token_ids:
            new_token_ids.append(token_id)
            request.token_ids.append(token_id)
            is_eos = token_id in self.config.eos_token_ids and not params.ignore_eos
            if is_eos or token_id in params.stop_token_ids:
                finish_reason, stop_token_id = FinishReason.STOP, token_id
            elif request.num_generated >= params.max_tokens or len(request.token_ids) >= self.config.max_model_len:
                finish_reason = FinishReason.LENGTH
            if finish_reason is not None:
                self._remove(sequence)
                break
        logprobs = row.logprobs[: len(new_token_ids)]
        return TokenChunk(new_token_ids, finish_reason, stop_token_id, logprobs, prompt_logprobs, planned_at_ns)

    def _sequence_of(self, slot: int, generation: int) -> _Sequence | None:
        """Whose row it is; None when that one has left its seat."""
        sequence = self._seats[slot] if 0 <= slot < len(self._seats) else None
        return sequence if sequence is not None and sequence.generation == generation else None

    def _add_prompt_logprobs(self, sequence: _Sequence, row: ScoredRow) -> None:
        known = sequence.request.prompt_logprobs
        num_known_here = 1 + len(known) - sequence.scores_from
        known.extend(row.logprobs[max(num_known_here, 0) :])

    def _remove(self, sequence: _Sequence) -> None:
        del self._sequences[sequence.request.request_id]
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        if sequence.slot >= 0:
            self._leave_seat(sequence)
        else:
            self._waiting.remove(sequence)

    def _preempt(self, sequence: _Sequence) -> None:
        """Back to the head of the queue; prompt and tokens so far are prefilled again when there is room."""
        self._leave_seat(sequence)
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _leave_seat(self, sequence: _Sequence) -> None:
        self._freed.append((sequence.slot, sequence.generation))
        self._generations[sequence.slot] += 1
        self._seats[sequence.slot] = None
        self._free_slots.append(sequence.slot)
        self._free_blocks.extend(sequence.blocks)
        self._running.remove(sequence)
        sequence.slot = sequence.generation = -1
        sequence.blocks = []


def _num_unscored(sequence: _Sequence) -> int:
    """Tokens of the prompt whose log-probabilities are wanted and not yet known."""
    request = sequence.request
    if request.params.num_prompt_logprobs is None:
        return 0
    return len(request.prompt_token_ids) - 1 - len(request.prompt_logprobs)
