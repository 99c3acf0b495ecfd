"""Reads PromQL just enough to hold it against the catalogue."""

import re

from docker.grafana.promql import check_matcher
from metrics.catalog import CATALOG, Kind, Metric

SAMPLES: dict[str, Metric] = {
    metric.full_name + suffix: metric
    for metric in CATALOG
    for suffix in (("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",))
}
_TARGET_LABELS = {"job", "instance"}
_SELECTOR = re.compile(r"(?<![\w:$])(stagewire_\w+)(?![\w:])(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(?:=|!=|=~|!~)"([^"]*)"')


def check_against_catalogue(expr: str) -> int:
    """``KeyError`` or ``ValueError`` for a metric, label or value that the catalogue lacks; returns how many metrics it has."""
    found = _SELECTOR.findall(expr)
    for name, matchers in found:
        metric = SAMPLES[name]
        for label, value in _MATCHER.findall(matchers):
            if label == "le" and name.endswith("_bucket"):
                assert value == "+Inf" or float(value) in metric.buckets, f"{name} has no bucket {value}"
            elif label not in _TARGET_LABELS and "$" not in value:
                check_matcher(metric, label, value)
    return len(found)
