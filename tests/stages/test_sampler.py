import math

import numpy as np
import pytest
import torch

from stages.plan import PlanRow, RowKind, RowSampling
from stages.sampler import Sampler, SamplerOutput, race_times

VOCAB = 16


def row(
    slot: int, sampling: RowSampling | None, *, position: int = 7, needs_token: bool = True, generation: int = 0
) -> PlanRow:
    """A row whose sampled token is at ``position``."""
    return PlanRow(slot, generation, RowKind.DECODE, position - 1, 1, [], [], sampling, needs_token)


def draw_many(logits: torch.Tensor, sampling: RowSampling, num_draws: int) -> torch.Tensor:
    """Counts per token id over ``num_draws`` successive positions of one sequence."""
    rows = [row(0, sampling, position=position) for position in range(1, num_draws + 1)]
    output = Sampler(len(logits), 1).sample(logits.expand(num_draws, -1), rows)
    return output.sampled_token_ids[:, 0].bincount(minlength=len(logits))


def exact(
    logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """The distribution the parameters define, spelled out token by token."""
    order = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
    weights = {i: math.exp((float(logits[i]) - float(logits[order[0]])) / temperature) for i in order}
    kept = order[: top_k or None]
    total = sum(weights[i] for i in kept)
    nucleus: list[int] = []
    for i in kept:
        if nucleus and sum(weights[j] for j in nucleus) >= top_p * total:
            break
        nucleus.append(i)
    final = [i for i in nucleus if weights[i] >= min_p * weights[order[0]]]
    total = sum(weights[i] for i in final)
    return [weights[i] / total if i in final else 0.0 for i in range(len(logits))]


LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.1, 0.0, 1.6, -3.0, 0.9, 1.3, -0.5, 0.6, -2.0, 1.8, 0.1, -0.2, 0.75])


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"temperature": 1.7, "top_k": 9, "top_p": 0.8, "min_p": 0.25},
        {"temperature": 0.7, "top_k": 3, "top_p": 0.99},
        {"top_k": 8, "top_p": 0.5},
    ],
)
def test_tokens_follow_the_exact_distribution(params: dict[str, float]) -> None:
    num_draws = 20_000
    probabilities = exact(LOGITS, **params)  # pyright: ignore[reportArgumentType]
    counts = draw_many(LOGITS, RowSampling(seed=11, **{"temperature": 1.0, **params}), num_draws).tolist()  # pyright: ignore[reportArgumentType]
    kept = [i for i, p in enumerate(probabilities) if p > 0]
    assert sum(counts[i] for i in kept) == num_draws
    expected = [num_draws * probabilities[i] for i in kept]
    chi_square = sum((counts[i] - e) ** 2 / e for i, e in zip(kept, expected, strict=True))
    # Wilson and Hilferty's approximation of chi-square by a normal: z < 3.09 is p > 0.001.
    freedom = len(kept) - 1
    z = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 3.09, f"chi-square {chi_square:.1f} with {freedom} degrees of freedom"


@pytest.mark.parametrize(
    "sampling",
    [RowSampling(), RowSampling(temperature=1.0, top_k=1), RowSampling(temperature=1.0, top_p=1e-9), RowSampling(1e-30)],
)
def test_what_leaves_one_token_takes_the_largest(sampling: RowSampling) -> None:
    assert draw_many(LOGITS, sampling, 50).nonzero().flatten().tolist() == [1]


def test_min_p_of_one_keeps_the_largest_and_its_ties() -> None:
    logits = torch.zeros(VOCAB)
    logits[[3, 9]] = 1.0
    assert draw_many(logits, RowSampling(1.0, min_p=1.0), 100).nonzero().flatten().tolist() == [3, 9]


def test_ties_at_the_edge_of_top_k_and_top_p_stay() -> None:
    logits = torch.full((VOCAB,), -20.0)
    logits[2] = 1.0
    logits[[5, 8, 13]] = 0.0
    for sampling in (RowSampling(1.0, top_k=2), RowSampling(1.0, top_p=0.6)):
        assert draw_many(logits, sampling, 200).nonzero().flatten().tolist() == [2, 5, 8, 13]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_of_equal_logits(dtype: torch.dtype) -> None:
    vocab_size = 4099  # longer than a vector and than a thread's share
    logits = torch.zeros(3, vocab_size, dtype=dtype)
    logits[0, [4098, 17, 2048]] = 1.5
    logits[1, [4097, 4098]] = 1.5
    output = Sampler(vocab_size, 3).sample(logits, [row(i, RowSampling()) for i in range(3)])
    assert output.sampled_token_ids.flatten().tolist() == [17, 4097, 0]
    assert output.num_sampled.tolist() == [1, 1, 1]
    assert output.num_rejected.tolist() == [0, 0, 0]
    assert output.sampled_token_ids.dtype == torch.int64
    assert output.num_sampled.dtype == output.num_rejected.dtype == torch.int32


def test_a_nucleus_wider_than_the_first_candidates() -> None:
    vocab_size = 5000
    logits = torch.linspace(0, 1e-3, vocab_size)  # nearly flat: 0.9 needs 4500 of the largest, found at the high ids
    counts = draw_many(logits, RowSampling(1.0, top_p=0.9), 3000)
    assert counts[:499].sum() == 0
    assert counts[501:1000].sum() > 0


