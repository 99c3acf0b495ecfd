"""Control channels between the engine and a rank: whole messages, in order, over a socket or within one process.

A frame is a 4-byte little-endian length and that many bytes of msgpack. File descriptors travel beside the first
byte of an ``Epoch`` frame (SCM_RIGHTS), as many as its ``num_fds`` says.
"""

import array
import asyncio
import contextlib
import os
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import DecodeError

from orchestrator import __version__
from stages.errors import ControlError
from stages.plan import PROTOCOL_VERSION, Epoch, Hello, Message, decode, encode

MAX_FRAME_BYTES = 16 << 20
# A plan has about 5 bytes per prompt token and at most lane depth + 1 of them are unacknowledged: well under one
# largest frame. Whoever leaves that much unread has stopped reading, and waiting longer would only hide it.
MAX_BUFFERED_BYTES = MAX_FRAME_BYTES + 4
MAX_FDS = 253  # what Linux lets one message carry (SCM_MAX_FD)
_READ_BYTES = 64 << 10  # a dozen plans, below malloc's mmap threshold
_LENGTH = struct.Struct("<I")
_FD_SPACE = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)


class ChannelClosed(ControlError):
    """The other side ended the channel, or this side closed it. Messages that had arrived whole came first."""


class _Frame(NamedTuple):
    data: bytes | memoryview
    fds: list[int]  # our own duplicates


class Channel(ABC):
    """One end of a control channel, used from its event loop's thread only. ``peer`` names the other side in errors."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._end: ControlError | None = None  # why nothing more can be received
        self._is_closed = False
        self._fds: deque[int] = deque()  # received; the first _num_current_fds belong to the last message
        self._num_current_fds = 0

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send ``message`` at once, or buffer what the socket does not take now. Never waits.

        ``fds`` are as many as an ``Epoch`` says, else none; the caller keeps them and may close them at once.
        ``ControlError`` when the message is too large or the buffer full: the channel stays usable and the message
        was not sent. ``ChannelClosed`` when the other side can no longer read.
        """
        if len(fds) != _num_fds(message) or len(fds) > MAX_FDS:
            raise ValueError(f"{len(fds)} descriptors with a message that says {_num_fds(message)}, at most {MAX_FDS}")
        self._send_payload(encode(message), type(message).__name__, fds)

    def send_encoded(self, payload: bytes, kind: str) -> None:
        """``send`` for a message without descriptors that goes to several ranks and is encoded once; ``kind`` names it."""
        self._send_payload(payload, kind, ())

    def _send_payload(self, payload: bytes, kind: str, fds: Sequence[int]) -> None:
        if self._is_closed:
            raise self._closed_error()
        if len(payload) > MAX_FRAME_BYTES:
            raise ControlError(f"{kind} to {self.peer}: {len(payload)} bytes, at most {MAX_FRAME_BYTES} fit a frame")
        self._send_frame(_LENGTH.pack(len(payload)) + payload, fds)

    async def receive(self) -> Message:
        """The next message. One caller at a time; a cancelled call loses nothing.

        ``ChannelClosed`` at the end of the stream, ``ControlError`` when what came is no message; either for good.
        Descriptors of the previous message that nobody took are closed.
        """
        if self._waiter is not None:
            raise RuntimeError(f"two receive() calls at once on the channel to {self.peer}")
        self._close_fds(self._num_current_fds)
        self._num_current_fds = 0
        while (message := self._next_message()) is None:
            if self._end is not None:
                raise type(self._end)(str(self._end))
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return message

    def take_fds(self, num_fds: int) -> list[int]:
        """The descriptors that came with the last message, now the caller's to close; ``ControlError`` unless ``num_fds``."""
        if num_fds != self._num_current_fds:
            raise ControlError(f"{self.peer} sent {self._num_current_fds} descriptors with its last message, not {num_fds}")
        self._num_current_fds = 0
        return [self._fds.popleft() for _ in range(num_fds)]

    @abstractmethod
    async def aclose(self) -> None:
        """Send what is buffered, then close. Waits as long as the other side does not read. May be called twice.

        A cancelled call leaves the channel open.
        """

    def abort(self) -> None:
        """Close now and drop what is buffered. Never waits, never raises; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._disconnect()
        self._finish(self._closed_error())
        self._num_current_fds = 0
        self._close_fds(len(self._fds))

    @abstractmethod
    def _send_frame(self, data: bytes, fds: Sequence[int]) -> None: ...

    @abstractmethod
    def _next_frame(self) -> bytes | bytearray | None:
        """The payload of the next whole frame, or None; ``ControlError`` when what came cannot be one."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Let go of the other side."""

    def _next_message(self) -> Message | None:
        if self._end is not None and not isinstance(self._end, ChannelClosed):
            return None
        try:
            payload = self._next_frame()
            if payload is None:
                return None
            message = decode(payload)
            num_fds = _num_fds(message)
            if not 0 <= num_fds <= len(self._fds):
                raise ControlError(f"a message says {num_fds} descriptors, {len(self._fds)} came")
        except ChannelClosed:
            raise
        except (ControlError, DecodeError, RecursionError) as exc:
            self._end = ControlError(f"malformed message from {self.peer}: {exc}")
            return None
        self._num_current_fds = num_fds
        return message

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _finish(self, end: ControlError) -> None:
        """Nothing more will come."""
        if self._end is None:
            self._end = end
        if not self._loop.is_closed():
            self._wake()

    def _closed_error(self) -> ChannelClosed:
        return ChannelClosed(f"the channel to {self.peer} is closed")

    def _close_fds(self, count: int) -> None:
        for _ in range(count):
            os.close(self._fds.popleft())


