"""Adds up what the records of a rank's steps say, in the counters and histograms of the same ledger.

The rank pays for a record a step and no more; the exporter, a process of its own, does the rest. The sums are in the ledger, so
they outlive exporter and rank. One process may fold a ledger: it holds a lock on it as long as it lives.
"""

import fcntl
import logging
import mmap
import os
from bisect import bisect_left

from metrics.catalog import (
    EVENT_WAKE,
    INFLIGHT_STEPS,
    LAST_STEP_TIMESTAMP,
    RING_SLOTS,
    STAGE_STATE,
    STAGE_WAIT,
    STATES,
    STEP_DURATION,
    STEP_ROWS,
    STEP_TOKENS,
    TRANSFER,
    TRANSFER_BYTES,
    TRANSFER_DEVICE,
    LabelValues,
    Metric,
    transfers,
)
from metrics.layout import (
    COMPUTED_FOLDED_WORD,
    COMPUTED_WORD,
    LANES_WORD,
    NUM_BEGUN_WORD,
    NUM_ENDED_WORD,
    NUM_FOLDED_WORD,
    NUM_SLOTS_WORD,
    ROW_BYTES_WORD,
    TOKENS_AT_WORD,
    UNTIL_WORD,
    WALL_OFFSET_WORD,
    scaled_buckets,
)
from metrics.reader import LedgerReader
from metrics.steps import (
    ATTACHED,
    FORWARD,
    HAS_DECODE,
    HAS_PREFILL,
    NUM_LANES,
    RECV,
    SEND,
    UNLINKED,
    Clock,
    StepRecord,
    account,
    forward_start,
    token_bytes,
    transfer_starts,
)

log = logging.getLogger(__name__)

_PHASES = {HAS_PREFILL: "prefill", HAS_DECODE: "decode", HAS_PREFILL | HAS_DECODE: "mixed"}
_WAIT_STATES = {"wait_input": "input", "wait_slot": "slot", "wait_token": "token"}


