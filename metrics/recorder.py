"""Where a rank's loop reports what it sees of its steps: a record a step in the rank's ledger, and what the rank is at."""

import struct
from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import Any, Protocol

from metrics.catalog import (
    BUILD_INFO,
    EPOCH,
    EVENT_WAKES,
    KV_BLOCKS,
    PEER_CONNECTED,
    RANK_RESTARTS,
    READY,
    STAGE_INFO,
    STALE_ROWS,
    TRANSFER_ERRORS,
    peers,
)
from metrics.layout import (
    COMPUTED_WORD,
    IDLE_UNTIL_WORD,
    LANES_WORD,
    LAST_STEP_WORD,
    NEEDED_STEP_WORD,
    NUM_BEGUN_WORD,
    NUM_ENDED_WORD,
    NUM_RECORDS,
    NUM_RECORDS_WORD,
    NUM_SLOTS_WORD,
    RECORD_WORDS,
    ROW_BYTES_WORD,
    SINCE_WORD,
    WORD_BYTES,
)
from metrics.ledger import LedgerWriter
from metrics.steps import (
    ATTACHED,
    CONTINUES,
    FORWARD,
    HAS_DECODE,
    HAS_PREFILL,
    NUM_LANES,
    RECV,
    SEND,
    SENDS_ON_COMPUTE,
    TOKENS,
    TOKENS_ON_COMPUTE,
    UNLINKED,
    StepRecord,
)


class Point(Protocol):
    """A place in a stream's order (``stages.device.Point``), as it is looked at here once it is reached."""

    @property
    def reached_at_ns(self) -> int: ...
    @property
    def waited_until_ns(self) -> int: ...
    @property
    def stream_name(self) -> str: ...
    def seconds_since(self, start: Any) -> float: ...


class RecordedWork(Protocol):
    """What one lane did in a step, between two Points; ``tokens`` and ``slot`` are what a forward waited for besides."""

    @property
    def start(self) -> Point: ...
    @property
    def end(self) -> Point: ...
    @property
    def tokens(self) -> Sequence[Point]: ...
    @property
    def slot(self) -> Point | None: ...


class Row(Protocol):
    @property
    def kind(self) -> int: ...  # 0: of a prompt, else decode
    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def needs_token(self) -> bool: ...


class Plan(Protocol):
    @property
    def step_id(self) -> int: ...
    @property
    def rows(self) -> Sequence[Row]: ...
    @property
    def needs_tokens_of(self) -> Sequence[int]: ...
    @property
    def max_sample_len(self) -> int: ...


_DECODES = HAS_DECODE | CONTINUES
_GOES_ON = HAS_PREFILL | CONTINUES
_pack = struct.Struct(f"<{RECORD_WORDS - 1}q").pack_into
assert len(StepRecord._fields) == RECORD_WORDS - 2