@pytest.mark.parametrize("vocab_size", [VOCAB, 49152])
def test_the_same_token_alone_and_among_others_in_any_order(vocab_size: int) -> None:
    num_rows = 8
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(5)) * 2
    samplings = [
        RowSampling(1.0, seed=1),
        RowSampling(0.7, top_k=11, seed=2),
        RowSampling(),
        RowSampling(1.2, top_p=0.9, seed=4),
        RowSampling(2.0, min_p=0.02, seed=-5),
        RowSampling(1.0, top_p=0.5, top_k=3, seed=6),
        RowSampling(1.5, seed=2**63 - 1),
        RowSampling(1.0, top_p=0.999, min_p=0.001, seed=8),
    ]
    rows = [row(i, samplings[i], position=100 + i) for i in range(num_rows)]
    sampler = Sampler(vocab_size, num_rows)
    alone = [sampler.sample(logits[i : i + 1], [rows[i]]).sampled_token_ids.item() for i in range(num_rows)]
    together = sampler.sample(logits, rows).sampled_token_ids.flatten().tolist()
    backwards = sampler.sample(logits.flip(0), rows[::-1]).sampled_token_ids.flatten().tolist()[::-1]
    assert alone == together == backwards


def test_a_draw_depends_on_seed_and_position_only() -> None:
    times = [race_times(seed, at, 400) for seed in (0, 1, -1, 2**63 - 1) for at in (1, 2, 3, 100_000)]
    together = np.concatenate(times)
    assert len(np.unique(together)) == len(together), "no number is used twice"
    assert together.min() > 0
    assert abs(together.mean() - 1) < 0.05
    assert (race_times(-1, 2, 400) == times[9]).all()
    # Fixed, so that a replay on another version continues the same text.
    assert race_times(7, 42, 3).tolist() == pytest.approx(
        [0.7520047967497471, 2.0765498365856243, 2.8449795422388164], rel=1e-12
    )


def test_the_last_bits_of_logits_do_not_change_draws() -> None:
    """Those of a batch of another size, or of a prefill where there was a decode, differ by some 1e-5."""
    vocab_size, num_draws = 49152, 300
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(vocab_size, generator=generator) * 2.5
    noise = torch.randn(vocab_size, generator=generator) * 2e-5
    sampler = Sampler(vocab_size, 1)

    def draws(of: torch.Tensor) -> list[int]:
        rows = (row(0, RowSampling(1.0, seed=4), position=position) for position in range(num_draws))
        return [int(sampler.sample(of[None], [each]).sampled_token_ids.item()) for each in rows]

    assert len(set(draws(logits))) > num_draws / 2, "the distribution is flat, most tokens are improbable"
    assert draws(logits) == draws(logits + noise)


def test_the_sampling_of_a_chunk_without_a_token_is_remembered() -> None:
    sampler = Sampler(VOCAB, 2)
    sampling = RowSampling(1.0, seed=3)
    none = sampler.sample(torch.empty(0, VOCAB), [row(1, sampling, needs_token=False)])
    assert none.sampled_token_ids.shape == (0, 1)
    later = sampler.sample(LOGITS[None], [row(1, None, position=9)])
    assert (
        later.sampled_token_ids.item()
        == Sampler(VOCAB, 2).sample(LOGITS[None], [row(1, sampling, position=9)]).sampled_token_ids.item()
    )


def test_a_row_without_sampling_of_its_generation_is_refused() -> None:
    sampler = Sampler(VOCAB, 2)
    sampler.sample(LOGITS[None], [row(1, RowSampling())])
    with pytest.raises(ValueError, match="slot 1, generation 1: sampled before its sampling was given"):
        sampler.sample(LOGITS[None], [row(1, None, generation=1)])
    with pytest.raises(ValueError, match=r"logits \(2, 16\): must be \(1, 16\)"):
        sampler.sample(LOGITS.expand(2, -1), [row(1, None), row(0, RowSampling(), needs_token=False)])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_fail_their_row_and_no_other(bad: float, temperature: float) -> None:
    logits = LOGITS.repeat(3, 1)
    rows = [row(i, RowSampling(temperature, seed=i)) for i in range(3)]
    good = Sampler(VOCAB, 3).sample(logits, rows).sampled_token_ids.flatten().tolist()
    logits[1, 4] = bad
    output = Sampler(VOCAB, 3).sample(logits, rows)
    assert output.num_sampled.tolist()[1] == 0
    assert output.num_sampled.tolist() == [1, 0, 1]
    assert output.sampled_token_ids.flatten().tolist() == [good[0], -1, good[2]]


def test_minus_infinity_is_a_token_that_is_never_drawn() -> None:
    logits = torch.full((VOCAB,), -math.inf)
    assert Sampler(VOCAB, 1).sample(logits[None], [row(0, RowSampling(1.0))]).num_sampled.tolist() == [0]
    logits[[2, 6]] = 0.0
    assert draw_many(logits, RowSampling(1.0), 100).nonzero().flatten().tolist() == [2, 6]


def test_output_tensors_of_the_caller_are_filled() -> None:
    out = SamplerOutput.empty(1, 3)
    out.packed.fill_(99)
    returned = Sampler(VOCAB, 1).sample(LOGITS[None], [row(0, RowSampling())], max_sample_len=3, out=out)
    assert returned is out
    assert out.sampled_token_ids.tolist() == [[1, -1, -1]]
    assert out.num_sampled.tolist() == [1]
    assert out.num_rejected.tolist() == [0]
