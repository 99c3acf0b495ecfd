"""The kernels of ``kernels.cu``, as typed launches. No torch.

``python -m stages.kernels`` builds ``kernels.ptx`` with nvcc. The PTX is of an old version, so that every driver since CUDA
11 loads it: the driver compiles it for its GPU.
"""

# pyright: strict

import ctypes
import hashlib
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

from stages.driver import Driver

SOURCE = Path(__file__).with_name("kernels.cu")
IMAGE = Path(__file__).with_name("kernels.ptx")
_PTX_VERSION = "7.0"
_ARCHITECTURE = "compute_75"
REPORT_BYTES = 4 * (1 + 16 + 16)
MAX_TARGETS = 15  # of one token message: more ranks than a host has GPUs

Progress = tuple[int, int, int]
"""How a kernel tells the host that its stream has come by: the address of the stream's word in pinned memory, the number that
is written there, and the address, before it, of the time in nanoseconds on the GPU's clock."""
NO_PROGRESS: Progress = (0, 0, 0)
_CHECK_THREADS = 32
_TOKEN_THREADS = 256


class _Launch:
    """One kernel and its arguments, which stay in place: the driver copies them at each launch."""

    def __init__(self, driver: Driver, function: int, num_threads: int, types: str) -> None:
        """``types`` are those of ``struct``, in the kernel's order; ``64s`` is a header, ``3Q`` a ``Progress``."""
        layout = "<" + "".join(kind + "4x" if kind == "I" else kind for kind in types.split())
        self._struct = struct.Struct(layout)
        self._block = ctypes.create_string_buffer(self._struct.size)
        self._launch = driver.launch_kernel
        self._function = function
        self._num_threads = num_threads
        offset, addresses = ctypes.addressof(self._block), list[int]()
        for kind in types.split():
            addresses.append(offset)
            offset += struct.calcsize(kind + "4x" if kind == "I" else "<" + kind)
        self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)

    def __call__(self, stream: int, *arguments: int | bytes) -> None:
        self._struct.pack_into(self._block, 0, *arguments)
        self._launch(self._function, 1, self._num_threads, stream, self._addresses)


class Kernels:
    """The kernels, loaded into the current context. Addresses are of device memory unless they say otherwise.

    Headers are bytes of at most 64, a multiple of 4, that end with the verdict. ``verdict`` addresses the rank's word, and
    ``report`` ``REPORT_BYTES`` of pinned memory: the first word becomes 1 with the first mismatch, then come the 16 words that
    were received and the 16 that were expected.
    """

    def __init__(self, driver: Driver) -> None:
        module = driver.load_module(IMAGE.read_bytes())

        def kernel(name: str, num_threads: int, types: str) -> _Launch:
            return _Launch(driver, driver.function(module, f"stagewire_{name}"), num_threads, types)

        self._boundary = kernel("boundary", _CHECK_THREADS, "Q 64s I Q 64s I I Q Q 3Q")
        self._send = kernel("send_tokens", _TOKEN_THREADS, f"Q Q Q I I 64s I Q {2 * MAX_TARGETS}Q I Q 3Q")
        self._unpack = kernel("unpack_tokens", _TOKEN_THREADS, "Q 64s I Q Q I I Q Q Q")
        self._scatter = kernel("scatter_tokens", _TOKEN_THREADS, "Q Q Q I I Q Q I I")

    def boundary(
        self,
        stream: int,
        got: int,
        expected: bytes,
        out: int,
        outgoing: bytes,
        verdict: int,
        report: int,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        """Compare the header at ``got`` with ``expected``, then write ``outgoing`` with the rank's verdict to ``out``.

        An empty header leaves that half out.
        """
        num_words = len(expected or outgoing) // 4
        self._boundary(
            stream, got, expected, len(expected), out, outgoing, len(outgoing), num_words, verdict, report, *progress
        )

    def send_tokens(
        self,
        stream: int,
        sources: tuple[int, int, int],
        num_reqs: int,
        width: int,
        outgoing: bytes,
        verdict: int,
        slots: Sequence[int],
        words: Sequence[int],
        value: int,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        """Write a token message into up to ``MAX_TARGETS`` ``slots``, then ``value`` to each slot's word.

        ``sources``: ids int64 ``[num_reqs, width]``, num_sampled and num_rejected int32 ``[num_reqs]``.
        """
        unused = (0,) * (MAX_TARGETS - len(slots))
        self._send(
            stream,
            *sources,
            num_reqs,
            width,
            outgoing,
            len(outgoing) // 4,
            verdict,
            *slots,
            *unused,
            *words,
            *unused,
            len(slots),
            value,
            *progress,
        )

    def unpack_tokens(
        self,
        stream: int,
        got: int,
        expected: bytes,
        verdict: int,
        report: int,
        num_reqs: int,
        width: int,
        ids: int,
        num_sampled: int,
        num_rejected: int,
    ) -> None:
        """Check the token message at ``got`` and copy its tensors out; with a false verdict ids are -1 and counts 0."""
        self._unpack(
            stream,
            got,
            expected,
            len(expected) // 4,
            verdict,
            report,
            num_reqs,
            width,
            ids,
            num_sampled,
            num_rejected,
        )

    def scatter_tokens(
        self,
        stream: int,
        ids: int,
        num_sampled: int,
        slots: int,
        num_reqs: int,
        width: int,
        last_tokens: int,
        positions: int,
        num_slots: int,
        max_sample_len: int,
    ) -> None:
        """Store tokens in their sequence slots. ``slots`` int32 ``[num_reqs]`` may be in pinned memory; -1 leaves a row out.

        ``last_tokens`` int64 ``[num_slots, max_sample_len]``, ``positions`` int64 ``[num_slots]``.
        """
        self._scatter(stream, ids, num_sampled, slots, num_reqs, width, last_tokens, positions, num_slots, max_sample_len)


def source_digest() -> str:
    """What ``kernels.ptx`` names in its first line: the source that it was built from."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def build() -> None:
    command = ["nvcc", "-ptx", f"-arch={_ARCHITECTURE}", str(SOURCE), "-o", "/dev/stdout"]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    code = [line for line in lines if not line.startswith("//")]
    code = [f".version {_PTX_VERSION}" if line.startswith(".version") else line for line in code]
    IMAGE.write_text("\n".join([f"// sha256 of kernels.cu: {source_digest()}", *code]).rstrip() + "\n")


if __name__ == "__main__":
    build()
