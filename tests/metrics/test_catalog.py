import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from metrics.catalog import CATALOG, Metric, Metrics


@pytest.fixture
def exposition() -> str:
    return generate_latest(Metrics(CollectorRegistry()).registry).decode()


@pytest.mark.parametrize("metric", CATALOG, ids=lambda metric: metric.name)
class TestEveryMetric:
    def test_is_exported_with_all_its_series_at_zero(self, metric: Metric, exposition: str) -> None:
        suffix = "_count" if metric.buckets else ""
        labels = [f'{{{metric.label}="{value}"}}' for value in metric.values] or [""]
        for label in labels:
            assert f"\n{metric.full_name}{suffix}{label} 0.0\n" in exposition

    def test_is_named_by_the_rules(self, metric: Metric) -> None:
        assert re.fullmatch(r"stagewire_[a-z0-9_]+", metric.full_name)
        assert metric.help.endswith(".")
        assert bool(metric.label) == bool(metric.values)
        assert bool(metric.buckets) == metric.name.endswith("_seconds")

    def test_buckets_are_1_2_5_steps(self, metric: Metric) -> None:
        assert list(metric.buckets) == sorted(metric.buckets)
        for bucket in metric.buckets:
            assert f"{bucket:.0e}"[0] in "125"
            assert float(f"{bucket:.0e}") == bucket


def test_nothing_is_exported_that_the_catalogue_lacks(exposition: str) -> None:
    exported = re.findall(r"^# TYPE (\S+)", exposition, re.MULTILINE)
    assert sorted(exported) == sorted(metric.full_name for metric in CATALOG)


def test_inter_token_latency_starts_at_a_millisecond() -> None:
    [metric] = [metric for metric in CATALOG if metric.name == "inter_token_latency_seconds"]
    assert metric.buckets[:4] == (0.001, 0.002, 0.005, 0.01)


def test_registries_do_not_share() -> None:
    one, other = Metrics(CollectorRegistry()), Metrics(CollectorRegistry())
    one.requests_finished["stop"].inc()
    labels = {"reason": "stop"}
    assert one.registry.get_sample_value("stagewire_requests_finished_total", labels) == 1
    assert other.registry.get_sample_value("stagewire_requests_finished_total", labels) == 0
