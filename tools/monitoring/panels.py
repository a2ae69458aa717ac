# SPDX-License-Identifier: Apache-2.0
"""What a dashboard consists of, and its form in Grafana's own schema.

Grafana's SDK has the names of fields and options, for version 10.1: later ones import it as it is.
Every panel has a description, a unit, and the data source that the reader chose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as schema
from grafana_foundation_sdk.models import heatmap as heatmaps
from grafana_foundation_sdk.models import prometheus as queries

TAG: Final = "allotment"
"""By it the dashboards find each other."""

Thresholds: TypeAlias = tuple[tuple[float, str], ...]
"""Color from each value on; below the first, green."""
Kind = Literal["stat", "lines", "stacked", "table", "ranking", "states", "heatmap"]

FAULTS: Final[Thresholds] = ((1, "red"),)
"""Of a number of things that are not as they should be."""
FULL: Final[Thresholds] = ((0.8, "orange"), (0.95, "red"))
HOT: Final[Thresholds] = ((83, "orange"), (87, "red"))


@dataclass(frozen=True, slots=True)
class Query:
    """One expression. In a table a column with a title and a unit, or without: labels alone."""

    expr: str
    legend: str = ""
    unit: str = ""
    thresholds: Thresholds = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; `width` in 24ths of the screen."""

    title: str
    kind: Kind
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    width: int = 8
    height: int = 8
    most: float | None = None
    decimals: int | None = None
    thresholds: Thresholds = ()
    states: tuple[str, str] = ("no", "yes")
    """What 0 and 1 mean, of `states`; 0 is the bad one."""
    labels: dict[str, str] = field(default_factory=dict)
    """Of a table: titles of the columns of labels, in their order."""
    link: tuple[str, str] = ("", "")
    """Of a table: the label whose values lead to another dashboard, and its name."""
    empty: str = ""
    """Why there may be no data in a healthy system."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice of the reader, from the values of a label."""

    name: str
    label: str
    query: str
    has_all: bool = True


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard."""

    name: str
    title: str
    question: str
    """What it answers, as a description."""
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    @property
    def uid(self) -> str:
        return f"{TAG}-{self.name}"

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


SOURCE: Final = schema.DataSourceRef(type_val="prometheus", uid="${datasource}")


def render(board: Board) -> str:
    """Return the dashboard as the JSON that Grafana imports."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.question)
        .tags([TAG])
        .time("now-3h", "now")
        .refresh("30s")
        .tooltip(schema.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Allotment")
            .type(schema.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(include_vars=True)
            .keep_time(keep_time=True)
        )
        .annotation(
            dashboard.AnnotationQuery()
            .name("Alerts")
            .datasource(SOURCE)
            .enable(enable=True)
            .icon_color("red")
            .expr('ALERTS{alertname=~"Allotment.+", alertstate="firing"}')
        )
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )
    for variable in board.variables:
        made.with_variable(_variable(variable))
    number = 0
    for row in board.rows:
        number += 1
        made.with_row(dashboard.Row(row.title).id(number))
        for panel in row.panels:
            number += 1
            made.with_panel(_panel(panel).id(number))
    document = json.loads(JSONEncoder().encode(made.build()))
    del document["style"]  # the reader's: light or dark
    return json.dumps(document, sort_keys=True, indent=2) + "\n"


def _variable(variable: Variable) -> dashboard.QueryVariable:
    made = (
        dashboard.QueryVariable(variable.name)
        .label(variable.label)
        .datasource(SOURCE)
        .query({"query": variable.query, "refId": variable.name})
        .refresh(schema.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(schema.VariableSort.ALPHABETICAL_ASC)
        .multi(variable.has_all)
        .include_all(variable.has_all)
    )
    if variable.has_all:
        # Also what has no such label: Prometheus takes an absent label for an empty one.
        made.all_value(".*").current(schema.VariableOption(text=["All"], value=["$__all"]))
    return made


Builder: TypeAlias = (
    bargauge.Panel
    | heatmap.Panel
    | stat.Panel
    | statetimeline.Panel
    | table.Panel
    | timeseries.Panel
)


def _panel(panel: Panel) -> Builder:
    made = _MAKERS[panel.kind](panel)
    made.title(panel.title).description(_described(panel)).datasource(SOURCE)
    made.span(panel.width).height(panel.height)
    if panel.kind != "table":
        made.unit(panel.unit).min(0)
    if panel.most is not None:
        made.max(panel.most)
    if panel.decimals is not None:
        made.decimals(panel.decimals)
    is_now = panel.kind in {"stat", "table", "ranking"}
    for number, query in enumerate(panel.queries):
        target = (
            prometheus.Dataquery()
            .ref_id(chr(ord("A") + number))
            .expr(query.expr)
            .legend_format(query.legend)
            .editor_mode(queries.QueryEditorMode.CODE)
        )
        target = target.instant() if is_now else target.range()
        if panel.kind == "table":
            target.format(queries.PromQueryFormat.TABLE)
        elif panel.kind == "heatmap":
            target.format(queries.PromQueryFormat.HEATMAP)
        made.with_target(target)
    return made


def _described(panel: Panel) -> str:
    return f"{panel.description} {panel.empty}".strip()


def _steps(thresholds: Thresholds, first: str = "green") -> dashboard.ThresholdsConfig:
    steps = [schema.Threshold(value=None, color=first)]
    steps += [schema.Threshold(value=value, color=color) for value, color in thresholds]
    return dashboard.ThresholdsConfig().mode(schema.ThresholdsMode.ABSOLUTE).steps(steps)


def _stat(panel: Panel) -> stat.Panel:
    made = (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(options.BigValueGraphMode.NONE)
        .color_mode(options.BigValueColorMode.VALUE)
        .text_mode(
            options.BigValueTextMode.VALUE_AND_NAME
            if len(panel.queries) > 1
            else options.BigValueTextMode.VALUE
        )
        .color_scheme(dashboard.FieldColor().mode(schema.FieldColorModeId.THRESHOLDS))
        .thresholds(_steps(panel.thresholds, "green" if panel.thresholds else "text"))
    )
    return made.no_value("-")


def _lines(panel: Panel) -> timeseries.Panel:
    is_stacked = panel.kind == "stacked"
    made = (
        timeseries.Panel()
        .legend(
            common.VizLegendOptions()
            .show_legend(show_legend=True)
            .display_mode(options.LegendDisplayMode.TABLE)
            .placement(options.LegendPlacement.BOTTOM)
            .calcs(["mean", "lastNotNull", "max"])
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(options.TooltipDisplayMode.MULTI)
            .sort(options.SortOrder.DESCENDING)
        )
        .line_width(1)
        .fill_opacity(30 if is_stacked else 5)
        .show_points(options.VisibilityMode.NEVER)
        .color_scheme(dashboard.FieldColor().mode(schema.FieldColorModeId.PALETTE_CLASSIC))
    )
    if is_stacked:
        made.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL).group("A"))
    # A promise is dashed, so that it is told from a use without its color.
    dashes = options.LineStyle(fill="dash", dash=[8, 8])
    return made.override_by_regexp(
        "/(limit|guarantee|ceiling|promised|quota)/",
        [
            schema.DynamicConfigValue(id_val="custom.lineStyle", value=dashes),
            schema.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
            schema.DynamicConfigValue(
                id_val="custom.stacking", value={"mode": "none", "group": "A"}
            ),
        ],
    )


