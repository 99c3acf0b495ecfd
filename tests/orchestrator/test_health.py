"""``stagewire health`` against a server that answers what a worker may answer."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from orchestrator import cli, health


class _Worker(HTTPServer):
    status = 200
    body = b'{"status": "ready"}'


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, _Worker)
        self.send_response(self.server.status if self.path == "/readyz" else 404)
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def worker() -> Iterator[_Worker]:
    with _Worker(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def run_health(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*arguments: str) -> tuple[int, str]:
        code = cli.main(["health", *arguments])
        captured = capsys.readouterr()
        return code, (captured.out + captured.err).strip()

    return run


def test_a_ready_worker_is_healthy(worker: _Worker, run_health: Callable[..., tuple[int, str]]) -> None:
    assert run_health("--port", str(worker.server_port)) == (0, "ready")


def test_the_environment_says_where_it_listens(
    worker: _Worker, run_health: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGEWIRE_HOST", "0.0.0.0")
    monkeypatch.setenv("STAGEWIRE_PORT", str(worker.server_port))
    assert run_health() == (0, "ready")


@pytest.mark.parametrize(
    ("body", "shown"), [(b'{"status": "draining"}', "draining"), (b"nonsense", "(no JSON)"), (b"[1]", "(no object)")]
)
def test_one_that_admits_nothing_is_not(
    body: bytes, shown: str, worker: _Worker, run_health: Callable[..., tuple[int, str]]
) -> None:
    worker.status, worker.body = 503, body
    code, text = run_health("--port", str(worker.server_port))
    assert (code, text) == (1, f"stagewire: error: http://127.0.0.1:{worker.server_port}/readyz says 503 {shown}")


def test_no_worker_is_unhealthy(run_health: Callable[..., tuple[int, str]]) -> None:
    with closing(socket.socket()) as sock:  # bound and not listening: nothing else can take the port meanwhile
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        code, text = run_health("--port", str(port))
    assert code == 1
    assert f"no answer from http://127.0.0.1:{port}/readyz" in text


def test_a_worker_that_hangs_is_unhealthy(run_health: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "TIMEOUT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        code, text = run_health("--port", str(sock.getsockname()[1]))
    assert code == 1
    assert "timed out" in text


def test_an_unknown_option_is_usage(run_health: Callable[..., tuple[int, str]]) -> None:
    code, text = run_health("--prot", "1")
    assert code == 2
    assert "--prot" in text
