"""The model path on a GPU. Its CPU twins run the same code in the order of an emulated stream, or on tensors without data."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from stages import kv_cache, runner, sampler
from stages.assembly import Gpu
from stages.cuda import CudaStream
from stages.device_slots import DeviceSlotTable
from stages.driver import Driver
from stages.kernels import Kernels
from stages.model.slice import StageModel, load_stage, resolve_dtype
from stages.model.source import ModelSource
from stages.plan import PlanRow, RowKind, RowSampling, StepPlan
from stages.sampler import DeviceSamplerOutputs, Sampler, SamplerOutput
from stages.slots import SlotTable
from stages.topology import stage_infos
from stages.transport.links import token_slot_bytes
from tests.gpu import GPUS, gpu_device
from tests.stages.chain import LIMITS, SPLITS, Chain, Generation, Tiny, decode, load_stages, prefill
from tests.stages.model_factory import FAMILIES, tiny_config
from tests.stages.transport.harness import reach

MAX_STEPS = LIMITS.lane_depth + 2
ONLY_CUDA = [pytest.param("cuda", marks=pytest.mark.gpu)]
WITHOUT_DATA = ["meta", *ONLY_CUDA]
"""Tensors on ``meta`` have no values: whatever looks at one raises, as it would wait on a GPU."""
NO_WAITING = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def torch_stream() -> torch.cuda.ExternalStream:
    """What torch enqueues on. It outlives every tensor, as torch records events on it when it frees pinned memory."""
    driver = Driver()
    driver.make_current(0)
    return torch.cuda.ExternalStream(driver.create_stream(), torch.device("cuda", 0))


@pytest.fixture
def opened_gpu(request: pytest.FixtureRequest) -> Iterator[tuple[Gpu, CudaStream]]:
    """A GPU and its compute stream, on which torch enqueues."""
    with gpu_device(request.param) as device:
        if request.param == "emulated":
            gpu = Gpu(device, torch.device("cpu"), Kernels(device.driver))
            stream = gpu.compute(0)
            yield gpu, stream
        else:
            precision = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
            gpu = Gpu(device, torch.device("cuda", 0), Kernels(device.driver), torch_stream().cuda_stream)
            stream = gpu.compute(0)
            with torch.cuda.stream(torch_stream()):
                yield gpu, stream
            torch.set_float32_matmul_precision(precision)
        stream.close()


on_each_gpu = pytest.mark.parametrize("opened_gpu", GPUS, indirect=True)


class DeviceChain(Chain):
    """Stages chained in the order of a GPU's stream. As in a Stage, sampled tokens reach the slots on the device, and the host
    through pinned memory."""

    def __init__(self, models: Sequence[StageModel], gpu: Gpu, stream: CudaStream) -> None:
        for model in models:
            model.move_to(gpu.torch_device)

        def make_slots(num_slots: int, max_sample_len: int) -> SlotTable:
            return DeviceSlotTable(num_slots, max_sample_len, gpu.device, gpu.torch_device, gpu.kernels, MAX_STEPS)

        super().__init__(models, make_slots=make_slots)
        self.stream = stream
        self.outputs = DeviceSamplerOutputs(gpu.torch_device, LIMITS.max_num_seqs, LIMITS.max_sample_len, MAX_STEPS)

    def enqueue(self, plan: StepPlan) -> Callable[[], list[int]]:
        """The whole step; what is returned waits for its tokens."""
        self.prepare(plan)
        rows = plan.sampled_rows
        output = self.outputs.next(len(rows), plan.max_sample_len)

        def compute() -> None:
            logits = self.forward(plan)
            self.logits.append(logits.clone())
            self.sampler.sample(logits, plan.rows, plan.max_sample_len, output)

        self.stream.launch(compute)
        tokens = (output.sampled_token_ids, output.num_sampled, output.num_rejected)
        for stage in self.runners:
            stage.slots.enqueue_scatter(self.stream, plan.step_id, rows, tokens)
        on_host = self.outputs.to_host(self.stream, output)
        end = self.stream.record()

        def tokens_of_step() -> list[int]:
            reach(end)
            assert on_host.num_sampled.tolist() == [1] * len(rows)
            assert on_host.num_rejected.tolist() == [0] * len(rows)
            return on_host.sampled_token_ids[:, 0].tolist()

        return tokens_of_step

    def step(self, rows: list[PlanRow], freed: list[tuple[int, int]] | None = None) -> list[int]:
        return self.enqueue(self.plan(rows, freed))()

    def close(self) -> None:
        for stage in self.runners:
            stage.slots.close()


@contextmanager
def chained(models: Sequence[StageModel], gpu: Gpu, stream: CudaStream) -> Iterator[DeviceChain]:
    chain = DeviceChain(models, gpu, stream)
    yield chain
    stream.device.driver.synchronize(stream.handle)
    chain.close()


@contextmanager
def held(gpu: Gpu, stream: CudaStream) -> Iterator[Callable[[], bool]]:
    """Nothing enqueued within runs before the end; the callable tells whether that is still so."""
    driver, rescue = gpu.device.driver, gpu.device.rescue
    word = driver.alloc(256)
    driver.memset_d32_async(word, 0, 64, rescue)
    driver.synchronize(rescue)
    if gpu.torch_device.type == "cuda":  # busy for some seconds, so that a call that waits fails the test and does not hang
        torch.cuda._sleep(4_000_000_000)
    else:
        driver.wait_value64(stream.handle, word, 1)
    started = stream.record()
    yield lambda: not started.is_reached()
    driver.write_value64(rescue, word, 1)
    reach(started)
    driver.synchronize(rescue)
    driver.free(word)


# ---- tokens -----------------------------------------------------------------------------------------------------------


@on_each_gpu
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tokens_equal_those_of_transformers_on_the_cpu(
    family: str, num_stages: int, opened_gpu: tuple[Gpu, CudaStream], tiny: Callable[[str], Tiny]
) -> None:
    model = tiny(family)
    stages = load_stages(model.source, SPLITS[num_stages])
    # 16 before 3: the chunks that begin at any token follow those that begin at a multiple of a block.
    for chunk in (512, 16, 3):
        with chained(stages, *opened_gpu) as chain:
            assert chain.run(model.requests(), chunk) == model.expected, f"chunks of {chunk}"


@on_each_gpu
def test_chunks_that_begin_anywhere_attend_alike(opened_gpu: tuple[Gpu, CudaStream], tiny: Callable[[str], Tiny]) -> None:
    """In one cache: a mask that was made for one chunk serves every other one."""
    model = tiny("llama")
    prompt, expected = model.prompts[4], model.expected[4]
    with chained(load_stages(model.source, SPLITS[1]), *opened_gpu) as chain:
        for chunk in (16, 7, 5, 24, 3, 64, 1):
            assert chain.run([Generation(prompt, 2)], chunk) == [expected[:2]], f"chunks of {chunk}"


@on_each_gpu
def test_random_tokens_equal_those_of_the_cpu(opened_gpu: tuple[Gpu, CudaStream], tiny: Callable[[str], Tiny]) -> None:
    model = tiny("llama")

    def requests() -> list[Generation]:
        requests = model.requests()
        for i, request in enumerate(requests):
            request.sampling = RowSampling(temperature=0.9, top_p=0.95, top_k=50 * (i % 2), min_p=0.01 * (i % 3), seed=i)
        return requests

    stages = load_stages(model.source, SPLITS[2])
    expected = Chain(stages).run(requests(), 16)
    assert expected != model.expected
    with chained(stages, *opened_gpu) as chain:
        assert chain.run(requests(), 16) == expected


@pytest.mark.parametrize("opened_gpu", ONLY_CUDA, indirect=True)  # test_runner.py has the CPU's
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_slicing_changes_no_bit_on_the_same_schedule(
    dtype: torch.dtype, opened_gpu: tuple[Gpu, CudaStream], tiny: Callable[[str], Tiny]
) -> None:
    model = tiny("llama")
    logits: list[torch.Tensor] = []
    for split in SPLITS.values():
        with chained(load_stages(model.source, split, dtype), *opened_gpu) as chain:
            chain.run(model.requests(), 16)
            logits.append(torch.cat(chain.logits).cpu())
    assert logits[0].dtype == dtype
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_auto_is_bfloat16_on_a_gpu() -> None:
    assert resolve_dtype("auto", torch.device("cuda", 0)) is torch.bfloat16
    assert resolve_dtype("float32", torch.device("cuda", 0)) is torch.float32


# ---- enqueueing -------------------------------------------------------------------------------------------------------


@on_each_gpu
def test_as_many_steps_as_may_be_in_flight_are_enqueued_before_the_first_runs(
    opened_gpu: tuple[Gpu, CudaStream], tiny: Callable[[str], Tiny]
) -> None:
    model = tiny("llama")
    first, second, third = (model.prompts[i] for i in (2, 5, 7))  # of 6, 3 and 2 tokens

    def plans(chain: Chain, generation: int) -> list[StepPlan]:
        freed = [(slot, generation - 1) for slot in range(3)] if generation else []
        return [
            chain.plan([prefill(0, first, [3], generation=generation)], freed),
            chain.plan([decode(0, 6, generation=generation)]),
            chain.plan([prefill(1, second, [5], generation=generation), decode(0, 7, generation=generation)]),
            chain.plan(
                [
                    decode(0, 8, generation=generation),
                    prefill(2, third, [9], generation=generation),
                    decode(1, 3, generation=generation),
                ]
            ),
        ]

    of_first, of_second, of_third = (model.expected[i] for i in (2, 5, 7))
    expected = [[of_first[0]], [of_first[1]], [of_second[0], of_first[2]], [of_first[3], of_third[0], of_second[1]]]
    with chained(load_stages(model.source, SPLITS[2]), *opened_gpu) as chain:
        for generation in range(2):  # the first time what is loaded on first use may wait for the device
            assert len(plans(chain, generation)) == MAX_STEPS
            if generation == 0:
                steps = [chain.enqueue(plan) for plan in plans(chain, generation)]
            else:
                with held(*opened_gpu) as is_held:
                    steps = [chain.enqueue(plan) for plan in plans(chain, generation)]
                    assert is_held(), "a step waited for the one before"
            assert [tokens() for tokens in steps] == expected


@contextmanager
def no_waiting(kind: str) -> Iterator[None]:
    if kind != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def without_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return

    def upload(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    for module in (kv_cache, runner, sampler):
        monkeypatch.setattr(module, "upload", upload)


SAMPLINGS = [
    RowSampling(),
    RowSampling(0.9, seed=1),
    RowSampling(0.8, top_k=4, seed=2),
    RowSampling(1.1, top_p=0.9, seed=3),
    RowSampling(1.0, min_p=0.1, seed=4),
    RowSampling(0.7, top_k=9, top_p=0.8, min_p=0.05, seed=5),
]


def mixed_plans(chain: Chain) -> list[StepPlan]:
    """Chunks with and without a token, and decode rows of different lengths between them, one of each sampling."""
    num_blocks = 8

    def chunk(slot: int, start: int, end: int, *, needs_token: bool = True) -> PlanRow:
        blocks = list(range(num_blocks * slot, num_blocks * (slot + 1))) if start == 0 else []
        sampling = SAMPLINGS[slot] if start == 0 else None
        return PlanRow(slot, 0, RowKind.PREFILL, start, end - start, [7] * (end - start), blocks, sampling, needs_token)

    return [
        chain.plan([chunk(0, 0, 5), chunk(1, 0, 33), chunk(2, 0, 9, needs_token=False), chunk(3, 0, 120), chunk(4, 0, 16)]),
        chain.plan([decode(0, 5), chunk(2, 9, 12), decode(3, 120), chunk(5, 0, 1), decode(1, 33), decode(4, 16)]),
        chain.plan([decode(slot, start) for slot, start in enumerate([6, 34, 12, 121, 17, 1])]),
        chain.plan([]),
    ]


@NO_WAITING
@pytest.mark.usefixtures("without_pinned_memory")
@pytest.mark.parametrize("kind", WITHOUT_DATA)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_looks_at_nothing_that_is_on_the_device(family: str, kind: str, tmp_path: Path) -> None:
    """In no family that is served, from the plan to the sampled tokens."""
    tiny_config(family, **FAMILIES[family]).save_pretrained(tmp_path)
    source = ModelSource(family, tmp_path, None, "dummy")
    device = torch.device(kind)
    stages = [load_stage(source, info, torch.bfloat16) for info in stage_infos(SPLITS[2])]

    def make_slots(num_slots: int, max_sample_len: int) -> SlotTable:
        slots = SlotTable(num_slots, max_sample_len)
        slots.last_tokens, slots.positions = slots.last_tokens.to(device), slots.positions.to(device)
        return slots

    for stage in stages:
        stage.move_to(device)
    chain = Chain(stages, make_slots=make_slots)
    for stage in chain.runners:
        stage.warm_up()
    outputs = []
    with no_waiting(kind):
        for plan in mixed_plans(chain):
            chain.prepare(plan)
            output = SamplerOutput.empty(len(plan.sampled_rows), 1, device)
            outputs.append(chain.sampler.sample(chain.forward(plan), plan.rows, 1, output))
    assert [len(output.num_sampled) for output in outputs] == [4, 6, 6, 0]
    assert all(output.packed.device.type == kind for output in outputs)


@on_each_gpu
def test_a_warm_up_leaves_no_trace(opened_gpu: tuple[Gpu, CudaStream], tiny: Callable[[str], Tiny]) -> None:
    model = tiny("qwen2")
    with chained(load_stages(model.source, SPLITS[2]), *opened_gpu) as chain:
        for stage in chain.runners:
            before = stage.slots.last_tokens.clone(), stage.slots.positions.clone()
            stage.warm_up()
            assert torch.equal(stage.slots.last_tokens, before[0])
            assert torch.equal(stage.slots.positions, before[1])
            assert all(not stage.cache.table(slot) for slot in range(LIMITS.max_num_seqs))
            assert not any(stage.slots.is_current(slot, 0) for slot in range(LIMITS.max_num_seqs))
        assert chain.run(model.requests(), 16) == model.expected


# ---- sampling ---------------------------------------------------------------------------------------------------------


@on_each_gpu
def test_of_equal_logits_a_gpu_and_the_cpu_sample_the_same(
    opened_gpu: tuple[Gpu, CudaStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, vocab_size, num_rows = opened_gpu[0].torch_device, 5003, 60
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    logits[6] = 0.0  # greedy: the lowest id wins
    logits[9] = torch.linspace(0, 1e-3, vocab_size)  # top_p: nearly all of the row is needed
    logits[[12, 13]] = math.nan
    logits[18, [4000, 17, 2048]] = 30.0
    logits[19, 100:] = -math.inf
    rows = [
        PlanRow(slot, 0, RowKind.DECODE, 40 + slot, 1, [], [], SAMPLINGS[slot % len(SAMPLINGS)], slot % 7 != 3)
        for slot in range(num_rows)
    ]
    sampled = logits[[row.slot for row in rows if row.needs_token]]
    expected = Sampler(vocab_size, num_rows).sample(sampled, rows, 2)
    assert expected.num_sampled.tolist().count(0) == 2
    # A GPU sorts a whole row for top_p at once; so does the CPU when all are candidates.
    monkeypatch.setattr(sampler, "NUM_NUCLEUS_CANDIDATES", vocab_size)
    found = Sampler(vocab_size, num_rows).sample(sampled.to(device), rows, 2, SamplerOutput.empty(len(sampled), 2, device))
    assert found.sampled_token_ids.tolist() == expected.sampled_token_ids.tolist()
    assert found.num_sampled.tolist() == expected.num_sampled.tolist()
    assert found.num_rejected.tolist() == expected.num_rejected.tolist()


@on_each_gpu
def test_sampled_tokens_stay_on_the_host_until_their_step_number_comes_around(opened_gpu: tuple[Gpu, CudaStream]) -> None:
    gpu, stream = opened_gpu
    max_num_reqs, max_sample_len = 5, 3
    outputs = DeviceSamplerOutputs(gpu.torch_device, max_num_reqs, max_sample_len, MAX_STEPS)
    sizes = [(5, 3), (2, 1), (0, 1), (1, 3)]
    assert len(sizes) == MAX_STEPS

    def take(step: int, num_reqs: int, sample_len: int) -> tuple[SamplerOutput, SamplerOutput]:
        output = outputs.next(num_reqs, sample_len)

        def fill() -> None:
            output.sampled_token_ids.fill_(1000 + step)
            output.num_sampled.fill_(10 + step)
            output.num_rejected.fill_(20 + step)

        stream.launch(fill)
        return output, outputs.to_host(stream, output)

    for lap in range(2):
        with held(gpu, stream) as is_held:
            taken = [take(10 * lap + step, *size) for step, size in enumerate(sizes)]
            assert is_held(), "tokens are copied in the stream's order, and nobody waits for it"
        reach(stream.record())
        for step, (size, (output, on_host)) in enumerate(zip(sizes, taken, strict=True)):
            assert output.packed.device.type == gpu.torch_device.type
            assert len(output.packed) == len(on_host.packed) == token_slot_bytes(*size)
            assert on_host.packed.device.type == "cpu"
            assert on_host.packed.is_pinned() == (gpu.torch_device.type == "cuda")
            assert on_host.sampled_token_ids.tolist() == [[1000 + 10 * lap + step] * size[1]] * size[0]
            assert on_host.num_sampled.tolist() == [10 + 10 * lap + step] * size[0]
            assert on_host.num_rejected.tolist() == [20 + 10 * lap + step] * size[0]
            assert torch.equal(output.packed.cpu(), on_host.packed)


def test_no_memory_is_taken_for_a_step() -> None:
    outputs = DeviceSamplerOutputs(torch.device("cpu"), 4, 1, MAX_STEPS)
    first = [outputs.next(4, 1).packed.data_ptr() for _ in range(MAX_STEPS)]
    again = [outputs.next(4, 1).packed.data_ptr() for _ in range(MAX_STEPS)]
    assert len(set(first)) == MAX_STEPS
    assert first == again
