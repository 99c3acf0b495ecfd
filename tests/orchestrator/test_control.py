import array
import asyncio
import contextlib
import fcntl
import os
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from orchestrator import __version__
from orchestrator.control import (
    MAX_BUFFERED_BYTES,
    MAX_FRAME_BYTES,
    Channel,
    ChannelClosed,
    SocketChannel,
    check_hello,
    memory_channel_pair,
)
from stages.errors import ControlError
from stages.plan import (
    PROTOCOL_VERSION,
    Drain,
    EndEpoch,
    Epoch,
    Hello,
    Limits,
    Message,
    Offer,
    PlanRow,
    RowKind,
    StepDone,
    StepPlan,
    encode,
)

LOOPS = ("asyncio", "uvloop")
LIMITS = Limits(8, 512, 2048, 1, 100, 16, 2, 4)
OFFER = Offer("host", 1, "cpu", {}, [], 0, 1, 1, 0, 0, 0, 0.0, 1, 16, 0, 0, False, 0)


def plan(step_id: int, num_tokens: int = 1) -> StepPlan:
    row = PlanRow(0, 0, RowKind.PREFILL, 0, num_tokens, [7] * num_tokens, [1], None, True)
    return StepPlan(0, step_id, [row], [(1, 2)], [step_id - 1], 1, 1)


def epoch(num_fds: int, number: int = 0) -> Epoch:
    return Epoch(number, [], "auto", LIMITS, num_fds)


