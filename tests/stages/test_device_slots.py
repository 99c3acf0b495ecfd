"""The sequence slots of a rank on a GPU; what they must hold is what the table of a host holds."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from stages.cuda import CudaDevice
from stages.device import Point
from stages.device_slots import DeviceSlotTable
from stages.errors import CudaError
from stages.kernels import Kernels
from stages.plan import PlanRow, RowKind, RowSampling, StepPlan, TensorSchema
from stages.pp_handler import SampledTokens
from stages.sampler import Sampler, SamplerOutputs
from stages.slots import SlotTable, Tokens, void
from stages.stage import Stage
from stages.topology import PPGroup
from tests.emulated_cuda import emulation
from tests.gpu import GPUS, Gate, gpu_device

MAX_STEPS = 3
NUM_LOOKS = 2000  # at a Point that must not be reached: some milliseconds, where an unhindered stream takes microseconds


def row(slot: int, generation: int = 0, *, start: int = 5, opens: bool = False) -> PlanRow:
    return PlanRow(slot, generation, RowKind.DECODE, start, 1, [], [], RowSampling() if opens else None, True)


class Gpu:
    """A device with the streams of a first rank, and what its tables need."""

    def __init__(self, device: CudaDevice, torch_device: torch.device) -> None:
        self.device = device
        self.torch_device = torch_device
        self.kernels = Kernels(device.driver)
        self.gate = Gate(device)
        self.tokens = device.stream("tokens")
        self._compute_handle = device.driver.create_stream()
        self.compute = device.stream("compute", self._compute_handle, self._scope)
        self._tables: list[DeviceSlotTable] = []
        # A kernel is loaded when it is first launched, and that may wait for streams which a test has stopped.
        table = self.table(1)
        table.enqueue_scatter(self.tokens, 0, [], self.message([], []))
        self.compute.launch(lambda: void(table.positions.fill_(0)))
        self.finish()

    def table(self, num_slots: int, max_sample_len: int = 1) -> DeviceSlotTable:
        made = DeviceSlotTable(num_slots, max_sample_len, self.device, self.torch_device, self.kernels, MAX_STEPS)
        self._tables.append(made)
        return made

    def opened(self, num_slots: int, max_sample_len: int = 1) -> DeviceSlotTable:
        table = self.table(num_slots, max_sample_len)
        for slot in range(num_slots):
            table.open(slot, 0)
        return table

    def message(self, ids: list[list[int]], counts: list[int], width: int = 1) -> Tokens:
        return (
            torch.tensor(ids, dtype=torch.int64, device=self.torch_device).view(len(counts), width),
            torch.tensor(counts, dtype=torch.int32, device=self.torch_device),
            torch.zeros(len(counts), dtype=torch.int32, device=self.torch_device),
        )

    def finish(self) -> None:
        self.device.driver.synchronize(self.tokens.handle)
        self.device.driver.synchronize(self.compute.handle)

    def close(self) -> None:
        self.gate.close()
        for table in self._tables:
            table.close()
        self.device.driver.destroy_stream(self._compute_handle)

    def _scope(self) -> AbstractContextManager[object]:
        if self.torch_device.type == "cpu":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.ExternalStream(self._compute_handle))


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    with gpu_device(request.param) as device:
        made = Gpu(device, torch.device("cpu" if request.param == "emulated" else "cuda"))
        yield made
        made.close()


@pytest.mark.parametrize(("num_slots", "max_sample_len"), [(5, 1), (7, 3), (300, 6)])
def test_it_holds_what_the_table_of_a_host_holds(gpu: Gpu, num_slots: int, max_sample_len: int) -> None:
    rng = random.Random(num_slots)
    host, table = SlotTable(num_slots, max_sample_len), gpu.table(num_slots, max_sample_len)
    generations = [-1] * num_slots
    is_open = [False] * num_slots
    for step_id in range(30):
        for slot in rng.sample(range(num_slots), rng.randrange(num_slots)):
            if not is_open[slot]:
                generations[slot] += 1
            for slots in (host, table):
                (slots.free if is_open[slot] else slots.open)(slot, generations[slot])
            is_open[slot] = not is_open[slot]
        # Also slots that are free by now, and generations before the present one: their tokens come too late.
        chosen = rng.sample(range(num_slots), rng.choice([0, 1, num_slots]))
        rows = [row(slot, max(generations[slot] - rng.randrange(2), 0)) for slot in chosen]
        width = rng.randint(1, max_sample_len)
        ids = [[rng.randrange(1 << 40) for _ in range(width)] for _ in rows]
        counts = [rng.choice([0, 1, width, width + 1, -3, 2**31 - 1]) for _ in rows]
        message = gpu.message(ids, counts, width)
        host.scatter(rows, *(tensor.cpu() for tensor in message))
        table.enqueue_scatter(gpu.tokens, step_id, rows, message)
        gpu.finish()
        assert torch.equal(table.last_tokens.cpu(), host.last_tokens)
        assert torch.equal(table.positions.cpu(), host.positions)
        assert table.num_stale_rows == host.num_stale_rows
    assert host.num_stale_rows
    assert host.positions.any()


def test_nothing_is_stored_before_the_stream_comes_by(gpu: Gpu) -> None:
    table = gpu.opened(1)
    gpu.gate.stop(gpu.tokens)
    table.enqueue_scatter(gpu.tokens, 1, [row(0)], message := gpu.message([[9]], [1]))
    assert table.last_tokens.flatten().tolist() == [-1]
    gpu.gate.open()
    gpu.finish()
    assert table.last_tokens.flatten().tolist() == [9]
    del message


def test_every_step_in_flight_keeps_its_own_slots(gpu: Gpu) -> None:
    table = gpu.opened(MAX_STEPS + 1)
    rng = random.Random(2)
    expected = [-1] * (MAX_STEPS + 1)
    for first in range(0, 10 * MAX_STEPS, MAX_STEPS):
        gpu.gate.stop(gpu.tokens)
        messages: list[Tokens] = []
        for step_id in range(first, first + MAX_STEPS):
            slot = rng.randrange(table.num_slots)
            expected[slot] = 100 + step_id
            messages.append(gpu.message([[100 + step_id]], [1]))
            table.enqueue_scatter(gpu.tokens, step_id, [row(slot)], messages[-1])
        gpu.gate.open()
        gpu.finish()
        assert table.last_tokens.flatten().tolist() == expected


def test_a_slot_outside_of_the_table_is_refused(gpu: Gpu) -> None:
    table = gpu.opened(2)
    message = gpu.message([[7]], [1])
    for slot in (2, -1):
        with pytest.raises(ValueError, match=f"slot {slot}: must be between 0 and 1"):
            table.enqueue_scatter(gpu.tokens, 1, [row(slot)], message)
    gpu.finish()
    assert table.last_tokens.flatten().tolist() == [-1, -1]


def test_a_plan_that_opens_a_slot_waits_for_the_last_step_that_sampled_it(gpu: Gpu) -> None:
    table = gpu.opened(3)
    messages = [gpu.message([[1], [2]], [1, 1]), gpu.message([[3]], [1])]
    table.enqueue_scatter(gpu.tokens, 4, [row(0), row(1)], messages[0])
    table.enqueue_scatter(gpu.tokens, 5, [row(1)], messages[1])
    assert table.reopened_after([row(0, 1, opens=True)]) == [4]
    assert table.reopened_after([row(1, 1, opens=True), row(0)]) == [5]
    assert table.reopened_after([row(0), row(1)]) == [], "they go on in their slots"
    assert table.reopened_after([row(2, 1, opens=True)]) == [], "no step has sampled it"
    assert SlotTable(3, 1).reopened_after([row(0, 1, opens=True)]) == []
    gpu.finish()


class Runner:
    """Does to the slots what a prefill of one chunk does."""

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self._hidden = torch.zeros(1, 4, device=slots.positions.device)

    def prepare(self, plan: StepPlan) -> None:
        for slot, generation in plan.freed:
            self._slots.free(slot, generation)
        for opening in plan.rows:
            self._slots.open(opening.slot, opening.generation)

    def take_row_errors(self, step_id: int) -> list[tuple[int, int, str]]:
        return []

    def forward(self, plan: StepPlan, hidden: torch.Tensor | None) -> torch.Tensor:
        for opening in plan.rows:
            self._slots.positions[opening.slot].fill_(opening.start)  # assigning the number would copy, and wait for the stream
        return self._hidden


class Boundary:
    """A transport that sends nothing."""

    output_free = None

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._hidden = torch.empty(1, 4, device=gpu.torch_device)

    def begin_step(self, shape: object) -> None:
        pass

    def outputs(self, group: PPGroup) -> dict[str, torch.Tensor]:
        return {"hidden_states": self._hidden}

    def sends_inline(self, num_tokens: int) -> bool:
        return False

    def send(self, tensors: object, group: PPGroup) -> Point:
        return self._gpu.compute.record()

    def close(self) -> None:
        pass


class TokenReturn:
    """A handler whose messages come one by one, as ``gate`` is opened."""

    receives_after_sending = False

    def __init__(self, gpu: Gpu, messages: list[Tokens]) -> None:
        self.stream = gpu.tokens
        self.gate = gpu.gate
        self.numbers: list[int] = []
        self._messages = iter(messages)

    def begin_step(self, step_id: int) -> None:
        pass

    def maybe_receive_sampled_tokens(self, num_reqs: int, max_sample_len: int = 1) -> SampledTokens:
        self.numbers.append(self.gate.stop(self.stream))
        return SampledTokens(next(self._messages), self.stream.record())

    def close(self) -> None:
        pass


def test_a_late_token_of_the_old_owner_leaves_nothing_to_the_new_one(gpu: Gpu) -> None:
    table = gpu.table(2)
    handler = TokenReturn(gpu, [gpu.message([[11]], [1]), gpu.message([[22]], [1])])
    stage = Stage(
        group=PPGroup(0, 2, 1),
        boundary=TensorSchema("hidden_states", "float32", 4),
        compute=gpu.compute,
        runner=Runner(table),
        sampler=Sampler(8, 2),
        outputs=SamplerOutputs(),
        slots=table,
        transport=Boundary(gpu),
        handler=handler,
    )
    plans = [
        StepPlan(1, 1, [row(0, 0, start=5, opens=True)], [], [], 1, 1),
        StepPlan(1, 2, [row(0, 1, start=40, opens=True)], [(0, 0)], [], 1, 2),  # the first one's client is gone
    ]
    for plan in plans:
        stage.begin(plan)
        for operation in stage.operations:
            end = operation.enqueue(plan).end
    assert not any(end.is_reached() for _ in range(NUM_LOOKS)), "compute went on before the old owner's token was stored"
    gpu.gate.open(handler.numbers[0])
    gpu.device.driver.synchronize(gpu.compute.handle)
    assert end.is_reached()
    gpu.gate.open()  # the new owner's token, which comes of that forward
    gpu.finish()
    assert table.last_tokens.flatten().tolist() == [22, -1]
    assert table.positions.tolist() == [41, 0]
    stage.close()


def test_closing_twice_and_after_the_device_is_gone() -> None:
    with emulation() as emulated:
        device = emulated.device()
        tables = [DeviceSlotTable(4, 1, device, torch.device("cpu"), Kernels(device.driver), MAX_STEPS) for _ in range(2)]
        tables[0].close()
        tables[0].close()
        emulated.fail()
        with pytest.raises(CudaError):
            device.driver.synchronize(device.rescue)
        tables[1].close()
        emulated.reset()
        device.close()
