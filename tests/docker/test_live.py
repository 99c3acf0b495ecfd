"""The boards and alerts on a real Prometheus that scrapes a real worker under load.

Rules and alerts are those of docker/prometheus, with their times cut short.
"""

import json
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from docker.grafana.boards import BOARDS, DIRECTORY
from stages.model.source import ModelSource
from tests.docker.conftest import DOCKER
from tests.integration.worker import Worker, free_port

pytestmark = [pytest.mark.alone, pytest.mark.timeout(200)]

WINDOW = "6s"  # of every rate
SCRAPE_SECONDS = 0.5
FAULTS = {"StagewireDown", "StagewireRankDown", "StagewireStalled", "StagewireMixedVersions", "StagewireKVNearlyFull"}


class Prometheus:
    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=10)

    def is_up(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def query(self, expr: str) -> list[float]:
        """The values of all series that an instant query gives."""
        response = self._client.get("/api/v1/query", params={"query": expr})
        assert response.status_code == 200, response.text
        return [float(series["value"][1]) for series in response.json()["data"]["result"]]

    def wait_for_a_whole_window(self) -> None:
        """Prometheus takes its time before it scrapes at all."""
        ends_at = time.monotonic() + 30
        while self.query(f"count_over_time(stagewire_engine_ready[{WINDOW}])") < [12]:
            assert time.monotonic() < ends_at
            time.sleep(0.2)
        time.sleep(1)  # until the rules have seen it, too

    def firing(self) -> dict[str, dict[str, str]]:
        alerts = self._client.get("/api/v1/alerts").json()["data"]["alerts"]
        return {alert["labels"]["alertname"]: alert["labels"] for alert in alerts if alert["state"] == "firing"}

    def wait_firing(self, name: str, seconds: float) -> dict[str, str]:
        ends_at = time.monotonic() + seconds
        while (labels := self.firing().get(name)) is None:
            assert time.monotonic() < ends_at, f"{name} does not fire; firing: {self.firing()}"
            time.sleep(0.2)
        return labels

    def close(self) -> None:
        self._client.close()


def shortened(text: str) -> str:
    """Rules that look back a few seconds and fire at once."""
    text = re.sub(r"\[(5m|30m|1h|6h)\]", f"[{WINDOW}]", text)
    text = re.sub(r"for: \w+", "for: 1s", text)
    return text.replace("> 0)) > 10", "> 0)) > 2")


@contextmanager
def prometheus_for(program: str, target: str, directory: Path) -> Iterator[Prometheus]:
    for name in ("rules.yaml", "alerts.yaml"):
        (directory / name).write_text(shortened((DOCKER / "prometheus" / name).read_text()))
    (directory / "prometheus.yaml").write_text(
        f"global: {{scrape_interval: {SCRAPE_SECONDS}s, scrape_timeout: {SCRAPE_SECONDS}s, evaluation_interval: 0.5s}}\n"
        "rule_files: [rules.yaml, alerts.yaml]\n"
        f"scrape_configs: [{{job_name: stagewire, static_configs: [{{targets: ['{target}']}}]}}]\n".replace("0.5s", "500ms")
    )
    port = free_port()
    arguments = [f"--config.file={directory / 'prometheus.yaml'}", f"--storage.tsdb.path={directory / 'data'}"]
    with subprocess.Popen([program, *arguments, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]) as process:
        found = Prometheus(f"http://127.0.0.1:{port}")
        try:
            ends_at = time.monotonic() + 20
            while not found.is_up():
                assert process.poll() is None
                assert time.monotonic() < ends_at
                time.sleep(0.05)
            yield found
        finally:
            found.close()
            process.terminate()


@contextmanager
def load(worker: Worker, num_clients: int, max_tokens: int) -> Iterator[None]:
    """Requests one after the other from each client, until the end or until the worker answers none."""
    is_over = threading.Event()

    def client() -> None:
        while not is_over.is_set():
            try:
                worker.complete("What is a pipeline?", max_tokens=max_tokens, ignore_eos=True)
            except (httpx.TransportError, AssertionError):
                return

    threads = [threading.Thread(target=client) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)


def target_of(worker: Worker) -> str:
    return worker.url.removeprefix("http://")


def test_every_panel_of_the_boards_shows_something(
    smollm2: ModelSource, prometheus_program: str, promtool: str, tmp_path: Path
) -> None:
    worker = Worker("--dtype", "float32")
    try:
        worker.wait_ready()
        told = httpx.get(f"{worker.url}/metrics").text
        checked = subprocess.run([promtool, "check", "metrics"], input=told, capture_output=True, text=True, timeout=20)
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
        with prometheus_for(prometheus_program, target_of(worker), tmp_path) as prometheus, load(worker, 3, 8):
            prometheus.wait_for_a_whole_window()
            missing = []
            for name in BOARDS:
                for panel in json.loads((DIRECTORY / f"{name}.json").read_text())["panels"]:
                    for target in panel.get("targets", []):
                        expr = target["expr"].replace("$__rate_interval", WINDOW).replace("$instance", ".+")
                        if not any(map(math.isfinite, prometheus.query(expr.replace("$rank", ".+")))):
                            missing.append((panel["title"], expr))
            assert missing == []
            # What the recording rules make of it.
            states = prometheus.query("sum by (rank) (instance_rank_state:stagewire_stage_state:rate5m)")
            assert states == [pytest.approx(1, abs=0.02)] * 2
            assert all(0 < load <= 1.02 for load in prometheus.query("instance_rank:stagewire_load:ratio_rate5m"))
            assert not FAULTS & prometheus.firing().keys()  # what tells of slowness may be true of a busy machine
        assert worker.stop() == 0
    finally:
        worker.kill()


@pytest.mark.full
def test_alerts_of_a_stalled_and_of_a_killed_rank(smollm2: ModelSource, prometheus_program: str, tmp_path: Path) -> None:
    worker = Worker("--dtype", "float32", "--step-timeout", "60")
    try:
        worker.wait_ready()
        with prometheus_for(prometheus_program, target_of(worker), tmp_path) as prometheus, load(worker, 2, 16):
            prometheus.wait_for_a_whole_window()
            [_, victim] = worker.rank_processes()
            os.kill(victim.pid, signal.SIGSTOP)
            assert prometheus.wait_firing("StagewireStalled", 15)["rank"] in "01"
            os.kill(victim.pid, signal.SIGKILL)
            assert prometheus.wait_firing("StagewireRankDown", 15)["rank"] == "1"
            ends_at = time.monotonic() + 60
            while FAULTS & prometheus.firing().keys():  # until the rank is back
                assert time.monotonic() < ends_at
                time.sleep(0.2)
            assert sorted(prometheus.query("stagewire_rank_restarts_total")) == [0, 1]
        assert worker.stop() == 0
    finally:
        worker.kill()


@pytest.mark.full
def test_alert_of_backpressure(smollm2: ModelSource, prometheus_program: str, tmp_path: Path) -> None:
    """One slot, and a second stage that computes nearly everything: the first waits for it."""
    options = ("--layer-split", "1,27,1,1", "--ring-slots", "1", "--cpu-binding", "none")
    worker = Worker("--dtype", "float32", "-pp", "4", *options)
    try:
        worker.wait_ready()
        with prometheus_for(prometheus_program, target_of(worker), tmp_path) as prometheus, load(worker, 8, 32):
            assert prometheus.wait_firing("StagewireSlotBackpressure", 40)["rank"] == "0"
        assert worker.stop() == 0
    finally:
        worker.kill()
