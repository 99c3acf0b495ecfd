import mmap
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from metrics.catalog import (
    BUILD_INFO,
    CATALOG,
    LAST_STEP_TIMESTAMP,
    REQUESTS_RUNNING,
    STEP_ROWS,
    TRANSFER,
    TRANSFER_BYTES,
    Kind,
    Place,
    Writer,
)
from metrics.layout import LAYOUT_WORD, WORD_BYTES, Layout
from metrics.ledger import LedgerError, LedgerWriter, create_ledger, create_ledger_at
from metrics.reader import HistogramValue, LedgerReader

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


class TestRestart:
    def test_counters_go_on_and_what_was_of_the_process_is_new(
        self, fd: int, writer: LedgerWriter, reader: LedgerReader
    ) -> None:
        writer.counter(TRANSFER_BYTES, "recv", "0").add(5)
        writer.gauge(LAST_STEP_TIMESTAMP).set(9)
        writer.set_info(BUILD_INFO, version="1", python="3", torch="2")
        restarted = LedgerWriter(os.dup(fd))
        assert restarted.num_processes == reader.identity.num_processes == 2
        restarted.counter(TRANSFER_BYTES, "recv", "0").add(2)
        assert reader.samples()["transfer_bytes_total"]["recv", "0"] == 7
        assert reader.samples()["last_step_timestamp_seconds"][()] == 0
        assert reader.infos() == {}

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


def test_writer_of_the_engine(reader: LedgerReader) -> None:
    engine_fd = create_ledger(ENGINE)
    engine_reader = LedgerReader(os.dup(engine_fd))
    LedgerWriter(engine_fd).gauge(REQUESTS_RUNNING).set(3)
    assert engine_reader.samples()["requests_running"] == {(): 3}
    assert "stage_state_seconds_total" not in engine_reader.samples()
