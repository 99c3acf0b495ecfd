"""The boards: what is checked in is what the code makes, of metrics that there are."""

import json

import pytest

from docker.grafana import boards, promql
from docker.grafana.boards import BOARDS, DIRECTORY
from metrics import catalog
from tests.docker.expressions import check_against_catalogue


@pytest.mark.parametrize("name", BOARDS)
def test_what_is_checked_in_is_what_the_code_makes(name: str) -> None:
    """If not: python -m docker.grafana.boards"""
    assert (DIRECTORY / f"{name}.json").read_text() == boards.build(name)


def test_there_is_no_other_board() -> None:
    assert {path.name for path in DIRECTORY.iterdir()} == {f"{name}.json" for name in BOARDS}


@pytest.mark.parametrize("name", BOARDS)
def test_every_query_reads_what_there_is(name: str) -> None:
    board = json.loads((DIRECTORY / f"{name}.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len(panels) >= 15
    for panel in panels:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert check_against_catalogue(target["expr"]), panel["title"]
            assert '$instance"' in target["expr"], panel["title"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            assert check_against_catalogue(variable["query"])


@pytest.mark.parametrize("name", BOARDS)
def test_panels_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((DIRECTORY / f"{name}.json").read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_metric_is_on_a_board() -> None:
    """What nobody can see need not be measured. The config is told by the page, and by whoever set it."""
    shown = " ".join(expr for _, _, rows in BOARDS.values() for _, expr in boards.queries(rows))
    unseen = [metric.name for metric in catalog.CATALOG if metric.full_name not in shown]
    assert sorted(unseen) == ["config_info", "engine_up"]


@pytest.mark.parametrize(
    ("matchers", "message"),
    [
        ({"sate": "compute"}, "has no label sate"),
        ({"state": "computing"}, "never computing"),
        ({"state": "~idle|x"}, "never x"),
    ],
)
def test_a_label_or_value_that_is_not_there_is_refused(matchers: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        promql.select(catalog.STAGE_STATE, **matchers)
