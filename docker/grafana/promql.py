"""PromQL over the catalogue's metrics: a name or a label that it does not have is an error when the boards are made."""

from collections.abc import Sequence

from metrics.catalog import RANK_LABEL, Kind, Metric, Place, Writer

EVERYWHERE = 'instance=~"$instance"'  # the workers that the board's variable selects


def label_names(metric: Metric) -> set[str]:
    return {*metric.labels.names, *([RANK_LABEL] if Writer.RANK in metric.writers else [])}


def known_values(metric: Metric, label: str) -> set[str] | None:
    """What a label of the catalogue can be, ranks' numbers aside; None where only who writes it knows."""
    if label not in metric.labels.names or label in (RANK_LABEL, "peer"):
        return None
    place = metric.labels.names.index(label)
    series = [
        values for rank in (0, 1, 2) for values in metric.labels.series(Place(writer=Writer.RANK, rank=rank, world_size=3))
    ]
    return {values[place] for values in series} or None


def check_matcher(metric: Metric, label: str, value: str) -> None:
    """``ValueError`` when the metric has no such label, or the label can have no such value. ``a|b`` are two values."""
    if label not in label_names(metric):
        raise ValueError(f"{metric.full_name} has no label {label}, only {sorted(label_names(metric))}")
    known = known_values(metric, label)
    for one in value.split("|"):
        if known is not None and one not in known:
            raise ValueError(f"{label} of {metric.full_name} is never {one}, only one of {sorted(known)}")


def select(metric: Metric, suffix: str = "", **matchers: str) -> str:
    """The series of the selected workers. A matcher is ``label="value"``, or ``label="~regular expression"``."""
    for label, value in matchers.items():
        check_matcher(metric, label, value.removeprefix("~"))
    found = [f'{label}=~"{value[1:]}"' if value.startswith("~") else f'{label}="{value}"' for label, value in matchers.items()]
    return f"{metric.full_name}{suffix}{{{', '.join([EVERYWHERE, *found])}}}"


def _by(metric: Metric, labels: Sequence[str], operation: str, of: str) -> str:
    for label in labels:
        if label not in label_names(metric) | {"instance"}:
            raise ValueError(f"{metric.full_name} has no label {label}, only {sorted(label_names(metric))}")
    return f"{operation} by ({', '.join(labels)}) ({of})" if labels else f"{operation}({of})"


def total(metric: Metric, *by: str, **matchers: str) -> str:
    """The sum of a gauge."""
    assert metric.kind in (Kind.GAUGE, Kind.INFO), metric.name
    return _by(metric, by, "sum", select(metric, **matchers))


def rate(metric: Metric, *by: str, suffix: str = "", **matchers: str) -> str:
    """How fast a counter grows, a second."""
    assert (metric.kind is Kind.COUNTER) == (not suffix), metric.name
    return _by(metric, by, "sum", f"rate({select(metric, suffix, **matchers)}[$__rate_interval])")


def quantile(q: float, metric: Metric, *by: str, **matchers: str) -> str:
    assert metric.kind is Kind.HISTOGRAM, metric.name
    of = _by(metric, by, "sum", f"rate({select(metric, '_bucket', **matchers)}[$__rate_interval])")
    buckets = of.replace("sum by (", "sum by (le, ", 1) if by else of.replace("sum(", "sum by (le) (", 1)
    return f"histogram_quantile({q}, {buckets})"


def mean(metric: Metric, *by: str, **matchers: str) -> str:
    assert metric.kind is Kind.HISTOGRAM, metric.name
    return f"{rate(metric, *by, suffix='_sum', **matchers)} / {rate(metric, *by, suffix='_count', **matchers)}"
