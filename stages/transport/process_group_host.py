"""One rank's part of its boundaries over gloo: threads of the host wait, and compare headers.

Every receiver posts all its slots at once, each under a tag of its own, and posts a slot again when it is released: the ring of
the other transports. A broken connection is no news: whether a peer is lost is for the engine to say, which then ends the
epoch. So what finds one waits on, for the poison.
"""

import logging
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from stages.device import Point, Stream
from stages.errors import HeaderMismatch
from stages.transport.host_ring import NUM_OUTPUT_BUFFERS, HostLane, copy_into
from stages.transport.process_group_backends import GlooGroup, reason_of
from stages.transport.process_group_links import GroupLink, ProcessGroupLinks
from stages.transport.ring import (
    SLOT_HEADER_BYTES,
    BoundaryHeader,
    Header,
    Poison,
    RingLayout,
    check_header,
    pack_header,
    unpack_header,
)

log = logging.getLogger(__name__)


class GlooLink:
    """A ``HostLink`` whose slots are here on both sides: the sender's hold what it is about to send."""

    def __init__(self, links: ProcessGroupLinks, link: GroupLink) -> None:
        assert isinstance(link.group, GlooGroup)
        self.link_id = link.link_id
        self.group = link.group
        self.peer = link.peer
        self.start_seq = links.start_seq
        self._layout = link.layout
        self._links: ProcessGroupLinks | None = links
        links.join()

    @property
    def layout(self) -> RingLayout:
        return self._layout

    @cached_property
    def slots(self) -> list[torch.Tensor]:
        """Header and payload of each, ``[stride]`` uint8."""
        return [torch.empty(self.layout.stride, dtype=torch.uint8) for _ in range(self.layout.num_slots)]

    def payloads(self) -> list[memoryview]:
        return [bytes_of(slot)[SLOT_HEADER_BYTES:][: self.layout.slot_bytes] for slot in self.slots]

    def sender(self, poison: Poison) -> "GlooSender":
        return GlooSender(self, poison)

    def receiver(self, poison: Poison) -> "GlooReceiver":
        return GlooReceiver(self, poison)

    def close(self) -> None:
        if self._links is not None:
            links, self._links = self._links, None
            links.leave()


class _GlooEnd:
    def __init__(self, link: GlooLink, poison: Poison) -> None:
        self.link = link
        self._poison = poison
        self._is_over = threading.Event()
        self._next_seq = link.start_seq
        poison.watch(self._break)

    def claim(self) -> int:
        seq = self._next_seq
        self._next_seq += 1
        return seq

    def close(self) -> None:
        self._poison.forget(self._break)
        self.link.close()

    def _break(self) -> None:
        self.link.group.break_waits()
        self._is_over.set()

    def _await_poison(self, error: str) -> None:
        """Never returns."""
        if not self._poison.is_set:
            log.warning("%s: the connection broke: %s", self.link.link_id, error)
        self._is_over.wait()
        self._poison.check()


class GlooSender(_GlooEnd):
    def wait_free(self, seq: int) -> int:
        """What is sent waits for its slot by itself, and then the buffer here is free: nobody can tell since when (0)."""
        self._poison.check()
        return 0

    def publish(self, seq: int, header: Header) -> None:
        """Send message ``seq``, whose payload is in our slot."""
        message = self.link.slots[seq % self.link.layout.num_slots]
        put_header(message, header)
        self.send(seq, message)

    def send(self, seq: int, message: torch.Tensor) -> None:
        """Block until message ``seq`` has gone to the peer's slot, which it waits for; raises the poison's cause."""
        self._poison.check()
        try:
            self.link.group.send(message, self.link.peer, seq % self.link.layout.num_slots)
            return
        except RuntimeError as exc:
            error = reason_of(exc)
        self._await_poison(error)


