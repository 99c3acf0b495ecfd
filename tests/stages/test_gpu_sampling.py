"""What requests ask of sampling, on a GPU: as on the CPU, and without a look at anything that is on the device."""

from collections.abc import Sequence

import pytest
import torch

from stages import history, kv_cache, runner, sampler
from stages.assembly import Gpu
from stages.cuda import CudaStream
from stages.history import TokenHistory
from stages.logprobs import StepLogprobs
from stages.plan import PlanRow, RowKind, RowSampling
from stages.sampler import DeviceSamplerOutputs, Sampler, SamplerOutput
from tests.stages.test_gpu_runner import (
    NO_WAITING,
    WITHOUT_DATA,
    no_waiting,
    on_each_gpu,
    opened_gpu,  # noqa: F401  a fixture
)
from tests.stages.transport.harness import reach

VOCAB = 5003
MAX_LEN = 128
SAMPLINGS = [
    RowSampling(num_prompt_tokens=3, repetition_penalty=1.3),
    RowSampling(num_prompt_tokens=3, presence_penalty=1.5, frequency_penalty=0.5, num_logprobs=3),
    RowSampling(),
    RowSampling(num_prompt_tokens=3, repetition_penalty=0.7, frequency_penalty=-0.5, logit_bias=[(5, 2.0), (9, -100.0)]),
    RowSampling(temperature=0.9, seed=4, top_k=40, num_prompt_tokens=3, presence_penalty=1.0, num_logprobs=0),
    RowSampling(temperature=0.7, seed=5, banned_token_ids=[1, 2, 3], banned_until=6, num_logprobs=20),
    RowSampling(banned_token_ids=[17], banned_until=6, logit_bias=[(17, 50.0)], num_prompt_logprobs=2),
]


def steps() -> list[list[PlanRow]]:
    """Prompts, one of them scored, then decode rows, then a slot that somebody else takes."""
    prompts = [
        PlanRow(i, 0, RowKind.PREFILL, 0, 3, [7, 8 + i, 7], [], s, i != 2, [8, 7] if i == 6 else [])
        for i, s in enumerate(SAMPLINGS)
    ]
    first_chunk = PlanRow(2, 0, RowKind.PREFILL, 3, 1, [4], [], None, True)
    decodes = [[PlanRow(i, 0, RowKind.DECODE, 3 + k, 1, [], [], None, True) for i in (0, 1, 3, 4, 5, 6)] for k in range(12)]
    taken = PlanRow(0, 1, RowKind.PREFILL, 0, 2, [3, 3], [], SAMPLINGS[0], True)
    return [prompts, [*decodes[0], first_chunk], *decodes[1:], [taken]]


def logits_of(rows: Sequence[PlanRow], step: int) -> torch.Tensor:
    num_logits = sum(row.needs_token + len(row.scored) for row in rows)
    # Close together at the top, so that what was generated before decides.
    logits = torch.randn(num_logits, VOCAB, generator=torch.Generator().manual_seed(step)).abs()
    logits[:, 7:20] += 3
    return logits


@on_each_gpu
def test_a_gpu_samples_what_the_cpu_samples(opened_gpu: tuple[Gpu, CudaStream]) -> None:  # noqa: F811
    gpu, stream = opened_gpu
    device, num_slots = gpu.torch_device, len(SAMPLINGS)
    on_cpu = Sampler(VOCAB, num_slots, TokenHistory(num_slots, MAX_LEN))
    on_gpu = Sampler(VOCAB, num_slots, TokenHistory(num_slots, MAX_LEN, device))
    outputs = DeviceSamplerOutputs(device, num_slots, 1, 2)
    num_repeated = 0
    for step, rows in enumerate(steps()):
        logits = logits_of(rows, step % 2)
        expected = on_cpu.sample(logits, rows)
        output = outputs.next(sum(row.needs_token for row in rows), 1)
        there = logits.to(device)

        def run(there: torch.Tensor = there, rows: Sequence[PlanRow] = rows, output: SamplerOutput = output) -> None:
            on_gpu.sample(there, rows, 1, output)

        stream.launch(run)
        found = outputs.to_host(stream, output)
        reach(stream.record())
        assert found.sampled_token_ids.tolist() == expected.sampled_token_ids.tolist()
        assert found.num_sampled.tolist() == expected.num_sampled.tolist()
        assert (found.logprobs is None) == (expected.logprobs is None)
        if found.logprobs is not None and expected.logprobs is not None:
            assert found.logprobs.packed.is_pinned() == (device.type == "cuda")
            check_logprobs(found.logprobs, expected.logprobs)
        num_repeated += int((expected.sampled_token_ids[:, 0] == logits[: len(expected.num_sampled)].argmax(1)).sum())
    assert 0 < num_repeated < 13 * 5, "the penalties decided"


def check_logprobs(found: StepLogprobs, expected: StepLogprobs) -> None:
    assert list(found.of_sampled()) == list(expected.of_sampled())
    pairs = list(zip(found.of_sampled().values(), expected.of_sampled().values(), strict=True))
    for theirs, ours in zip(found.of_scored(), expected.of_scored(), strict=True):
        assert (theirs.slot, theirs.generation) == (ours.slot, ours.generation)
        pairs += zip(theirs.logprobs, ours.logprobs, strict=True)
    for theirs, ours in pairs:
        assert theirs.logprob == pytest.approx(ours.logprob, abs=1e-5)
        assert theirs.top_token_ids == ours.top_token_ids
        assert theirs.top_logprobs == pytest.approx(ours.top_logprobs, abs=1e-5)


@NO_WAITING
@pytest.mark.parametrize("kind", WITHOUT_DATA)
def test_nothing_on_the_device_is_looked_at(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, num_slots = torch.device(kind), len(SAMPLINGS)
    if not torch.cuda.is_available():

        def upload(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        for module in (history, kv_cache, runner, sampler):
            monkeypatch.setattr(module, "upload", upload)
    inputs = [(rows, logits_of(rows, step).to(device)) for step, rows in enumerate(steps())]
    subject = Sampler(VOCAB, num_slots, TokenHistory(num_slots, MAX_LEN, device))
    for rows, logits in inputs[:2]:  # what is loaded on first use may wait for the device
        subject.sample(logits, rows, 1, SamplerOutput.empty(sum(row.needs_token for row in rows), 1, device))
    with no_waiting(kind):
        for rows, logits in inputs:
            output = SamplerOutput.empty(sum(row.needs_token for row in rows), 1, device)
            subject.sample(logits, rows, 1, output)
            asks = any(SAMPLINGS[row.slot].num_logprobs >= 0 for row in rows if row.needs_token)
            assert (output.logprobs is not None) == asks
            assert output.logprobs is None or output.logprobs.packed.device.type == kind
