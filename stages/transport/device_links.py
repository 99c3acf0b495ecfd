"""The links of a rank on a GPU: rings in device memory, written by the peer's copy engine over CUDA IPC.

A link carries messages one way. The receiver owns its K slots and, before them, a page with a ``full`` word for each; the
sender owns a page with a ``free`` word for each. Every word is polled only in its owner's memory, by stream waits, and written
only by the peer, by stream writes. Message n uses slot n mod K:

    send n     wait ``free[n mod K] >= n + 1 - K``; copy into the slot; ``full[n mod K] := n + 1``
    receive n  wait ``full[n mod K] >= n + 1``; read the slot; ``free[n mod K] := n + 1``

A word for each slot, where a counter for the link would do, lets two streams of the sender take turns, so that the flag of a
message overlaps with the copy of the next, and lets credits come back in any order. The words are ``ring.counter_word``s.
"""

import ctypes
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import numpy as np
import torch

from stages.cuda import CudaDevice, CudaPoint, CudaStream
from stages.driver import MemoryOp, memory_ops
from stages.errors import CudaError, PeerLost, TransportError
from stages.kernels import Kernels
from stages.topology import PPGroup
from stages.transport.links import LinkId, LinkSizes, link_ids
from stages.transport.ring import (
    CONTROL_BYTES,
    RingLayout,
    counter_word,
    is_at_least,
    poison_word,
)
from stages.transport.verdict import Verdict

WORD_STRIDE = 64
MAX_SLOTS = CONTROL_BYTES // WORD_STRIDE
POLL_SECONDS = 0.0005
_PROCESS = secrets.token_bytes(16)  # ids of processes differ only within one PID namespace


