"""An engine and toy ranks, each a process of its own: ``python -m tests.toy_worker STAGES SECONDS REQUESTS TOKENS TRANSPORT``.

Prints one line of JSON: every request's tokens; when each arrived (seconds, of any clock); and how long, at that time, the
last step had taken on each stage.
"""

import asyncio
import gc
import json
import os
import sys
import time

import uvloop

from orchestrator.launch import Launcher, rank_environment
from orchestrator.request import SamplingParams
from tests.served_engine import Sizes, serving_engine

VOCAB_SIZE = 1009


async def main(num_stages: int, seconds: str, num_requests: int, num_tokens: int, transport: str) -> dict[str, list[object]]:
    launcher = Launcher()
    device = "emulated" if transport == "copy_engine" else "cpu"
    argv = [sys.executable, "-m", "tests.toy_rank", str(num_stages), seconds, device]
    await launcher.start([[rank] for rank in range(num_stages)], lambda _: argv, rank_environment(os.environ, 1))
    arrivals: list[object] = []
    stage_seconds: list[object] = []
    try:
        async with serving_engine(launcher.channels, VOCAB_SIZE, transport, Sizes(), cpu_binding="auto") as (engine, _):
            gc.freeze()

            async def one(i: int) -> list[int]:
                tokens: list[int] = []
                async for chunk in engine.generate(str(i), [i], SamplingParams(max_tokens=num_tokens, temperature=0.0)):
                    arrivals.append(time.perf_counter())
                    stage_seconds.append(engine.stage_seconds.copy())
                    tokens += chunk.token_ids
                return tokens

            answers = await asyncio.gather(*(one(i) for i in range(num_requests)))
        exits = await launcher.stop(10)
    finally:
        launcher.kill()
    return {
        "tokens": [*answers],
        "arrivals": arrivals,
        "stage_seconds": stage_seconds,
        "exit_codes": [ended.returncode for ended in exits],
    }


if __name__ == "__main__":
    stages, seconds, requests, tokens, transport = sys.argv[1:]
    print(json.dumps(uvloop.run(main(int(stages), seconds, int(requests), int(tokens), transport))))  # noqa: T201
