"""The driver's calls, and that the stand-in orders and compares as a GPU does, wherever a transport relies on it."""

import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stages.driver import IPC_HANDLE_BYTES, P2P_ACCESS_SUPPORTED, P2P_NATIVE_ATOMIC_SUPPORTED, Driver, MemoryOp, memory_ops
from stages.errors import CudaError
from stages.kernels import IMAGE, Kernels
from stages.transport.ring import counter_word, is_at_least, poison_word
from tests.emulated_cuda import ILLEGAL_ADDRESS, Emulation, Operation, build, emulation, the_emulation
from tests.gpu import GPUS, gpu_device

MEMORY_BYTES = 1 << 17
DEADLINE_SECONDS = 20
_C = ctypes.CDLL(None)
POST = ctypes.cast(_C.sem_post, ctypes.c_void_p).value or 0  # a host function, in C, whose calls can be counted


class Rig:
    """Three streams, events, device memory and pinned memory, both zeroed, all made before anything can wait.

    Words are 256 bytes apart; ``data`` is behind them.
    """

    def __init__(self, driver: Driver, rescue: int, emulated: Emulation | None) -> None:
        self.driver = driver
        self.emulated = emulated
        self.rescue = rescue
        self.a, self.b, self.c = self._streams = [driver.create_stream() for _ in range(3)]
        self.events = [driver.create_event() for _ in range(4)]
        self.memory = driver.alloc(MEMORY_BYTES)
        self.pinned = driver.alloc_host(MEMORY_BYTES)
        self._scratch = driver.alloc_host(MEMORY_BYTES)
        ctypes.memset(self.pinned, 0, MEMORY_BYTES)
        driver.memset_d32_async(self.memory, 0, MEMORY_BYTES // 4, rescue)
        driver.synchronize(rescue)
        self.data = self.memory + (1 << 16)
        self._waits: list[tuple[int, int]] = []

    def word(self, i: int) -> int:
        return self.memory + 256 * i

    def stop(self, stream: int, word: int, value: int = 1) -> None:
        """Have ``stream`` wait for ``value``; ``close`` lets it go on, if the test does not."""
        self._waits.append((word, value))
        self.driver.wait_value64(stream, word, value)

    def set(self, word: int, value: int) -> None:
        self.driver.write_value64(self.rescue, word, value)
        self.driver.synchronize(self.rescue)

    def read(self, address: int, num_bytes: int = 8) -> bytes:
        """What is there now, whatever the other streams wait for."""
        self.driver.memcpy_async(self._scratch, address, num_bytes, self.rescue)
        self.driver.synchronize(self.rescue)
        return ctypes.string_at(self._scratch, num_bytes)

    def value(self, word: int) -> int:
        return int.from_bytes(self.read(word), "little")

    def reach(self, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not is_there():
            assert time.monotonic() < deadline
            time.sleep(0)

    def finish(self, *streams: int) -> None:
        for stream in streams or self._streams:
            self.reach(lambda stream=stream: self.driver.is_idle(stream))

    def occupy(self, stream: int) -> None:
        """Have ``stream`` work for long enough that whatever could go on meanwhile has gone on."""
        for i in range(200):
            self.driver.memset_d32_async(self.data, i, 1 << 14, stream)
        self.driver.synchronize(stream)

    def close(self) -> None:
        for stream in self._streams:
            while not self.driver.is_idle(stream):
                for word, value in self._waits:
                    self.set(word, value)
            self.driver.destroy_stream(stream)
        for event in self.events:
            self.driver.destroy_event(event)
        self.driver.free(self.memory)
        self.driver.free_host(self.pinned)
        self.driver.free_host(self._scratch)


@pytest.fixture(params=GPUS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with gpu_device(request.param) as device:
        made = Rig(device.driver, device.rescue, the_emulation() if request.param == "emulated" else None)
        yield made
        if made.emulated is not None:
            made.emulated.reset()
        made.close()


@pytest.fixture
def emulated() -> Iterator[Emulation]:
    with emulation() as made:
        yield made


@pytest.fixture
def emulated_rig(emulated: Emulation) -> Iterator[Rig]:
    with gpu_device("emulated") as device:
        made = Rig(device.driver, device.rescue, emulated)
        yield made
        emulated.reset()
        made.close()


# ---- the library ----------------------------------------------------------------------------------------------------


def test_a_machine_without_a_driver_is_told_so() -> None:
    with pytest.raises(CudaError, match=r"the CUDA driver cannot be loaded: libnone\.so\.1: ") as raised:
        Driver("libnone.so.1")
    assert raised.value.code == -1
    assert raised.value.__cause__ is None


def test_a_driver_that_lacks_an_entry_point_is_told_so() -> None:
    with pytest.raises(CudaError, match="the CUDA driver is too old: it has no cuInit"):
        Driver("libm.so.6")


def test_a_wrong_result_names_the_call_and_the_error(rig: Rig) -> None:
    with pytest.raises(CudaError, match=r"^cuMemFree_v2: CUDA_ERROR_INVALID_VALUE \(1\)$") as raised:
        rig.driver.free(64)
    assert raised.value.code == 1
    module = rig.driver.load_module(IMAGE.read_bytes())
    with pytest.raises(CudaError, match=r"^cuModuleGetFunction: CUDA_ERROR_NOT_FOUND \(500\)$"):
        rig.driver.function(module, "no_such_kernel")


def test_several_processes_build_one_stand_in(tmp_path: Path) -> None:
    source = (
        "from tests.emulated_cuda import build; from stages.driver import Driver; path = build(); Driver(path); print(path)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    builders = [
        subprocess.Popen([sys.executable, "-c", source], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    paths = {builder.communicate(timeout=60)[0] for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0, 0]
    assert len(paths) == 1
    (library,) = tmp_path.glob("*/*")
    assert paths == {f"{library}\n"}
    assert library.name == Path(build()).name


# ---- devices --------------------------------------------------------------------------------------------------------


def test_what_a_device_says_of_itself(rig: Rig) -> None:
    driver = rig.driver
    assert driver.version() >= 12000
    ordinals = range(driver.device_count())
    uuids = [driver.device_uuid(ordinal) for ordinal in ordinals]
    assert all(re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid) for uuid in uuids)
    assert len(set(uuids)) == len(ordinals) >= 1
    assert driver.device_name(0)
    free, total = driver.memory_info()
    assert 0 < free <= total <= driver.device_bytes(0)
    assert not driver.can_access_peer(0, 0)
    with pytest.raises(CudaError, match=r"^cuDeviceGet: CUDA_ERROR_INVALID_DEVICE \(101\)$"):
        driver.device_name(len(ordinals))


def test_peers_can_be_taken_away(emulated: Emulation) -> None:
    def reaches() -> tuple[bool, ...]:
        what = (P2P_ACCESS_SUPPORTED, P2P_NATIVE_ATOMIC_SUPPORTED)
        return driver.can_access_peer(0, 1), *(driver.p2p_attribute(attribute, 0, 1) == 1 for attribute in what)

    driver = emulated.driver
    assert reaches() == (True, True, True)
    emulated.take_peers()
    assert reaches() == (False, False, False)


def test_memory_operations_can_be_taken_away(emulated: Emulation, emulated_rig: Rig) -> None:
    rig, driver = emulated_rig, emulated_rig.driver
    emulated.take_memory_operations()
    ops = memory_ops([MemoryOp.write(rig.word(0), 1)])
    for use in (
        lambda: driver.wait_value64(rig.a, rig.word(0), 1),
        lambda: driver.write_value64(rig.a, rig.word(0), 1),
        lambda: driver.batch_memory_ops(rig.a, ops),
    ):
        with pytest.raises(CudaError, match=r"CUDA_ERROR_NOT_SUPPORTED \(801\)"):
            use()


def test_the_stand_in_refuses_a_word_that_is_not_aligned(emulated_rig: Rig) -> None:
    for use in (emulated_rig.driver.wait_value64, emulated_rig.driver.write_value64):
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
            use(emulated_rig.a, emulated_rig.word(0) + 4, 1)


def test_a_stream_that_is_captured_is_told(emulated: Emulation, emulated_rig: Rig) -> None:
    assert not emulated_rig.driver.is_capturing(emulated_rig.a)
    emulated.set_capturing(emulated_rig.a, is_capturing=True)
    assert emulated_rig.driver.is_capturing(emulated_rig.a)
    assert not emulated_rig.driver.is_capturing(emulated_rig.b)
    emulated.set_capturing(emulated_rig.a, is_capturing=False)
    assert not emulated_rig.driver.is_capturing(emulated_rig.a)


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_copies_and_fills_touch_what_they_name_and_nothing_else(rig: Rig) -> None:
    data = random.Random(5).randbytes(1000)
    ctypes.memmove(rig.pinned, data, len(data))
    rig.driver.memcpy_async(rig.data + 64, rig.pinned, len(data), rig.a)
    rig.driver.memcpy_async(rig.data + 2048, rig.data + 64, 999, rig.a)
    rig.driver.memset_d32_async(rig.data + 2048 + 4, 0x01020304, 3, rig.a)
    rig.driver.synchronize(rig.a)
    expected = bytes(64) + data + bytes(2048 - 64 - 1000) + data[:4] + b"\4\3\2\1" * 3 + data[16:999] + bytes(64)
    assert rig.read(rig.data, len(expected)) == expected


# ---- order ----------------------------------------------------------------------------------------------------------


def test_who_sees_the_flag_sees_the_data(rig: Rig) -> None:
    """Over streams that each take their time, with the credit that keeps the sender off what is still to be read."""
    driver, num_rounds, num_words = rig.driver, 150, 2048
    if rig.emulated is not None:
        rig.emulated.delay(*list(Operation)[:6], random_us=60)
    full, free = rig.word(0), rig.word(1)
    for n in range(1, num_rounds + 1):
        rig.stop(rig.a, free, n - 1)
        driver.memset_d32_async(rig.data, n, num_words, rig.a)
        driver.write_value64(rig.a, full, n)
        rig.stop(rig.b, full, n)
        for i, word in enumerate((0, num_words - 1)):
            driver.memcpy_async(rig.pinned + 8 * n + 4 * i, rig.data + 4 * word, 4, rig.b)
        driver.write_value64(rig.b, free, n)
    rig.finish()
    seen = list((ctypes.c_uint32 * (2 * num_rounds)).from_address(rig.pinned + 8))
    assert seen == [n for n in range(1, num_rounds + 1) for _ in range(2)]


def test_a_stream_waits_for_what_an_event_stood_for_when_it_was_told_to(rig: Rig) -> None:
    driver, event = rig.driver, rig.events[0]
    rig.stop(rig.b, rig.word(0))
    driver.event_record(event, rig.a)
    driver.stream_wait_event(rig.b, event)
    driver.write_value64(rig.b, rig.word(2), 7)
    driver.synchronize(rig.a)
    rig.stop(rig.a, rig.word(1))
    driver.event_record(event, rig.a)
    rig.set(rig.word(0), 1)
    rig.finish(rig.b)
    assert rig.value(rig.word(2)) == 7
    assert not driver.is_done(event), "it stands for its newest record, which is stopped"
    rig.set(rig.word(1), 1)
    rig.reach(lambda: driver.is_done(event))


@pytest.mark.parametrize("is_destroyed", [False, True])
def test_an_event_that_is_used_again_lets_nobody_go_early(rig: Rig, is_destroyed: bool) -> None:
    """A Point's event is recorded anew, on any stream, while others may still wait for what it stood for."""
    driver, event = rig.driver, rig.events[0]
    rig.stop(rig.a, rig.word(0))
    driver.write_value64(rig.a, rig.word(1), 7)
    driver.event_record(event, rig.a)
    driver.stream_wait_event(rig.b, event)
    driver.memcpy_async(rig.pinned, rig.word(1), 8, rig.b)
    if is_destroyed:
        driver.destroy_event(rig.events.pop(0))
        event = driver.create_event()
        rig.events.append(event)
    driver.event_record(event, rig.c)
    rig.occupy(rig.c)
    assert driver.is_done(event)
    assert not driver.is_idle(rig.b)
    rig.set(rig.word(0), 1)
    rig.finish()
    assert ctypes.string_at(rig.pinned, 8) == (7).to_bytes(8, "little")


def test_an_event_that_was_never_recorded_keeps_nobody(rig: Rig) -> None:
    assert rig.driver.is_done(rig.events[0])
    rig.driver.stream_wait_event(rig.a, rig.events[0])
    rig.finish(rig.a)


def test_an_event_comes_behind_what_was_enqueued_before_it_and_no_more(rig: Rig) -> None:
    driver, (first, second) = rig.driver, rig.events[:2]
    driver.event_record(first, rig.a)
    rig.stop(rig.a, rig.word(0))
    driver.event_record(second, rig.a)
    rig.reach(lambda: driver.is_done(first))
    assert not driver.is_done(second)
    assert not driver.is_idle(rig.a)
    with pytest.raises(CudaError, match=r"^cuEventElapsedTime: CUDA_ERROR_NOT_READY \(600\)$"):
        driver.elapsed_ms(first, second)
    rig.set(rig.word(0), 1)
    rig.reach(lambda: driver.is_done(second))
    rig.finish(rig.a)


def test_elapsed_time_is_what_lay_between_in_either_direction(rig: Rig) -> None:
    driver, (start, end) = rig.driver, rig.events[:2]
    driver.event_record(start, rig.a)
    rig.stop(rig.a, rig.word(0))
    driver.event_record(end, rig.a)
    rig.reach(lambda: driver.is_done(start))
    before = time.perf_counter()
    while time.perf_counter() < before + 0.004:
        pass
    rig.set(rig.word(0), 1)
    rig.finish(rig.a)
    elapsed_ms = driver.elapsed_ms(start, end)
    assert 3.9 <= elapsed_ms < DEADLINE_SECONDS * 1000
    assert driver.elapsed_ms(end, start) == pytest.approx(-elapsed_ms, abs=0.01)
    assert driver.elapsed_ms(start, start) == 0


def test_a_destroyed_stream_still_does_what_it_was_told(rig: Rig) -> None:
    driver = rig.driver
    stream = driver.create_stream()
    rig.stop(stream, rig.word(0))
    driver.write_value64(stream, rig.word(1), 7)
    driver.destroy_stream(stream)
    assert rig.value(rig.word(1)) == 0
    rig.set(rig.word(0), 1)
    rig.reach(lambda: rig.value(rig.word(1)) == 7)


# ---- memory operations ----------------------------------------------------------------------------------------------

TOP = 1 << 63


@pytest.mark.parametrize(
    ("word", "value", "is_enough"),
    [
        (0, 0, True),
        (1, 0, True),
        (0, 1, False),
        (2**64 - 1, 0, False),
        (0, 2**64 - 1, True),
        (TOP - 1, 0, True),
        (TOP, 0, False),
        (TOP, TOP - 1, True),
        (TOP - 1, TOP, False),
        (counter_word(0x7FFF, 2**48 - 1), counter_word(0x8000, 0), False),
        (counter_word(0x8000, 0), counter_word(0x7FFF, 2**48 - 1), True),
        (counter_word(0xFFFF, 9), counter_word(0x10000, 0), False),
        (counter_word(0x10000, 0), counter_word(0xFFFF, 9), True),
        (poison_word(0xFFFF), counter_word(0xFFFF, 5), True),
        (poison_word(0x7FFF), counter_word(0x7FFF, 1 << 50), True),
    ],
)
def test_a_wait_compares_as_the_ring_counts(rig: Rig, word: int, value: int, is_enough: bool) -> None:
    assert is_at_least(word, value) == is_enough
    rig.set(rig.word(0), word)
    rig.stop(rig.a, rig.word(0), value)
    rig.driver.write_value64(rig.a, rig.word(1), 7)
    if not is_enough:
        rig.occupy(rig.c)
        assert rig.value(rig.word(1)) == 0
        rig.set(rig.word(0), value)
    rig.finish(rig.a)
    assert rig.value(rig.word(1)) == 7


def test_operations_of_a_batch_keep_their_order_and_are_copied(rig: Rig) -> None:
    def wait(word: int) -> MemoryOp:
        rig._waits.append((word, 1))
        return MemoryOp.wait(word, 1)

    ops = memory_ops(
        [wait(rig.word(0)), MemoryOp.write(rig.word(1), 5), wait(rig.word(2)), MemoryOp.write(rig.word(1), 2**64 - 6)]
    )
    rig.driver.batch_memory_ops(rig.a, ops)
    for op in ops:
        op.address, op.value = rig.word(3), 99
    rig.occupy(rig.c)
    assert rig.value(rig.word(1)) == 0
    rig.set(rig.word(0), 1)
    rig.reach(lambda: rig.value(rig.word(1)) == 5)
    rig.occupy(rig.c)
    assert rig.value(rig.word(1)) == 5
    rig.set(rig.word(2), 1)
    rig.finish(rig.a)
    assert rig.value(rig.word(1)) == 2**64 - 6
    assert rig.value(rig.word(3)) == 0


def test_a_word_may_be_pinned_memory_that_the_host_writes(rig: Rig) -> None:
    word = ctypes.c_uint64.from_address(rig.pinned)
    rig.stop(rig.a, rig.pinned, 3)
    rig.driver.write_value64(rig.a, rig.pinned + 64, 8)
    word.value = 2
    rig.occupy(rig.c)
    told = ctypes.c_uint64.from_address(rig.pinned + 64)
    assert told.value == 0
    word.value = 3
    rig.reach(lambda: told.value == 8)


def test_a_stopped_stream_costs_little(emulated: Emulation, emulated_rig: Rig) -> None:
    rig = emulated_rig
    for stream in (rig.a, rig.b):
        rig.stop(stream, rig.word(0))
    rig.reach(lambda: emulated.is_waiting(rig.word(0), 8))
    assert not emulated.is_waiting(rig.word(1), 8)
    assert not emulated.is_waiting(rig.word(0) - 8, 8)
    started = time.process_time()
    time.sleep(0.4)  # what is measured, not waited for
    assert time.process_time() - started < 0.1
    rig.set(rig.word(0), 1)
    rig.finish()
    assert not emulated.is_waiting(rig.word(0), 8)


# ---- host functions -------------------------------------------------------------------------------------------------


class Semaphore:
    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(64)
        self.address = ctypes.addressof(self._memory)
        assert _C.sem_init(self._memory, 0, 0) == 0

    @property
    def count(self) -> int:
        value = ctypes.c_int()
        _C.sem_getvalue(self._memory, ctypes.byref(value))
        return value.value


def test_a_host_function_is_called_when_its_stream_comes_by(rig: Rig) -> None:
    called = Semaphore()
    rig.driver.launch_host_func(rig.a, POST, called.address)
    rig.reach(lambda: called.count == 1)
    rig.stop(rig.a, rig.word(0))
    rig.driver.launch_host_func(rig.a, POST, called.address)
    rig.occupy(rig.c)
    assert called.count == 1
    rig.set(rig.word(0), 1)
    rig.finish(rig.a)
    assert called.count == 2


def test_host_functions_can_get_lost(emulated: Emulation, emulated_rig: Rig) -> None:
    rig, called = emulated_rig, Semaphore()
    emulated.drop_host_functions(3)
    for _ in range(9):
        rig.driver.launch_host_func(rig.a, POST, called.address)
    rig.finish(rig.a)
    assert called.count == 6
    emulated.drop_host_functions(0)
    for _ in range(9):
        rig.driver.launch_host_func(rig.a, POST, called.address)
    rig.finish(rig.a)
    assert called.count == 15


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_after_a_sticky_error_every_call_fails_and_nothing_waits_any_more(emulated: Emulation, emulated_rig: Rig) -> None:
    rig, driver, called = emulated_rig, emulated_rig.driver, Semaphore()
    event = rig.events[0]
    kernels, ops = Kernels(driver), memory_ops([MemoryOp.write(rig.word(1), 1)])
    rig.stop(rig.a, rig.word(0))
    driver.write_value64(rig.a, rig.word(1), 7)
    driver.launch_host_func(rig.a, POST, called.address)
    driver.event_record(event, rig.a)
    rig.reach(lambda: emulated.is_waiting(rig.word(0), 8))
    emulated.fail()
    uses: dict[str, Callable[[], object]] = {
        "cuCtxSetCurrent": lambda: driver.make_current(0),
        "cuMemAlloc_v2": lambda: driver.alloc(256),
        "cuMemHostAlloc": lambda: driver.alloc_host(256),
        "cuIpcGetMemHandle": lambda: driver.export(rig.memory),
        "cuIpcOpenMemHandle_v2": lambda: driver.open(bytes(IPC_HANDLE_BYTES)),
        "cuStreamCreateWithPriority": driver.create_stream,
        "cuStreamSynchronize": lambda: driver.synchronize(rig.a),
        "cuStreamQuery": lambda: driver.is_idle(rig.a),
        "cuStreamIsCapturing": lambda: driver.is_capturing(rig.a),
        "cuStreamWaitEvent": lambda: driver.stream_wait_event(rig.b, event),
        "cuStreamWaitValue64_v2": lambda: driver.wait_value64(rig.b, rig.word(1), 1),
        "cuStreamWriteValue64_v2": lambda: driver.write_value64(rig.b, rig.word(1), 1),
        "cuStreamBatchMemOp": lambda: driver.batch_memory_ops(rig.b, ops),
        "cuMemcpyAsync": lambda: driver.memcpy_async(rig.word(1), rig.word(0), 8, rig.b),
        "cuMemsetD32Async": lambda: driver.memset_d32_async(rig.word(1), 1, 1, rig.b),
        "cuEventCreate": driver.create_event,
        "cuEventRecord": lambda: driver.event_record(event, rig.b),
        "cuEventQuery": lambda: driver.is_done(event),
        "cuEventElapsedTime": lambda: driver.elapsed_ms(event, event),
        "cuLaunchHostFunc": lambda: driver.launch_host_func(rig.b, POST, called.address),
        "cuModuleLoadData": lambda: driver.load_module(b""),
        "cuLaunchKernel": lambda: kernels.boundary(rig.b, 0, b"", rig.word(1), bytes(8), rig.word(1), rig.word(1)),
    }
    for call, use in uses.items():
        with pytest.raises(CudaError, match=rf"^{call}: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)$") as raised:
            use()
        assert raised.value.code == ILLEGAL_ADDRESS
    emulated.reset()
    rig.finish()
    assert called.count == 0
    assert rig.value(rig.word(1)) == 0, "what was behind the broken wait was not done"
    driver.write_value64(rig.a, rig.word(1), 8)
    rig.finish()
    assert rig.value(rig.word(1)) == 8, "the reset stand-in works again"


def test_what_was_enqueued_before_an_error_is_never_done(emulated: Emulation, emulated_rig: Rig) -> None:
    """Not even when a stream comes to it only after the reset: what it would write to may be gone."""
    rig, gate = emulated_rig, threading.Event()
    device = emulated.device()
    stream = device.stream("a")

    def hold() -> None:
        assert gate.wait(DEADLINE_SECONDS)

    stream.launch(hold)
    rig.driver.write_value64(stream.handle, rig.word(0), 7)
    emulated.fail()
    emulated.reset()
    gate.set()
    rig.finish(stream.handle)
    assert rig.value(rig.word(0)) == 0
    device.close()


def test_an_error_without_a_name_is_shown_by_its_code(emulated: Emulation) -> None:
    emulated.fail(12345)
    with pytest.raises(CudaError, match=r"^cuMemAlloc_v2: CUDA_ERROR_UNKNOWN \(12345\)$") as raised:
        emulated.driver.alloc(256)
    assert raised.value.code == 12345


# ---- what outlives what ---------------------------------------------------------------------------------------------


def listed(folder: str) -> set[str]:
    return set(os.listdir(f"/proc/self/{folder}"))


def test_nothing_is_left_of_what_was_destroyed(emulated: Emulation) -> None:
    driver = emulated.driver
    Rig(driver, driver.create_stream(), emulated).close()  # whatever is made once
    event = driver.create_event()
    files = listed("fd")
    for has_failed in (False, True):
        threads = listed("task")
        streams = [driver.create_stream() for _ in range(4)]
        threads = listed("task") - threads
        assert len(threads) == 4
        memory = [driver.alloc(4096) for _ in range(4)]
        opened = driver.open(driver.export(memory[0]))  # the stand-in opens its own, which CUDA does not
        driver.event_record(event, streams[0])
        driver.stream_wait_event(streams[1], event)
        driver.wait_value64(streams[0], memory[0], int(has_failed))
        if has_failed:
            emulated.fail()
        for stream in streams:
            release(driver.destroy_stream, stream, has_failed=has_failed)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while threads & listed("task"):
            assert time.monotonic() < deadline
        for address, undo in [(opened, driver.close), *((address, driver.free) for address in memory)]:
            release(undo, address, has_failed=has_failed)
        assert listed("fd") == files
    release(driver.destroy_event, event, has_failed=True)


def release(undo: Callable[[int], None], handle: int, *, has_failed: bool) -> None:
    if has_failed:
        with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            undo(handle)
    else:
        undo(handle)


EXPORTER = """
import sys
from tests.gpu import gpu_device
with gpu_device(sys.argv[1]) as device:
    driver = device.driver
    memory = driver.alloc(1 << 16)
    driver.memset_d32_async(memory, 0x600DF00D, 1 << 14, device.rescue)
    driver.synchronize(device.rescue)
    print(driver.export(memory).hex(), flush=True)
    sys.stdin.readline()
    driver.write_value64(device.rescue, memory + 256, 5)
    driver.synchronize(device.rescue)
    print("written", flush=True)
    sys.stdin.read()
"""


def run_exporter(kind: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", EXPORTER, kind]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_another_process_s_memory_is_shared_and_outlives_it(rig: Rig) -> None:
    """Killed without a chance to clean up, the exporter leaves its memory to who has opened it, and no name behind."""
    files = listed("fd")
    with run_exporter("cuda" if rig.emulated is None else "emulated") as exporter:
        assert exporter.stdin is not None
        assert exporter.stdout is not None
        try:
            handle = bytes.fromhex(exporter.stdout.readline())
            assert len(handle) == IPC_HANDLE_BYTES
            theirs = rig.driver.open(handle)
            if rig.emulated is not None:
                (mapped,) = (
                    line for line in Path("/proc/self/maps").read_text().splitlines() if line.startswith(f"{theirs:x}-")
                )
                assert mapped.endswith(" (deleted)"), "it has a name, which a killed process leaves behind"
            assert rig.read(theirs, 1 << 16) == (0x600DF00D).to_bytes(4, "little") * (1 << 14)
            rig.set(theirs + 256, 0)
            rig.driver.memcpy_async(rig.memory, theirs, 512, rig.b)
            rig.driver.synchronize(rig.b)
            exporter.stdin.write("\n")
            exporter.stdin.flush()
            assert exporter.stdout.readline() == "written\n"
            assert rig.value(theirs + 256) == 5
        finally:
            exporter.send_signal(signal.SIGKILL)
            exporter.wait()
    rig.set(theirs + 512, 6)
    rig.driver.memcpy_async(theirs, rig.data, 256, rig.a)
    rig.driver.synchronize(rig.a)
    assert [rig.value(theirs + offset) for offset in (0, 256, 512)] == [0, 5, 6]
    rig.driver.close(theirs)
    if rig.emulated is not None:
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
            rig.driver.open(handle)
        assert listed("fd") == files


def test_memory_of_another_process_can_be_refused(emulated: Emulation) -> None:
    driver = emulated.driver
    memory = driver.alloc(4096)
    handle = driver.export(memory)
    for bad in (bytes(IPC_HANDLE_BYTES), b"x" * IPC_HANDLE_BYTES):
        with pytest.raises(CudaError, match=r"^cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_HANDLE"):
            driver.open(bad)
    driver.close(driver.open(handle))
    emulated.refuse_ipc()
    with pytest.raises(CudaError, match=r"^cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_HANDLE"):
        driver.open(handle)
    driver.free(memory)


# ---- what a test can do to the stand-in -----------------------------------------------------------------------------


def test_operations_are_counted_and_slowed_down_by_kind(emulated: Emulation, emulated_rig: Rig) -> None:
    rig, driver = emulated_rig, emulated_rig.driver
    emulated.reset()
    emulated.delay(Operation.COPY, fixed_us=20_000)
    started = time.monotonic()
    for _ in range(3):
        driver.memset_d32_async(rig.data, 1, 1, rig.a)
        driver.write_value64(rig.a, rig.word(0), 1)
    rig.finish()
    quick, started = time.monotonic() - started, time.monotonic()
    driver.memcpy_async(rig.data, rig.word(0), 8, rig.a)
    driver.memcpy_async(rig.data, rig.word(0), 8, rig.a)
    rig.finish()
    assert time.monotonic() - started >= 0.04
    assert quick < 0.04
    counts = {operation: emulated.count(operation) for operation in Operation if emulated.count(operation)}
    assert counts == {Operation.SET: 3, Operation.WRITE_VALUE: 3, Operation.COPY: 2}
    emulated.reset()
    assert not any(emulated.count(operation) for operation in Operation)


def test_a_callable_runs_in_its_stream_s_order(emulated: Emulation, emulated_rig: Rig) -> None:
    rig, seen = emulated_rig, list[int]()
    device = emulated.device()
    stream = device.stream("a")
    rig.stop(stream.handle, rig.word(0))
    rig.driver.write_value64(stream.handle, rig.word(1), 1)
    stream.launch(lambda: seen.append(ctypes.c_uint64.from_address(rig.word(1)).value))
    rig.driver.write_value64(stream.handle, rig.word(1), 2)
    stream.launch(lambda: seen.append(ctypes.c_uint64.from_address(rig.word(1)).value))
    rig.occupy(rig.c)
    assert seen == []
    rig.set(rig.word(0), 1)
    rig.finish(stream.handle)
    assert seen == [1, 2]
    device.close()