def framed(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def memfd(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def content_of(fd: int) -> bytes:
    return os.pread(fd, 100, 0)


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def receive_at_once(channel: Channel) -> Message:
    """What ``receive()`` returns without giving way to the loop."""
    with pytest.raises(StopIteration) as stopped:
        channel.receive().send(None)
    return stopped.value.value


@pytest.fixture(autouse=True)
async def _no_fd_leaks() -> AsyncIterator[None]:
    before = open_fds()
    yield
    assert open_fds() == before


def socket_channel_pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return SocketChannel(ours, "rank 1"), SocketChannel(theirs, "the engine")


@pytest.fixture(params=[socket_channel_pair, memory_channel_pair])
async def ends(request: pytest.FixtureRequest, _no_fd_leaks: None) -> AsyncIterator[tuple[Channel, Channel]]:
    """Both ends of a channel, of every kind."""
    pair = request.param()
    yield pair
    for channel in pair:
        channel.abort()


@pytest.fixture
async def raw(_no_fd_leaks: None) -> AsyncIterator[tuple[socket.socket, SocketChannel]]:
    """A bare socket and the channel at its other end."""
    ours, theirs = socket.socketpair()
    channel = SocketChannel(theirs, "rank 1")
    yield ours, channel
    ours.close()
    channel.abort()


# Every kind of channel


async def test_messages_go_both_ways_in_order(ends):
    engine, rank = ends
    sent = [plan(i, num_tokens=i) for i in range(50)]
    for message in sent:
        engine.send(message)
        rank.send(StepDone(0, message.step_id, 1, 1, True, 0.5, ""))
    assert [await rank.receive() for _ in sent] == sent
    assert [(await engine.receive()).step_id for _ in sent] == list(range(50))


async def test_a_waiting_receive_gets_the_message(ends):
    engine, rank = ends
    waiting = asyncio.ensure_future(rank.receive())
    await asyncio.sleep(0)
    engine.send(plan(3))
    assert await waiting == plan(3)


async def test_a_cancelled_receive_loses_nothing(ends):
    engine, rank = ends
    waiting = asyncio.ensure_future(rank.receive())
    await asyncio.sleep(0)
    engine.send(plan(1))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await rank.receive() == plan(1)


async def test_two_receives_at_once_are_refused(ends):
    _, rank = ends
    waiting = asyncio.ensure_future(rank.receive())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="two receive"):
        await rank.receive()
    waiting.cancel()


async def test_aclose_delivers_what_was_sent_then_ends(ends):
    engine, rank = ends
    for i in range(3):
        engine.send(plan(i))
    await engine.aclose()
    await engine.aclose()
    assert [(await rank.receive()).step_id for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(ChannelClosed, match="closed the channel"):
            await rank.receive()


async def test_a_waiting_receive_ends_when_the_other_side_aborts(ends):
    engine, rank = ends
    waiting = asyncio.ensure_future(rank.receive())
    await asyncio.sleep(0)
    engine.abort()
    with pytest.raises(ChannelClosed, match="closed the channel"):
        await waiting


async def test_abort_ends_the_own_side_too(ends):
    engine, rank = ends
    rank.send(Drain())
    waiting = asyncio.ensure_future(engine.receive())
    await waiting
    waiting = asyncio.ensure_future(engine.receive())
    await asyncio.sleep(0)
    engine.abort()
    engine.abort()
    with pytest.raises(ChannelClosed, match="is closed"):
        await waiting
    with pytest.raises(ChannelClosed, match="is closed"):
        engine.send(Drain())
    await engine.aclose()


async def test_what_the_other_side_sent_before_it_closed_survives_a_failed_send(ends):
    engine, rank = ends
    rank.send(plan(1))
    rank.abort()
    for _ in range(2):
        with pytest.raises(ChannelClosed, match="closed the channel"):
            engine.send(Drain())
    assert await engine.receive() == plan(1)
    with pytest.raises(ChannelClosed):
        await engine.receive()


async def test_a_side_that_does_not_read_is_noticed(ends):
    engine, rank = ends
    message = plan(0, num_tokens=100_000)
    size = len(encode(message))
    num_sent = 0
    refusal = None
    while refusal is None and num_sent * size < 3 * MAX_BUFFERED_BYTES:
        try:
            engine.send(msgspec.structs.replace(message, step_id=num_sent))
            num_sent += 1
        except ControlError as exc:
            refusal = exc
    assert "does not read" in str(refusal)
    assert not isinstance(refusal, ChannelClosed)
    assert num_sent * size < MAX_BUFFERED_BYTES + (1 << 20)
    # It was refused whole: the other side reads everything before it, and what comes after once there is room again.
    half = num_sent // 2
    assert [(await rank.receive()).step_id for _ in range(half)] == list(range(half))
    for step_id in range(num_sent, num_sent + half - 2):
        engine.send(msgspec.structs.replace(message, step_id=step_id))
    assert [(await rank.receive()).step_id for _ in range(num_sent - 2)] == list(range(half, num_sent + half - 2))


async def test_a_message_larger_than_a_frame_is_refused(ends):
    engine, rank = ends
    with pytest.raises(ControlError, match=f"EndEpoch to .*at most {MAX_FRAME_BYTES}"):
        engine.send(EndEpoch(0, "x" * MAX_FRAME_BYTES))
    engine.send(EndEpoch(0, "x" * (MAX_FRAME_BYTES - 100)))
    assert len((await rank.receive()).cause) == MAX_FRAME_BYTES - 100


async def test_descriptors_stay_with_their_message(ends):
    engine, rank = ends
    for number in range(3):
        fds = [memfd(b"%d-%d" % (number, i)) for i in range(number)]
        engine.send(plan(number))
        engine.send(epoch(number, number), fds)
        for fd in fds:
            os.close(fd)
    for number in range(3):
        assert await rank.receive() == plan(number)
        assert rank.take_fds(0) == []
        assert await rank.receive() == epoch(number, number)
        with pytest.raises(ControlError, match=f"sent {number} descriptors"):
            rank.take_fds(number + 1)
        fds = rank.take_fds(number)
        assert [content_of(fd) for fd in fds] == [b"%d-%d" % (number, i) for i in range(number)]
        assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in fds)
        for fd in fds:
            os.close(fd)


async def test_descriptors_that_nobody_takes_are_closed(ends):
    engine, rank = ends
    before = open_fds()
    for content in (b"first", b"second", b"third"):
        fd = memfd(content)
        engine.send(epoch(1), [fd])
        os.close(fd)
    await rank.receive()
    await rank.receive()
    (fd,) = rank.take_fds(1)
    assert content_of(fd) == b"second"
    os.close(fd)
    await rank.receive()
    engine.abort()
    rank.abort()
    assert open_fds() <= before


async def test_descriptors_must_be_as_many_as_the_message_says(ends):
    engine, _ = ends
    for message, fds in ((epoch(2), [0]), (Drain(), [0]), (epoch(300), [0] * 300)):
        with pytest.raises(ValueError, match="descriptors"):
            engine.send(message, fds)


# Sockets only


async def test_frames_are_found_however_the_bytes_are_cut(raw):
    sock, channel = raw
    for number in range(3):
        data = framed(encode(plan(number)))
        received = asyncio.ensure_future(channel.receive())
        for position in range(len(data)):
            await asyncio.sleep(0)
            assert not received.done()
            sock.send(data[position : position + 1])
        assert await received == plan(number)


async def test_frames_that_came_together_need_no_second_wake_up(raw):
    sock, channel = raw
    sock.send(b"".join(framed(encode(plan(i))) for i in range(100)))
    assert (await channel.receive()).step_id == 0
    assert [receive_at_once(channel).step_id for _ in range(99)] == list(range(1, 100))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("<I", MAX_FRAME_BYTES + 1), f"a frame of {MAX_FRAME_BYTES + 1} bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of"),
        (framed(b""), "truncated"),
        (framed(b"\xc1\xc1"), "malformed"),
        (framed(encode(Drain()) + b"\0"), "trailing"),
        (framed(encode(plan(0))[:-1]), "truncated"),
        (framed(b"\x81\xa4type\xa3nop"), "'nop'"),
        (framed(b"\x81\xa4type\xa4plan"), "missing required field"),
        (framed(b"\x82\xa4type\xa5drain\xa1x" + b"\x91" * 100_000), "recursion"),
        (framed(encode(epoch(1))), "says 1 descriptors, 0 came"),
        (framed(encode(epoch(-1))), "says -1 descriptors"),
    ],
)
async def test_what_is_no_message_ends_the_channel(raw, data, reason):
    sock, channel = raw
    sock.send(framed(encode(plan(1))) + data + framed(encode(plan(2))))
    assert await channel.receive() == plan(1)
    for _ in range(2):
        with pytest.raises(ControlError, match=rf"rank 1.*{reason}") as raised:
            await channel.receive()
        assert not isinstance(raised.value, ChannelClosed)


