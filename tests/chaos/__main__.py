"""Loses ranks of a real worker while clients stream: ``make chaos``, or ``python -m tests.chaos --help``.

First every request is answered once, undisturbed. Then ``--streams`` clients ask for them again and again, greedy and seeded,
with long prompts among them and some that leave half way, while a random rank is killed, or stopped, at a random time. What a
client is sent must be, token for token, what it was sent the first time. Prints one line of JSON and exits 1 when it was not.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile
from typing import Any

import httpx

from stages.model.source import locate_model
from tests.integration.worker import Worker

LEAVES = 0.1  # share of the requests whose client leaves half way
STEP_TIMEOUT = 2.0
PATIENCE_SECONDS = 120.0  # for a token; whoever waits longer counts as failed
SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "vocab_size": 49152,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Ask:
    """A request and, once it is known, its answer: the text of each event."""

    body: dict[str, Any]
    texts: list[str] = field(default_factory=list)


@dataclass
class Found:
    num_done: int = 0
    num_left: int = 0  # clients that left
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    next_token_seconds: list[float] = field(default_factory=list)  # of every stream that was open when a rank was lost
    detected_seconds: list[float] = field(default_factory=list)
    recovered_seconds: list[float] = field(default_factory=list)


class Chaos:
    def __init__(self, worker: Worker, client: httpx.AsyncClient, args: argparse.Namespace) -> None:
        self._worker = worker
        self._client = client
        self._args = args
        self._chance = random.Random(args.seed)
        self._asks = [Ask(self._body(i)) for i in range(args.streams)]
        self.found = Found()
        self._open: dict[int, float] = {}  # stream -> when it got its last event
        self._lost_at: dict[int, float] = {}  # stream -> when a rank was lost while it waited for its next
        self._is_over = False

    def _body(self, i: int) -> dict[str, Any]:
        chance = self._chance
        length = chance.choice([3, 20, 60, self._args.long_prompt])
        return {
            "prompt": [chance.randrange(100, 40_000) for _ in range(length)],
            "max_tokens": chance.randint(10, self._args.tokens),
            "temperature": i % 2,
            "seed": chance.randrange(2**31),
            "presence_penalty": chance.choice([0, 0, 0.5]),
            "ignore_eos": True,
            "stream": True,
        }

    async def _texts(self, ask: Ask) -> AsyncIterator[str]:
        async with self._client.stream("POST", f"{self._worker.url}/v1/completions", json=ask.body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code} {(await response.aread())[:200]!r}")
            is_done = False
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line:
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    yield event["choices"][0]["text"]
            if not is_done:
                raise RuntimeError("the stream ended without [DONE]")

    async def learn(self) -> None:
        async def one(ask: Ask) -> None:
            async for text in self._texts(ask):
                ask.texts.append(text)

        await asyncio.gather(*(one(ask) for ask in self._asks))

    async def ask_again(self, stream: int) -> None:
        chance = random.Random(f"{self._args.seed} {stream}")
        while not self._is_over:
            ask = chance.choice(self._asks)
            leaves_after = chance.randrange(len(ask.texts)) if chance.random() < LEAVES else -1
            got: list[str] = []
            try:
                async with aclosing(self._texts(ask)) as texts:  # type: ignore[type-var]
                    self._open[stream] = time.monotonic()
                    async for text in texts:
                        self._note_token(stream)
                        got.append(text)
                        if len(got) == leaves_after:
                            break
            except (RuntimeError, httpx.HTTPError) as exc:
                self.found.failed.append(f"{type(exc).__name__}: {exc}")
            else:
                wanted = ask.texts[: len(got)] if len(got) == leaves_after else ask.texts
                if "".join(got) != "".join(wanted):
                    self.found.wrong.append(f"{''.join(got)!r} is not {''.join(wanted)!r}")
                self.found.num_done += 1
                self.found.num_left += len(got) == leaves_after
            finally:
                self._open.pop(stream, None)
                self._lost_at.pop(stream, None)

    def _note_token(self, stream: int) -> None:
        now = self._open[stream] = time.monotonic()
        if (lost_at := self._lost_at.pop(stream, None)) is not None:
            self.found.next_token_seconds.append(now - lost_at)

    async def lose(self) -> None:
        """One rank, and wait until the worker is ready again."""
        await asyncio.sleep(self._chance.uniform(0, self._args.pause))
        process = self._chance.choice(self._worker.rank_processes())
        lost_at = time.monotonic()
        os.kill(process.pid, signal.SIGSTOP if self._args.stop else signal.SIGKILL)
        self._lost_at = dict.fromkeys(self._open, lost_at)
        while await self._is_ready():
            await asyncio.sleep(0.02)
        self.found.detected_seconds.append(time.monotonic() - lost_at)
        while not await self._is_ready():
            await asyncio.sleep(0.05)
        self.found.recovered_seconds.append(time.monotonic() - lost_at)
        async with asyncio.timeout(PATIENCE_SECONDS):  # a loss more would be another one for whoever still waits
            while self._lost_at:
                await asyncio.sleep(0.02)

    async def _is_ready(self) -> bool:
        return (await self._client.get(f"{self._worker.url}/readyz")).status_code == 200

    async def run(self) -> None:
        await self.learn()
        began_at = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for stream in range(self._args.streams):
                tasks.create_task(self.ask_again(stream))
            try:
                num_losses = 0
                while num_losses < self._args.losses and time.monotonic() - began_at < self._args.duration:
                    await self.lose()
                    num_losses += 1
            finally:
                self._is_over = True


def small_model(directory: Path) -> list[str]:
    """A model of random weights with the tokenizer of the default one: it starts as quickly as a worker can."""
    source = locate_model(None, "auto").path
    (directory / "config.json").write_text(json.dumps(SMALL))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source / name).is_file():
            copyfile(source / name, directory / name)
    return ["--model", str(directory), "--load-format", "dummy", "--max-num-batched-tokens", "128"]


def share(values: list[float], of: float) -> float:
    return round(sorted(values)[min(int(len(values) * of), len(values) - 1)], 2) if values else 0.0


async def disturb(worker: Worker, args: argparse.Namespace) -> Found:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS, limits=limits) as client:
        chaos = Chaos(worker, client, args)
        await chaos.run()
        return chaos.found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", type=int, default=50, help="ranks to lose")
    parser.add_argument("--duration", type=float, default=1e9, help="seconds after which no more rank is lost")
    parser.add_argument("--stop", action="store_true", help="stop ranks with SIGSTOP, do not kill them")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=60, help="most tokens of an answer")
    parser.add_argument("--long-prompt", type=int, default=700)
    parser.add_argument("--pause", type=float, default=4.0, help="most seconds between losses")
    parser.add_argument("--small", action="store_true", help="a small model of random weights, not the default one")
    parser.add_argument("-pp", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        options = small_model(Path(directory)) if args.small else []
        options += ["-pp", str(args.pp), "--dtype", "float32", "--step-timeout", str(STEP_TIMEOUT), "--max-restarts", "100000"]
        worker = Worker(*options).wait_ready()
        try:
            found = asyncio.run(disturb(worker, args))
            code = worker.stop()
            worker.check_nothing_is_left()
        except BaseException:
            print("\n".join(worker.lines[-40:]), file=sys.stderr)  # noqa: T201
            raise
        finally:
            worker.kill()
    for text in (*found.failed, *found.wrong):
        print(text, file=sys.stderr)  # noqa: T201
    report = {
        "signal": "SIGSTOP" if args.stop else "SIGKILL",
        "stages": args.pp,
        "losses": len(found.detected_seconds),
        "requests": found.num_done,
        "left": found.num_left,
        "failed": len(found.failed),
        "wrong": len(found.wrong),
        "detected_seconds_max": share(found.detected_seconds, 1.0),
        "ready_seconds_p95": share(found.recovered_seconds, 0.95),
        "next_token_seconds_p50": share(found.next_token_seconds, 0.5),
        "next_token_seconds_p95": share(found.next_token_seconds, 0.95),
        "exit_code": code,
    }
    print(json.dumps(report))  # noqa: T201
    return 0 if not found.failed and not found.wrong and code == 0 and found.detected_seconds else 1


if __name__ == "__main__":
    sys.exit(main())
