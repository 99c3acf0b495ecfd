"""A stand-in for libcuda, compiled from C in the test run: the real streams, transports and kernels run on it without a GPU."""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from pathlib import Path

from stages.cuda import CudaDevice
from stages.driver import Driver
from stages.kernels import SOURCE as KERNELS

SOURCE = Path(__file__).with_name("emulated_cuda.c")
ILLEGAL_ADDRESS = 700


class Operation(IntEnum):
    """As ``enum Kind`` in the source."""

    RECORD = 0
    WAIT_EVENT = 1
    WAIT_VALUE = 2
    WRITE_VALUE = 3
    COPY = 4
    SET = 5
    HOST_FUNCTION = 6
    KERNEL = 7
    CALL = 8


@cache
def build() -> str:
    """The path of the compiled library. Safe when several processes build it at once."""
    digest = hashlib.sha256(SOURCE.read_bytes() + KERNELS.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"emulated-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{digest}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}")
        flags = ["-O2", "-Wall", "-Wno-psabi", "-shared", "-fPIC", "-pthread", f"-I{KERNELS.parent}"]
        done = subprocess.run(["cc", *flags, "-o", part, SOURCE], stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0, done.stderr
        part.rename(library)
    return str(library)


class Emulation:
    """The stand-in of this process, and what a test can do to it. Use it through ``emulation``, which resets it."""

    def __init__(self) -> None:
        self.driver = Driver(build())
        self._lib = self.driver.lib
        for name, types in {
            "emulated_call": [ctypes.c_void_p] * 3,
            "emulated_set_latency": [ctypes.c_int] * 3,
            "emulated_set_capturing": [ctypes.c_void_p, ctypes.c_int],
            "emulated_count": [ctypes.c_int],
            "emulated_is_waiting": [ctypes.c_uint64] * 2,
        }.items():
            getattr(self._lib, name).argtypes = types
        self._lib.emulated_count.restype = ctypes.c_long
        self._calls: dict[int, Callable[[], None]] = {}
        self._num_calls = 0
        self._trampoline = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._run)

    def device(self, ordinal: int = 0) -> CudaDevice:
        """``launch`` on its streams runs a callable on the stream's thread, as if it were work of the device."""
        return CudaDevice(self.driver, ordinal, self._enqueue)

    def fail(self, code: int = ILLEGAL_ADDRESS) -> None:
        """A sticky device error."""
        self._lib.emulated_set_error(code)

    def delay(self, *operations: Operation, fixed_us: int = 0, random_us: int = 0) -> None:
        """Each of ``operations`` takes this much longer, the random part up to ``random_us``."""
        for operation in operations:
            self._lib.emulated_set_latency(operation, fixed_us, random_us)

    def drop_host_functions(self, every: int) -> None:
        """Never call every ``every``-th host function; 0 calls all."""
        self._lib.emulated_drop_host_functions(every)

    def refuse_ipc(self) -> None:
        self._lib.emulated_refuse_ipc(1)

    def take_peers(self) -> None:
        """No GPU reaches another one."""
        self._lib.emulated_take_peers(1)

    def take_memory_operations(self) -> None:
        """Stream waits and writes are not supported."""
        self._lib.emulated_take_memory_operations(1)

    def set_capturing(self, stream: int, *, is_capturing: bool) -> None:
        self._lib.emulated_set_capturing(stream, is_capturing)

    def count(self, operation: Operation) -> int:
        """How many were enqueued since the last reset."""
        return self._lib.emulated_count(operation)

    def is_waiting(self, address: int, num_bytes: int) -> bool:
        """Whether a stream of this process waits for a word there, having found it too low."""
        return bool(self._lib.emulated_is_waiting(address, address + num_bytes))

    def reset(self) -> None:
        self._lib.emulated_reset()

    def _enqueue(self, stream: int, fn: Callable[[], None]) -> None:
        self._num_calls += 1
        self._calls[self._num_calls] = fn
        if self._lib.emulated_call(stream, self._trampoline, self._num_calls):
            del self._calls[self._num_calls]

    def _run(self, number: int) -> None:
        self._calls.pop(number)()  # CudaStream keeps what it raises


@cache
def the_emulation() -> Emulation:
    """The one of this process."""
    return Emulation()


@contextmanager
def emulation() -> Iterator[Emulation]:
    """The stand-in as it is at first, and again afterwards."""
    emulated = the_emulation()
    emulated.reset()
    try:
        yield emulated
    finally:
        emulated.reset()