class Folder:
    """Folds the ledger of one rank, which it opens anew from ``reader``'s."""

    def __init__(self, reader: LedgerReader) -> None:
        self._reader = reader
        self._fd = os.open(f"/proc/self/fd/{reader.fileno()}", os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(self._fd, reader.layout.num_bytes)
        self._words = memoryview(self._map).cast("q")
        place = reader.place
        self._is_first, self._is_last = place.rank == 0, place.rank == place.world_size - 1
        self._states = {state: self._first(STAGE_STATE, state) for state in STATES}
        self._waits = {reason: (reason, peer) for reason, peer in STAGE_WAIT.labels.series(place)}
        self._transfers = {op: (op, peer) for op, peer in transfers(place)}
        self._is_owner = False

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self._fd)

    def fold(self) -> bool:
        """Add up what is new; False when another process does that."""
        if not self._is_owner:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            self._is_owner = True
        words = self._words
        while True:
            first, records = self._reader.records(words[NUM_FOLDED_WORD])
            if not records:
                break
            if num_lost := first - words[NUM_FOLDED_WORD]:
                log.warning("rank %d: %d steps were written over before they were counted", self._reader.place.rank, num_lost)
                words[UNTIL_WORD] = max(records[0].begun_ns, words[UNTIL_WORD])
            for record in records:
                self._fold_record(record)
            words[NUM_FOLDED_WORD] = first + len(records)
        self._set_gauges()
        return True

    def _fold_record(self, record: StepRecord) -> None:
        words = self._words
        if record.step_id in (ATTACHED, UNLINKED):
            if record.step_id == UNLINKED:  # what was under way is told by no other record
                state = "idle" if not record.num_rows else "wait_token" if self._is_first else "wait_input"
                words[self._states[state]] += max(record.begun_ns - words[UNTIL_WORD], 0)
            else:  # what the process before was at when it ended, as far as it was told: else the counters would stand still
                for state, ns in self._reader.told_state_times().items():
                    words[self._states[state]] = max(words[self._states[state]], ns)
            words[UNTIL_WORD] = words[TOKENS_AT_WORD] = record.begun_ns
            words[COMPUTED_FOLDED_WORD] = words[COMPUTED_WORD]
            return
        words[COMPUTED_FOLDED_WORD] += record.forward_ended_ns - record.forward_began_ns
        clock = Clock(words[UNTIL_WORD], words[TOKENS_AT_WORD])
        stretches, clock = account(record, clock, is_first=self._is_first, is_last=self._is_last)
        spent: dict[str, int] = dict.fromkeys(STATES, 0)
        for state, start, end in stretches:
            spent[state] += end - start
        for state, ns in spent.items():
            words[self._states[state]] += ns
        words[UNTIL_WORD], words[TOKENS_AT_WORD] = clock
        if record.num_rows:
            for state, reason in _WAIT_STATES.items():
                if (values := self._waits.get(reason)) is not None:
                    self._observe(STAGE_WAIT, values, spent[state])
            waited = forward_start(record) - record.forward_began_ns
            duration = (record.forward_device_ns or record.forward_ended_ns - record.forward_began_ns) - waited
            self._observe(STEP_DURATION, (_PHASES[record.flags & (HAS_PREFILL | HAS_DECODE)],), duration)
            self._observe(STEP_ROWS, (), record.num_rows)
            self._observe(STEP_TOKENS, (), record.num_tokens)
        self._fold_transfers(record)
        for woke, ended in (
            (record.forward_woke_ns, record.forward_ended_ns),
            (record.recv_woke_ns, record.recv_ended_ns),
            (record.send_woke_ns, record.send_ended_ns),
            (record.tokens_woke_ns, record.tokens_ended_ns),
        ):
            if woke:
                self._observe(EVENT_WAKE, (), max(woke - ended, 0))
        last_end = max(record.forward_ended_ns, record.send_ended_ns, record.tokens_ended_ns)
        words[self._first(LAST_STEP_TIMESTAMP)] = last_end + words[WALL_OFFSET_WORD]

    def _fold_transfers(self, record: StepRecord) -> None:
        hidden = record.num_tokens * self._words[ROW_BYTES_WORD]
        recv, send, tokens = transfer_starts(record, is_last=self._is_last)
        for op, start, end, device_ns, size in (
            ("recv", recv, record.recv_ended_ns, 0, hidden),
            ("send", send, record.send_ended_ns, record.send_device_ns, hidden),
            (
                "token_broadcast" if self._is_last else "token_receive",
                tokens,
                record.tokens_ended_ns,
                record.tokens_device_ns,
                token_bytes(record),
            ),
        ):
            values = self._transfers.get(op)
            if not end or values is None:
                continue
            self._words[self._first(TRANSFER_BYTES, *values)] += size
            if start:
                duration = max(end - start, 0)
                self._observe(TRANSFER, values, duration)
                self._observe(TRANSFER_DEVICE, values, device_ns or duration)

    def _set_gauges(self) -> None:
        words = self._words
        begun, ended, lanes = words[NUM_BEGUN_WORD], words[NUM_ENDED_WORD : NUM_ENDED_WORD + NUM_LANES], words[LANES_WORD]
        under_way = [begun - ended[lane] if lanes >> lane & 1 else 0 for lane in range(NUM_LANES)]
        words[self._first(INFLIGHT_STEPS)] = max(under_way)
        num_slots = words[NUM_SLOTS_WORD]
        receiving = reading = sending = num_ends = 0
        if lanes >> RECV & 1:
            num_ends += 1
            reading = min(max(ended[RECV] - ended[FORWARD], 0), num_slots)
            receiving = min(under_way[RECV], num_slots - reading)
        if lanes >> SEND & 1:
            num_ends += 1
            sending = min(max(ended[FORWARD] - ended[SEND], 0), num_slots)
        for state, number in (("receiving", receiving), ("reading", reading), ("sending", sending)):
            words[self._first(RING_SLOTS, state)] = number
        words[self._first(RING_SLOTS, "free")] = num_ends * num_slots - receiving - reading - sending

    def _first(self, metric: Metric, *values: str) -> int:
        return self._reader.layout.find(metric, values).first

    def _observe(self, metric: Metric, values: LabelValues, value: int) -> None:
        first, bounds = self._first(metric, *values), scaled_buckets(metric)
        self._words[first + bisect_left(bounds, value)] += 1
        self._words[first + len(bounds) + 1] += value