class SocketChannel(Channel):
    """A channel over a connected stream socket, which it owns; descriptors need an AF_UNIX one."""

    def __init__(self, sock: socket.socket, peer: str = "the other side") -> None:
        super().__init__(peer)
        sock.setblocking(False)
        self._sock = sock
        self._inbox = bytearray()
        self._outbox: deque[_Frame] = deque()  # bounded by MAX_BUFFERED_BYTES
        self._num_outbox_bytes = 0
        self._send_error: ChannelClosed | None = None
        self._flushed: asyncio.Event | None = None
        self._is_reading = False
        self._resume_reading()

    async def aclose(self) -> None:
        while self._outbox:
            self._flushed = self._flushed or asyncio.Event()
            await self._flushed.wait()
        self.abort()

    # Sending

    def _send_frame(self, data: bytes, fds: Sequence[int]) -> None:
        if self._send_error is not None:
            raise ChannelClosed(str(self._send_error))
        if self._outbox:
            if self._num_outbox_bytes + len(data) > MAX_BUFFERED_BYTES:
                raise ControlError(
                    f"{self.peer} does not read: {self._num_outbox_bytes} bytes wait, at most {MAX_BUFFERED_BYTES} may"
                )
            self._buffer(data, fds)
            return
        num_sent = self._write(data, fds)
        if self._send_error is not None:
            raise ChannelClosed(str(self._send_error))
        if num_sent < len(data):
            # The kernel hands over all descriptors with the first byte.
            self._buffer(memoryview(data)[num_sent:], () if num_sent else fds)
            self._loop.add_writer(self._sock.fileno(), self._on_writable)

    def _buffer(self, data: bytes | memoryview, fds: Sequence[int]) -> None:
        self._outbox.append(_Frame(data, [os.dup(fd) for fd in fds]))
        self._num_outbox_bytes += len(data)

    def _write(self, data: bytes | memoryview, fds: Sequence[int]) -> int:
        """How many bytes the socket took; a peer that is gone is noted in ``_send_error``."""
        try:
            return socket.send_fds(self._sock, [data], list(fds)) if fds else self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as exc:
            # What the peer sent before it went can still be received; the end comes after that.
            self._send_error = ChannelClosed(f"{self.peer} closed the channel ({exc.strerror})")
            return 0

    def _on_writable(self) -> None:
        while self._outbox and self._send_error is None:
            data, fds = self._outbox.popleft()
            num_sent = self._write(data, fds)
            self._num_outbox_bytes -= num_sent
            if num_sent or self._send_error is not None:
                _close_all(fds)
                fds = []
            if num_sent < len(data):
                self._outbox.appendleft(_Frame(memoryview(data)[num_sent:], fds))
                break
        if not self._outbox or self._send_error is not None:
            self._drop_outbox()

    def _drop_outbox(self) -> None:
        """End a flush: everything was sent, or nothing more can be."""
        if not self._loop.is_closed():
            self._loop.remove_writer(self._sock.fileno())
        while self._outbox:
            _close_all(self._outbox.popleft().fds)
        self._num_outbox_bytes = 0
        if self._flushed is not None:
            self._flushed.set()
            self._flushed = None

    # Receiving

    def _next_frame(self) -> bytearray | None:
        inbox = self._inbox
        if len(inbox) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(inbox)
            if length > MAX_FRAME_BYTES:
                raise ControlError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES}")
            end = _LENGTH.size + length
            if len(inbox) >= end:
                payload = inbox[_LENGTH.size : end]
                del inbox[:end]  # moves a pointer: bytearray keeps the free space in front
                return payload
        if inbox and isinstance(self._end, ChannelClosed):
            raise ChannelClosed(f"{self._end} in the middle of a message")
        self._resume_reading()
        return None

    def _resume_reading(self) -> None:
        if not self._is_reading and self._end is None:
            self._is_reading = True
            self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def _pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            if not self._loop.is_closed():
                self._loop.remove_reader(self._sock.fileno())

    def _on_readable(self) -> None:
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(_READ_BYTES, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError as exc:
            self._on_end(f"{self.peer} closed the channel ({exc.strerror})")
            return
        for level, kind, body in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            self._pause_reading()
            self._finish(ControlError(f"descriptors from {self.peer} were lost: this process has too many open files"))
        elif data:
            self._inbox += data
            # Nobody waits and there is plenty: let the kernel's buffer fill and hold the sender back.
            if self._waiter is None and len(self._inbox) >= _READ_BYTES:
                self._pause_reading()
            self._wake()
        else:
            self._on_end(f"{self.peer} closed the channel")

    def _on_end(self, text: str) -> None:
        self._pause_reading()
        self._finish(ChannelClosed(text))

    def _disconnect(self) -> None:
        self._pause_reading()
        self._drop_outbox()
        self._inbox.clear()
        self._sock.close()


class MemoryChannel(Channel):
    """One end of ``memory_channel_pair()``: the same contract between two users of one event loop."""

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self._other: MemoryChannel | None = None
        self._inbox: deque[bytes] = deque()  # bounded by MAX_BUFFERED_BYTES
        self._num_inbox_bytes = 0

    async def aclose(self) -> None:
        self.abort()

    def _send_frame(self, data: bytes, fds: Sequence[int]) -> None:
        other = self._other
        if other is None:
            raise ChannelClosed(f"{self.peer} closed the channel")
        if other._inbox and other._num_inbox_bytes + len(data) > MAX_BUFFERED_BYTES:
            raise ControlError(
                f"{self.peer} does not read: {other._num_inbox_bytes} bytes wait, at most {MAX_BUFFERED_BYTES} may"
            )
        other._fds.extend(os.dup(fd) for fd in fds)
        other._inbox.append(data[_LENGTH.size :])
        other._num_inbox_bytes += len(data)
        other._wake()

    def _next_frame(self) -> bytes | None:
        if not self._inbox:
            return None
        payload = self._inbox.popleft()
        self._num_inbox_bytes -= len(payload) + _LENGTH.size
        return payload

    def _disconnect(self) -> None:
        self._inbox.clear()
        other, self._other = self._other, None
        if other is not None:
            other._other = None
            other._finish(ChannelClosed(f"{other.peer} closed the channel"))


def memory_channel_pair(peers: tuple[str, str] = ("the rank", "the engine")) -> tuple[Channel, Channel]:
    """Two connected ends on the running loop. ``peers``: what the first and the second end call the other side."""
    first, second = MemoryChannel(peers[0]), MemoryChannel(peers[1])
    first._other, second._other = second, first  # pyright: ignore[reportPrivateUsage]
    return first, second


def check_hello(hello: Hello, rank: int, world_size: int) -> None:
    """``ControlError`` naming both sides unless ``hello`` is of this build and from ``rank`` of ``world_size``."""
    pairs = [
        ("control protocol", hello.protocol, PROTOCOL_VERSION),
        ("stagewire version", hello.version, __version__),
        ("rank", hello.rank, rank),
        ("pipeline size", hello.world_size, world_size),
    ]
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise ControlError(f"rank {rank} says {name} {theirs}, the engine says {ours}")


def _num_fds(message: Message) -> int:
    return message.num_fds if isinstance(message, Epoch) else 0


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
