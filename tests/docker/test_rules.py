"""Prometheus's configuration, rules and alerts: promtool's verdict, and every name held against the catalogue."""

import re
import subprocess

import pytest

from metrics.catalog import CATALOG
from tests.docker.conftest import DOCKER, load_yaml
from tests.docker.expressions import check_against_catalogue

DIRECTORY = DOCKER / "prometheus"
RULES = [
    rule for name in ("rules.yaml", "alerts.yaml") for group in load_yaml(DIRECTORY / name)["groups"] for rule in group["rules"]
]
ALERTS = [rule["alert"] for rule in RULES if "alert" in rule]
RECORDS = {rule["record"] for rule in RULES if "record" in rule}
TEST_FILES = sorted(path.name for path in DIRECTORY.glob("*.test.yaml"))
TESTS = [test for name in TEST_FILES for test in load_yaml(DIRECTORY / name)["tests"]]


def run(*argv: str) -> None:
    done = subprocess.run(argv, cwd=DIRECTORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_configuration(promtool: str) -> None:
    run(promtool, "check", "config", "prometheus.yaml")


@pytest.mark.parametrize("name", TEST_FILES)
def test_promtool_runs_the_tests_of_the_alerts(name: str, promtool: str) -> None:
    run(promtool, "test", "rules", name)


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_fires_in_one_test_and_is_silent_in_another(alert: str) -> None:
    verdicts = [
        bool(case.get("exp_alerts"))
        for test in TESTS
        for case in test["alert_rule_test"]
        if case["alertname"] == alert and test["input_series"]
    ]
    assert set(verdicts) == {True, False}


def test_no_test_is_of_an_alert_that_is_not_there() -> None:
    """promtool would find such an alert silent, and be content."""
    assert {case["alertname"] for test in TESTS for case in test["alert_rule_test"]} == set(ALERTS)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_rule_reads_what_there_is(rule: dict[str, str]) -> None:
    recorded = re.findall(r"\b\w+:\w+:\w+", rule["expr"])
    assert set(recorded) <= RECORDS
    assert check_against_catalogue(rule["expr"]) or recorded or rule["alert"] == "StagewireDown"


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test["name"])
def test_every_series_of_the_tests_is_one_that_there_is(test: dict[str, list[dict[str, str]]]) -> None:
    for series in test["input_series"]:
        assert check_against_catalogue(series["series"]) or series["series"].startswith("up{")


@pytest.mark.parametrize("rule", [rule for rule in RULES if "alert" in rule], ids=lambda rule: rule["alert"])
def test_every_alert_says_whom_to_call_and_what_to_do(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert set(rule["annotations"]) == {"summary", "description"}
    for text in rule["annotations"].values():
        assert text.endswith(".")
        for name in re.findall(r"\bstagewire_\w+", text):
            assert name in {metric.full_name for metric in CATALOG}
