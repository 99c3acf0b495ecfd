"""From the record of a step to states, counters and spans."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from metrics.catalog import STATES, Place, Writer
from metrics.fold import Folder
from metrics.layout import NUM_RECORDS, NUM_RECORDS_WORD, RECORD_WORDS
from metrics.ledger import LedgerWriter, create_ledger
from metrics.reader import Doing, LedgerReader
from metrics.recorder import StepRecorder
from metrics.steps import FORWARD, RECV, SEND, TOKENS, Clock, Span, StepRecord, Stretch, account

HIDDEN_BYTES = 64
MS = 1_000_000


@dataclass(frozen=True)
class FakePoint:
    reached_at_ns: int
    waited_until_ns: int = 0
    stream_name: str = "compute"

    def seconds_since(self, start: "FakePoint") -> float:
        return (self.reached_at_ns - start.reached_at_ns) / 1e9


@dataclass(frozen=True)
class FakeWork:
    start: FakePoint
    end: FakePoint
    tokens: tuple[FakePoint, ...] = ()
    slot: FakePoint | None = None


@dataclass(frozen=True)
class FakeRow:
    kind: int = 1
    start: int = 5
    num_tokens: int = 1
    needs_token: bool = True


@dataclass(frozen=True)
class FakePlan:
    step_id: int
    rows: list[FakeRow] = field(default_factory=lambda: [FakeRow()])
    needs_tokens_of: tuple[int, ...] = ()
    max_sample_len: int = 1


class Rank:
    """One rank's ledger, with everybody who has to do with it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.fd = create_ledger(Place(writer=Writer.RANK, rank=rank, world_size=world_size))
        self.reader = LedgerReader(os.dup(self.fd))
        self.writer = LedgerWriter(os.dup(self.fd))
        self.recorder = StepRecorder(self.writer)
        self.folder = Folder(self.reader)
        link(self.recorder, rank, world_size)

    def close(self) -> None:
        self.folder.close()
        self.reader.close()
        os.close(self.fd)


@pytest.fixture
def middle() -> Iterator[Rank]:
    rank = Rank(1, 3)
    yield rank
    rank.close()


def link(recorder: StepRecorder, rank: int, world_size: int) -> None:
    lanes = [FORWARD, *([RECV] if rank > 0 else []), *([SEND] if rank < world_size - 1 else [])]
    lanes += [TOKENS] if world_size > 1 else []
    recorder.linked(1, "shared_memory", lanes, num_slots=3, num_blocks=100, row_bytes=HIDDEN_BYTES, has_device_clock=False)


def step(recorder: StepRecorder, plan: FakePlan, at_ns: int) -> None:
    """A step of a middle rank: 2 ms of waiting for input, 5 ms forward, 1 ms sending; tokens 3 ms after that."""
    recorder.begin(plan, at_ns)
    recv = FakeWork(FakePoint(at_ns), FakePoint(at_ns + 2 * MS, at_ns + 2 * MS))
    forward = FakeWork(recv.end, FakePoint(at_ns + 7 * MS))
    send = FakeWork(forward.end, FakePoint(at_ns + 8 * MS, at_ns + 7 * MS, "send"))
    tokens = FakeWork(FakePoint(at_ns), FakePoint(at_ns + 11 * MS, at_ns + 11 * MS - 1000, "tokens"))
    woke_ns = [0] * 4
    recorder.forwarded(forward.start.reached_at_ns, forward.end.reached_at_ns)
    for lane, work in ((RECV, recv), (FORWARD, forward), (SEND, send), (TOKENS, tokens)):
        woke_ns[lane] = work.end.reached_at_ns + 4000
        recorder.ended(lane, woke_ns[lane])
    recorder.finish(plan, at_ns, [forward, recv, send, tokens], woke_ns, 7, 2)


def test_a_step_in_counters_and_spans(middle: Rank) -> None:
    start = time.perf_counter_ns() + 10 * MS  # past what was attached
    for number in range(3):
        step(middle.recorder, FakePlan(number), start + number * 11 * MS)
    assert middle.folder.fold()
    samples, histograms = middle.reader.samples(), middle.reader.histograms()
    assert samples["transfer_bytes_total"] == {("recv", "0"): 192, ("send", "2"): 192, ("token_receive", "2"): 48}
    assert (samples["kv_blocks"]["used",], samples["stale_rows_total"][()], samples["inflight_steps"][()]) == (7, 2, 0)
    assert samples["ring_slots"] == {("receiving",): 0, ("reading",): 0, ("sending",): 0, ("free",): 6}
    assert samples["kv_blocks"]["free",] == 93
    assert samples["last_step_timestamp_seconds"][()] == pytest.approx(time.time() + 0.043, abs=0.05)
    for name, values, count, total in (
        ("stage_wait_seconds", ("input", "0"), 3, 0.006 + 2 * 0.004),  # 2 ms of each, and from the end of the step before
        ("stage_wait_seconds", ("slot", "2"), 3, 0),
        ("transfer_seconds", ("recv", "0"), 3, 0),
        ("transfer_seconds", ("send", "2"), 3, 0.003),
        ("transfer_device_seconds", ("send", "2"), 3, 0.003),
        ("transfer_seconds", ("token_receive", "2"), 3, 3e-6),
        ("step_duration_seconds", ("decode",), 3, 0.015),
        ("step_duration_seconds", ("prefill",), 0, 0),
        ("step_rows", (), 3, 3),
        ("event_wake_seconds", (), 12, 12 * 4e-6),
    ):
        counts, summed = histograms[name][values]
        assert (name, values, counts[-1], summed) == (name, values, count, pytest.approx(total, abs=1e-9))
    spans = middle.reader.spans()
    assert [span.kind for span in spans[-5:]] == ["wait_input", "recv", "forward", "send", "token_receive"]
    at = start + 22 * MS
    assert Span(2, "forward", -1, at + 2 * MS, at + 7 * MS, 1) in spans
    assert Span(2, "send", 2, at + 7 * MS, at + 8 * MS, HIDDEN_BYTES) in spans
    assert middle.reader.spans(since_ns=at + 11 * MS) == [spans[-1]]


