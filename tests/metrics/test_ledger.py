import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from metrics.catalog import (
    BUILD_INFO,
    CATALOG,
    LAST_STEP_TIMESTAMP,
    REQUESTS_RUNNING,
    STAGE_STATE,
    STATES,
    STEP_ROWS,
    TRANSFER,
    TRANSFER_BYTES,
    Kind,
    Place,
    Writer,
)
from metrics.layout import LAYOUT_WORD, NUM_SPANS, SPAN_KINDS, SPAN_WORDS, STATE_WORD, STATES_SINCE_WORD, WORD_BYTES, Layout
from metrics.ledger import SPAN_KIND_INDEX, LedgerError, LedgerWriter, create_ledger, create_ledger_at
from metrics.reader import Doing, HistogramValue, LedgerReader, Span, State

RANK = Place(writer=Writer.RANK, rank=1, world_size=3)
ENGINE = Place(writer=Writer.ENGINE, rank=-1, world_size=3)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_ledger(RANK)
    yield fd
    os.close(fd)


@pytest.fixture
def reader(fd: int) -> Iterator[LedgerReader]:
    reader = LedgerReader(os.dup(fd))
    yield reader
    reader.close()


@pytest.fixture
def writer(fd: int, reader: LedgerReader) -> LedgerWriter:
    return LedgerWriter(os.dup(fd))


@pytest.mark.parametrize("place", [RANK, ENGINE], ids=["rank", "engine"])
def test_every_series_is_there_at_zero_before_anybody_writes(place: Place) -> None:
    reader = LedgerReader(create_ledger(place))
    samples, histograms = reader.samples(), reader.histograms()
    for metric in CATALOG:
        if place.writer in metric.writers and metric.kind is not Kind.INFO:
            shown = histograms if metric.kind is Kind.HISTOGRAM else samples
            assert list(shown[metric.name]) == list(metric.labels.series(place))
            zero = HistogramValue((0,) * (len(metric.buckets) + 1), 0) if metric.kind is Kind.HISTOGRAM else 0
            assert set(shown[metric.name].values()) == {zero}
    assert reader.state() is None
    assert (reader.doing(), reader.spans(), reader.infos(), reader.is_alive()) == ([], [], {}, False)


def test_what_is_written_is_read(writer: LedgerWriter, reader: LedgerReader) -> None:
    writer.counter(TRANSFER_BYTES, "send", "2").add(4096)
    writer.counter(TRANSFER_BYTES, "send", "2").add(4)
    writer.gauge(LAST_STEP_TIMESTAMP).set(1_700_000_000_250_000_000)
    rows, send = writer.histogram(STEP_ROWS), writer.histogram(TRANSFER, "send", "2")
    for value in (1, 2, 3, 1000, 5000):
        rows.observe(value)
    send.observe(1000)  # a bound belongs to its bucket
    send.observe(1001)
    assert reader.samples()["transfer_bytes_total"] == {("recv", "0"): 0, ("send", "2"): 4100, ("token_receive", "2"): 0}
    assert reader.samples()["last_step_timestamp_seconds"][()] == pytest.approx(1_700_000_000.25)
    assert reader.histograms()["step_rows"][()] == HistogramValue((1, 2, 3, 3, 3, 3, 3, 3, 3, 4, 5), 6006)
    counts, total = reader.histograms()["transfer_seconds"]["send", "2"]
    assert (counts[:3], counts[-1], total) == ((1, 2, 2), 2, pytest.approx(2.001e-6))
    with pytest.raises(KeyError):
        writer.counter(TRANSFER_BYTES, "send", "0")


def test_infos(writer: LedgerWriter, reader: LedgerReader) -> None:
    writer.set_info(BUILD_INFO, version="1", python="3.11", torch='2"\n')
    assert reader.infos() == {"build_info": {"version": "1", "python": "3.11", "torch": '2"\n'}}
    with pytest.raises(ValueError, match="build_info: has labels version, python, torch, not version"):
        writer.set_info(BUILD_INFO, version="1")
    with pytest.raises(ValueError, match="all infos together take"):
        writer.set_info(BUILD_INFO, version="1" * 5000, python="", torch="")


