"""The CUDA driver calls that Stagewire makes, through ctypes. No torch.

ctypes drops the GIL around every call. The ``cuda-bindings`` package is not used: before its version 13.5 it wraps even a C
function given to ``cuLaunchHostFunc`` in Python. Names and codes are those of ``cuda.h``, CUDA 12 and later.

A wrong result code is raised as ``CudaError``. Handles and addresses are plain ints.
"""

# pyright: strict

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from stages.errors import CudaError

LIBRARY = "libcuda.so.1"
IPC_HANDLE_BYTES = 64

_SUCCESS = 0
NOT_READY = 600
_WAIT_GEQ = 0
_EVENT_DISABLE_TIMING = 2
_STREAM_NON_BLOCKING = 1
_HOST_PORTABLE_AND_MAPPED = 3
_IPC_LAZY_ENABLE_PEER_ACCESS = 1
_OP_WAIT_VALUE_64 = 4
_OP_WRITE_VALUE_64 = 5

P2P_ACCESS_SUPPORTED = 2
P2P_NATIVE_ATOMIC_SUPPORTED = 3  # NVLink has them, PCIe does not


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", c_char * IPC_HANDLE_BYTES)]


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


class MemoryOp(ctypes.Structure):
    """One operation of ``batch_memory_ops``; ``CUstreamBatchMemOpParams`` is a union of 48 bytes."""

    _fields_ = [
        ("operation", c_uint),
        ("_pad", c_uint),
        ("address", c_uint64),
        ("value", c_uint64),
        ("flags", c_uint),
        ("_rest", c_uint * 5),
    ]

    @classmethod
    def wait(cls, address: int, value: int) -> "MemoryOp":
        """Wait until ``(int64)(*address - value) >= 0``."""
        return cls(operation=_OP_WAIT_VALUE_64, address=address, value=value, flags=_WAIT_GEQ)

    @classmethod
    def write(cls, address: int, value: int) -> "MemoryOp":
        """Store ``value`` once everything before it on the stream is visible."""
        return cls(operation=_OP_WRITE_VALUE_64, address=address, value=value, flags=0)


_CALLS: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDeviceGetUuid_v2": [POINTER(_Uuid), c_int],
    "cuDeviceTotalMem_v2": [POINTER(c_size_t), c_int],
    "cuDeviceCanAccessPeer": [POINTER(c_int), c_int, c_int],
    "cuDeviceGetP2PAttribute": [POINTER(c_int), c_int, c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemGetInfo_v2": [POINTER(c_size_t), POINTER(c_size_t)],
    "cuMemHostAlloc": [POINTER(c_void_p), c_size_t, c_uint],
    "cuMemFreeHost": [c_void_p],
    "cuIpcGetMemHandle": [POINTER(_IpcHandle), c_uint64],
    "cuIpcOpenMemHandle_v2": [POINTER(c_uint64), _IpcHandle, c_uint],
    "cuIpcCloseMemHandle": [c_uint64],
    "cuStreamCreateWithPriority": [POINTER(c_void_p), c_uint, c_int],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamIsCapturing": [c_void_p, POINTER(c_int)],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuStreamWaitValue64_v2": [c_void_p, c_uint64, c_uint64, c_uint],
    "cuStreamWriteValue64_v2": [c_void_p, c_uint64, c_uint64, c_uint],
    "cuStreamBatchMemOp_v2": [c_void_p, c_uint, POINTER(MemoryOp), c_uint],
    "cuMemcpyAsync": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuMemsetD32Async": [c_uint64, c_uint, c_size_t, c_void_p],
    "cuEventCreate": [POINTER(c_void_p), c_uint],
    "cuEventDestroy_v2": [c_void_p],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventElapsedTime": [POINTER(c_float), c_void_p, c_void_p],
    "cuLaunchHostFunc": [c_void_p, c_void_p, c_void_p],
    "cuModuleLoadData": [POINTER(c_void_p), c_char_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p],
}