def test_what_was_folded_is_not_folded_again_and_only_one_process_folds(middle: Rank) -> None:
    step(middle.recorder, FakePlan(0), time.perf_counter_ns())
    for _ in range(2):
        assert middle.folder.fold()
        assert middle.reader.histograms()["step_rows"][()].sum == 1
    other = Folder(middle.reader)
    assert not other.fold()
    middle.folder.close()
    assert other.fold()
    step(middle.recorder, FakePlan(1), time.perf_counter_ns())
    assert other.fold()
    assert middle.reader.histograms()["step_rows"][()].sum == 2
    middle.folder = other


def test_more_steps_than_are_kept_are_told_as_lost(middle: Rank, caplog: pytest.LogCaptureFixture) -> None:
    now = time.perf_counter_ns()
    for number in range(NUM_RECORDS + 9):
        step(middle.recorder, FakePlan(number), now + number)
    middle.folder.fold()
    assert middle.reader.histograms()["step_rows"][()].sum in (NUM_RECORDS, NUM_RECORDS - 1)
    assert "rank 1: 1" in caplog.text
    assert "steps were written over before they were counted" in caplog.text
    steps = {span.step_id for span in middle.reader.spans()}
    assert max(steps) == NUM_RECORDS + 8
    assert len(steps) in (NUM_RECORDS, NUM_RECORDS - 1)


@pytest.mark.parametrize("word", [0, RECORD_WORDS - 1])
def test_a_record_that_is_being_written_over_is_not_read(middle: Rank, word: int) -> None:
    for number in range(3):
        step(middle.recorder, FakePlan(number), time.perf_counter_ns())
    middle.writer.words[middle.writer.layout.records_word + 2 * RECORD_WORDS + word] = 0  # the first was that of attaching
    assert {span.step_id for span in middle.reader.spans() if span.kind == "forward"} == {0, 2}


def test_a_restart_goes_on_counting(middle: Rank) -> None:
    step(middle.recorder, FakePlan(0), time.perf_counter_ns())
    middle.recorder = StepRecorder(LedgerWriter(os.dup(middle.fd)))
    middle.folder.fold()
    step(middle.recorder, FakePlan(0), time.perf_counter_ns())
    middle.folder.fold()
    samples = middle.reader.samples()
    assert samples["rank_restarts_total"] == {(): 1}
    assert middle.reader.histograms()["step_rows"][()].sum == 2
    assert middle.writer.words[NUM_RECORDS_WORD] == 4


def test_the_time_in_which_a_rank_hung_before_its_restart_is_kept(middle: Rank) -> None:
    """It was told while nobody knew that no record would come of it. What comes after is told on top, from the start."""
    middle.folder.fold()

    def compute_for(ns: int) -> dict[str, int]:
        middle.recorder.begin(FakePlan(0), time.perf_counter_ns())
        middle.recorder.ended(RECV, until_ns := time.perf_counter_ns())
        while time.perf_counter_ns() < until_ns + ns:
            pass
        return middle.reader.state_times()

    told = compute_for(20 * MS)
    assert told["compute"] >= 20 * MS
    middle.recorder = StepRecorder(LedgerWriter(os.dup(middle.fd)))
    middle.folder.fold()
    link(middle.recorder, 1, 3)
    assert compute_for(10 * MS)["compute"] >= told["compute"] + 10 * MS


# ---- where the time goes ------------------------------------------------------------------------------------------------


def spent(stretches: list[Stretch]) -> dict[str, int]:
    assert all(before.end_ns == after.start_ns for before, after in pairwise(stretches)), "nothing between, nothing twice"
    assert {stretch.state for stretch in stretches} <= set(STATES)
    total = dict.fromkeys((stretch.state for stretch in stretches), 0)
    for state, start, end in stretches:
        total[state] += end - start
    return total


def record(**times: int) -> StepRecord:
    of_any = {"step_id": 1, "begun_ns": 100, "num_rows": 1, "num_tokens": 1, "num_reqs": 1, "max_sample_len": 1, "flags": 6}
    return StepRecord(**(of_any | times))


