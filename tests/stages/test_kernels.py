"""The kernels, by what they do to memory."""

import ctypes
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator

import pytest

from stages.cuda import CudaDevice, CudaStream
from stages.kernels import IMAGE, MAX_TARGETS, REPORT_BYTES, Kernels, source_digest
from tests.gpu import GPUS, Gate, gpu_device

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


@pytest.fixture
def gate(bench: Bench) -> Iterator[Gate]:
    made = Gate(bench.device)
    yield made
    made.close()


def test_the_image_was_built_from_the_source() -> None:
    assert IMAGE.read_text().splitlines()[0].endswith(source_digest()), "run `make kernels`"


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
def test_the_image_is_what_old_and_new_gpus_take(architecture: str) -> None:
    command = ["ptxas", f"-arch={architecture}", str(IMAGE), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_arguments_are_those_of_the_launch_whatever_is_launched_next(bench: Bench, gate: Gate) -> None:
    gate.stop(bench.stream)
    for i in range(20):
        header = struct.pack("<3I", i, i + 1, 1)
        bench.kernels.boundary(bench.stream.handle, 0, b"", bench.out + 64 * i, header, bench.verdict, bench.report)
    assert ctypes.string_at(bench.out, 12) == b"\xee" * 12, "nothing has run: else this test shows nothing"
    gate.open()
    for i in range(20):
        assert bench.read(bench.out + 64 * i, 16) == struct.pack("<3I", i, i + 1, 1) + b"\xee" * 4


@pytest.mark.parametrize("num_words", [1, 7, 14, 16])
def test_boundaries_do_as_a_plain_model_over_many_steps(bench: Bench, num_words: int) -> None:
    rng = random.Random(num_words)
    verdict, num_mismatches = 1, 0
    report = bytes(REPORT_BYTES)
    for step in range(60):
        expected, outgoing = (struct.pack(f"<{num_words}I", *(rng.getrandbits(32) for _ in range(num_words))) for _ in "ab")
        got = bytearray(expected + rng.randbytes(64 - len(expected)))  # what follows the header is no part of it
        has_incoming, has_outgoing = rng.choice([(True, True), (True, False), (False, True)])
        if step > 20 and rng.random() < 0.2:
            got[rng.randrange(len(expected))] ^= 1 << rng.randrange(8)
        bench.put(bench.got, bytes(got))
        bench.put(bench.out, b"\xee" * 128)
        bench.kernels.boundary(
            bench.stream.handle,
            bench.got if has_incoming else 0,
            expected if has_incoming else b"",
            bench.out if has_outgoing else 0,
            outgoing if has_outgoing else b"",
            bench.verdict,
            bench.report,
        )
        if has_incoming and got[: len(expected)] != expected:
            if verdict:
                seen = bytes(got[: len(expected)])
                report = struct.pack("<I64s64s", 1, seen, expected)
            verdict, num_mismatches = 0, num_mismatches + 1
        sent = outgoing[:-4] + struct.pack("<I", verdict) if has_outgoing else b""
        assert bench.read(bench.out, 128) == sent + b"\xee" * (128 - len(sent))
        assert bench.read(bench.verdict, 8) == struct.pack("<I", verdict) + b"\xee" * 4
        assert bench.read(bench.report, REPORT_BYTES + 4) == report + b"\xee" * 4
    assert num_mismatches > 1


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


def test_a_token_message_carries_a_false_verdict_to_all_and_touches_nothing_else(bench: Bench) -> None:
    num_reqs, width, stride = 5, 3, 512
    ids, counts = [*range(1000, 1015)], [3, 2, 1, 0, 3, 0, 1, 2, 3, 0]
    source, message = bench.memory + 16384, struct.pack("<15q10i", *ids, *counts)
    bench.put(source, message)
    bench.put(bench.verdict, bytes(4))
    slots = [bench.memory + 24576 + stride * i for i in range(MAX_TARGETS)]
    words = [bench.memory + 12288 + 64 * i for i in range(MAX_TARGETS)]
    header = struct.pack("<9I", *range(8), 1)
    point, progress = bench.stream.record_in_kernel()
    value = 2**64 - 5
    sources = (source, source + 120, source + 140)
    bench.kernels.send_tokens(
        bench.stream.handle, sources, num_reqs, width, header, bench.verdict, slots, words, value, progress
    )
    untouched = b"\xee" * stride
    for slot, word in zip(slots, words, strict=True):
        sent = header[:-4] + bytes(4) + untouched[: 64 - len(header)] + message
        assert bench.read(slot, stride) == sent + untouched[len(sent) :]
        assert bench.read(word, 64) == struct.pack("<Q", value) + untouched[:56]
    assert bench.read(slots[-1] + stride, stride) == untouched
    assert bench.read(words[-1] + 64, 64) == untouched[:64]
    assert point.is_reached()
    assert point.reached_at_ns > 0


def test_tokens_are_none_once_the_verdict_is_false_and_a_mismatch_is_reported(bench: Bench) -> None:
    num_reqs, width = 3, 2
    header = struct.pack("<9I", *range(8), 1)
    message = struct.pack("<6q6i", *range(50, 56), 2, 1, 2, 0, 1, 0)
    none = struct.pack("<6q6i", *[-1] * 6, *[0] * 6)
    target = bench.memory + 16384

    def unpack(expected: bytes) -> bytes:
        bench.put(target, b"\xee" * 128)
        arguments = (target, target + 48, target + 60)
        bench.kernels.unpack_tokens(
            bench.stream.handle, bench.got, expected, bench.verdict, bench.report, num_reqs, width, *arguments
        )
        assert bench.read(target + len(message), 56) == b"\xee" * 56
        return bench.read(target, len(message))

    bench.put(bench.got, header.ljust(64, b"\x77") + message)
    assert unpack(header) == message
    assert bench.read(bench.report, 4) == bytes(4)
    expected = struct.pack("<9I", *range(7), 70, 1)
    assert unpack(expected) == none
    assert bench.read(bench.report, REPORT_BYTES) == struct.pack("<I64s64s", 1, header, expected)
    bench.put(bench.report, bytes(4))
    assert unpack(header) == none, "the verdict is sticky"
    assert unpack(expected) == none
    assert bench.read(bench.report, 4) == bytes(4)


@pytest.mark.parametrize(("num_reqs", "width", "longest"), [(1, 1, 1), (7, 1, 4), (40, 3, 3), (300, 2, 5), (40, 4, 2)])
def test_scattering_does_as_a_plain_model_over_many_steps(bench: Bench, num_reqs: int, width: int, longest: int) -> None:
    rng, num_slots = random.Random(num_reqs), num_reqs + 3
    at, last, positions = (bench.memory + 16384 * i for i in (1, 2, 3))
    wanted_last, wanted_positions = (
        [[-9] * longest for _ in range(num_slots)],
        [rng.randrange(1 << 40) for _ in range(num_slots)],
    )
    flat = [token for row in wanted_last for token in row]
    bench.put(last, struct.pack(f"<{len(flat)}q", *flat))
    bench.put(positions, struct.pack(f"<{num_slots}q", *wanted_positions))
    for _ in range(8):
        ids = [[rng.randrange(1 << 40) for _ in range(width)] for _ in range(num_reqs)]
        counts = [rng.choice([rng.randrange(width + 1), width, width + 1, -1, 2**31 - 1, -(2**31)]) for _ in range(num_reqs)]
        slots = rng.sample(range(num_slots), num_reqs)
        for i in range(0, num_reqs, 5):
            slots[i] = rng.choice([slots[i], -1, num_slots, 2**31 - 1, -(2**31)])
        flat = [token for row in ids for token in row]
        bench.put(at, struct.pack(f"<{len(flat)}q{num_reqs}i{num_reqs}i", *flat, *counts, *slots))
        sampled = at + 8 * len(flat)
        bench.kernels.scatter_tokens(
            bench.stream.handle, at, sampled, sampled + 4 * num_reqs, num_reqs, width, last, positions, num_slots, longest
        )
        for row, count, slot in zip(ids, counts, slots, strict=True):
            count = min(max(count, 0), width)
            if count and 0 <= slot < num_slots:
                wanted_last[slot] = (row[:count][::-1] + [-1] * longest)[:longest]
                wanted_positions[slot] += count
        flat = [token for row in wanted_last for token in row]
        assert bench.read(last, 8 * len(flat) + 8) == struct.pack(f"<{len(flat)}q", *flat) + b"\xee" * 8
        assert bench.read(positions, 8 * num_slots + 8) == struct.pack(f"<{num_slots}q", *wanted_positions) + b"\xee" * 8


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
