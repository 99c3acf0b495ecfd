"""Choosing tokens from logits, on the last rank.

First come the changes to single logits, in vLLM's order: tokens that are banned for now lose theirs, ``logit_bias`` is added,
then the penalties are taken (``stages.history``). The rest is in the order of transformers: the logits are divided by the
temperature, then ``top_k`` keeps the k largest, then ``top_p`` keeps the fewest of what is left whose probabilities add up to
at least p, then ``min_p`` drops what is less probable than min_p times the most probable token. The most probable token always
stays, and tokens that tie with the least of those kept stay too, so that no result depends on how a sort breaks ties.

A draw is a pure function of the logits and of (seed, position): a race between tokens, each with an exponential time from
Philox with the seed as its key and the position of the sampled token in its counter, divided by its weight (float64); first
between blocks of tokens, then in the block that won, so that some hundred random numbers serve any vocabulary. Logits that
differ in their last bits, as those of a batch of another size, then give another token only in a near tie of the two fastest; a
number looked up in the cumulative distribution would fall on another of the many improbable tokens every few dozen times.
Temperature 0 is greedy; of equal logits the lowest token id wins. Log-probabilities are of the logits as they came.

Nothing here waits for a GPU, and a row that asks for none of a feature takes no part in what it costs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from stages.device import Stream
from stages.history import TokenHistory
from stages.logprobs import StepLogprobs, pack_logprobs
from stages.plan import MAX_LOGPROBS, MAX_SCORED_TOKENS, NO_LOGPROBS, PlanRow, RowSampling
from stages.pp_handler import unpack_tokens
from stages.slots import NO_TOKEN
from stages.transport.links import token_slot_bytes
from stages.upload import upload

# top_p looks at this many of the largest logits first, and at the whole row only when they do not add up to p.
NUM_NUCLEUS_CANDIDATES = 256
DRAW_BLOCK = 256  # tokens; near the root of usual vocabularies


@dataclass
class SamplerOutput:
    """A step's sampled tokens, one row for each of the plan's ``sampled_rows``.

    ``sampled_token_ids [num_reqs, max_sample_len] int64``, -1 past a row's tokens; ``num_sampled [num_reqs] int32``;
    ``num_rejected [num_reqs] int32``. They are views of ``packed``, one after the other. A row whose logits had NaN, +inf or no
    finite value has ``num_sampled`` 0; the other rows are not affected. ``logprobs`` is there, in stream order, if a row asks.
    """

    sampled_token_ids: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    packed: torch.Tensor
    logprobs: StepLogprobs | None = None

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
        num_logprobs = (max_num_reqs + MAX_SCORED_TOKENS) * (1 + 2 * MAX_LOGPROBS)
        self._logprobs = [torch.empty(num_logprobs, dtype=torch.int32, pin_memory=is_pinned) for _ in range(max_steps)]
        self._index = -1

    def next(self, num_reqs: int, max_sample_len: int) -> SamplerOutput:
        self._index = (self._index + 1) % len(self._buffers)
        num_bytes = token_slot_bytes(num_reqs, max_sample_len)
        return SamplerOutput.over(self._buffers[self._index][:num_bytes], num_reqs, max_sample_len)

    def to_host(self, compute: Stream, output: SamplerOutput) -> SamplerOutput:
        mirror, logprobs = self._mirrors[self._index][: len(output.packed)], self._logprobs[self._index]
        on_host = SamplerOutput.over(mirror, *output.sampled_token_ids.shape)

        def copy() -> None:
            mirror.copy_(output.packed, non_blocking=True)
            if output.logprobs is not None:
                on_host.logprobs = output.logprobs.copied_to(logprobs)

        compute.launch(copy)
        return on_host


class Sampler:
    """Samples for ``num_slots`` sequence slots, remembering how each is sampled. Called in step order from one thread.

    ``history`` keeps the tokens of penalised slots; without one no row may be penalised.
    """

    def __init__(self, vocab_size: int, num_slots: int, history: TokenHistory | None = None) -> None:
        self.vocab_size = vocab_size
        self._history = history
        self._seats: list[_Seat | None] = [None] * num_slots

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, rows: Sequence[PlanRow], max_sample_len: int = 1, out: SamplerOutput | None = None
    ) -> SamplerOutput:
        """Sample one token for each of ``rows`` that needs one.

        ``rows`` are all rows of the step, so that the sampling of a row whose first chunk needs no token is seen too;
        ``logits [n, vocab_size]`` of any float dtype are those of the rows that need a token, in that order, and then those of
        all rows' scored tokens. ``out``, when given, is filled and returned. ``ValueError`` when a row's sampling never was.
        """
        sampled = [row for row in rows if row.needs_token]
        scored = [row for row in rows if row.scored]
        num_logits = len(sampled) + (sum(len(row.scored) for row in scored) if scored else 0)
        if logits.shape != (num_logits, self.vocab_size):
            raise ValueError(f"logits {tuple(logits.shape)}: must be {(num_logits, self.vocab_size)}")
        for row in rows:
            if row.sampling is not None:
                self._seats[row.slot] = _Seat(row.generation, row.sampling, logits.device)
            if row.token_ids:
                self._remember_prompt(row)
        output = out or SamplerOutput.empty(len(sampled), max_sample_len)
        if max_sample_len > 1:
            output.sampled_token_ids.fill_(NO_TOKEN)
        output.num_rejected.zero_()
        seats = [self._seat_of(row) for row in sampled]
        asking = [seat for seat in seats if not seat.is_plain]
        token_ids: torch.Tensor | None = None
        if sampled:
            to_sample = logits[: len(sampled)] if scored else logits
            largest, token_ids = to_sample.max(dim=1)
            is_finite = largest.isfinite()
            if asking:
                self._choose(to_sample, sampled, seats, token_ids, is_finite)
            output.num_sampled.copy_(is_finite)
            output.sampled_token_ids[:, 0] = token_ids.masked_fill_(~is_finite, NO_TOKEN)
        if asking or scored:
            output.logprobs = self._logprobs(logits, token_ids, seats, scored)
        return output

    def _choose(
        self,
        logits: torch.Tensor,
        rows: Sequence[PlanRow],
        seats: "Sequence[_Seat]",
        token_ids: torch.Tensor,
        is_finite: torch.Tensor,
    ) -> None:
        """Replace the greedy ``token_ids [n]`` of ``logits [n, vocab]`` where seats ask for others, and ``is_finite [n]``."""
        positions = [row.start + row.num_tokens for row in rows]
        changing = [i for i, seat in enumerate(seats) if seat.changes_logits(positions[i])]
        changed: torch.Tensor | None = None
        if changing:
            where = upload(changing, torch.int64, logits.device)
            changed = logits[where].to(torch.float32)
            self._change(
                changed, [rows[i].slot for i in changing], [positions[i] for i in changing], [seats[i] for i in changing]
            )
            largest, chosen = changed.max(dim=1)
            token_ids.index_copy_(0, where, chosen)
            is_finite.index_copy_(0, where, is_finite[where] & largest.isfinite())
        random = [i for i, seat in enumerate(seats) if seat.sampling.temperature > 0]
        if random:
            where = upload(random, torch.int64, logits.device)
            drawn_from = logits[where]
            if changed is not None:
                places = {i: place for place, i in enumerate(changing)}
                both = [(to, places[i]) for to, i in enumerate(random) if i in places]
                to = upload([to for to, _ in both], torch.int64, logits.device)
                of = upload([of for _, of in both], torch.int64, logits.device)
                drawn_from = drawn_from.to(torch.float32).index_copy_(0, to, changed[of])
            drawn = _draw(drawn_from, [seats[i].sampling for i in random], [positions[i] for i in random])
            token_ids.index_copy_(0, where, drawn)
        remembered = [i for i in changing if seats[i].sampling.is_penalised]
        if remembered:
            assert self._history is not None
            new = token_ids if len(remembered) == len(rows) else token_ids[upload(remembered, torch.int64, logits.device)]
            slots, at = [rows[i].slot for i in remembered], [positions[i] for i in remembered]
            # An index into the vocabulary, whatever the logits were: it is read back before anybody has looked at it.
            self._history.store_sampled(slots, at, new.clamp(0, self.vocab_size - 1))

    def _change(self, logits: torch.Tensor, slots: Sequence[int], positions: Sequence[int], seats: "Sequence[_Seat]") -> None:
        """Ban, bias and penalise ``logits [n, vocab]`` float32, in place."""
        biases = [(i, bias) for i, seat in enumerate(seats) for bias in seat.biases(positions[i])]
        if biases:
            counts = upload([len(bias.token_ids) for _, bias in biases], torch.int64, logits.device)
            rows = upload([i for i, _ in biases], torch.int64, logits.device)
            num_values = sum(len(bias.token_ids) for _, bias in biases)
            rows = rows.repeat_interleave(counts, output_size=num_values)
            index = rows * self.vocab_size + torch.cat([bias.token_ids for _, bias in biases])
            logits.view(-1).index_add_(0, index, torch.cat([bias.values for _, bias in biases]))
        penalised = [i for i, seat in enumerate(seats) if seat.sampling.is_penalised]
        if penalised:
            assert self._history is not None
            which = upload(penalised, torch.int64, logits.device)
            part = logits if len(penalised) == len(seats) else logits[which]
            samplings = [seats[i].sampling for i in penalised]
            self._history.penalise(part, [slots[i] for i in penalised], [positions[i] for i in penalised], samplings)
            if part is not logits:
                logits.index_copy_(0, which, part)

    def _logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor | None, seats: "Sequence[_Seat]", scored: Sequence[PlanRow]
    ) -> StepLogprobs | None:
        """``token_ids`` are what the seats got, None when there are none."""
        wanted = [(i, seat.sampling.num_logprobs) for i, seat in enumerate(seats) if seat.sampling.num_logprobs != NO_LOGPROBS]
        if not wanted and not scored:
            return None
        scored_rows = [(row, self._seat_of(row).sampling.num_prompt_logprobs) for row in scored]
        device = logits.device
        told = [upload([token_id for row in scored for token_id in row.scored], torch.int64, device)] if scored else []
        if wanted and token_ids is not None:
            told.insert(0, token_ids[upload([i for i, _ in wanted], torch.int64, device)])
        if len(wanted) < len(seats):
            logits = logits[upload([i for i, _ in wanted] + list(range(len(seats), len(logits))), torch.int64, device)]
        num_top = max(num_top for _, num_top in (*wanted, *scored_rows))
        return StepLogprobs(pack_logprobs(logits, torch.cat(told), num_top), wanted, scored_rows)

    def _remember_prompt(self, row: PlanRow) -> None:
        seat = self._seats[row.slot]
        if seat is not None and seat.generation == row.generation and seat.sampling.is_penalised:
            if self._history is None:
                raise ValueError(f"slot {row.slot}: is penalised, and this sampler keeps no history")
            self._history.store_prompt(row.slot, row.start, row.token_ids)

    def _seat_of(self, row: PlanRow) -> "_Seat":
        seat = self._seats[row.slot]
        if seat is None or seat.generation != row.generation:
            raise ValueError(f"slot {row.slot}, generation {row.generation}: sampled before its sampling was given")
        return seat


@dataclass(frozen=True)
class _Biases:
    """What is added to a row's logits: ``token_ids [n]`` int64 and ``values [n]`` float32, on the device."""

    token_ids: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, token_ids: Sequence[int], values: Sequence[float], device: torch.device) -> "tuple[_Biases, ...]":
        """One, or none when there is nothing to add."""
        if not token_ids:
            return ()
        return (cls(upload(token_ids, torch.int64, device), upload(values, torch.float32, device)),)


