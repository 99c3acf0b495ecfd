import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil
import pytest

from metrics.catalog import Place, Writer
from metrics.ledger import create_ledger
from orchestrator.control import ChannelClosed
from orchestrator.launch import Launcher, ProcessExit, open_control, rank_environment, run_child
from orchestrator.rank_main import open_ledger
from stages.errors import ConfigError, StagewireError
from stages.plan import Drain, EndEpoch, StepDone

LOOPS = ("asyncio", "uvloop")
ENV = rank_environment({**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, num_threads=3)

# Answers EndEpoch(n, ...) with StepDone(n, rank = its rank, error = its environment's threads); what it does on Drain is given.
RANK = """
import argparse, asyncio, os, signal, sys, time
from orchestrator.control import ChannelClosed, SocketChannel
from orchestrator.launch import die_with_parent, open_control
from stages.plan import Drain, StepDone

parser = argparse.ArgumentParser()
parser.add_argument("on_drain")
parser.add_argument("--parent", type=int)
parser.add_argument("--control", action="append")
args = parser.parse_args()
die_with_parent(args.parent)
assert os.getsid(0) == os.getpid(), "not a session of its own"

async def serve(rank, sock):
    channel = SocketChannel(sock, "the engine")
    while not isinstance(message := await channel.receive(), Drain):
        channel.send(StepDone(message.epoch, os.getpid(), rank, 0, True, 0.0, os.environ["OMP_NUM_THREADS"]))
    if args.on_drain == "ignore-sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.on_drain != "exit":
        channel.send(message)
        signal.pause()
    await channel.aclose()

async def main():
    async with asyncio.TaskGroup() as tasks:
        for rank, sock in map(open_control, args.control):
            tasks.create_task(serve(rank, sock))

asyncio.run(main())
"""


def argv(on_drain: str = "exit", program: str = RANK) -> list[str]:
    return [sys.executable, "-c", program, on_drain]


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
async def _nothing_is_left() -> AsyncIterator[None]:
    before = open_fds()
    yield
    assert open_fds() == before
    assert psutil.Process().children() == []  # zombies count


@pytest.fixture
async def launcher(_nothing_is_left: None) -> AsyncIterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.kill()


async def started(launcher: Launcher, groups: Sequence[Sequence[int]], on_drain: str = "exit") -> dict[int, int]:
    """Start the ranks and hear from each; returns rank -> process id, as the ranks themselves say."""
    await launcher.start(groups, lambda _: argv(on_drain), ENV)
    process_ids: dict[int, int] = {}
    for rank, channel in launcher.channels.items():
        channel.send(EndEpoch(0, ""))
        answer = await channel.receive()
        assert isinstance(answer, StepDone)
        assert (answer.rank, answer.error) == (rank, "3")
        process_ids[rank] = answer.step_id
    return process_ids


def gone(process_ids: Sequence[int]) -> bool:
    """Whether every one of the processes ends within 10 s."""
    processes: list[psutil.Process] = []
    for process_id in process_ids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(process_id))
    return not psutil.wait_procs(processes, timeout=10)[1]


@pytest.mark.parametrize(("groups", "num_processes"), [([[0], [1], [2]], 3), ([[0, 1, 2]], 1)])
async def test_every_rank_has_its_channel_and_drains(launcher, groups, num_processes):
    process_ids = await started(launcher, groups)
    assert process_ids == launcher.process_ids
    assert len(set(process_ids.values())) == num_processes
    for channel in launcher.channels.values():
        channel.send(Drain())
    exits = await launcher.stop(timeout_seconds=30)
    assert [(ended.ranks, ended.returncode) for ended in exits] == [(tuple(group), 0) for group in groups]
    assert await launcher.stop(timeout_seconds=0) == exits


