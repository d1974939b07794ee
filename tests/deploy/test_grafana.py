"""The dashboard: it is what its maker makes, Grafana can lay it out, and no panel asks for what nobody exports."""

from __future__ import annotations

import json
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest

from deploy.grafana import dashboard
from tests.deploy.installation import ROOT
from tests.deploy.promql import asked, faults, recorded, well_formed

if TYPE_CHECKING:
    from pathlib import Path

FILE = ROOT / "deploy" / "grafana" / "elasticd.json"
BOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
EXPRS = [target["expr"] for panel in GRAPHS for target in panel["targets"]]
EXPRS += [one["expr"] for one in BOARD["annotations"]["list"]]
SHAPES: dict[str, dict[str, type | tuple[type, ...]]] = {
    "board": {"uid": str, "title": str, "schemaVersion": int, "panels": list, "templating": dict, "annotations": dict, "time": dict, "refresh": str},
    "row": {"id": int, "title": str, "collapsed": bool, "panels": list, "gridPos": dict},
    "graph": {"id": int, "title": str, "datasource": dict, "gridPos": dict, "fieldConfig": dict, "targets": list},
    "target": {"refId": str, "expr": str, "legendFormat": str, "datasource": dict},
    "place": {"x": int, "y": int, "w": int, "h": int},
    "variable": {"name": str, "type": str, "query": (dict, str)},
    "annotation": {"name": str, "expr": str, "enable": bool, "iconColor": str, "datasource": dict, "titleFormat": str},
}
"""What Grafana's model needs of each part, and of which type."""


def misshapen(kind: str, part: dict[str, Any]) -> list[str]:
    """Fields that are missing or of another type."""
    return [name for name, of in SHAPES[kind].items() if not isinstance(part.get(name), of)]


def in_promtools_words(expr: str) -> str:
    """The same, with what Grafana puts in."""
    return expr.replace("$__rate_interval", "5m")


def test_the_file_is_what_its_maker_makes() -> None:
    assert FILE.read_text() == dashboard.text(), "run: python -m deploy.grafana.dashboard >deploy/grafana/elasticd.json"


def test_every_part_has_the_shape_that_grafana_reads() -> None:
    assert misshapen("board", BOARD) == []
    for panel in PANELS:
        assert misshapen("row" if panel["type"] == "row" else "graph", panel) == [], panel["title"]
        assert misshapen("place", panel["gridPos"]) == []
        for target in panel.get("targets", []):
            assert misshapen("target", target) == []
    for variable in BOARD["templating"]["list"]:
        assert misshapen("variable", variable) == []
    for one in BOARD["annotations"]["list"]:
        assert misshapen("annotation", one) == []
    assert {panel["type"] for panel in PANELS} <= {"row", "timeseries", "stat", "state-timeline"}


def test_no_two_panels_are_the_same_or_lie_on_one_another() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert len({panel["title"] for panel in GRAPHS}) == len(GRAPHS)
    cells = [{(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])} for at in (panel["gridPos"] for panel in PANELS)]
    assert not [1 for one, other in combinations(cells, 2) if one & other]
    assert all(0 <= x < dashboard.WIDTH for places in cells for x, _ in places)


def test_every_panel_asks_something_and_says_what_it_shows() -> None:
    for panel in GRAPHS:
        assert panel["targets"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["legendFormat"] for target in panel["targets"])


@pytest.mark.parametrize("expr", EXPRS)
def test_a_panel_asks_for_nothing_that_nobody_exports(expr: str) -> None:
    assert faults(in_promtools_words(expr), recorded=recorded()) == []


def test_every_expression_is_promql(tmp_path: Path) -> None:
    done = well_formed([in_promtools_words(expr) for expr in EXPRS], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(EXPRS)} rules found" in done.stdout


def test_an_expression_that_is_none_is_noticed(tmp_path: Path) -> None:
    assert well_formed(["sum by (job_name (elasticd_job_nodes)"], tmp_path).returncode != 0


def test_panels_follow_the_variables() -> None:
    names = {variable["name"] for variable in BOARD["templating"]["list"]}
    assert names == {"datasource", "cluster", "job_name", "instance"}
    for panel in GRAPHS:
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            used = {value for _, _, _, value in asked(in_promtools_words(target["expr"])).matchers if value.startswith("$")}
            assert {"$cluster"} < used <= {f"${name}" for name in names}, panel["title"]


def test_variables_are_found_by_metrics_that_exist() -> None:
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            inside = variable["query"]["query"].removeprefix("label_values(").removesuffix(")")
            expr, _, label = inside.rpartition(", ")
            assert faults(expr) == []
            assert label == variable["name"]


def test_rows_are_there_for_whoever_looks_for_one() -> None:
    assert [panel["title"] for panel in PANELS if panel["type"] == "row"] == list(dashboard.ROWS)
    shown = {name for expr in EXPRS for name in asked(in_promtools_words(expr)).metrics}
    assert {"elasticd_job:goodput:ratio_rate1h", "elasticd_job_loss", "elasticd_gpu_utilization_ratio", "elasticd_frozen"} <= shown