def test_identity_and_life(writer: LedgerWriter, reader: LedgerReader) -> None:
    identity = reader.identity
    assert (identity.place, identity.process_id, identity.num_processes) == (RANK, os.getpid(), 1)
    assert abs(time.perf_counter_ns() + identity.wall_offset_ns - time.time_ns()) < 50_000_000
    assert reader.is_alive()


def test_the_states_add_up_to_the_time_that_passed(writer: LedgerWriter, reader: LedgerReader) -> None:
    """Whatever was stored last: here the counter of a state that ended, and not yet the state that began."""
    words, compute = writer.words, writer.counter(STAGE_STATE, "compute")
    started = words[STATES_SINCE_WORD]
    words[STATE_WORD] = STATES.index("compute")
    compute.add(time.perf_counter_ns() - started)
    before = time.perf_counter_ns()
    times = reader.state_times()
    assert before - started <= sum(times.values()) <= time.perf_counter_ns() - started
    state = reader.state()
    assert state is not None
    assert state == State("compute", started + writer.words[writer.state_words()[0]])


def test_times_of_states_never_go_down(writer: LedgerWriter, reader: LedgerReader) -> None:
    """A state's end is heard of late: the reader has meanwhile counted too much for it."""
    before = reader.state_times()["idle"]
    writer.counter(STAGE_STATE, "compute").add(time.perf_counter_ns() - writer.words[STATES_SINCE_WORD])
    assert reader.state_times()["idle"] >= before > 0


class TestSpans:
    def test_come_in_the_order_written(self, writer: LedgerWriter, reader: LedgerReader) -> None:
        writer.add_span(SPAN_KIND_INDEX["recv"], 7, 0, 100, 200, 64)
        writer.add_span(SPAN_KIND_INDEX["forward"], 7, -1, 200, 300, 5)
        assert reader.spans() == [Span(7, "recv", 0, 100, 200, 64), Span(7, "forward", -1, 200, 300, 5)]
        assert reader.spans(since_ns=201) == [Span(7, "forward", -1, 200, 300, 5)]

    def test_the_last_ones_are_kept(self, writer: LedgerWriter, reader: LedgerReader) -> None:
        assert NUM_SPANS >= 16384
        for step in range(NUM_SPANS + 10):
            writer.add_span(1, step, -1, step, step + 1)
        spans = reader.spans()
        assert [spans[0].step_id, spans[-1].step_id, len(spans)] == [10, NUM_SPANS + 9, NUM_SPANS]

    @pytest.mark.parametrize("field", [0, SPAN_WORDS - 1])
    def test_one_that_is_being_written_over_is_not_read(self, writer: LedgerWriter, reader: LedgerReader, field: int) -> None:
        for step in range(3):
            writer.add_span(1, step, -1, step, step + 1)
        writer.words[writer.layout.spans_word + SPAN_WORDS + field] = 0
        assert [span.step_id for span in reader.spans()] == [0, 2]


