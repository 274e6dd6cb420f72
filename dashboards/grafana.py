"""Pages as Grafana's dashboard JSON, by grafana-foundation-sdk."""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from dashboards.spec import ANNOTATIONS, Page, Panel, promql

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "rayzero"
HEIGHT = {"stat": 4, "lines": 8, "stack": 8, "table": 6}
OF_VARIABLE = {"rank": "rayzero_step", "actor": "rayzero_param_version", "role": "rayzero_process_memory_bytes"}


def to_json(page: Page) -> str:
    """The dashboard as it is committed."""
    made = dashboard.Dashboard(page.title).uid(page.uid).description(page.description).tags([TAG])
    made = made.refresh("10s").time("now-30m", "now").timezone("browser").tooltip(models.DashboardCursorSync.CROSSHAIR)
    made = made.editable().link(_link())
    for name, (expr, colour) in ANNOTATIONS.items():
        made = made.annotation(_annotation(name, expr, colour))
    for variable in _variables(page):
        made = made.with_variable(variable)
    for row in page.rows:
        made = made.with_row(dashboard.Row(row.title))
        for one in row.panels:
            made = made.with_panel(_panel(one))
    text = JSONEncoder(sort_keys=True, indent=2).encode(made.build())
    return json.dumps(_tidy(json.loads(text)), indent=2, sort_keys=True) + "\n"


def _tidy(described: Any) -> dict[str, Any]:
    """What the builder leaves open (numbers of panels, no database id), and what it writes beside Grafana's published
    type, which tests/dashboards/test_schema.py compares."""
    described["id"] = None
    for number, one in enumerate(described["panels"], start=1):
        one["id"] = number
    for one in described["annotations"]["list"]:
        one["target"] = {"expr": one.pop("expr"), "refId": "Anno"}
    for one in described["templating"]["list"]:
        for name in ("auto", "auto_count", "auto_min"):  # of variables that are intervals
            one.pop(name, None)
    return dict(described)


def _link() -> Any:
    return (
        dashboard.DashboardLink("RayZero")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )


def _variables(page: Page) -> list[Any]:
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    run = _variable("run", "label_values(rayzero_step, run)").sort(models.VariableSort.ALPHABETICAL_DESC)
    others = [_variable(name, f'label_values({OF_VARIABLE[name]}{{run=~"$run"}}, {name})') for name in page.variables]
    return [source, run, *others]


def _variable(name: str, query: str) -> Any:
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .query(query)
        .datasource(SOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _annotation(name: str, expr: str, colour: str) -> Any:
    made = dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour)
    return made.expr(promql(expr))


def _panel(one: Panel) -> Any:
    kinds = {"lines": _lines, "stack": _stack, "stat": _stat, "table": _table}
    made = kinds[one.kind]().title(one.title).description(one.description).unit(one.unit).datasource(SOURCE)
    made = made.span(one.width).height(HEIGHT[one.kind])
    for number, query in enumerate(one.queries):
        made = made.with_target(_target(one, query.expr, query.legend, chr(ord("A") + number)))
    if one.thresholds:
        steps = [models.Threshold(value=value, color=colour) for value, colour in one.thresholds]
        made = made.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    if one.at_most is not None:
        made = made.min(0).max(one.at_most)
    if one.opens:
        link = dashboard.DashboardLink("More").type(models.DashboardLinkType.LINK).url(f"/d/{one.opens}")
        made = made.links([link.include_vars(True).keep_time(True)])
    return made


def _target(one: Panel, expr: str, legend: str, ref: str) -> Any:
    made = prometheus.Dataquery().datasource(SOURCE).expr(promql(expr)).ref_id(ref).legend_format(legend or "__auto")
    if one.kind == "table":
        return made.instant().format(prometheus_models.PromQueryFormat.TABLE)
    return made.range()


def _lines() -> Any:
    legend = common.VizLegendOptions().show_legend(True).placement(common_models.LegendPlacement.BOTTOM)
    legend = legend.display_mode(common_models.LegendDisplayMode.LIST)
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    return timeseries.Panel().line_width(1).fill_opacity(5).legend(legend).tooltip(tooltip)


def _stack() -> Any:
    stacking = common.StackingConfig().mode(common_models.StackingMode.NORMAL)
    return _lines().stacking(stacking).fill_opacity(60)


def _stat() -> Any:
    reduced = common.ReduceDataOptions().calcs(["lastNotNull"])
    return stat.Panel().reduce_options(reduced).graph_mode(common_models.BigValueGraphMode.AREA)


def _table() -> Any:
    return table.Panel()
