"""A real worker: ``stagewire serve`` as a process, with its ranks, as a user starts it."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

START_SECONDS = 60.0
END_SECONDS = 30.0


class Worker:
    """A running ``stagewire serve``; ``stderr`` gathers what it prints."""

    def __init__(self, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator", "serve", "--port", "0", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.lines: list[str] = []
        self.url = ""
        self.ready_seconds = 0.0
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._family: dict[int, psutil.Process] = {}

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if found := re.match(r"Ready: (http://\S+) ", line):
                self.url = found[1]
                self.ready_seconds = time.monotonic() - self.started_at
                self._is_ready.set()
        self._is_ready.set()

    def wait_ready(self) -> "Worker":
        assert self._is_ready.wait(START_SECONDS), "\n".join(self.lines)
        assert self.url, "\n".join(self.lines)
        self.family()
        return self

    def family(self) -> list[psutil.Process]:
        """The worker's process and every child seen so far."""
        try:
            for process in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]:
                self._family.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            pass
        return list(self._family.values())

    def rank_processes(self) -> list[psutil.Process]:
        """The rank processes that live, in rank order."""
        ranks: list[tuple[str, psutil.Process]] = []
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):  # also of a zombie
                arguments = process.cmdline()
                if process.pid != self.process.pid and "orchestrator.rank_main" in arguments:
                    ranks.append((arguments[arguments.index("--control") + 1], process))
        return [process for _, process in sorted(ranks, key=lambda rank: rank[0])]

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        self.process.send_signal(signum)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(END_SECONDS)
        self._reader.join(END_SECONDS)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code

    def check_nothing_is_left(self, seconds: float = 5.0) -> None:
        """No process of the worker lives on, not even as a zombie."""
        _, alive = psutil.wait_procs(self._family.values(), timeout=seconds)
        assert alive == []

    def kill(self) -> None:
        """For the end of a test that failed half way."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    # ---- requests -------------------------------------------------------------------------------------------------

    def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 16, **fields}
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, prompt: str | list[int], **fields: Any) -> Iterator[Any]:
        """The events of a streamed completion: decoded JSON, and the string ``[DONE]``."""
        body = {"prompt": prompt, "temperature": 0, "stream": True, "ignore_eos": True, **fields}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line:
                    data = line.removeprefix("data: ")
                    yield data if data == "[DONE]" else json.loads(data)


def run_to_end(*arguments: str, env: Mapping[str, str] | None = None) -> tuple[int, list[str]]:
    """Run ``stagewire serve`` with arguments that it refuses; returns the exit code and the lines it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "serve", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
        env={**os.environ, **(env or {})},
    )
    return done.returncode, (done.stdout + done.stderr).splitlines()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def named_leftovers() -> set[str]:
    """Everything with a name that a worker could leave behind: shared memory, sockets, temporary files."""
    names = {str(path) for path in Path("/dev/shm").iterdir()}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and "stagewire" in fields[7]:
            names.add(fields[7])
    return names | {str(path) for path in Path(os.environ.get("TMPDIR", "/tmp")).glob("*stagewire*")}
