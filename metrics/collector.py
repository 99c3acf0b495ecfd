"""Ledgers as metric families, for ``prometheus_client`` to put into words."""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]

from metrics.catalog import (
    CATALOG,
    ENGINE_RANK,
    ENGINE_UP,
    PROCESS_CPU,
    PROCESS_OPEN_FDS,
    PROCESS_RESIDENT,
    RANK_LABEL,
    RANK_UP,
    Kind,
    LabelValues,
    Metric,
    Writer,
)
from metrics.processes import process_status
from metrics.reader import HistogramValue, LedgerReader

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily


class LedgerCollector(Collector):
    """Reads the ledgers anew for each scrape. What a process counted stays when it is dead; what it uses is gone."""

    def __init__(self, readers: Sequence[LedgerReader]) -> None:
        self._readers = readers
        self._bounds = {metric.name: [*(floatToGoString(bound) for bound in metric.buckets), "+Inf"] for metric in CATALOG}

    def describe(self) -> Iterable[Family]:
        return _empty_families().values()  # else the registry collects once when this is registered

    def collect(self) -> Iterator[Family]:
        families = _empty_families()
        for reader in self._readers:
            self._collect_written(reader, families)
            _collect_seen(reader, families)
        yield from families.values()

    def _collect_written(self, reader: LedgerReader, families: dict[str, Family]) -> None:
        whose = _rank_of(reader)
        for name, values in reader.samples().items():
            family = families[name]
            for labels, value in values.items():
                _add(family, (*_prefix(name, whose), *labels), value)
        for name, values in reader.histograms().items():
            family = families[name]
            for labels, value in values.items():
                _add_histogram(family, (*_prefix(name, whose), *labels), value, self._bounds[name])
        for name, said in reader.infos().items():
            family = families[name]
            assert isinstance(family, InfoMetricFamily)
            family.add_metric(_prefix(name, whose), said)


def _collect_seen(reader: LedgerReader, families: dict[str, Family]) -> None:
    """What the exporter itself finds out about the process that writes a ledger."""
    whose = _rank_of(reader)
    status = process_status(reader.identity.process_id) if reader.is_alive() else None
    if reader.place.writer is Writer.RANK:
        _add(families[RANK_UP.name], (whose,), status is not None)
    else:
        _add(families[ENGINE_UP.name], (), status is not None)
    if status is not None:
        _add(families[PROCESS_CPU.name], (whose,), status.cpu_seconds)
        _add(families[PROCESS_RESIDENT.name], (whose,), status.resident_bytes)
        if status.num_open_fds is not None:
            _add(families[PROCESS_OPEN_FDS.name], (whose,), status.num_open_fds)


def _empty_families() -> dict[str, Family]:
    """By the name of the metric, in the catalogue's order."""
    return {metric.name: _empty_family(metric) for metric in CATALOG}


def _empty_family(metric: Metric) -> Family:
    names = metric.labels.names
    if Writer.RANK in metric.writers:
        names = (RANK_LABEL, *names)
    match metric.kind:
        case Kind.COUNTER:
            return CounterMetricFamily(metric.full_name, metric.help, labels=names)
        case Kind.GAUGE:
            return GaugeMetricFamily(metric.full_name, metric.help, labels=names)
        case Kind.HISTOGRAM:
            return HistogramMetricFamily(metric.full_name, metric.help, labels=names)
        case Kind.INFO:
            labels = (RANK_LABEL,) if Writer.RANK in metric.writers else ()
            return InfoMetricFamily(metric.full_name.removesuffix("_info"), metric.help, labels=labels)


def _rank_of(reader: LedgerReader) -> str:
    return str(reader.place.rank) if reader.place.writer is Writer.RANK else ENGINE_RANK


_LABELLED_BY_RANK = frozenset(metric.name for metric in CATALOG if Writer.RANK in metric.writers)


def _prefix(name: str, whose: str) -> LabelValues:
    return (whose,) if name in _LABELLED_BY_RANK else ()


def _add(family: Family, labels: LabelValues, value: float) -> None:
    assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
    family.add_metric(labels, value)


def _add_histogram(family: Family, labels: LabelValues, value: HistogramValue, bounds: Sequence[str]) -> None:
    assert isinstance(family, HistogramMetricFamily)
    family.add_metric(labels, list(zip(bounds, value.counts, strict=True)), value.sum)
