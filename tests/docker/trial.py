#!/usr/bin/env python3
"""The whole of docker/ on a real Docker engine: built, started, asked, watched, drained, and nothing left.

    make docker-test
    make docker-test TRIAL_ARGS="--stand-ins --wheels DIR"

It needs a Docker engine that the ``docker`` client reaches (DOCKER_HOST names another one), Docker Compose 2.24 or newer, 10 GB
of disk, and a network with the images that docker/ names, Debian's packages, PyPI and PyTorch's index. TORCH_PIP_ARGS goes to
pip when torch is installed. ``--help`` says what can be had instead of a part of that network. Standard library only.
"""

import argparse
import contextlib
import functools
import http.client
import http.server
import json
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
NEEDED_COMPOSE = (2, 24)  # the first whose overrides can take away with !reset
UP_SECONDS = 900  # the first start converts the model
DRAIN_SECONDS = 90  # stop_grace_period
STREAM_TOKENS = 128  # well within STAGEWIRE_SHUTDOWN_TIMEOUT on two busy cores
PORTS = ("STAGEWIRE_PORT", "STAGEWIRE_METRICS_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")

log = logging.getLogger("trial")


class Failed(Exception):
    """What was tried is not as it must be."""


class Unmet(Exception):
    """Something that the trial needs is not here."""


def check(is_so: bool, what: str, found: object = "") -> None:
    if not is_so:
        raise Failed(f"{what}: {found}")
    log.info("ok: %s", what)


def wait_for(is_so: Callable[[], bool], what: str, found: Callable[[], object]) -> None:
    """Like ``check``, of what is so after a few scrapes."""
    ends_at = time.monotonic() + 90
    while not is_so() and time.monotonic() < ends_at:
        time.sleep(0.5)
    check(is_so(), what, found())


def run(*argv: str, env: dict[str, str] | None = None) -> str:
    """The standard output of a command; ``Failed`` with its standard error when it exits with another code than 0."""
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    if done.returncode:
        raise Failed(f"{' '.join(argv)} exits with {done.returncode}: {done.stderr.strip()[-4000:]}")
    return done.stdout.strip()


# ---- what is needed -----------------------------------------------------------------------------------------------------


