import re

import pytest

from metrics.catalog import ALL_PEERS, CATALOG, PREFIX, STAGE_STATE, Kind, Metric, Place, Writer, peers, transfers, waits

WORLD_SIZES = (1, 2, 3, 8)
PLACES = [Place(writer=Writer.RANK, rank=rank, world_size=size) for size in WORLD_SIZES for rank in range(size)]
NOT_RANKS = [
    Place(writer=writer, rank=-1, world_size=size) for writer in (Writer.ENGINE, Writer.EXPORTER) for size in WORLD_SIZES
]


@pytest.mark.parametrize("metric", CATALOG, ids=lambda metric: metric.name)
class TestEveryMetric:
    def test_is_named_by_the_rules(self, metric: Metric) -> None:
        assert re.fullmatch(r"stagewire_[a-z0-9_]+", metric.full_name)
        assert metric.help.endswith(".")
        assert "\n" not in metric.help
        assert metric.writers
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.name.endswith("_info") == (metric.kind is Kind.INFO)
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        for reserved in ("_count", "_sum", "_bucket", "_created"):
            assert not metric.name.endswith(reserved)
        for label in metric.labels.names:
            assert re.fullmatch(r"[a-z_]+", label)
            assert label != "le"

    def test_buckets_are_1_2_5_steps(self, metric: Metric) -> None:
        assert list(metric.buckets) == sorted(set(metric.buckets))
        for bucket in metric.buckets:
            assert f"{bucket:.0e}"[0] in "125"
            assert float(f"{bucket:.0e}") == bucket

    def test_has_its_series_from_the_start(self, metric: Metric) -> None:
        for place in [*PLACES, *NOT_RANKS]:
            if place.writer in metric.writers:
                series = metric.labels.series(place)
                assert len(set(series)) == len(series)
                assert all(len(values) == len(metric.labels.names) for values in series)
                if metric.kind is Kind.INFO:
                    assert series == ()
                elif "peer" not in metric.labels.names:
                    assert series


def test_names_are_used_once() -> None:
    assert len({metric.name for metric in CATALOG}) == len(CATALOG)
    assert PREFIX == "stagewire_"


def test_buckets_fit_what_is_measured() -> None:
    buckets = {metric.name: metric.buckets for metric in CATALOG}
    for name in ("stage_wait_seconds", "transfer_seconds", "transfer_device_seconds", "event_wake_seconds"):
        assert (buckets[name][0], buckets[name][-1]) == (1e-6, 1)
    assert (buckets["step_duration_seconds"][0], buckets["step_duration_seconds"][-1]) == (1e-4, 10)
    assert buckets["inter_token_latency_seconds"][:4] == (0.001, 0.002, 0.005, 0.01)


def test_every_state_of_a_stage_has_its_series() -> None:
    states = [state for (state,) in STAGE_STATE.labels.series(PLACES[0])]
    assert states == ["compute", "wait_input", "wait_slot", "wait_token", "transfer", "host", "idle"]


def test_peers_follow_from_the_place_in_the_pipeline() -> None:
    def place(rank: int, world_size: int) -> Place:
        return Place(writer=Writer.RANK, rank=rank, world_size=world_size)

    assert transfers(place(0, 1)) == waits(place(0, 1)) == peers(place(0, 1)) == []
    assert transfers(place(0, 3)) == [("send", "1"), ("token_receive", "2")]
    assert transfers(place(1, 3)) == [("recv", "0"), ("send", "2"), ("token_receive", "2")]
    assert transfers(place(2, 3)) == [("recv", "1"), ("token_broadcast", ALL_PEERS)]
    assert waits(place(1, 3)) == [("input", "0"), ("slot", "2"), ("token", "2")]
    assert waits(place(2, 3)) == [("input", "1")]
    assert peers(place(0, 4)) == [("1",), ("3",)]
    assert peers(place(1, 4)) == [("0",), ("2",), ("3",)]
    assert peers(place(3, 4)) == [("0",), ("1",), ("2",)]
