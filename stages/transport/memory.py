"""The links of ranks that live in one process. No torch."""

# pyright: strict

import threading
from mmap import mmap

from stages.errors import TransportError
from stages.topology import PPGroup
from stages.transport.links import LinkId, LinkSizes, RankLinks, link_ids, make_stamp
from stages.transport.ring import Link, RingLayout, stamp_segment


class MemoryBell:
    """A doorbell between threads."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._is_rung = False

    def ring(self) -> None:
        with self._condition:
            self._is_rung = True
            self._condition.notify()

    def wait(self) -> None:
        with self._condition:
            while not self._is_rung:
                self._condition.wait()
            self._is_rung = False

    def close(self) -> None:
        """Nothing to free: the other end may still ring."""


class MemoryHub:
    """Where the ranks of one process find each other's links; one for all of them, used epoch after epoch."""

    def __init__(self, start_seq: int = 0) -> None:
        self._start_seq = start_seq
        self._lock = threading.Lock()
        self._epoch = -1
        self._segments: dict[LinkId, tuple[mmap, MemoryBell, MemoryBell]] = {}  # links that one end has yet to take

    def join(self, group: PPGroup, sizes: LinkSizes) -> RankLinks:
        """A rank's links of its epoch; each rank joins an epoch once. Any thread, in any order.

        A newer epoch drops what is left of an older one. ``TransportError`` for an older epoch, or other sizes than the
        first rank to join gave.
        """
        with self._lock:
            if group.epoch < self._epoch:
                raise TransportError(f"rank {group.rank} joins epoch {group.epoch}, but epoch {self._epoch} has begun")
            if group.epoch > self._epoch:
                self._epoch = group.epoch
                self._segments.clear()
            links: dict[LinkId, Link] = {}
            for link_id in link_ids(group.rank, group.world_size):
                layout = sizes.boundary if link_id.kind == "boundary" else sizes.tokens
                segment = self._segments.pop(link_id, None)
                if segment is None:
                    segment = self._segments[link_id] = self._make(link_id, layout)
                links[link_id] = link = Link(*segment)
                if link.layout != layout:
                    raise TransportError(f"{link_id}: rank {group.rank} expects {layout}, its peer {link.layout}")
            return RankLinks(links, group)

    def _make(self, link_id: LinkId, layout: RingLayout) -> tuple[mmap, MemoryBell, MemoryBell]:
        buffer = mmap(-1, layout.segment_bytes)
        stamp_segment(buffer, make_stamp(link_id, layout, self._epoch, self._start_seq))
        return buffer, MemoryBell(), MemoryBell()
