"""What a panel of the boards is, and how it becomes one of Grafana's."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, Threshold, ThresholdsMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
BOARD_WIDTH = 24


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """``kind`` is timeseries, stacked, stat, bars or table. ``warn`` and ``alarm`` colour values from there on."""

    title: str
    description: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = 8
    low: float | None = 0
    high: float | None = None
    warn: float | None = None
    alarm: float | None = None
    repeat: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    title: str
    panels: Sequence[Panel] = field(default_factory=list)


def to_grafana(panel: Panel) -> Any:
    """The SDK's builder of a panel."""
    built = _BUILDERS[panel.kind](panel)
    built.title(panel.title).description(panel.description).datasource(DATASOURCE)
    built.span(panel.width).height(panel.height)
    if panel.repeat:
        built.repeat(panel.repeat).repeat_direction("h").max_per_row(BOARD_WIDTH // panel.width)
    if panel.kind != "table":
        built.unit(panel.unit)
    if panel.low is not None and panel.kind != "table":
        built.min(panel.low)
    if panel.high is not None:
        built.max(panel.high)
    if panel.warn is not None or panel.alarm is not None:
        steps = [Threshold(value=None, color="green")]
        steps += [Threshold(value=panel.warn, color="orange")] if panel.warn is not None else []
        steps += [Threshold(value=panel.alarm, color="red")] if panel.alarm is not None else []
        built.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expr).ref_id(chr(ord("A") + index)).datasource(DATASOURCE)
        if query.legend:
            target.legend_format(query.legend)
        if panel.kind == "table":
            target.instant().format(PromQueryFormat.TABLE)
        elif panel.kind in ("stat", "bars"):
            target.instant()
        else:
            target.range()
        built.with_target(target)
    return built


def _timeseries(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
    return (
        timeseries.Panel()
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .show_points(VisibilityMode.NEVER)
        .line_width(1)
        .fill_opacity(8)
    )


def _stacked(panel: Panel) -> timeseries.Panel:
    return _timeseries(panel).fill_opacity(70).line_width(0).stacking(common.StackingConfig().mode(StackingMode.NORMAL))


def _stat(panel: Panel) -> stat.Panel:
    return stat.Panel().graph_mode(BigValueGraphMode.NONE)


def _bars(panel: Panel) -> bargauge.Panel:
    return bargauge.Panel().orientation(VizOrientation.HORIZONTAL)


def _table(panel: Panel) -> table.Panel:
    return table.Panel()


_BUILDERS = {"timeseries": _timeseries, "stacked": _stacked, "stat": _stat, "bars": _bars, "table": _table}
