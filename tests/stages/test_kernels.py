"""The kernels, by what they do to memory."""

import ctypes
import random
import struct
from collections.abc import Iterator

import pytest

from stages.cuda import CudaDevice, CudaStream
from stages.kernels import IMAGE, REPORT_BYTES, Kernels, source_digest
from tests.gpu import GPUS, gpu_device

HEADER = struct.pack("<14I", *range(100, 113), 1)


class Bench:
    """A stream, the kernels, and memory that host and device both see."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.stream: CudaStream = device.stream("bench")
        self.kernels = Kernels(device.driver)
        self.memory = device.driver.alloc_host(1 << 16)
        ctypes.memset(self.memory, 0xEE, 1 << 16)
        self.verdict, self.report, self.got, self.out = (self.memory + 4096 * i for i in range(4))
        self.put(self.verdict, struct.pack("<I", 1))
        self.put(self.report, bytes(REPORT_BYTES))

    def put(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, num_bytes: int) -> bytes:
        self.device.driver.synchronize(self.stream.handle)
        return ctypes.string_at(address, num_bytes)


@pytest.fixture(params=GPUS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with gpu_device(request.param) as device:
        made = Bench(device)
        yield made
        made.stream.close()
        device.driver.free_host(made.memory)


def test_the_image_was_built_from_the_source() -> None:
    assert IMAGE.read_text().splitlines()[0].endswith(source_digest()), "run `make kernels`"


def test_an_expected_header_passes_and_the_next_one_is_written(bench: Bench) -> None:
    bench.put(bench.got, HEADER)
    outgoing = struct.pack("<14I", *range(14))
    point, progress = bench.stream.record_in_kernel()
    bench.kernels.boundary(bench.stream.handle, bench.got, HEADER, bench.out, outgoing, bench.verdict, bench.report, progress)
    assert bench.read(bench.out, 56) == outgoing[:52] + struct.pack("<I", 1), "the last word is the rank's verdict"
    assert bench.read(bench.report, 4) == bytes(4)
    assert point.is_reached()
    assert point.reached_at_ns > 0


@pytest.mark.parametrize("word", range(14))
def test_a_difference_clears_the_verdict_and_is_reported_once(bench: Bench, word: int) -> None:
    wrong = bytearray(HEADER)
    wrong[4 * word] ^= 1
    bench.put(bench.got, bytes(wrong))
    for _ in range(2):
        bench.kernels.boundary(bench.stream.handle, bench.got, HEADER, bench.out, HEADER, bench.verdict, bench.report)
    assert bench.read(bench.verdict, 4) == bytes(4)
    assert bench.read(bench.out + 52, 4) == bytes(4)
    flag, got, expected = struct.unpack("<I64s64s", bench.read(bench.report, REPORT_BYTES))
    assert flag == 1
    assert got[:56] == bytes(wrong)
    assert expected[:56] == HEADER
    bench.put(bench.report, bytes(4))
    bench.kernels.boundary(bench.stream.handle, bench.got, HEADER, 0, b"", bench.verdict, bench.report)
    assert bench.read(bench.report, 4) == bytes(4), "a second mismatch is not reported over the first"


@pytest.mark.parametrize(("num_reqs", "width"), [(0, 1), (1, 1), (3, 6), (256, 1), (300, 2)])
@pytest.mark.parametrize("num_targets", [1, 3])
def test_tokens_reach_every_target_whole(bench: Bench, num_reqs: int, width: int, num_targets: int) -> None:
    rng = random.Random(num_reqs)
    ids = [rng.randrange(-1, 1 << 40) for _ in range(num_reqs * width)]
    counts = [rng.randrange(width + 1) for _ in range(2 * num_reqs)]
    source = bench.memory + 16384
    bench.put(source, struct.pack(f"<{len(ids)}q{len(counts)}i", *ids, *counts))
    sampled = source + 8 * len(ids)
    slots = [bench.memory + 24576 + 8192 * i for i in range(num_targets)]
    words = [bench.memory + 12288 + 64 * i for i in range(num_targets)]
    header = struct.pack("<9I", *range(8), 1)
    bench.kernels.send_tokens(
        bench.stream.handle,
        (source, sampled, sampled + 4 * num_reqs),
        num_reqs,
        width,
        header,
        bench.verdict,
        slots,
        words,
        77,
    )
    for slot, word in zip(slots, words, strict=True):
        assert bench.read(word, 8) == struct.pack("<q", 77)
        assert bench.read(slot, 36) == header
        assert bench.read(slot + 64, 8 * len(ids) + 4 * len(counts)) == struct.pack(
            f"<{len(ids)}q{len(counts)}i", *ids, *counts
        )
    target = bench.memory + 57344
    arguments = (target, target + 8 * len(ids), target + 8 * len(ids) + 4 * num_reqs)
    bench.kernels.unpack_tokens(
        bench.stream.handle, slots[-1], header, bench.verdict, bench.report, num_reqs, width, *arguments
    )
    unpacked = bench.read(target, 8 * len(ids) + 4 * len(counts))
    assert unpacked == struct.pack(f"<{len(ids)}q{len(counts)}i", *ids, *counts)
    other = struct.pack("<9I", 9, *range(1, 8), 1)
    bench.kernels.unpack_tokens(bench.stream.handle, slots[-1], other, bench.verdict, bench.report, num_reqs, width, *arguments)
    unpacked = bench.read(target, 8 * len(ids) + 4 * len(counts))
    assert unpacked == struct.pack(f"<{len(ids)}q{len(counts)}i", *[-1] * len(ids), *[0] * len(counts))


def test_scattering_clamps_what_a_damaged_message_says(bench: Bench) -> None:
    num_slots, longest, width = 5, 3, 2
    slots = [3, -1, 99, 0, 1, 2]
    counts = [2, 1, 1, 7, -4, 1]
    ids = [10 * i + j for i in range(6) for j in range(width)]
    at = bench.memory + 16384
    bench.put(at, struct.pack("<12q6i6i", *ids, *counts, *slots))
    last, positions = bench.memory + 20480, bench.memory + 24576
    bench.put(last, struct.pack("<15q", *[-9] * 15))
    bench.put(positions, struct.pack("<5q", *range(5)))
    bench.kernels.scatter_tokens(bench.stream.handle, at, at + 96, at + 120, 6, width, last, positions, num_slots, longest)
    assert struct.unpack("<15q", bench.read(last, 120)) == (
        *(31, 30, -1),  # 7 tokens were claimed, the row has 2
        *(-9, -9, -9),
        *(50, -1, -1),
        *(1, 0, -1),
        *(-9, -9, -9),
    )
    assert struct.unpack("<5q", bench.read(positions, 40)) == (2, 1, 3, 5, 4)