class StepRecorder:
    """Writes the ledger of one rank. All calls from the rank's loop, which pays for a few dozen stores a step.

    ``begin`` with each plan, ``ended`` as each lane's part of a step is heard to have ended, ``finish`` after the last of them.
    """

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer
        self._words = words = writer.words
        layout = writer.layout
        self._map = writer.memory
        self._records_word = layout.records_word
        self._has_device_clock = False
        self._shared_streams = -1  # flags of the lanes that use the compute stream; not known before the first step
        first_wake = layout.find(EVENT_WAKES, ("spin",)).first
        self.wake_counts: memoryview = words[first_wake : first_wake + 3]
        self._kv_used = layout.find(KV_BLOCKS, ("used",)).first
        self._kv_free = layout.find(KV_BLOCKS, ("free",)).first
        self._stale_rows = writer.counter(STALE_ROWS)
        self._num_stale = self._num_blocks = 0
        self._num_begun, self._num_ended = 0, [0] * NUM_LANES  # as in the ledger
        self._num_records, self._computed = words[NUM_RECORDS_WORD], words[COMPUTED_WORD]
        self._errors = {
            values[0]: writer.counter(TRANSFER_ERRORS, *values) for values in TRANSFER_ERRORS.labels.series(writer.place)
        }
        self._failed_lanes: set[int] = set()
        self._connected = [writer.gauge(PEER_CONNECTED, *values) for values in peers(writer.place)]
        self._ready, self._epoch = writer.gauge(READY), writer.gauge(EPOCH)
        self._about: dict[str, str] = {"layers": "", "transport": "", "device": "", "host": ""}
        for word in (NUM_BEGUN_WORD, LAST_STEP_WORD, LANES_WORD, *range(NUM_ENDED_WORD, NUM_ENDED_WORD + NUM_LANES)):
            words[word] = 0
        words[NEEDED_STEP_WORD] = -1
        if writer.num_processes > 1:
            writer.counter(RANK_RESTARTS).add()
        self._write(StepRecord(ATTACHED, perf_counter_ns(), 0, 0, 0, 0, 0))

    def close(self) -> None:
        """Let go of the ledger, which stays as it is."""
        self.wake_counts.release()
        self._writer.close()

    # ---- the life of a rank -----------------------------------------------------------------------------------------

    def describe(self, build: Mapping[str, str], *, layers: str, device: str, host: str) -> None:
        """What runs here; the transport is told with each epoch."""
        self._writer.set_info(BUILD_INFO, **build)
        self._about |= {"layers": layers, "device": device, "host": host}
        self._writer.set_info(STAGE_INFO, **self._about)

    def linked(
        self,
        epoch: int,
        transport: str,
        lanes: Sequence[int],
        *,
        num_slots: int,
        num_blocks: int,
        row_bytes: int,
        has_device_clock: bool,
    ) -> None:
        """The links of an epoch work, and its KV cache is empty. ``lanes`` are those of this stage; each of its rings has
        ``num_slots``, its KV cache ``num_blocks``; ``row_bytes`` one token's hidden states have."""
        words = self._words
        words[ROW_BYTES_WORD], words[NUM_SLOTS_WORD] = row_bytes, num_slots
        words[NUM_BEGUN_WORD] = self._num_begun = 0
        self._num_ended = [0] * NUM_LANES
        for lane in range(NUM_LANES):
            words[NUM_ENDED_WORD + lane] = 0
        words[LANES_WORD] = sum(1 << lane for lane in lanes)
        self._has_device_clock = has_device_clock
        self._shared_streams = -1
        words[self._kv_used], words[self._kv_free] = 0, num_blocks
        self._num_stale = self._num_blocks = 0
        self._failed_lanes.clear()
        self._about["transport"] = transport
        self._writer.set_info(STAGE_INFO, **self._about)
        self._epoch.set(epoch)
        self._set_connected(1)

    def unlinked(self) -> None:
        """Its epoch has ended: nothing is under way any more."""
        is_busy = self._num_begun > self._num_ended[FORWARD]
        self._write(StepRecord(UNLINKED, perf_counter_ns(), int(is_busy), 0, 0, 0, 0))
        self._words[LANES_WORD] = 0
        self._set_connected(0)

    def failed(self, lane: int, kind: str) -> None:
        """A transfer failed: one of the kinds of ``transfer_errors_total``. What fails after it in the lane is no new error."""
        if lane not in self._failed_lanes:
            self._failed_lanes.add(lane)
            self._errors[kind].add()

    def _set_connected(self, value: int) -> None:
        self._ready.set(value)
        for gauge in self._connected:
            gauge.set(value)

    # ---- every step -------------------------------------------------------------------------------------------------

    def begin(self, plan: Plan, begun_ns: int) -> None:
        words, ended, begun = self._words, self._num_ended, self._num_begun
        if ended[FORWARD] == begun:
            words[SINCE_WORD + FORWARD] = words[SINCE_WORD + RECV] = words[SINCE_WORD + SEND] = begun_ns
            if not plan.needs_tokens_of and (ended[TOKENS] == begun or not words[LANES_WORD] >> TOKENS & 1):
                words[IDLE_UNTIL_WORD] = begun_ns
        if ended[TOKENS] == begun:
            words[SINCE_WORD + TOKENS] = begun_ns
        words[LAST_STEP_WORD] = plan.step_id
        if needed := plan.needs_tokens_of:
            words[NEEDED_STEP_WORD] = needed[-1]
        words[NUM_BEGUN_WORD] = self._num_begun = begun + 1

    def forwarded(self, start_ns: int, end_ns: int) -> None:
        """A forward has ended: ``ended`` is told of it next."""
        self._words[COMPUTED_WORD] = self._computed = self._computed + end_ns - start_ns

    def ended(self, lane: int, woke_ns: int) -> None:
        """``woke_ns``: about now."""
        words, ended = self._words, self._num_ended
        words[NUM_ENDED_WORD + lane] = ended[lane] = ended[lane] + 1
        words[SINCE_WORD + lane] = woke_ns

    def finish(
        self,
        plan: Plan,
        begun_ns: int,
        works: Sequence[RecordedWork | None],
        woke_ns: Sequence[int],
        num_blocks: int,
        num_stale: int,
    ) -> None:
        """Everything of a step has ended. ``works`` and ``woke_ns`` are by lane; ``num_blocks`` of the KV cache are in use."""
        num_tokens = num_reqs = flags = 0
        for row in plan.rows:
            num_tokens += row.num_tokens
            if row.needs_token:
                num_reqs += 1
            flags |= _DECODES if row.kind else _GOES_ON if row.start else HAS_PREFILL
        forward, recv, send, tokens = works
        assert forward is not None
        start, end = forward.start, forward.end
        forward_ended = end.reached_at_ns
        recv_ready = recv_ended = send_ready = send_ended = tokens_ready = tokens_ended = 0
        forward_device = send_device = tokens_device = tokens_needed = slot_needed = 0
        if recv is not None:
            recv_ready, recv_ended = recv.end.waited_until_ns, recv.end.reached_at_ns
        if send is not None:
            point = send.end
            send_ready, send_ended = point.waited_until_ns, point.reached_at_ns
        if tokens is not None:
            point = tokens.end
            tokens_ready, tokens_ended = point.waited_until_ns, point.reached_at_ns
        for point in forward.tokens:
            if (needed := point.reached_at_ns) > tokens_needed:
                tokens_needed = needed
        if forward.slot is not None:
            slot_needed = forward.slot.reached_at_ns
        if self._has_device_clock or self._shared_streams < 0:  # on a GPU it depends on the message's size
            self._shared_streams = (SENDS_ON_COMPUTE * (send is not None and send.end.stream_name == end.stream_name)) | (
                TOKENS_ON_COMPUTE * (tokens is not None and tokens.end.stream_name == end.stream_name)
            )
        if self._has_device_clock:
            forward_device = round(end.seconds_since(start) * 1e9)
            if send is not None:
                send_device = round(send.end.seconds_since(send.start) * 1e9)
            if tokens is not None and recv is not None and send is None:
                tokens_device = round(tokens.end.seconds_since(tokens.start) * 1e9)
        words, number = self._words, self._num_records
        first = self._records_word + number % NUM_RECORDS * RECORD_WORDS
        words[first] = 0  # what is read from here on is not taken for a record
        _pack(
            self._map,
            (first + 1) * WORD_BYTES,
            plan.step_id,
            begun_ns,
            len(plan.rows),
            num_tokens,
            num_reqs,
            plan.max_sample_len,
            flags | self._shared_streams,
            recv_ready,
            recv_ended,
            start.reached_at_ns,
            forward_ended,
            forward_device,
            send_ready,
            send_ended,
            send_device,
            tokens_ready,
            tokens_ended,
            tokens_device,
            tokens_needed,
            slot_needed,
            *woke_ns,
            number + 1,
        )
        words[first] = words[NUM_RECORDS_WORD] = self._num_records = number + 1
        if num_blocks != self._num_blocks:
            words[self._kv_free] += self._num_blocks - num_blocks
            words[self._kv_used] = self._num_blocks = num_blocks
        if num_stale != self._num_stale:
            self._stale_rows.add(num_stale - self._num_stale)
            self._num_stale = num_stale

    def _write(self, record: StepRecord) -> None:
        words, number = self._words, self._num_records
        first = self._records_word + number % NUM_RECORDS * RECORD_WORDS
        words[first] = 0
        _pack(self._map, (first + 1) * WORD_BYTES, *record, number + 1)
        words[first] = words[NUM_RECORDS_WORD] = self._num_records = number + 1