class _End:
    """What both ends do: own a page of words that the peer writes, and know where the peer's are."""

    def __init__(self, device: CudaDevice, link_id: LinkId, layout: RingLayout, epoch: int, start_seq: int, extra: int) -> None:
        if layout.num_slots > MAX_SLOTS:
            raise TransportError(f"{link_id}: {layout.num_slots} slots, the most are {MAX_SLOTS}")
        self.link_id = link_id
        self.layout = layout
        self.peer_memory = 0
        self._driver = device.driver
        self._epoch = epoch
        self._num_slots = layout.num_slots
        self.memory = device.driver.alloc(CONTROL_BYTES + extra)
        self.next_seq = start_seq
        self._fill(device, CONTROL_BYTES + extra, counter_word(epoch, start_seq))

    def connect(self, peer_memory: int) -> None:
        """``peer_memory``: the address here of what the other end owns."""
        self.peer_memory = peer_memory

    def claim(self) -> int:
        """The number of the next message, in message order."""
        seq = self.next_seq
        self.next_seq += 1
        return seq

    def slot(self, seq: int) -> int:
        """Address of the slot of message ``seq``, its header first."""
        return self._receiver_memory + CONTROL_BYTES + seq % self._num_slots * self.layout.stride

    def words(self) -> list[int]:
        """Addresses of the words that are ours to wait for."""
        return [self.memory + slot * WORD_STRIDE for slot in range(self._num_slots)]

    @property
    def _receiver_memory(self) -> int:
        raise NotImplementedError

    def _word(self, memory: int, seq: int) -> int:
        return memory + seq % self._num_slots * WORD_STRIDE

    def _fill(self, device: CudaDevice, num_bytes: int, word: int) -> None:
        """Before any peer knows of this memory: in half of all epochs a zeroed word satisfies every wait."""
        self._driver.memset_d32_async(self.memory, 0, num_bytes // 4, device.rescue)
        ops = memory_ops([MemoryOp.write(address, word) for address in self.words()])
        self._driver.batch_memory_ops(device.rescue, ops)
        self._driver.synchronize(device.rescue)


class DeviceSender(_End):
    """The sending end, with its ``free`` words here and the slots in the receiver's memory."""

    def __init__(self, device: CudaDevice, link_id: LinkId, layout: RingLayout, epoch: int, start_seq: int) -> None:
        super().__init__(device, link_id, layout, epoch, start_seq, 0)

    @property
    def _receiver_memory(self) -> int:
        return self.peer_memory

    def wait_free(self, stream: CudaStream, seq: int) -> None:
        """Have ``stream`` wait until the slot of message ``seq`` may be written."""
        self._driver.wait_value64(
            stream.handle, self._word(self.memory, seq), counter_word(self._epoch, seq + 1 - self._num_slots)
        )

    def copy(self, stream: CudaStream, seq: int, source: int, num_bytes: int) -> CudaPoint:
        """Copy a message, header first, into its slot and publish it; the Point after which the source may be overwritten."""
        self._driver.memcpy_async(self.slot(seq), source, num_bytes, stream.handle)
        return stream.record_with(self.full_word(seq), self.full_value(seq))

    def full_word(self, seq: int) -> int:
        """Address of the word, in the receiver's memory, that tells of message ``seq``."""
        return self._word(self.peer_memory, seq)

    def full_value(self, seq: int) -> int:
        return counter_word(self._epoch, seq + 1)

    def describe(self, last_word: int) -> str:
        """``last_word`` is the newest of our words."""
        receiver = self.link_id.receiver
        return (
            f"rank {self.link_id.sender} sends {self.link_id.kind} to rank {receiver}: full is at {self.next_seq}, "
            f"free at {_shown(last_word, self._epoch)}"
        )


class DeviceReceiver(_End):
    """The receiving end, with the slots and their ``full`` words here."""

    def __init__(self, device: CudaDevice, link_id: LinkId, layout: RingLayout, epoch: int, start_seq: int) -> None:
        super().__init__(device, link_id, layout, epoch, start_seq, layout.num_slots * layout.stride)
        self._num_released = start_seq

    @property
    def _receiver_memory(self) -> int:
        return self.memory

    def wait_full(self, stream: CudaStream, seq: int) -> None:
        """Have ``stream`` wait for message ``seq``."""
        self._driver.wait_value64(stream.handle, self._word(self.memory, seq), counter_word(self._epoch, seq + 1))

    def release(self, stream: CudaStream, seq: int) -> None:
        """Give the credit of message ``seq`` back once ``stream`` comes by. In any order."""
        self._num_released += 1
        self._driver.write_value64(stream.handle, self._word(self.peer_memory, seq), counter_word(self._epoch, seq + 1))

    def describe(self, last_word: int) -> str:
        sender = self.link_id.sender
        return (
            f"rank {self.link_id.receiver} receives {self.link_id.kind} from rank {sender}: "
            f"full is at {_shown(last_word, self._epoch)}, free at {self._num_released}"
        )


def _shown(word: int, epoch: int) -> str:
    count = (word - counter_word(epoch, 0)) & (2**64 - 1)
    return str(count) if count < 2**63 else f"{word:#018x}"


class _Export(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank's end of each of its links is: its address within the process, and the handle for other ones."""

    process: bytes
    ends: dict[str, tuple[int, bytes]]


class DeviceLinks:
    """The links of one rank in one epoch, and the verdict that all of them share.

    ``start_seq`` is the number of the first message. Freed by the lanes that use them, once both are closed.
    """

    def __init__(
        self,
        device: CudaDevice,
        torch_device: torch.device,
        kernels: Kernels,
        group: PPGroup,
        sizes: LinkSizes,
        start_seq: int = 0,
    ) -> None:
        self.device = device
        self.torch_device = torch_device
        self.kernels = kernels
        self.group = group
        self._ends: list[DeviceSender | DeviceReceiver] = []
        self._opened: list[int] = []
        self._is_freed = False
        self._are_waits_broken = False
        self.open_lanes = 0
        device.free_retired()
        self.verdict = Verdict(device, group)
        self._pinned = device.driver.alloc_host(CONTROL_BYTES)
        self.from_prev: DeviceReceiver | None = None
        self.to_next: DeviceSender | None = None
        self.token_senders: list[DeviceSender] = []
        self.token_receiver: DeviceReceiver | None = None
        try:
            for link_id in link_ids(group.rank, group.world_size):
                self._make(link_id, sizes, start_seq)
        except BaseException:
            self.close()
            raise

    def _make(self, link_id: LinkId, sizes: LinkSizes, start_seq: int) -> None:
        layout = sizes.boundary if link_id.kind == "boundary" else sizes.tokens
        if link_id.sender == self.group.rank:
            sender = DeviceSender(self.device, link_id, layout, self.group.epoch, start_seq)
            self._ends.append(sender)
            if link_id.kind == "boundary":
                self.to_next = sender
            else:
                self.token_senders.append(sender)
        else:
            receiver = DeviceReceiver(self.device, link_id, layout, self.group.epoch, start_seq)
            self._ends.append(receiver)
            if link_id.kind == "boundary":
                self.from_prev = receiver
            else:
                self.token_receiver = receiver

    # ---- linking ----------------------------------------------------------------------------------------------------

    def exports(self) -> bytes:
        """What the other ranks need for ``connect``."""
        driver = self.device.driver
        return msgspec.msgpack.encode(
            _Export(_PROCESS, {str(end.link_id): (end.memory, driver.export(end.memory)) for end in self._ends})
        )

    def connect(self, exports: Sequence[bytes]) -> None:
        """Reach the other ends, from the exports of all ranks in their order. ``TransportError`` when one cannot be."""
        found = [msgspec.msgpack.decode(data, type=_Export) for data in exports]
        for end in self._ends:
            link_id = end.link_id
            peer = link_id.receiver if link_id.sender == self.group.rank else link_id.sender
            address, handle = found[peer].ends[str(link_id)]
            if found[peer].process != _PROCESS:
                try:
                    address = self.device.driver.open(handle)
                except CudaError as exc:
                    raise TransportError(f"{link_id}: rank {self.group.rank} cannot open rank {peer}'s memory: {exc}") from exc
                self._opened.append(address)
            end.connect(address)

    def probe(self, timeout_seconds: float) -> None:
        """Send a full-size pattern through every slot of every link and compare what arrives.

        Every rank probes at the same time. This proves the links, and is the warm-up of copies and waits too.
        ``TransportError`` when something differs, or does not arrive within ``timeout_seconds``.
        """
        stream = self.device.stream(f"probe-{self.group.rank}")
        deadline = time.monotonic() + timeout_seconds
        buffers: list[int] = []
        driver = self.device.driver
        try:
            buffers += [self._send_patterns(stream, end) for end in self._ends if isinstance(end, DeviceSender)]
            for end in self._ends:
                if isinstance(end, DeviceReceiver):
                    self._check_patterns(end, deadline)
            self._await_idle(stream, deadline, "a pattern was not taken")
        except BaseException:
            self.break_waits()
            raise
        finally:
            self.drain([stream])
            stream.close()
            for address in buffers:
                driver.free(address)

    def _send_patterns(self, stream: CudaStream, end: DeviceSender) -> int:
        num_bytes = end.layout.stride
        buffer = self.device.driver.alloc(num_bytes)
        for _ in range(end.layout.num_slots):
            seq = end.claim()
            self.device.driver.memset_d32_async(buffer, _pattern(end.link_id, seq), num_bytes // 4, stream.handle)
            end.wait_free(stream, seq)
            end.copy(stream, seq, buffer, num_bytes)
        return buffer

    def _check_patterns(self, end: DeviceReceiver, deadline: float) -> None:
        num_bytes = end.layout.stride
        driver = self.device.driver
        stream = self.device.stream(f"probe-{end.link_id.kind}")
        seen = driver.alloc_host(num_bytes)
        words = np.ctypeslib.as_array((ctypes.c_uint32 * (num_bytes // 4)).from_address(seen))
        try:
            for _ in range(end.layout.num_slots):
                seq = end.claim()
                end.wait_full(stream, seq)
                driver.memcpy_async(seen, end.slot(seq), num_bytes, stream.handle)
                end.release(stream, seq)
                self._await_idle(stream, deadline, f"{end.link_id}: message {seq} of the probe did not arrive")
                wanted = _pattern(end.link_id, seq)
                wrong = np.flatnonzero(words != wanted)
                if len(wrong):
                    raise TransportError(
                        f"{end.link_id}: word {wrong[0]} of message {seq} of the probe is {words[wrong[0]]:#010x}, "
                        f"expected {wanted:#010x}; {len(wrong)} of {len(words)} words differ"
                    )
        except BaseException:
            self.break_waits()
            raise
        finally:
            self.drain([stream])
            stream.close()
            driver.free_host(seen)

    def _await_idle(self, stream: CudaStream, deadline: float, complaint: str) -> None:
        while not self.device.driver.is_idle(stream.handle):
            if time.monotonic() > deadline:
                raise TransportError(f"rank {self.group.rank}: {complaint} in time")
            time.sleep(POLL_SECONDS)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def break_waits(self, ends: "Sequence[DeviceSender | DeviceReceiver] | None" = None) -> None:
        """Let every wait of this epoch on our words fall through, from now on."""
        self._are_waits_broken = True
        word = poison_word(self.group.epoch)
        for end in self._ends if ends is None else ends:
            ops = memory_ops([MemoryOp.write(address, word) for address in end.words()])
            self.device.driver.batch_memory_ops(self.device.rescue, ops)

    def read_words(self, end: "DeviceSender | DeviceReceiver") -> int:
        """The newest of an end's words, as they are on the device now. Takes microseconds: what it uses never waits."""
        driver, rescue = self.device.driver, self.device.rescue
        driver.memcpy_async(self._pinned, end.memory, CONTROL_BYTES, rescue)
        driver.synchronize(rescue)
        words = [ctypes.c_uint64.from_address(self._pinned + i * WORD_STRIDE).value for i in range(end.layout.num_slots)]
        newest = words[0]
        for word in words[1:]:
            newest = word if is_at_least(word, newest) else newest
        return newest

    def drain(self, streams: Sequence[CudaStream]) -> None:
        """Return once the streams have run what is enqueued. Waits that were broken are broken again and again: a late store of
        a live peer can lower a word that was raised."""
        driver = self.device.driver
        for stream in streams:
            while not stream.is_closed and not driver.is_idle(stream.handle):
                if self._are_waits_broken:
                    self.break_waits()
                time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Let go of everything. Our memory is freed only with the next epoch's links: until then a peer that is still
        draining may write there. May be called twice."""
        if self._is_freed:
            return
        self._is_freed = True
        driver = self.device.driver
        with suppress(CudaError):  # after a device error nothing can be freed, nor needs to be
            driver.synchronize(self.device.rescue)
            for address in self._opened:
                driver.close(address)
            self.device.retire(*(end.memory for end in self._ends))
            driver.free_host(self._pinned)
        self.verdict.close()


class DeviceLane:
    """The poison and the orderly end of whatever uses some of a rank's device links: the boundary's, or the tokens'.

    ``waits`` are its streams, each with the end that it waits for.
    """

    def __init__(self, links: DeviceLinks, waits: Sequence[tuple[CudaStream, DeviceSender | DeviceReceiver]]) -> None:
        self.links = links
        self.cause: BaseException | None = None
        self._waits = list(waits)
        self._ends = list(dict.fromkeys(end for _, end in waits))
        self._users = {stream for stream, _ in waits}
        self.is_closed = False
        links.open_lanes += 1

    def check(self) -> None:
        if self.cause is not None:
            raise self.cause
        if self.is_closed:
            raise TransportError(f"the links of rank {self.links.group.rank} are closed")

    def note_use(self, stream: CudaStream) -> None:
        self._users.add(stream)

    def poison(self, cause: BaseException) -> None:
        if self.cause is not None or self.is_closed:
            return
        self.cause = cause
        try:
            for stream, end in self._waits:
                text = f"{cause}; {end.describe(self.links.read_words(end))}"
                stream.fail(PeerLost(text) if isinstance(cause, PeerLost) else cause)
            self.links.break_waits(self._ends)
        except CudaError as exc:
            self.links.device.fail(exc)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        try:
            self.links.drain(list(self._users))
        except CudaError as exc:
            self.links.device.fail(exc)
        self.links.open_lanes -= 1
        if self.links.open_lanes == 0:
            self.links.close()


def _pattern(link_id: LinkId, seq: int) -> int:
    return (seq * 2654435761 + link_id.sender * 40503 + link_id.receiver * 7919 + 1) & 0xFFFFFFFF