async def test_a_killed_rank_shows_as_an_exit_and_as_the_end_of_its_channel(launcher):
    process_ids = await started(launcher, [[0], [1]])
    failed = asyncio.ensure_future(launcher.wait_failed())
    await asyncio.sleep(0)
    os.kill(process_ids[1], signal.SIGKILL)
    with pytest.raises(ChannelClosed, match="rank 1 closed the channel"):
        await launcher.channels[1].receive()
    ended = await failed
    assert ended == ProcessExit((1,), -signal.SIGKILL)
    assert ended.cause == "rank 1 was killed by SIGKILL"
    launcher.channels[0].send(EndEpoch(0, ""))
    assert isinstance(await launcher.channels[0].receive(), StepDone)


async def test_on_exit_hears_of_every_end_once():
    ends: list[ProcessExit] = []
    launcher = Launcher(on_exit=ends.append)
    await started(launcher, [[0], [1]])
    launcher.channels[0].send(Drain())
    with pytest.raises(ChannelClosed):
        await launcher.channels[0].receive()
    launcher.kill()
    launcher.kill()
    assert sorted(ended.ranks for ended in ends) == [(0,), (1,)]
    assert ProcessExit((1,), -signal.SIGKILL) in ends


@pytest.mark.parametrize(
    ("ended", "cause"),
    [
        (ProcessExit((0,), 3), "rank 0 exited with code 3"),
        (ProcessExit((0, 1), -signal.SIGSEGV), "the process of ranks 0, 1 was killed by SIGSEGV"),
        (ProcessExit((2,), -99), "rank 2 was killed by signal 99"),
    ],
)
def test_an_exit_is_told_in_words(ended, cause):
    assert ended.cause == cause


async def test_an_exit_code_is_a_failure(launcher):
    await launcher.start([[0], [1]], lambda group: argv(program="raise SystemExit(3)" if group == [1] else RANK), ENV)
    assert (await launcher.wait_failed()).cause == "rank 1 exited with code 3"


@pytest.mark.parametrize(("on_drain", "signum"), [("hang", signal.SIGTERM), ("ignore-sigterm", signal.SIGKILL)])
async def test_a_rank_that_does_not_end_is_made_to(launcher, on_drain, signum, monkeypatch):
    monkeypatch.setattr("orchestrator.launch.TERM_GRACE_SECONDS", 0.2 if on_drain == "ignore-sigterm" else 30)
    await started(launcher, [[0]], on_drain)
    launcher.channels[0].send(Drain())
    assert await launcher.channels[0].receive() == Drain()  # it hangs now
    assert [ended.returncode for ended in await launcher.stop(timeout_seconds=0)] == [-signum]


async def test_a_cancelled_stop_leaves_no_process(launcher):
    process_ids = await started(launcher, [[0], [1]])
    stopping = asyncio.ensure_future(launcher.stop(timeout_seconds=1000))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert not any(psutil.pid_exists(process_id) for process_id in process_ids.values())


async def test_a_rank_that_cannot_be_started_takes_the_others_with_it(launcher):
    with pytest.raises(StagewireError, match="cannot start /nonexistent: No such file"):
        await launcher.start([[0], [1]], lambda group: ["/nonexistent"] if group == [1] else argv(), ENV)
    assert len(launcher.process_ids) == 1
    assert not psutil.pid_exists(launcher.process_ids[0])


def test_kill_works_without_a_running_loop():
    launcher = Launcher()
    ends = asyncio.run(started(launcher, [[0], [1]]))
    launcher.kill()
    assert not any(psutil.pid_exists(process_id) for process_id in ends.values())


# A process that starts two ranks and a one-off child, says their ids, and waits to be killed.
ENGINE = """
import asyncio, os, sys
from orchestrator.launch import Launcher, run_child
from stages.plan import EndEpoch

async def main():
    launcher = Launcher()
    await launcher.start([[0], [1]], lambda _: [sys.executable, "-c", sys.argv[1], "exit"], os.environ)
    for channel in launcher.channels.values():
        channel.send(EndEpoch(0, ""))
        await channel.receive()
    print(*launcher.process_ids.values(), flush=True)
    await run_child([sys.executable, "-c", "import os, signal; print(os.getpid(), flush=True); signal.pause()"])

asyncio.run(main())
"""