class TestRestart:
    def test_counters_go_on_and_what_was_of_the_process_is_new(
        self, fd: int, writer: LedgerWriter, reader: LedgerReader
    ) -> None:
        writer.counter(TRANSFER_BYTES, "recv", "0").add(5)
        writer.gauge(LAST_STEP_TIMESTAMP).set(9)
        writer.begin_operation("recv", 3, 77)
        writer.set_info(BUILD_INFO, version="1", python="3", torch="2")
        assert reader.doing() == [Doing("recv", 3, 77)]
        times = reader.state_times()
        restarted = LedgerWriter(os.dup(fd))
        assert restarted.num_processes == reader.identity.num_processes == 2
        restarted.counter(TRANSFER_BYTES, "recv", "0").add(2)
        assert reader.samples()["transfer_bytes_total"]["recv", "0"] == 7
        assert reader.samples()["last_step_timestamp_seconds"][()] == 0
        assert (reader.doing(), reader.infos()) == ([], {})
        assert all(reader.state_times()[state] >= ns for state, ns in times.items())

    def test_at_a_path(self, tmp_path: Path) -> None:
        path = tmp_path / "rank-1.ledger"
        writer = LedgerWriter(create_ledger_at(path, RANK))
        writer.counter(TRANSFER_BYTES, "recv", "0").add(5)
        assert LedgerReader(path).samples()["transfer_bytes_total"]["recv", "0"] == 5
        again = LedgerWriter(create_ledger_at(path, RANK))
        assert again.num_processes == 2
        other = LedgerWriter(create_ledger_at(path, ENGINE))
        assert other.num_processes == 1
        assert LedgerReader(path).samples()["requests_running"] == {(): 0}


class TestRefusals:
    def test_another_layout(self, fd: int) -> None:
        os.pwrite(fd, struct.pack("<q", 5), LAYOUT_WORD * WORD_BYTES)
        with pytest.raises(LedgerError, match=r"ledger of rank 1: has layout 0x5 of \d+ bytes, .*another version"):
            LedgerReader(os.dup(fd))
        with pytest.raises(LedgerError, match="another version"):
            LedgerWriter(os.dup(fd))

    def test_no_ledger(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"x" * 100)
        with pytest.raises(LedgerError, match="has 100 bytes"):
            LedgerReader(path)
        path.write_bytes(b"x" * 4096)
        with pytest.raises(LedgerError, match="is not one"):
            LedgerReader(path)

    def test_every_place_has_a_layout_of_its_own(self) -> None:
        places = [
            RANK,
            ENGINE,
            Place(writer=Writer.RANK, rank=2, world_size=3),
            Place(writer=Writer.RANK, rank=1, world_size=2),
        ]
        assert len({Layout(place).hash for place in places}) == len(places)

    def test_a_ledger_cannot_be_shrunk_under_its_readers(self, fd: int) -> None:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, mmap.PAGESIZE)


WRITE_AND_HANG = """
import os, sys, time
from metrics.catalog import STEP_ROWS
from metrics.ledger import LedgerWriter
writer = LedgerWriter(int(sys.argv[1]))
writer.histogram(STEP_ROWS).observe(3)
writer.add_span(1, 41, -1, 10, 20, 3)
writer.begin_operation("recv", 42, 30)
print("written", flush=True)
sys.stdin.read()
"""


def test_a_stopped_and_then_killed_writer_can_be_read(fd: int, reader: LedgerReader) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_AND_HANG, str(fd)], pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"

        def check() -> None:
            assert reader.identity.process_id == process.pid
            assert reader.histograms()["step_rows"][()].sum == 3
            assert reader.spans() == [Span(41, "forward", -1, 10, 20, 3)]
            assert reader.doing() == [Doing("recv", 42, 30)]

        process.send_signal(signal.SIGSTOP)
        check()
        assert reader.is_alive()
        before = reader.state_times()
        assert reader.state_times()["idle"] > before["idle"], "time goes on for one that hangs"
        process.kill()
    check()
    assert not reader.is_alive()
    assert reader.state_times() == reader.state_times()


def test_writer_of_the_engine(reader: LedgerReader) -> None:
    engine_fd = create_ledger(ENGINE)
    engine_reader = LedgerReader(os.dup(engine_fd))
    LedgerWriter(engine_fd).gauge(REQUESTS_RUNNING).set(3)
    assert engine_reader.samples()["requests_running"] == {(): 3}
    assert "stage_state_seconds_total" not in engine_reader.samples()


def test_spans_kinds_are_numbered() -> None:
    assert [SPAN_KINDS[index] for index in SPAN_KIND_INDEX.values()] == list(SPAN_KIND_INDEX)
