"""The image and how Compose runs it, as far as files tell. tests/docker/trial.py builds and runs them on a Docker engine."""

import re
import subprocess

import pytest

from orchestrator.config import OPTIONS, ServeConfig
from orchestrator.serve import ERROR_EVENTS_SECONDS, RANK_EXIT_SECONDS
from tests.docker.conftest import DOCKER, load_yaml

DOCKERFILE = (DOCKER / "Dockerfile").read_text()


def test_hadolint_has_nothing_to_say(hadolint: str) -> None:
    done = subprocess.run([hadolint, str(DOCKER / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_last_stage_is_what_an_orchestrator_expects() -> None:
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*:\d+$", last, re.MULTILINE), "numeric and not root"
    assert "\nSTOPSIGNAL SIGTERM\n" in last
    assert re.search(r'^HEALTHCHECK .* CMD \["stagewire", "health"\]$', last, re.MULTILINE)
    assert '\nENTRYPOINT ["/usr/bin/tini", "--", "stagewire"]\n' in last
    assert re.search(r"^VOLUME /var/cache/stagewire$", last, re.MULTILINE)
    for tool in ("gcc", "build-essential", "pip install"):
        assert tool not in last


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "compose.cpu.yaml"])
def test_every_variable_is_an_option(name: str) -> None:
    """An unknown one would be refused when the container starts."""
    set_here = set(re.findall(r"^\s+(STAGEWIRE_\w+)[=:]", (DOCKER / name).read_text(), re.MULTILINE))
    assert set_here
    assert set_here <= {option.variable for option in OPTIONS}


@pytest.mark.parametrize("port", [ServeConfig().port, ServeConfig().wanted_metrics_port])
def test_the_default_ports_are_exposed_and_published(port: int) -> None:
    assert re.search(rf"^EXPOSE .*\b{port}\b", DOCKERFILE, re.MULTILINE)
    ports = load_yaml(DOCKER / "compose.yaml")["services"]["worker"]["ports"]
    assert any(published.endswith(f":{port}") for published in ports)


def test_nothing_is_published_beyond_this_host() -> None:
    services = load_yaml(DOCKER / "compose.yaml")["services"]
    ports = [port for service in services.values() for port in service["ports"]]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_a_stop_waits_for_a_drain() -> None:
    worker = load_yaml(DOCKER / "compose.yaml")["services"]["worker"]
    drain = float(re.fullmatch(r"\$\{\w+:-(\d+)\}", worker["environment"]["STAGEWIRE_SHUTDOWN_TIMEOUT"])[1])
    grace = float(worker["stop_grace_period"].removesuffix("s"))
    assert grace >= drain + RANK_EXIT_SECONDS + ERROR_EVENTS_SECONDS + 10


def test_the_root_is_read_only_and_privileges_are_dropped() -> None:
    worker = load_yaml(DOCKER / "compose.yaml")["services"]["worker"]
    assert worker["read_only"] is True
    assert worker["cap_drop"] == ["ALL"]
    assert worker["security_opt"] == ["no-new-privileges:true"]


def test_the_cpu_override_takes_the_gpu_away() -> None:
    worker = load_yaml(DOCKER / "compose.yaml")["services"]["worker"]
    assert worker["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    override = load_yaml(DOCKER / "compose.cpu.yaml")["services"]["worker"]
    assert "deploy" in override
    assert override["deploy"] is None
    assert override["environment"]["STAGEWIRE_DEVICE"] == "cpu"
    assert override["build"]["args"]["TORCH_PIP_ARGS"] == (
        "${TORCH_PIP_ARGS:---index-url https://download.pytorch.org/whl/cpu}"
    )


def test_prometheus_scrapes_the_exporter_and_grafana_finds_prometheus() -> None:
    services = load_yaml(DOCKER / "compose.yaml")["services"]
    jobs = {job["job_name"]: job for job in load_yaml(DOCKER / "prometheus/prometheus.yaml")["scrape_configs"]}
    [target] = jobs["stagewire"]["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in services
    assert int(port) == ServeConfig().wanted_metrics_port
    [datasource] = load_yaml(DOCKER / "grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert datasource["url"] == "http://prometheus:9090"
    [provider] = load_yaml(DOCKER / "grafana/provisioning/dashboards/stagewire.yaml")["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]