class _Seat:
    """How the tokens of a sequence slot are sampled, for one generation."""

    def __init__(self, generation: int, sampling: RowSampling, device: torch.device) -> None:
        self.generation = generation
        self.sampling = sampling
        given, banned = sampling.logit_bias, sampling.banned_token_ids
        self._bias = _Biases.of([token_id for token_id, _ in given], [value for _, value in given], device)
        self._ban = _Biases.of(banned, [-math.inf] * len(banned), device) if sampling.banned_until else ()
        self._always_changes = bool(self._bias) or sampling.is_penalised
        self._is_banned_until = sampling.banned_until if self._ban else 0
        # Greedy on the logits as they are, and nothing told of them: by far the most frequent.
        has_changes = self._always_changes or bool(self._ban)
        self.is_plain = not has_changes and sampling.temperature <= 0 and sampling.num_logprobs == NO_LOGPROBS

    def changes_logits(self, position: int) -> bool:
        """Whether the logits of the token at ``position`` are to be changed before it is sampled."""
        return self._always_changes or position < self._is_banned_until

    def biases(self, position: int) -> tuple[_Biases, ...]:
        return self._ban + self._bias if position < self._is_banned_until else self._bias


def race_times(seed: int, position: int, count: int) -> npt.NDArray[np.float64]:
    """The exponential times ``[count]``, all above 0, that decide the token at ``position`` of a sequence with ``seed`` (any 64
    bits)."""
    bits = np.random.Philox(key=seed % 2**64, counter=position << 64).random_raw(count)
    return -np.log(((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)


def _draw(logits: torch.Tensor, samplings: Sequence[RowSampling], positions: Sequence[int]) -> torch.Tensor:
    """Token ids ``[n]`` drawn from ``logits [n, vocab]``, every row by itself: nothing here mixes rows."""
    device, num_rows = logits.device, len(logits)
    logits = logits.to(torch.float64)
    scaled = logits - logits.amax(dim=1, keepdim=True)  # the largest is 0, so a small temperature cannot overflow
    scaled /= upload([s.temperature for s in samplings], torch.float64, device)[:, None]
    weights = _truncated(scaled.exp(), samplings)
    num_blocks = -(-weights.shape[1] // DRAW_BLOCK)
    blocks = pad(weights, (0, num_blocks * DRAW_BLOCK - weights.shape[1])).view(num_rows, num_blocks, DRAW_BLOCK)
    numbers = [race_times(s.seed, at, num_blocks + DRAW_BLOCK) for s, at in zip(samplings, positions, strict=True)]
    times = upload(np.concatenate(numbers), torch.float64, device).view(num_rows, -1)
    block = (blocks.sum(dim=2) / times[:, :num_blocks]).argmax(dim=1)
    within = blocks.gather(1, block[:, None, None].expand(-1, 1, DRAW_BLOCK)).squeeze(1)
    return block * DRAW_BLOCK + (within / times[:, num_blocks:]).argmax(dim=1)


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
