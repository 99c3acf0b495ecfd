"""Toy ranks that are lost while they serve: ``python -m tests.toy_loss TRANSPORT SIGNAL STEP_TIMEOUT ROUNDS``.

Each round starts two ranks as processes, forked since what they import takes longer than all else, and sends ``SIGNAL`` to one
of them at a random time. Prints one line of JSON for each round: the rank, what each stream was told and after how many
seconds, every await that raised on the other rank (its stream, the error, and the seconds), and the exit codes.
"""

import asyncio
import json
import os
import random
import secrets
import signal
import socket
import sys
import time
from contextlib import suppress

import uvloop

import orchestrator.rank
from orchestrator.control import Channel, ChannelClosed, SocketChannel
from orchestrator.engine import Engine
from orchestrator.rank_main import main as serve_ranks
from orchestrator.request import SamplingParams
from orchestrator.waiting import Waker
from stages.device import Point
from stages.errors import PeerLost
from stages.plan import Drain
from stages.transport import device_links
from tests.local_pipeline import emulated_gpu, slice_loader
from tests.served_engine import Sizes, assemble_ranks, engine_over
from tests.toy_model import VOCAB_SIZE, toy_slices

NUM_RANKS = 2
FORWARD_SECONDS = 0.001
PHASE_SECONDS = 0.02  # some steps
END_SECONDS = 20.0


def start_rank(rank: int, pairs: list[tuple[socket.socket, socket.socket]], transport: str, lost_fd: int) -> int:
    """Fork; the rank's process id. ``pairs``: the engine's socket and the rank's, for each rank."""
    engine_pid = os.getpid()
    if (process_id := os.fork()) != 0:
        return process_id

    class TellingWaker(Waker):
        async def reached(self, point: Point, deadline_seconds: float | None = None) -> None:
            try:
                await super().reached(point, deadline_seconds)
            except PeerLost as exc:
                line = json.dumps([point.stream_name, str(exc), time.monotonic()])
                os.write(lost_fd, line.encode() + b"\n")
                raise

    orchestrator.rank.Waker = TellingWaker
    device_links._PROCESS = secrets.token_bytes(16)  # it was made before the fork
    control = pairs[rank][1].detach()
    for sock in (sock for pair in pairs for sock in pair):
        sock.close()
    slices = toy_slices(NUM_RANKS, forward_seconds=FORWARD_SECONDS)
    load = slice_loader(slices, Sizes().num_blocks, emulated_gpu if transport == "copy_engine" else None)
    arguments = ["--parent", str(engine_pid), "--control", f"{rank}:{control}", "--log-level", "error"]
    os._exit(serve_ranks(arguments, load))


async def lose(
    channels: dict[int, Channel], transport: str, victim_pid: int, signum: int, step_timeout: float, survivor: int
) -> dict[str, object]:
    pipeline = await assemble_ranks(channels, transport, Sizes())
    async with engine_over(pipeline, VOCAB_SIZE, Sizes(), step_timeout) as (engine, _):
        is_under_way = asyncio.Event()
        streams = [asyncio.create_task(told(engine, i, is_under_way)) for i in range(4)]
        await is_under_way.wait()
        await asyncio.sleep(random.uniform(0, PHASE_SECONDS))
        lost_at = time.monotonic()
        os.kill(victim_pid, signum)
        answers = await asyncio.gather(*streams)
    channels[survivor].send(Drain())  # a rank whose channel closes ends its awaits
    async with asyncio.timeout(END_SECONDS):
        with suppress(ChannelClosed):
            while True:
                await channels[survivor].receive()
    return {"lost_at": lost_at, "told": answers}


async def told(engine: Engine, i: int, is_under_way: asyncio.Event) -> tuple[str, float]:
    try:
        async for _ in engine.generate(str(i), [i], SamplingParams(max_tokens=250, temperature=0.0)):
            is_under_way.set()
    except Exception as exc:  # noqa: BLE001  the test judges it
        return str(exc), time.monotonic()
    return "", time.monotonic()


def play(transport: str, signum: int, step_timeout: float, victim: int) -> dict[str, object]:
    pairs = [socket.socketpair() for _ in range(NUM_RANKS)]
    lost_reader, lost_writer = os.pipe()
    process_ids: list[int] = []
    try:
        for rank in range(NUM_RANKS):
            process_ids.append(start_rank(rank, pairs, transport, lost_writer))
    finally:
        os.close(lost_writer)
        for _, theirs in pairs:
            theirs.close()

    async def run() -> dict[str, object]:
        channels: dict[int, Channel] = {rank: SocketChannel(ours, f"rank {rank}") for rank, (ours, _) in enumerate(pairs)}
        try:
            return await lose(channels, transport, process_ids[victim], signum, step_timeout, 1 - victim)
        finally:
            for channel in channels.values():
                channel.abort()

    try:
        found = uvloop.run(run())
    finally:
        with suppress(ProcessLookupError):
            os.kill(process_ids[victim], signal.SIGKILL)
        exits = [os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]) for process_id in process_ids]
    lost_at = found.pop("lost_at")
    assert isinstance(lost_at, float)
    with os.fdopen(lost_reader) as lines:
        awaits = [json.loads(line) for line in lines]
    found["told"] = [(text, at - lost_at) for text, at in found["told"]]  # type: ignore[attr-defined]
    found["awaits"] = [(stream, text, at - lost_at) for stream, text, at in awaits]
    return found | {"victim": victim, "exit_codes": exits}


if __name__ == "__main__":
    wanted, signal_name, timeout, rounds = sys.argv[1:]
    for i in range(int(rounds)):
        print(json.dumps(play(wanted, signal.Signals[signal_name], float(timeout), i % NUM_RANKS)), flush=True)  # noqa: T201