def find_compose() -> tuple[str, ...]:
    """The command of a Compose that is new enough; ``Unmet`` without a Docker client, engine or Compose."""
    if shutil.which("docker") is None:
        raise Unmet("no docker in PATH")
    engine = subprocess.run(["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True)
    if engine.returncode:
        raise Unmet(f"no Docker engine: {engine.stderr.strip()}")
    compose = subprocess.run(["docker", "compose", "version", "--short"], capture_output=True, text=True)
    found = re.match(r"v?(\d+)\.(\d+)", compose.stdout)
    if compose.returncode or found is None or (int(found[1]), int(found[2])) < NEEDED_COMPOSE:
        version = compose.stdout.strip() or "none"
        raise Unmet(f"Docker Compose {version}: must be {'.'.join(map(str, NEEDED_COMPOSE))} or newer, as the plugin of docker")
    log.info("Docker engine %s, Compose %s", engine.stdout.strip(), compose.stdout.strip())
    return ("docker", "compose")


def has_image(name: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", name], capture_output=True).returncode == 0


# ---- stand-ins for images -----------------------------------------------------------------------------------------------


def make_stand_in(name: str) -> None:
    """An image of Debian's packages under the name of one that only a registry has; ``Unmet`` when none can be made."""
    if shutil.which("mmdebstrap") is None:
        raise Unmet("--stand-ins: mmdebstrap must be in PATH")
    busybox = '--customize-hook=chroot "$1" busybox --install -s'  # wget, for the health checks
    if name.startswith("python:"):
        suite = name.rpartition("-")[2]
        packages, hooks, changes = "ca-certificates,python3,python3-venv", [], ['CMD ["python3"]']
    elif name.startswith("prom/prometheus:"):
        suite, packages = "bookworm", "prometheus,busybox"
        hooks = [busybox, '--customize-hook=install -d -o 65534 -g 65534 "$1/prometheus"']
        changes = ["USER nobody", 'ENTRYPOINT ["/usr/bin/prometheus"]', "WORKDIR /prometheus"]
    elif name.startswith("grafana/grafana:"):
        # Debian has no Grafana: something that is healthy, and shows nothing.
        suite, packages = "bookworm", "busybox"
        hooks = [busybox, '--customize-hook=install -D /dev/null "$1/www/api/health"']
        changes = ["USER 472", 'ENTRYPOINT ["busybox", "httpd", "-f", "-p", "3000", "-h", "/www"]']
    else:
        raise Unmet(f"--stand-ins: there is none for {name}")
    log.info("stand-in for %s: Debian %s with %s", name, suite, packages)
    with tempfile.TemporaryDirectory() as directory:
        archive = f"{directory}/image.tar"
        run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", *hooks, suite, archive)
        path = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        options = [option for change in (path, *changes) for option in ("--change", change)]
        run("docker", "import", *options, archive, name)


@contextlib.contextmanager
def stand_ins(names: list[str]) -> Iterator[None]:
    """What the engine lacks of these images, for as long as the context lasts."""
    made: list[str] = []
    try:
        for name in names:
            if not has_image(name):
                make_stand_in(name)
                made.append(name)
        yield
    finally:
        for name in made:
            run("docker", "image", "rm", name)


@contextlib.contextmanager
def served(directory: Path) -> Iterator[str]:
    """The address of a page that lists a folder's files, for pip."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


# ---- the services ------------------------------------------------------------------------------------------------------


class Project:
    """compose.yaml with the CPU override under a name, an image and ports of its own, beside whatever else the engine runs."""

    def __init__(
        self, compose: tuple[str, ...], directory: Path, build: dict[str, Any], build_secrets: dict[str, Path]
    ) -> None:
        self.name = f"stagewire-trial-{secrets.token_hex(3)}"
        self.image = self.name
        override = {
            "services": {"worker": {"image": self.image, "build": {**build, "secrets": list(build_secrets)}}},
            "secrets": {name: {"file": str(path)} for name, path in build_secrets.items()},
        }
        path = directory / "override.json"  # JSON is YAML
        path.write_text(json.dumps(override))
        files = (DOCKER / "compose.yaml", DOCKER / "compose.cpu.yaml", path)
        self._command = (*compose, "-p", self.name, *(argument for file in files for argument in ("-f", str(file))))
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in PORTS]
            for sock in sockets:
                sock.bind(("127.0.0.1", 0))
            self.ports = {name: sock.getsockname()[1] for name, sock in zip(PORTS, sockets, strict=True)}
        # A model of the caller's is not what is tried.
        env = {name: value for name, value in os.environ.items() if not name.startswith("STAGEWIRE_")}
        self._env = {**env, **{name: str(port) for name, port in self.ports.items()}}

    def set_variable(self, name: str, value: str) -> None:
        self._env[name] = value

    def compose(self, *arguments: str) -> str:
        return run(*self._command, *arguments, env=self._env)

    def show(self, *arguments: str) -> None:
        """Like ``compose``, with the command's output shown."""
        if subprocess.run([*self._command, *arguments], env=self._env).returncode:
            raise Failed(f"docker compose {' '.join(arguments)}")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, *arguments], env=self._env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    def services(self) -> list[str]:
        return self.compose("config", "--services").split()

    def images(self) -> list[str]:
        return self.compose("config", "--images").split()

    def inspect(self, service: str) -> dict[str, Any]:
        return json.loads(run("docker", "inspect", self.compose("ps", "--all", "--quiet", service)))[0]

    def execute(self, *arguments: str, user: str = "") -> subprocess.CompletedProcess[str]:
        """A command in the worker's container."""
        options = ("--user", user) if user else ()
        container = self.compose("ps", "--quiet", "worker")
        return subprocess.run(["docker", "exec", *options, container, *arguments], capture_output=True, text=True)

    def get(self, port: str, path: str) -> bytes:
        status, body = self.request(port, "GET", path)
        if status != 200:
            raise Failed(f"GET {path} of {port}: {status} {body[:500]!r}")
        return body

    def request(self, port: str, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.ports[port], timeout=60)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()

    def remove(self) -> None:
        """Everything of this project, also when it never came up."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")
        if has_image(self.image):
            run("docker", "image", "rm", self.image)

    def leftovers(self) -> list[str]:
        label = f"label=com.docker.compose.project={self.name}"
        of_compose = [
            f"{kind} {name}"
            for kind, listing in (("container", "ps --all"), ("volume", "volume ls"), ("network", "network ls"))
            for name in run("docker", *listing.split(), "--quiet", "--filter", label).split()
        ]
        return of_compose + [f"image {name}" for name in [self.image] if has_image(name)]


# ---- what is tried -----------------------------------------------------------------------------------------------------


def try_container(project: Project) -> None:
    for service in project.services():
        state = project.inspect(service)["State"]
        check(state["Health"]["Status"] == "healthy", f"{service} is healthy", state)
    worker = project.inspect("worker")
    check(worker["Config"]["User"] == "10001:10001", "the image's user is a number and not root", worker["Config"]["User"])
    check(worker["HostConfig"]["ReadonlyRootfs"], "the root is read-only")
    check(worker["HostConfig"]["DeviceRequests"] in (None, []), "the override asks for no GPU")
    processes = run("docker", "top", worker["Id"], "-eo", "pid,uid,args").splitlines()[1:]
    check(all(line.split()[1] == "10001" for line in processes), "no process is root's", processes)
    check(sum("orchestrator.rank_main" in line for line in processes) == 2, "two ranks run", processes)
    check(any("-m metrics" in line for line in processes), "the exporter runs", processes)
    status = project.execute("cat", "/proc/1/status").stdout
    check(bool(re.search(r"^CapBnd:\s+0+$", status, re.MULTILINE)), "there is no capability to be had", status)
    check(bool(re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)), "and no new privilege", status)
    written = project.execute("touch", "/opt/stagewire/written", user="0")
    check("Read-only file system" in written.stderr, "not even root could write", written.stderr)
    health = project.execute("stagewire", "health")
    check(health.returncode == 0, "stagewire health exits 0", health.stderr)


def try_completion(project: Project) -> None:
    request = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    status, body = project.request("STAGEWIRE_PORT", "POST", "/v1/completions", request)
    check(status == 200, "a completion is answered", body)
    answer = json.loads(body)
    check("Paris" in answer["choices"][0]["text"], "and says what the model knows", answer)
    check(answer["usage"]["completion_tokens"] == 8, "in as many tokens as asked for", answer)


def try_metrics(project: Project) -> None:
    check(b"<svg" in (page := project.get("STAGEWIRE_METRICS_PORT", "/pipeline")) or b"<canvas" in page, "/pipeline is a page")
    trace = json.loads(project.get("STAGEWIRE_METRICS_PORT", "/trace?seconds=60"))
    check(len(trace["traceEvents"]) > 0, "/trace has spans")

    def query(expr: str) -> list[dict[str, Any]]:
        answer = json.loads(project.get("PROMETHEUS_PORT", f"/api/v1/query?{urlencode({'query': expr})}"))
        return answer["data"]["result"]

    def all_up() -> bool:
        targets = json.loads(project.get("PROMETHEUS_PORT", "/api/v1/targets"))["data"]["activeTargets"]
        up = {series["metric"]["job"]: series["value"][1] for series in query("up")}
        return len(up) == len(targets) and "stagewire" in up and set(up.values()) == {"1"}

    def health_of_rules() -> list[str]:
        groups = json.loads(project.get("PROMETHEUS_PORT", "/api/v1/rules"))["data"]["groups"]
        return [rule["health"] for group in groups for rule in group["rules"]]

    wait_for(all_up, "up == 1 for all of Prometheus's targets", lambda: query("up"))
    wait_for(
        lambda: [series["value"][1] for series in query("stagewire_rank_up")] == ["1", "1"],
        "Prometheus sees two ranks",
        lambda: query("stagewire_rank_up"),
    )
    wait_for(lambda: set(health_of_rules()) == {"ok"}, "every rule and alert is evaluated, none with an error", health_of_rules)


def try_drain(project: Project) -> None:
    """``docker compose stop`` while a stream is open: it goes on, new requests are refused, the worker exits 0."""
    connection = http.client.HTTPConnection("127.0.0.1", project.ports["STAGEWIRE_PORT"], timeout=DRAIN_SECONDS)
    with contextlib.closing(connection):
        request = {
            "prompt": "Once upon a time",
            "max_tokens": STREAM_TOKENS,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        options = {"stream_options": {"include_usage": True}}
        connection.request("POST", "/v1/completions", json.dumps(request | options), {"content-type": "application/json"})
        response = connection.getresponse()
        events = (line[6:].strip() for line in iter(response.readline, b"") if line.startswith(b"data: "))
        first = next(events)
        check(response.status == 200 and b"error" not in first, "a stream is open", first)
        started_at = time.monotonic()
        stop = project.start("stop")
        try:
            refused = None
            rest: list[bytes] = []
            for event in events:
                rest.append(event)
                if refused is None and len(rest) == STREAM_TOKENS // 2:
                    with contextlib.suppress(OSError):
                        body = {"prompt": "Hello", "max_tokens": 1}
                        refused = project.request("STAGEWIRE_PORT", "POST", "/v1/completions", body)
            streamed_seconds = time.monotonic() - started_at
            _, stderr = stop.communicate(timeout=DRAIN_SECONDS + 30)
        except BaseException:
            stop.kill()
            stop.communicate()
            raise
    check(rest[-1] == b"[DONE]", "the stream that was open goes on to its end", rest[-3:])
    decoded = [json.loads(event) for event in [first, *rest[:-1]]]
    [usage] = [event["usage"] for event in decoded if event.get("usage")]
    [reason] = [choice["finish_reason"] for event in decoded for choice in event["choices"] if choice.get("finish_reason")]
    check(usage["completion_tokens"] == STREAM_TOKENS and reason == "length", "with every token", (usage, reason))
    check(refused is not None and refused[0] == 503, "a request that comes meanwhile is refused with 503", refused)
    check(stop.returncode == 0, "docker compose stop exits 0", stderr)
    state = project.inspect("worker")["State"]
    check((state["ExitCode"], state["OOMKilled"]) == (0, False), "the worker exits 0", state)
    stopped_seconds = time.monotonic() - started_at
    log.info("the stream ended %.1f s after the stop, everything %.1f s after it", streamed_seconds, stopped_seconds)


def trial(project: Project, are_stand_ins: bool) -> None:
    base = re.search(r"^ARG PYTHON_VERSION=(\S+)$.*?^FROM (\S+) AS build$", (DOCKER / "Dockerfile").read_text(), re.M | re.S)
    assert base is not None
    names = [base[2].replace("${PYTHON_VERSION}", base[1]), *(name for name in project.images() if name != project.image)]
    with stand_ins(names if are_stand_ins else []):
        try:
            project.show("build", "worker")
            size = int(run("docker", "image", "inspect", "--format", "{{.Size}}", project.image))
            log.info("ok: the image builds, %.2f GB", size / 1e9)
            started_at = time.monotonic()
            project.show("up", "--detach", "--no-build", "--wait", "--wait-timeout", str(UP_SECONDS))
            log.info("ok: everything is up after %.0f s", time.monotonic() - started_at)
            try_container(project)
            try_completion(project)
            try_metrics(project)
            try_drain(project)
        except Failed:
            project.show("logs", "--tail", "40", "worker")  # what it says may explain it
            raise
        finally:
            project.remove()
    left = project.leftovers()
    check(not left, "nothing is left", left)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Builds the image and runs all of compose.yaml on a Docker engine, without GPU."
    )
    parser.add_argument(
        "--stand-ins",
        action="store_true",
        help="make each image that the engine lacks from Debian's packages (as root, with mmdebstrap) instead of pulling it; "
        "Grafana's is empty then, and Python's has the version that Debian has",
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="a folder with torch's wheel, for a network without its index"
    )
    parser.add_argument("--pip-conf", type=Path, metavar="FILE", help="pip's configuration while the image is built")
    parser.add_argument("--ca-certificate", type=Path, metavar="FILE", help="what pip trusts, where --pip-conf names it")
    parser.add_argument("--network", help="of the build; host when --wheels is given")
    arguments = parser.parse_args()
    for option in ("wheels", "pip_conf", "ca_certificate"):
        path = getattr(arguments, option)
        if path is not None and not path.exists():
            parser.error(f"--{option.replace('_', '-')} {path}: must exist")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    build_secrets = {
        name: path.resolve()
        for name, path in (("pip.conf", arguments.pip_conf), ("ca.crt", arguments.ca_certificate))
        if path is not None
    }
    network = arguments.network or ("host" if arguments.wheels else None)
    started_at = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
            build = {} if network is None else {"network": network}
            project = Project(find_compose(), Path(directory), build, build_secrets)
            if arguments.wheels:
                address = stack.enter_context(served(arguments.wheels.resolve()))
                project.set_variable("TORCH_PIP_ARGS", f"--find-links {address}")
            trial(project, arguments.stand_ins)
    except Unmet as exc:
        log.error("cannot be tried: %s\n%s", exc, (__doc__ or "").partition("\n\n")[2])
        return 2
    except Failed as exc:
        log.error("FAILED: %s", exc)
        return 1
    log.info("all as it must be, after %.0f s", time.monotonic() - started_at)
    return 0


if __name__ == "__main__":
    sys.exit(main())