class GlooReceiver(_GlooEnd):
    """With all its slots posted, except those that are being read."""

    def __init__(self, link: GlooLink, poison: Poison) -> None:
        self._changed = threading.Condition()
        self._posted: list[Any] = [None] * link.layout.num_slots  # a work of the group, or why there is none; None: being read
        super().__init__(link, poison)
        for slot in range(link.layout.num_slots):
            self.release(slot)

    def wait_full(self, seq: int, expected: Header) -> int:
        """Block until message ``seq`` is there, compare its header, and return when it was there (``time.perf_counter_ns``);
        raises ``HeaderMismatch`` or the poison's cause."""
        slot = seq % self.link.layout.num_slots
        error = self._finish(slot)
        self._poison.check()
        if error:
            self._await_poison(error)
        there_at_ns = time.perf_counter_ns()
        got = unpack_header(type(expected), bytes_of(self.link.slots[slot]))
        check_header(expected, got, receiver=self.link.link_id.receiver, sender=self.link.link_id.sender)
        return there_at_ns

    def release(self, seq: int) -> None:
        """Post the slot of message ``seq`` for the one that comes there next. Any thread, in any order."""
        slot = seq % self.link.layout.num_slots
        try:
            posted = self.link.group.post(self.link.slots[slot], self.link.peer, slot)
        except RuntimeError as exc:
            posted = reason_of(exc)
        with self._changed:
            self._posted[slot] = posted
            self._changed.notify_all()

    def close(self) -> None:
        super().close()
        self._posted = []

    def _finish(self, slot: int) -> str:
        """Wait; the error that ended it, if one did. Not in ``wait_full``: a traceback must keep no work of the group."""
        with self._changed:
            self._changed.wait_for(lambda: self._posted[slot] is not None or self._poison.is_set)
            work, self._posted[slot] = self._posted[slot], None
        if work is None or isinstance(work, str):
            return work or ""
        try:
            self.link.group.finish(work)
        except RuntimeError as exc:
            return reason_of(exc)
        return ""

    def _break(self) -> None:
        super()._break()
        with self._changed:
            self._changed.notify_all()


class HostSide:
    """Receives on ``compute``, and sends on ``send_stream``, None for one of its own."""

    def __init__(self, links: ProcessGroupLinks, compute: Stream, send_stream: Stream | None) -> None:
        self._compute = compute
        self._lane = HostLane(f"send-{links.pp_group.rank}", send_stream)
        poison, to_next, from_prev = self._lane.poison, links.to_next, links.from_prev
        self._sender = None if to_next is None else self._lane.own(GlooLink(links, to_next).sender(poison))
        self._receiver = None if from_prev is None else self._lane.own(GlooLink(links, from_prev).receiver(poison))
        num_bytes = links.sizes.boundary.stride
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(0 if to_next is None else NUM_OUTPUT_BUFFERS)]
        self._is_free: list[Point | None] = [None] * NUM_OUTPUT_BUFFERS

    @property
    def is_over(self) -> bool:
        return self._lane.poison.is_set

    def check(self) -> None:
        self._lane.poison.check()

    def output(self, seq: int) -> torch.Tensor:
        return self._buffers[seq % NUM_OUTPUT_BUFFERS]

    def output_free(self, seq: int) -> Point | None:
        return self._is_free[seq % NUM_OUTPUT_BUFFERS]

    def send(
        self,
        seq: int,
        num_bytes: int,
        header: BoundaryHeader,
        moves: Sequence[tuple[torch.Tensor, torch.Tensor]],
        ready: Point,
    ) -> Point:
        lane, sender, message = self._lane, self._sender, self.output(seq)[:num_bytes]
        assert sender is not None, "else there is no output"

        def write() -> None:
            try:
                lane.poison.wait_for(ready)
            except HeaderMismatch:
                put_header(message, header._replace(verdict=0))
                sender.send(seq, message[:SLOT_HEADER_BYTES])
                raise
            self.move(moves)
            put_header(message, header)
            sender.send(seq, message)

        lane.stream.launch(write)
        lane.note_use(lane.stream)
        sent = self._is_free[seq % NUM_OUTPUT_BUFFERS] = lane.stream.record()
        return sent

    def recv(self, seq: int, num_bytes: int, header: BoundaryHeader) -> torch.Tensor:
        receiver = self._receiver
        assert receiver is not None
        self._lane.note_use(self._compute)
        self._compute.launch(lambda: receiver.wait_full(seq, header))
        return receiver.link.slots[seq % receiver.link.layout.num_slots]

    def received(self, step_id: int) -> Point:
        return self._compute.record()

    def release(self, stream: Stream, seq: int) -> None:
        receiver = self._receiver
        assert receiver is not None
        stream.launch(lambda: receiver.release(seq))
        self._lane.note_use(stream)

    def move(self, moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in moves:
            copy_into(target, source)

    def poison(self, cause: BaseException) -> None:
        self._lane.poison.set(cause)

    def close(self) -> None:
        self._lane.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a uint8 tensor of the host."""
    return memoryview(tensor.numpy())  # pyright: ignore[reportArgumentType]


def put_header(message: torch.Tensor, header: Header) -> None:
    """At the front of a message in host memory."""
    data = pack_header(header)
    bytes_of(message)[: len(data)] = data