def _ranking(panel: Panel) -> bargauge.Panel:
    return (
        bargauge.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .orientation(options.VizOrientation.HORIZONTAL)
        .display_mode(options.BarGaugeDisplayMode.BASIC)
        .color_scheme(dashboard.FieldColor().mode(schema.FieldColorModeId.THRESHOLDS))
        .thresholds(_steps(panel.thresholds, "green" if panel.thresholds else "blue"))
        .no_value("-")
    )


def _states(panel: Panel) -> statetimeline.Panel:
    bad, good = panel.states
    mapped = schema.ValueMap(
        {
            "0": schema.ValueMappingResult(text=bad, color="red"),
            "1": schema.ValueMappingResult(text=good, color="green"),
        }
    )
    return (
        statetimeline.Panel()
        .merge_values(merge_values=True)
        .show_value(options.VisibilityMode.AUTO)
        .fill_opacity(70)
        .row_height(0.8)
        .mappings([mapped])
        .color_scheme(dashboard.FieldColor().mode(schema.FieldColorModeId.THRESHOLDS))
        .thresholds(_steps(((1, "green"),), "red"))
    )


def _heatmap(panel: Panel) -> heatmap.Panel:
    return (
        heatmap.Panel()
        .calculate(calculate=False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmaps.HeatmapColorMode.SCHEME)
            .scheme("Blues")
            .steps(32)
        )
        .y_axis(heatmap.YAxisConfig().unit(panel.unit))
        .show_legend()
        .show_tooltip()
    )


def _table(panel: Panel) -> table.Panel:
    """Join the queries by their labels; each is a column."""
    letters = [chr(ord("A") + number) for number in range(len(panel.queries))]
    # The only query of a table keeps its plain name.
    values = ["Value"] if len(letters) == 1 else [f"Value #{letter}" for letter in letters]
    titled = dict(zip(values, (query.legend for query in panel.queries), strict=True))
    hidden = [name for name, title in titled.items() if not title]
    titles = {name: title for name, title in titled.items() if title}
    order = [*panel.labels, *values]
    made = (
        table.Panel()
        .show_header(show_header=True)
        .cell_height(options.TableCellHeight.SM)
        .with_transformation(schema.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(
            schema.DataTransformerConfig(
                id_val="organize",
                options={
                    "excludeByName": {"Time": True, **dict.fromkeys(hidden, True)},
                    "indexByName": {name: number for number, name in enumerate(order)},
                    "renameByName": {**panel.labels, **titles},
                },
            )
        )
    )
    for query in (each for each in panel.queries if each.legend):
        shown = [schema.DynamicConfigValue(id_val="unit", value=query.unit or panel.unit)]
        if query.thresholds:
            shown += [
                schema.DynamicConfigValue(
                    id_val="thresholds", value=_steps(query.thresholds).build()
                ),
                schema.DynamicConfigValue(
                    id_val="custom.cellOptions", value={"type": "color-text"}
                ),
            ]
        made.override_by_name(query.legend, shown)
    label, board = panel.link
    if label:
        url = (
            f"/d/{TAG}-{board}?${{datasource:queryparam}}&${{cluster:queryparam}}"
            f"&var-{label}=${{__value.raw}}&${{__url_time_range}}"
        )
        if "namespace" in panel.labels and label != "namespace":
            url += f"&var-namespace=${{__data.fields.{panel.labels['namespace']}}}"
        link = {"title": f"Open the {board} dashboard", "url": url}
        made.override_by_name(
            panel.labels[label], [schema.DynamicConfigValue(id_val="links", value=[link])]
        )
    return made


_MAKERS: Final[Mapping[Kind, Callable[[Panel], Builder]]] = {
    "stat": _stat,
    "lines": _lines,
    "stacked": _lines,
    "table": _table,
    "ranking": _ranking,
    "states": _states,
    "heatmap": _heatmap,
}