class Driver:
    """libcuda. ``library`` is another one that has the same entry points; ``CudaError`` when it cannot be loaded."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self.lib = ctypes.CDLL(library)
        except OSError as exc:
            raise CudaError(f"the CUDA driver cannot be loaded: {exc}") from None
        for name, argument_types in _CALLS.items():
            function = self._entry(name)
            function.argtypes, function.restype = argument_types, c_int
        self._error_name = self._entry("cuGetErrorName")
        self._error_name.argtypes, self._error_name.restype = [c_int, POINTER(c_char_p)], c_int
        self._event_query = self._entry("cuEventQuery")
        self._event_query.argtypes, self._event_query.restype = [c_void_p], c_int
        self._event_elapsed_time = self._entry("cuEventElapsedTime")
        self._elapsed = c_float()
        self._elapsed_at = byref(self._elapsed)
        self._stream_query = self._entry("cuStreamQuery")
        self._stream_query.argtypes, self._stream_query.restype = [c_void_p], c_int
        self._call("cuInit", 0)
        # The calls of every step, bound once.
        self.stream_wait_event = self._checked("cuStreamWaitEvent", 0)
        """``(stream, event)``"""
        self.wait_value64 = self._checked("cuStreamWaitValue64_v2", _WAIT_GEQ)
        """``(stream, address, value)``: the stream waits until ``(int64)(*address - value) >= 0``."""
        self.write_value64 = self._checked("cuStreamWriteValue64_v2", 0)
        """``(stream, address, value)``: stored once everything before it on the stream is visible, to peers too."""
        self.memcpy_async = self._checked("cuMemcpyAsync")
        """``(destination, source, num_bytes, stream)``"""
        self.memset_d32_async = self._checked("cuMemsetD32Async")
        """``(address, value, num_words, stream)``"""
        self.event_record = self._checked("cuEventRecord")
        """``(event, stream)``"""
        self.launch_host_func = self._checked("cuLaunchHostFunc")
        """``(stream, function, argument)``: addresses of a C function ``void (void *)``, never of a Python callable."""

    def error(self, code: int, call: str) -> CudaError:
        name = c_char_p()
        self._error_name(code, byref(name))
        return CudaError(f"{call}: {(name.value or b'unknown error').decode()} ({code})", code)

    def _entry(self, name: str) -> Any:
        try:
            return getattr(self.lib, name)
        except AttributeError:
            raise CudaError(f"the CUDA driver is too old: it has no {name}") from None

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.lib, name)(*arguments)
        if code != _SUCCESS:
            raise self.error(code, name)

    def _checked(self, name: str, *last: int) -> Callable[..., None]:
        function = getattr(self.lib, name)
        if last:

            def call(*arguments: int) -> None:
                code = function(*arguments, *last)
                if code:
                    raise self.error(code, name)
        else:

            def call(*arguments: int) -> None:
                code = function(*arguments)
                if code:
                    raise self.error(code, name)

        return call

    def _int(self, name: str, *arguments: Any) -> int:
        value = c_int()
        self._call(name, byref(value), *arguments)
        return value.value

    def _pointer(self, name: str, *arguments: Any) -> int:
        value = c_void_p()
        self._call(name, byref(value), *arguments)
        return value.value or 0

    # ---- devices --------------------------------------------------------------------------------------------------

    def version(self) -> int:
        """The newest CUDA that the driver supports, 1000 * major + 10 * minor."""
        return self._int("cuDriverGetVersion")

    def device_count(self) -> int:
        return self._int("cuDeviceGetCount")

    def device_name(self, ordinal: int) -> str:
        name = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", name, len(name), self._device(ordinal))
        return name.value.decode()

    def device_uuid(self, ordinal: int) -> str:
        """As ``nvidia-smi -L`` shows it: ``GPU-8-4-4-4-12``."""
        uuid = _Uuid()
        self._call("cuDeviceGetUuid_v2", byref(uuid), self._device(ordinal))
        text = bytes(uuid.bytes).hex()
        return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def device_bytes(self, ordinal: int) -> int:
        total = c_size_t()
        self._call("cuDeviceTotalMem_v2", byref(total), self._device(ordinal))
        return total.value

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        return self._int("cuDeviceCanAccessPeer", self._device(ordinal), self._device(peer)) != 0

    def p2p_attribute(self, attribute: int, ordinal: int, peer: int) -> int:
        return self._int("cuDeviceGetP2PAttribute", attribute, self._device(ordinal), self._device(peer))

    def make_current(self, ordinal: int) -> None:
        """Make the device's primary context, which torch uses too, the calling thread's."""
        context = self._pointer("cuDevicePrimaryCtxRetain", self._device(ordinal))
        self._call("cuCtxSetCurrent", context)

    def _device(self, ordinal: int) -> int:
        return self._int("cuDeviceGet", ordinal)

    # ---- memory ---------------------------------------------------------------------------------------------------

    def alloc(self, num_bytes: int) -> int:
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), num_bytes)
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the current device."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def alloc_host(self, num_bytes: int) -> int:
        """Pinned memory that the device reads and writes at the same address."""
        return self._pointer("cuMemHostAlloc", num_bytes, _HOST_PORTABLE_AND_MAPPED)

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def export(self, address: int) -> bytes:
        """The ``IPC_HANDLE_BYTES`` by which another process opens an allocation of ``alloc``."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address here of another process's allocation."""
        address = c_uint64()
        self._call("cuIpcOpenMemHandle_v2", byref(address), _IpcHandle.from_buffer_copy(handle), _IPC_LAZY_ENABLE_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Undo ``open``."""
        self._call("cuIpcCloseMemHandle", address)

    # ---- streams and events ---------------------------------------------------------------------------------------

    def create_stream(self, priority: int = 0) -> int:
        """One that does not wait for the legacy default stream. A lower ``priority`` goes first."""
        return self._pointer("cuStreamCreateWithPriority", _STREAM_NON_BLOCKING, priority)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def is_idle(self, stream: int) -> bool:
        code = self._stream_query(stream)
        if code not in (_SUCCESS, NOT_READY):
            raise self.error(code, "cuStreamQuery")
        return code == _SUCCESS

    def is_capturing(self, stream: int) -> bool:
        return self._int_after("cuStreamIsCapturing", stream) != 0

    def create_event(self, *, has_timing: bool = True) -> int:
        return self._pointer("cuEventCreate", 0 if has_timing else _EVENT_DISABLE_TIMING)

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def is_done(self, event: int) -> bool:
        code = self._event_query(event)
        if code not in (_SUCCESS, NOT_READY):
            raise self.error(code, "cuEventQuery")
        return code == _SUCCESS

    def elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds between two events that are done, with a resolution of about half a microsecond."""
        code = self._event_elapsed_time(self._elapsed_at, start, end)
        if code:
            raise self.error(code, "cuEventElapsedTime")
        return self._elapsed.value

    def batch_memory_ops(self, stream: int, ops: "ctypes.Array[MemoryOp]") -> None:
        """Enqueue waits and writes in their order, with one call."""
        code = self.lib.cuStreamBatchMemOp_v2(stream, len(ops), ops, 0)
        if code:
            raise self.error(code, "cuStreamBatchMemOp")

    def _int_after(self, name: str, *arguments: Any) -> int:
        value = c_int()
        self._call(name, *arguments, byref(value))
        return value.value

    # ---- kernels --------------------------------------------------------------------------------------------------

    def load_module(self, image: bytes) -> int:
        """A module of PTX, which the driver compiles now."""
        module = c_void_p()
        self._call("cuModuleLoadData", byref(module), image)
        return module.value or 0

    def function(self, module: int, name: str) -> int:
        return self._pointer("cuModuleGetFunction", module, name.encode())

    def launch_kernel(self, function: int, num_blocks: int, num_threads: int, stream: int, parameters: Any) -> None:
        """``parameters`` is a ctypes array of the addresses of the arguments; the driver copies them."""
        code = self.lib.cuLaunchKernel(function, num_blocks, 1, 1, num_threads, 1, 1, 0, stream, parameters, None)
        if code:
            raise self.error(code, "cuLaunchKernel")


def memory_ops(ops: Sequence[MemoryOp]) -> "ctypes.Array[MemoryOp]":
    """What ``Driver.batch_memory_ops`` takes; its fields may be changed between calls."""
    return (MemoryOp * len(ops))(*ops)