@pytest.mark.parametrize(("flags", "wanted"), [(1, {"idle": 40, "host": 10}), (6, {"host": 50})])
def test_nothing_to_do_is_idle_and_planning_is_host(flags: int, wanted: dict[str, int]) -> None:
    stretches, clock = account(
        record(flags=flags, forward_began_ns=110, forward_ended_ns=150, send_ended_ns=155, tokens_ended_ns=170),
        Clock(40, 60),
        is_first=True,
        is_last=False,
    )
    assert spent(stretches) == {"wait_token": 20, "compute": 40} | wanted
    assert clock == Clock(150, 170)


def test_a_stage_that_is_given_its_plan_late_waits_for_input() -> None:
    stretches, _ = account(
        record(recv_ready_ns=130, recv_ended_ns=130, forward_began_ns=130, forward_ended_ns=150, tokens_ended_ns=160),
        Clock(40, 140),  # the tokens before came after the plan: something was in flight all the time
        is_first=False,
        is_last=False,
    )
    assert spent(stretches) == {"wait_input": 60 + 30, "compute": 20}


def test_waits_follow_each_other_as_the_stream_waits() -> None:
    stretches, clock = account(
        record(
            begun_ns=90,
            recv_ready_ns=120,
            recv_ended_ns=124,
            forward_began_ns=124,
            tokens_needed_ns=130,
            slot_needed_ns=145,
            forward_ended_ns=200,
            send_ready_ns=204,
            send_ended_ns=210,
            flags=6 | 8,
        ),
        Clock(100, 80),
        is_first=False,
        is_last=False,
    )
    assert [tuple(stretch) for stretch in stretches] == [
        ("wait_input", 100, 120),
        ("transfer", 120, 124),
        ("wait_token", 124, 130),
        ("wait_slot", 130, 145),
        ("compute", 145, 200),
        ("wait_slot", 200, 204),
        ("transfer", 204, 210),
    ]
    assert clock.until_ns == 210


# ---- now ------------------------------------------------------------------------------------------------------------------


def test_what_a_rank_is_at(middle: Rank) -> None:
    recorder, reader = middle.recorder, middle.reader

    def now() -> tuple[str, list[tuple[str, int]]]:
        state = reader.state()
        assert state is not None
        return state.state, [(doing.kind, doing.step_id) for doing in reader.doing()]

    assert now() == ("idle", [])
    recorder.begin(FakePlan(10), 1000)
    assert now() == ("wait_input", [("recv", 10), ("forward", 10), ("send", 10), ("token_receive", 10)])
    recorder.ended(RECV, 2000)
    assert now() == ("compute", [("forward", 10), ("send", 10), ("token_receive", 10)])
    recorder.begin(FakePlan(11, needs_tokens_of=(10,)), 2500)
    assert reader.doing() == [
        Doing("recv", 11, 2000),
        Doing("forward", 10, 1000),
        Doing("send", 10, 1000),
        Doing("token_receive", 10, 1000),
    ]
    recorder.ended(FORWARD, 3000)
    recorder.ended(SEND, 3000)
    recorder.ended(RECV, 3500)
    assert now()[0] == "wait_token"
    middle.folder.fold()
    assert reader.samples()["inflight_steps"][()] == 2
    assert reader.samples()["ring_slots"] == {("receiving",): 0, ("reading",): 1, ("sending",): 0, ("free",): 5}
    recorder.ended(TOKENS, 4000)
    assert now()[0] == "compute"
    recorder.ended(FORWARD, 5000)
    assert now() == ("wait_input", [("send", 11), ("token_receive", 11)])
    recorder.unlinked()
    assert now() == ("idle", [])


WRITE_AND_HANG = """
import sys, time
from metrics.ledger import LedgerWriter
from metrics.recorder import StepRecorder
from tests.metrics.test_steps import FakePlan, link, step
recorder = StepRecorder(LedgerWriter(int(sys.argv[1])))
link(recorder, 1, 3)
step(recorder, FakePlan(41), time.perf_counter_ns() - 50_000_000)
recorder.begin(FakePlan(42), time.perf_counter_ns())
print("written", flush=True)
sys.stdin.read()
"""


def test_a_stopped_and_then_killed_writer_can_be_read(middle: Rank) -> None:
    reader = middle.reader
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_AND_HANG, str(middle.fd)],
        pass_fds=[middle.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"

        def check() -> None:
            middle.folder.fold()
            assert reader.identity.process_id == process.pid
            assert reader.histograms()["step_rows"][()].sum == 1
            assert reader.spans()[-1].step_id == 41
            assert (reader.doing()[0].kind, reader.doing()[0].step_id) == ("recv", 42)
            assert reader.state() is not None
            assert reader.state().state == "wait_input"  # type: ignore[union-attr]

        process.send_signal(signal.SIGSTOP)
        check()
        assert reader.is_alive()
        before = reader.state_times()
        assert reader.state_times()["wait_input"] > before["wait_input"], "time goes on for one that hangs"
        process.kill()
    check()
    assert not reader.is_alive()
    assert reader.state_times() == reader.state_times()
