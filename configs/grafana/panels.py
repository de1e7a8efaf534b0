"""What the dashboard's rows are made of: PromQL over this project's metrics, and the kinds of panel."""

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import bargauge, common, prometheus, stat, timeseries
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BigValueGraphMode,
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

Panel = timeseries.Panel | stat.Panel | bargauge.Panel


@dataclass(frozen=True)
class Query:
    expr: str
    """PromQL with the dashboard's variables."""
    legend: str = "{{model_name}}"
    """A series' name, with {{label}} for the values of its labels."""


@dataclass(frozen=True)
class Row:
    title: str
    panels: list[Panel]
    collapsed: bool = False


# PromQL. Names are those of telemetry/metrics.py, without the suffixes that the exporters add.

SELECT = '{model_name=~"$model_name"}'
WINDOW = f"{SELECT}[$rate_interval]"


def gauge(name: str, by: str = "model_name", over: str = "sum") -> str:
    return f"{over} by ({by}) ({name}{SELECT})"


def per_rank(name: str) -> str:
    """The gauge of each rank, as Ray exports it."""
    return gauge("ray_" + name.replace(":", "_"), by="model_name, engine, rank", over="max")


def rate(counter: str, by: str = "model_name") -> str:
    """Per second."""
    return f"sum by ({by}) (rate({counter}_total{WINDOW}))"


def mean(histogram: str, by: str) -> str:
    """Of the values observed in the window."""
    return f"sum by ({by}) (rate({histogram}_sum{WINDOW})) / sum by ({by}) (rate({histogram}_count{WINDOW}))"


def largest(expr: str) -> str:
    """The ten largest values above zero at each moment: a series for every bucket is more than a panel holds."""
    return f"topk(10, {expr} > 0)"


def percentiles(histogram: str) -> list[Query]:
    """p50, p90 and p99 of the values observed in the window."""
    buckets = f"sum by (model_name, le) (rate({histogram}_bucket{WINDOW}))"
    return [
        Query(f"histogram_quantile({quantile}, {buckets})", f"{name} {{{{model_name}}}}")
        for name, quantile in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    ]


# Panels. `width` is in columns, of which the board has 24; `unit` is one of Grafana's.


def lines(title: str, says: str, unit: str, queries: Sequence[Query], width: int = 8) -> timeseries.Panel:
    """One line per series over time. A share (unit percentunit) has an axis from 0 to 1."""
    legend = common.VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST)
    panel = timeseries.Panel().title(title).description(says).datasource(SOURCE).unit(unit).span(width).height(8).min(0)
    if unit == "percentunit":
        panel.max(1)
    for letter, query in zip("ABCDEFGH", queries, strict=False):
        panel.with_target(_target(letter, query))
    return (
        panel.line_width(1)
        .legend(legend.placement(LegendPlacement.BOTTOM))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )


def areas(title: str, says: str, unit: str, queries: Sequence[Query], width: int = 8) -> timeseries.Panel:
    """Series stacked on one another: the top is their sum."""
    stacked = common.StackingConfig().mode(StackingMode.NORMAL)
    return lines(title, says, unit, queries, width).fill_opacity(30).stacking(stacked)


def number(title: str, says: str, unit: str, query: Query, width: int = 8) -> stat.Panel:
    """The last value of each series."""
    panel = stat.Panel().title(title).description(says).datasource(SOURCE).unit(unit).span(width).height(5)
    return (
        panel.graph_mode(BigValueGraphMode.NONE)
        .text_mode(BigValueTextMode.VALUE_AND_NAME)
        .reduce_options(_last())
        .with_target(_target("A", query))
    )


def names(title: str, says: str, query: Query, width: int = 8) -> stat.Panel:
    """The name of each series, for a metric whose labels are the information."""
    return number(title, says, "short", query, width).text_mode(BigValueTextMode.NAME).height(8)


def bars(title: str, says: str, unit: str, query: Query, width: int = 12) -> bargauge.Panel:
    """The last value of each series as a horizontal bar."""
    panel = bargauge.Panel().title(title).description(says).datasource(SOURCE).unit(unit).span(width).height(8).min(0)
    return (
        panel.display_mode(BarGaugeDisplayMode.BASIC)
        .orientation(VizOrientation.HORIZONTAL)
        .reduce_options(_last())
        .with_target(_target("A", query))
    )


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


def _target(letter: str, query: Query) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(letter).expr(query.expr).legend_format(query.legend)
    return target.datasource(SOURCE).range()
