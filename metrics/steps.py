"""What a rank writes of each step, and what follows from it: how the time of its compute stream was spent, and spans.

A rank writes one record a step, of plain numbers, once everything that it does in the step has ended: that is all that it
pays for. Whoever reads the ledger works out the rest (``metrics.fold``, ``metrics.reader``).
"""

from typing import NamedTuple, cast

from metrics.layout import NO_PEER, NO_STEP, SpanKind

FORWARD, RECV, SEND, TOKENS = range(4)
"""The lanes of a rank: each does one operation a step, in step order. ``TOKENS`` sends or receives sampled tokens."""
NUM_LANES = 4

# Bits of ``StepRecord.flags``.
HAS_PREFILL = 1
HAS_DECODE = 2
CONTINUES = 4  # the step goes on with what an earlier step left: the engine had work all the time
SENDS_ON_COMPUTE = 8
TOKENS_ON_COMPUTE = 16


class StepRecord(NamedTuple):
    """One step of one rank. Times are of ``time.perf_counter_ns``, 0 where there is none.

    ``begun_ns``: the rank took up the plan. ``forward_began_ns``: all that the forward needs is there. ``recv_ready_ns``,
    ``send_ready_ns``, ``tokens_ready_ns``: the transfer had waited for what it needs of a peer, 0 where that is not known.
    ``tokens_needed_ns`` and ``slot_needed_ns``: when the earlier tokens and the output buffer that the forward waited for were
    there. ``..._device_ns`` are durations by the device's clock, 0 where it is the host's. ``..._woke_ns``: the coroutine that
    awaited the end went on, 0 when there was nothing to wait for.
    """

    step_id: int  # or ATTACHED, or UNLINKED
    begun_ns: int
    num_rows: int
    num_tokens: int
    num_reqs: int  # rows that are sampled
    max_sample_len: int
    flags: int
    recv_ready_ns: int = 0
    recv_ended_ns: int = 0
    forward_began_ns: int = 0
    forward_ended_ns: int = 0
    forward_device_ns: int = 0
    send_ready_ns: int = 0
    send_ended_ns: int = 0
    send_device_ns: int = 0
    tokens_ready_ns: int = 0
    tokens_ended_ns: int = 0
    tokens_device_ns: int = 0
    tokens_needed_ns: int = 0
    slot_needed_ns: int = 0
    forward_woke_ns: int = 0
    recv_woke_ns: int = 0
    send_woke_ns: int = 0
    tokens_woke_ns: int = 0


class Stretch(NamedTuple):
    """Time that the compute stream spent in one state, of ``metrics.catalog.STATES``."""

    state: str
    start_ns: int
    end_ns: int


class Clock(NamedTuple):
    """Up to where a rank's time is accounted for: ``until_ns``; and when it had its last sampled tokens: from then to the next
    plan nothing was in flight, unless the plan came first."""

    until_ns: int = 0
    tokens_at_ns: int = 0


LANES: dict[SpanKind, int] = {
    "forward": FORWARD,
    "recv": RECV,
    "send": SEND,
    "token_broadcast": TOKENS,
    "token_receive": TOKENS,
}
"""The lane of each kind of operation."""


def forward_start(record: StepRecord) -> int:
    """When the forward of a step really began: a stream passes the Point before it without waiting for a buffer or tokens."""
    return min(max(record.forward_began_ns, record.tokens_needed_ns, record.slot_needed_ns), record.forward_ended_ns)


