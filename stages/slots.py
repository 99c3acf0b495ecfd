"""The sequence slots of a rank: each one's last tokens and position, and the generation that owns it."""

import threading
from collections.abc import Sequence

import torch

from stages.device import Stream
from stages.plan import PlanRow

NO_TOKEN = -1
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Sampled token ids ``[n, m] int64``, num_sampled and num_rejected ``[n] int32``."""


class SlotTable:
    """State of ``num_slots`` sequence slots.

    ``last_tokens [num_slots, max_sample_len] int64``: the accepted tokens of the slot's last sampled step, newest first, then
    -1. So column 0 is the next input id; the columns after it, which only a step that samples several tokens fills, are the
    tokens accepted just before it.
    ``positions [num_slots] int64``: the position at which column 0 is input next. The forward of a prefill chunk sets it to the
    chunk's last position; ``scatter`` adds ``num_sampled``.

    ``open`` and ``free`` are called from the loop's thread in plan order, ``scatter`` from the thread that receives tokens.
    The tensors' rows of a live generation are read and written by one thread at a time, in the order the plans give.
    """

    def __init__(self, num_slots: int, max_sample_len: int) -> None:
        self.num_slots = num_slots
        self.max_sample_len = max_sample_len
        self.last_tokens = torch.full((num_slots, max_sample_len), NO_TOKEN)
        self.positions = torch.zeros(num_slots, dtype=torch.int64)
        self._last_tokens = self.last_tokens.numpy()  # the same memory
        self._positions = self.positions.numpy()
        self.num_stale_rows = 0
        self._lock = threading.Lock()
        self._generations = [-1] * num_slots  # the last one opened
        self._is_open = [False] * num_slots

    def open(self, slot: int, generation: int) -> None:
        """Give a free slot to ``generation``, which must be newer than any the slot had; ``ValueError`` otherwise."""
        self.check_slot(slot)
        with self._lock:
            if self._is_open[slot]:
                raise ValueError(
                    f"slot {slot}: still belongs to generation {self._generations[slot]}, cannot open {generation}"
                )
            if generation <= self._generations[slot]:
                raise ValueError(f"slot {slot}: generation {generation} is not newer than {self._generations[slot]}")
            self._generations[slot] = generation
            self._is_open[slot] = True

    def free(self, slot: int, generation: int) -> None:
        """Take the slot from ``generation``; ``ValueError`` when it is not the current one."""
        self.check_slot(slot)
        with self._lock:
            if not self._is_current(slot, generation):
                raise ValueError(f"slot {slot}: generation {generation} cannot be freed, it is not current")
            self._is_open[slot] = False

    def is_current(self, slot: int, generation: int) -> bool:
        with self._lock:
            return self._is_current(slot, generation)

    def scatter(
        self,
        rows: Sequence[PlanRow],
        sampled_token_ids: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
    ) -> int:
        """Store a step's sampled tokens in the slots of ``rows``, its sampled rows, and advance their positions.

        ``sampled_token_ids [n, m] int64``, ``num_sampled [n] int32``, ``num_rejected [n] int32`` (unused here: rejected
        tokens were never part of ``num_sampled``), with ``m <= max_sample_len``. A count outside ``0..m`` is clamped, so that a
        damaged message cannot write elsewhere. Rows whose generation is not current any more are dropped; returns their
        number. A row with nothing sampled keeps its state.
        """
        n, m = sampled_token_ids.shape
        if n != len(rows) or num_sampled.shape != (n,) or num_rejected.shape != (n,) or m > self.max_sample_len:
            raise ValueError(
                f"tokens of shape {(n, m)}, {tuple(num_sampled.shape)}, {tuple(num_rejected.shape)} "
                f"for {len(rows)} rows of at most {self.max_sample_len}"
            )
        for row in rows:
            self.check_slot(row.slot)
        # The few rows of a step are ten times quicker one by one through numpy than by a dozen small tensor operations.
        counts = [min(max(count, 0), m) for count in num_sampled.tolist()]
        accepted = [ids[:count] for ids, count in zip(sampled_token_ids.tolist(), counts, strict=True)]
        with self._lock:
            current = [i for i, row in enumerate(rows) if self._is_current(row.slot, row.generation)]
            padding = [NO_TOKEN] * self.max_sample_len
            for i in current:
                if counts[i]:
                    slot = rows[i].slot
                    self._last_tokens[slot] = (accepted[i][::-1] + padding)[: self.max_sample_len]
                    self._positions[slot] += counts[i]
            num_stale = n - len(current)
            self.num_stale_rows += num_stale
        return num_stale

    def enqueue_scatter(self, stream: Stream, step_id: int, rows: Sequence[PlanRow], tokens: Tokens) -> None:
        """``scatter`` in the order of ``stream``: the tokens of step ``step_id``, as a message of them has them."""
        stream.launch(lambda: void(self.scatter(rows, *tokens)))

    def reopened_after(self, rows: Sequence[PlanRow]) -> list[int]:
        """The steps whose tokens must have been stored before ``rows`` may run, because a row opens a slot that they sampled.

        None here: a late token of a dead request is told by its generation.
        """
        return []

    def close(self) -> None:
        """Once nothing enqueued uses it any more."""

    def check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot}: must be between 0 and {self.num_slots - 1}")

    def _is_current(self, slot: int, generation: int) -> bool:
        return 0 <= slot < self.num_slots and self._is_open[slot] and self._generations[slot] == generation


def void(_: object) -> None:
    """Drops a value, where a callable must return None."""