async def test_an_end_in_the_middle_of_a_message_says_so(raw):
    sock, channel = raw
    sock.send(framed(encode(plan(1))) + framed(encode(plan(2)))[:-1])
    sock.close()
    assert await channel.receive() == plan(1)
    for _ in range(2):
        with pytest.raises(ChannelClosed, match="in the middle of a message"):
            await channel.receive()


async def test_a_reset_is_an_end(raw):
    sock, channel = raw
    channel.send(plan(1))
    sock.close()  # with unread bytes: the kernel reports a reset, not the end of the stream
    with pytest.raises(ChannelClosed, match=r"rank 1 closed the channel .*reset"):
        await channel.receive()


async def test_descriptors_wait_in_the_buffer_with_their_message(raw):
    sock, channel = raw
    messages: list[Message] = [plan(i, num_tokens=50_000) for i in range(6)]
    messages.insert(5, epoch(2))
    fds = [memfd(b"first"), memfd(b"second")]
    for message in messages:
        channel.send(message, fds if isinstance(message, Epoch) else ())
    for fd in fds:
        os.close(fd)
    closing = asyncio.ensure_future(channel.aclose())
    await asyncio.sleep(0)
    assert not closing.done()
    rank = SocketChannel(sock, "the engine")
    for message in messages:
        assert await rank.receive() == message
        if isinstance(message, Epoch):
            taken = rank.take_fds(2)
            assert [content_of(fd) for fd in taken] == [b"first", b"second"]
            for fd in taken:
                os.close(fd)
    await closing
    rank.abort()


async def test_descriptors_go_once_when_their_message_goes_in_pieces(raw):
    sock, channel = raw
    rank = SocketChannel(sock, "the engine")
    for content in (b"first", b"second"):
        fd = memfd(content)
        channel.send(msgspec.structs.replace(epoch(1), wanted_transport="x" * 1_000_000), [fd])
        os.close(fd)
    for content in (b"first", b"second"):
        assert len((await rank.receive()).wanted_transport) == 1_000_000
        (fd,) = rank.take_fds(1)
        assert content_of(fd) == content
        os.close(fd)
    rank.abort()