def test_nothing_outlives_a_killed_engine():
    # Stopped ranks cannot notice the end of their channels: the kernel has to end them.
    with subprocess.Popen([sys.executable, "-c", ENGINE, RANK], env=ENV, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        rank_ids = [int(word) for word in engine.stdout.readline().split()]
        child_id = int(engine.stdout.readline())
        for rank_id in rank_ids:
            os.kill(rank_id, signal.SIGSTOP)
        engine.kill()
    assert len(rank_ids) == 2
    assert gone([*rank_ids, child_id])


def test_a_child_of_a_parent_that_is_gone_ends_at_once():
    program = "from orchestrator.launch import die_with_parent; die_with_parent(1 << 30); print('went on')"
    ended = subprocess.run([sys.executable, "-c", program], env=ENV, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")


# One-off children


def child(program: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, sys\n{program}"]


async def test_a_child_passes_its_standard_error_on(capsys):
    await run_child(child("print('converting', file=sys.stderr)"), ENV)
    assert capsys.readouterr().err == "converting\n"


@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        ("print('first\\n--model x: damaged\\n', file=sys.stderr); sys.exit(2)", ConfigError, "--model x: damaged"),
        ("print('disk full', file=sys.stderr); sys.exit(1)", StagewireError, "disk full"),
        ("sys.exit(1)", StagewireError, f"{sys.executable} exited with code 1"),
        ("print(50 * 'x', file=sys.stderr); os.abort()", StagewireError, f"{sys.executable} was killed by SIGABRT"),
        ("sys.stderr.write('x' * 100000 + '\\nlast'); sys.exit(1)", StagewireError, "last"),
    ],
)
async def test_a_child_that_fails_says_why(program, kind, message):
    with pytest.raises(StagewireError) as raised:
        await run_child(child(program), ENV)
    assert (type(raised.value), str(raised.value)) == (kind, message)


async def test_a_cancelled_child_is_killed(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    running = asyncio.ensure_future(run_child(child(f"open({str(fifo)!r}, 'w').write(str(os.getpid())); signal.pause()"), ENV))
    process_id = int(await asyncio.to_thread(fifo.read_text))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not psutil.pid_exists(process_id)


# The child's side


@pytest.mark.parametrize("argument", ["", "1", "1:", ":5", "a:5", "1:x", "-1:5", "1:5:6"])
def test_a_malformed_control_argument_is_refused(argument):
    with pytest.raises(ConfigError) as raised:
        open_control(argument)
    assert str(raised.value) == f"--control {argument}: must be RANK:FD, two numbers"


def test_a_control_descriptor_must_be_a_socket(tmp_path):
    with pytest.raises(ConfigError, match="--control 0:987654: descriptor 987654 is not an open socket"):
        open_control("0:987654")
    with (tmp_path / "file").open("w") as file, pytest.raises(ConfigError, match="is not an open socket"):
        open_control(f"0:{file.fileno()}")


def test_ranks_get_their_threads_and_stay_offline():
    environment = rank_environment({"OMP_NUM_THREADS": "64", "PATH": "/bin", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, num_threads=2)
    assert environment == {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_MODULE_LOADING": "EAGER",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # as it was given
    }


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("0", "--ledger 0: must be RANK:FD, two numbers"),
        ("0:x", "--ledger 0:x: must be RANK:FD, two numbers"),
        ("0:4095", "--ledger 0:4095: .*Bad file descriptor"),
        ("1:{fd}", "--ledger 1:{fd}: is the ledger of rank 0"),
        ("0:{other}", "--ledger 0:{other}: ledger: has 0 bytes"),
    ],
)
def test_a_ledger_that_is_none_is_refused(argument: str, message: str) -> None:
    fd, other = create_ledger(Place(writer=Writer.RANK, rank=0, world_size=2)), os.memfd_create("other")
    try:
        with pytest.raises(ConfigError, match=message.format(fd=fd, other=other)):
            open_ledger(argument.format(fd=fd, other=other))
    finally:
        for each in (fd, other):
            with contextlib.suppress(OSError):
                os.close(each)  # whose writer took it over