def account(record: StepRecord, clock: Clock, *, is_first: bool, is_last: bool) -> tuple[list[Stretch], Clock]:
    """How the compute stream spent the time up to the end of a step; ``clock`` is that of the step before.

    Before the plan came: on the first stage it waited for the tokens that let the engine plan, on another for input, as long as
    anything was in flight; after that the engine had to plan (``host``), or there was nothing to do (``idle``). Then for what
    the forward needs, in the order in which its stream waits: input, tokens, output buffer.
    """
    now = clock.until_ns
    stretches: list[Stretch] = []

    def until(state: str, end_ns: int) -> None:
        nonlocal now
        if end_ns > now:
            stretches.append(Stretch(state, now, end_ns))
            now = end_ns

    begun_ns, began_ns = record.begun_ns, forward_start(record)
    tokens_at_ns = now if is_last else clock.tokens_at_ns
    until("wait_token" if is_first else "wait_input", min(tokens_at_ns, begun_ns))
    if not record.flags & CONTINUES and tokens_at_ns < begun_ns:
        until("idle", begun_ns)
    until("host", begun_ns)
    until("wait_input", min(record.recv_ready_ns or record.recv_ended_ns, began_ns))
    until("transfer", min(record.recv_ended_ns, began_ns))
    until("wait_token", min(record.tokens_needed_ns, began_ns))
    until("wait_slot", min(record.slot_needed_ns, began_ns))
    until("host", began_ns)
    until("compute", record.forward_ended_ns)
    if record.flags & SENDS_ON_COMPUTE:
        until("wait_slot", record.send_ready_ns)
        until("transfer", record.send_ended_ns)
    if record.flags & TOKENS_ON_COMPUTE:
        until("transfer", record.tokens_ended_ns)
    return stretches, Clock(now, max(record.tokens_ended_ns, record.forward_ended_ns))


class Span(NamedTuple):
    """``peer`` is the rank at the other end, -1 for none or all. ``size``: tokens of a forward, bytes of a transfer, else 0."""

    step_id: int
    kind: SpanKind
    peer: int
    start_ns: int
    end_ns: int
    size: int = 0


def token_bytes(record: StepRecord) -> int:
    """Of the message with a step's tokens: ids of 8 bytes, and two counts of 4 for each request."""
    return record.num_reqs * (8 * record.max_sample_len + 8)


def transfer_starts(record: StepRecord, *, is_last: bool) -> tuple[int, int, int]:
    """From when on receive, send and tokens could be transferred: data and slot there; 0 where that is not known."""
    send = max(record.send_ready_ns, record.forward_ended_ns) if record.send_ended_ns else 0
    tokens = max(record.tokens_ready_ns, record.forward_ended_ns) if is_last else record.tokens_ready_ns
    return record.recv_ready_ns, send, tokens if record.tokens_ended_ns else 0


def spans_of(record: StepRecord, stretches: list[Stretch], hidden_row_bytes: int, *, rank: int, world_size: int) -> list[Span]:
    """The step as spans. A transfer whose beginning is not known is shown from the forward that follows or precedes it."""
    step_id, last = record.step_id, world_size - 1
    found = [
        Span(step_id, cast("SpanKind", state), _awaited(state, rank, last), start, end)
        for state, start, end in stretches
        if state not in ("compute", "transfer")
    ]
    recv, send, tokens = transfer_starts(record, is_last=rank == last)
    if record.recv_ended_ns:
        size = record.num_tokens * hidden_row_bytes
        found.append(Span(step_id, "recv", rank - 1, recv or record.recv_ended_ns, record.recv_ended_ns, size))
    found.append(Span(step_id, "forward", NO_PEER, forward_start(record), record.forward_ended_ns, record.num_tokens))
    if record.send_ended_ns:
        found.append(Span(step_id, "send", rank + 1, send, record.send_ended_ns, record.num_tokens * hidden_row_bytes))
    if record.tokens_ended_ns:
        kind, peer = ("token_broadcast", NO_PEER) if rank == last else ("token_receive", last)
        found.append(Span(step_id, kind, peer, tokens or record.tokens_ended_ns, record.tokens_ended_ns, token_bytes(record)))
    return found


def _awaited(state: str, rank: int, last: int) -> int:
    return {"wait_input": rank - 1, "wait_slot": rank + 1, "wait_token": last}.get(state, NO_PEER)


# What a record without a step says, in the place of its number.
ATTACHED = NO_STEP  # a process has begun to write the ledger
UNLINKED = NO_STEP - 1  # an epoch has ended; ``num_rows`` is 1 when it cut a step off
