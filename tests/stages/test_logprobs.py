import math

import pytest
import torch

from stages.device import HostStream
from stages.plan import MAX_SCORED_TOKENS, PlanRow, RowKind, RowSampling, TokenLogprobs
from stages.sampler import DeviceSamplerOutputs, Sampler, SamplerOutput, SamplerOutputs

VOCAB = 40


def row(slot: int, sampling: RowSampling, *, needs_token: bool = True, scored: list[int] | None = None) -> PlanRow:
    num_tokens = max(len(scored or []), 1)
    return PlanRow(slot, 0, RowKind.PREFILL, 0, num_tokens, [1] * num_tokens, [], sampling, needs_token, scored or [])


def check(found: TokenLogprobs, logits: torch.Tensor, token_id: int, num_top: int) -> None:
    expected = logits.double().log_softmax(0)
    assert found.logprob == pytest.approx(expected[token_id].item(), abs=1e-5)
    assert found.top_token_ids == expected.topk(num_top).indices.tolist()
    assert found.top_logprobs == pytest.approx(expected.topk(num_top).values.tolist(), abs=1e-5)


@pytest.fixture(params=["host", "device"])
def outputs(request: pytest.FixtureRequest) -> SamplerOutputs:
    """Where they are sampled, and by way of a copy as from a GPU."""
    return SamplerOutputs() if request.param == "host" else DeviceSamplerOutputs(torch.device("cpu"), 8, 1, 2)


def sampled_on(outputs: SamplerOutputs, sampler: Sampler, logits: torch.Tensor, rows: list[PlanRow]) -> SamplerOutput:
    stream = HostStream("compute")
    output = outputs.next(sum(row.needs_token for row in rows), 1)
    stream.launch(lambda: sampler.sample(logits, rows, 1, output) and None)
    on_host = outputs.to_host(stream, output)
    stream.close()
    return on_host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_gets_what_it_asked_for(outputs: SamplerOutputs, dtype: torch.dtype) -> None:
    logits = (torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    rows = [
        row(0, RowSampling(num_logprobs=5)),
        row(1, RowSampling()),
        row(2, RowSampling(num_prompt_logprobs=3), needs_token=False, scored=[4, 39]),
        row(3, RowSampling(temperature=3.0, seed=9, logit_bias=[(8, 30.0)], num_logprobs=0)),
        row(4, RowSampling(num_prompt_logprobs=0, num_logprobs=1), scored=[0]),
        row(5, RowSampling(temperature=0.5, num_logprobs=20)),
    ]
    output = sampled_on(outputs, Sampler(VOCAB, 8), logits, rows)
    token_ids = output.sampled_token_ids[:, 0].tolist()
    assert token_ids[2] == 8, "biased to the utmost"
    assert output.logprobs is not None
    of_sampled = output.logprobs.of_sampled()
    assert list(of_sampled) == [0, 2, 3, 4]
    for i, num_top in ((0, 5), (2, 0), (3, 1), (4, 20)):
        check(of_sampled[i], logits[i], token_ids[i], num_top)
    first, second = output.logprobs.of_scored()
    assert (first.slot, first.generation, second.slot) == (2, 0, 4)
    check(first.logprobs[0], logits[5], 4, 3)
    check(first.logprobs[1], logits[6], 39, 3)
    check(second.logprobs[0], logits[7], 0, 0)


def test_prompts_alone(outputs: SamplerOutputs) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    output = sampled_on(
        outputs, Sampler(VOCAB, 1), logits, [row(0, RowSampling(num_prompt_logprobs=1), needs_token=False, scored=[3, 5])]
    )
    assert output.logprobs is not None
    assert output.logprobs.of_sampled() == {}
    [scored] = output.logprobs.of_scored()
    check(scored.logprobs[1], logits[1], 5, 1)


def test_the_most_probable_token_has_exactly_the_highest_logprob() -> None:
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(1)) * 10
    for num_top in (1, 3):
        sampling = RowSampling(num_logprobs=num_top)
        output = Sampler(VOCAB, 64).sample(logits, [row(i, sampling) for i in range(64)])
        assert output.logprobs is not None
        assert all(one.logprob == one.top_logprobs[0] for one in output.logprobs.of_sampled().values())


def test_nobody_asks_and_nothing_is_computed() -> None:
    assert Sampler(VOCAB, 1).sample(torch.zeros(1, VOCAB), [row(0, RowSampling(temperature=1.0))]).logprobs is None


def test_a_row_of_bad_logits_does_not_hurt_the_logprobs_of_others(outputs: SamplerOutputs) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0, 3] = math.nan
    output = sampled_on(outputs, Sampler(VOCAB, 2), logits, [row(i, RowSampling(num_logprobs=2)) for i in range(2)])
    assert output.num_sampled.tolist() == [0, 1]
    assert output.logprobs is not None
    check(output.logprobs.of_sampled()[1], logits[1], int(output.sampled_token_ids[1, 0]), 2)


def test_more_top_tokens_than_the_vocabulary_has() -> None:
    output = Sampler(3, 1).sample(torch.tensor([[0.0, 2.0, 1.0]]), [row(0, RowSampling(num_logprobs=20))])
    assert output.logprobs is not None
    assert output.logprobs.of_sampled()[0].top_token_ids == [1, 2, 0]


def test_the_most_that_a_step_scores_fits_its_place_on_the_host() -> None:
    num_reqs = 3
    outputs = DeviceSamplerOutputs(torch.device("cpu"), num_reqs, 1, 2)
    logits = torch.randn(num_reqs + MAX_SCORED_TOKENS, VOCAB, generator=torch.Generator().manual_seed(1))
    sampling = RowSampling(num_logprobs=20, num_prompt_logprobs=20)
    rows = [row(i, sampling) for i in range(num_reqs - 1)]
    rows.append(row(num_reqs - 1, sampling, scored=[7] * MAX_SCORED_TOKENS))
    output = sampled_on(outputs, Sampler(VOCAB, num_reqs), logits, rows)
    assert output.logprobs is not None
    [scored] = output.logprobs.of_scored()
    check(scored.logprobs[-1], logits[-1], 7, 20)