@pytest.mark.parametrize("end", ["abort", "peer closes"])
async def test_what_is_buffered_is_dropped_when_nobody_will_read_it(raw, end):
    sock, channel = raw
    fd = memfd(b"")
    for i in range(10):
        channel.send(plan(i, num_tokens=50_000))
    channel.send(epoch(1), [fd])
    os.close(fd)
    closing = asyncio.ensure_future(channel.aclose())
    await asyncio.sleep(0)
    assert not closing.done()
    if end == "abort":
        channel.abort()
    else:
        sock.close()
    await closing
    with pytest.raises(ChannelClosed):
        channel.send(Drain())


async def test_a_cancelled_aclose_leaves_the_channel_open(raw):
    sock, channel = raw
    for i in range(10):
        channel.send(plan(i, num_tokens=50_000))
    closing = asyncio.ensure_future(channel.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    sock.send(framed(encode(Drain())))
    assert await channel.receive() == Drain()


async def test_a_reader_that_is_busy_holds_the_sender_back(raw):
    sock, channel = raw
    sock.setblocking(False)
    frame = framed(encode(plan(0, num_tokens=1000)))
    num_sent_bytes = 0
    for _ in range(100):  # turns of the loop, in each of which the channel could read what the kernel holds
        await asyncio.sleep(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                num_sent_bytes += sock.send(frame)
    assert num_sent_bytes < 2 << 20
    for _ in range(num_sent_bytes // len(frame)):
        assert (await channel.receive()).num_tokens == 1000


async def test_lost_descriptors_are_an_error(raw):
    sock, channel = raw
    fd = memfd(b"")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, open_fds() - {str(fd)}))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(fd, highest), limits[1]))
    try:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        sock.sendmsg([framed(encode(epoch(1)))], ancillary)
        with pytest.raises(ControlError, match="too many open files"):
            await channel.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(fd)


# Between processes

ECHO = """
import asyncio, os, socket, sys
import uvloop
from orchestrator.control import SocketChannel
from stages.plan import Epoch

async def main():
    channel = SocketChannel(socket.socket(fileno=int(sys.argv[1])), "the engine")
    while True:
        message = await channel.receive()
        if isinstance(message, Epoch):
            os.write(*channel.take_fds(1), b"from the child")
        channel.send(message if not isinstance(message, Epoch) else Epoch(1, [], "auto", message.limits, 0))

uvloop.run(main())
"""


@pytest.fixture
def child(_no_fd_leaks: None) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """A process that answers every message with itself, and our end of its socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        argv = [sys.executable, "-c", ECHO, str(theirs.fileno())]
        process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": "."})
    yield ours, process
    process.kill()
    process.wait()
    ours.close()


async def test_another_process_answers_and_its_death_is_an_end(child):
    sock, process = child
    channel = SocketChannel(sock, "rank 1")
    for i in range(20):
        channel.send(plan(i, num_tokens=i * 500))
    for i in range(20):
        assert await channel.receive() == plan(i, num_tokens=i * 500)
    fd = memfd(b"")
    channel.send(epoch(1), [fd])
    assert await channel.receive() == epoch(0, number=1)
    assert content_of(fd) == b"from the child"
    os.close(fd)
    process.kill()
    with pytest.raises(ChannelClosed, match="rank 1 closed the channel"):
        await channel.receive()
    channel.abort()


# Hello


def hello(**changed: object) -> Hello:
    return msgspec.structs.replace(Hello(PROTOCOL_VERSION, __version__, 1, 2, OFFER), **changed)


def test_a_hello_of_the_same_build_is_welcome():
    check_hello(hello(), rank=1, world_size=2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"protocol": 99}, f"rank 1 says control protocol 99, the engine says {PROTOCOL_VERSION}"),
        ({"version": "9.9"}, f"rank 1 says stagewire version 9.9, the engine says {__version__}"),
        ({"rank": 0}, "rank 1 says rank 0, the engine says 1"),
        ({"world_size": 3}, "rank 1 says pipeline size 3, the engine says 2"),
    ],
)
def test_a_hello_that_does_not_fit_names_both_sides(changed, message):
    with pytest.raises(ControlError) as raised:
        check_hello(hello(**changed), rank=1, world_size=2)
    assert str(raised.value) == message
