"""What a request asks to be done to single logits: bans, biases, penalties."""

import math
import random
from collections.abc import Sequence

import pytest
import torch

from stages.history import TokenHistory
from stages.plan import PlanRow, RowKind, RowSampling
from stages.sampler import Sampler

VOCAB = 24
MAX_LEN = 64


def penalised(logits: torch.Tensor, sampling: RowSampling, prompt: Sequence[int], generated: Sequence[int]) -> list[float]:
    """The definition, token by token."""
    values = logits.tolist()
    for token_id in {*prompt, *generated}:
        penalty = sampling.repetition_penalty
        values[token_id] = values[token_id] / penalty if values[token_id] > 0 else values[token_id] * penalty
    for token_id in set(generated):
        values[token_id] -= sampling.frequency_penalty * list(generated).count(token_id) + sampling.presence_penalty
    return values


def make_sampler(num_slots: int) -> Sampler:
    return Sampler(VOCAB, num_slots, TokenHistory(num_slots, MAX_LEN))


def prefill(slot: int, token_ids: list[int], sampling: RowSampling, generation: int = 0) -> PlanRow:
    return PlanRow(slot, generation, RowKind.PREFILL, 0, len(token_ids), token_ids, [], sampling, True)


def decode(slot: int, start: int, generation: int = 0) -> PlanRow:
    return PlanRow(slot, generation, RowKind.DECODE, start, 1, [], [], None, True)


def greedy(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda i: values[i])


SAMPLINGS = [
    {},
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.1},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.4},
    {"repetition_penalty": 1.3, "presence_penalty": -0.9, "frequency_penalty": 0.6},
]


def test_penalties_are_as_defined_alone_and_among_others() -> None:
    """Sequences of every kind and length share steps; each gets the tokens of the definition, one after the other."""
    chance = random.Random(4)
    prompts = [[chance.randrange(VOCAB) for _ in range(1 + 5 * i % 17)] for i in range(len(SAMPLINGS))]
    samplings = [RowSampling(num_prompt_tokens=len(p), **s) for p, s in zip(prompts, SAMPLINGS, strict=True)]  # type: ignore[arg-type]
    generated: list[list[int]] = [[] for _ in samplings]
    together, alone = make_sampler(len(samplings)), [make_sampler(len(samplings)) for _ in samplings]
    rng = torch.Generator().manual_seed(2)
    for step in range(25):
        logits = torch.randn(len(samplings), VOCAB, generator=rng)
        if step == 0:
            rows = [prefill(i, prompt, samplings[i]) for i, prompt in enumerate(prompts)]
        else:
            rows = [decode(i, len(prompt) + step - 1) for i, prompt in enumerate(prompts)]
        expected = [greedy(penalised(logits[i], samplings[i], prompt, generated[i])) for i, prompt in enumerate(prompts)]
        before = logits.clone()
        assert together.sample(logits, rows).sampled_token_ids[:, 0].tolist() == expected
        assert logits.equal(before), "the logits of a row belong to whoever gave them"
        for i, sampler in enumerate(alone):
            assert sampler.sample(logits[i : i + 1], [rows[i]]).sampled_token_ids.item() == expected[i]
            generated[i].append(expected[i])
    assert any(len(set(tokens)) < len(tokens) for tokens in generated), "something was repeated"


@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=str)
def test_penalised_logits_are_exact(sampling: dict[str, float]) -> None:
    history = TokenHistory(3, MAX_LEN)
    row = RowSampling(num_prompt_tokens=4, **sampling)  # type: ignore[arg-type]
    prompt, generated = [5, 0, 5, 9], [9, 3, 3, 0, 3, 23]
    history.store_prompt(1, 0, [7] * MAX_LEN)  # of a former owner
    history.store_prompt(1, 0, prompt)
    for i, token_id in enumerate(generated):
        history.store_sampled([1], [4 + i], torch.tensor([token_id]))
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0, 3] = -math.inf
    expected = penalised(logits[0], row, prompt, generated)
    history.penalise(logits, [1], [10], [row])
    assert logits[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_before_the_first_token_only_the_prompt_counts() -> None:
    history = TokenHistory(1, MAX_LEN)
    history.store_prompt(0, 0, [11] * MAX_LEN)
    history.store_prompt(0, 0, [2, 3])
    sampling = RowSampling(num_prompt_tokens=2, repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0)
    logits = torch.ones(1, VOCAB)
    history.penalise(logits, [0], [2], [sampling])
    assert [i for i, value in enumerate(logits[0].tolist()) if value != 1] == [2, 3]
    assert logits[0, 2] == 0.5


def test_a_preempted_sequence_counts_what_it_had_generated() -> None:
    """Its tokens come back as a prefill, in another slot, and count from where the prompt ends."""
    prompt, sampling = [1, 2, 3], RowSampling(num_prompt_tokens=3, frequency_penalty=2.0, presence_penalty=0.5)
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(12, 1, VOCAB, generator=rng)
    undisturbed = make_sampler(2)
    tokens = [int(undisturbed.sample(logits[0], [prefill(0, prompt, sampling)]).sampled_token_ids)]
    for i in range(1, 12):
        tokens.append(int(undisturbed.sample(logits[i], [decode(0, 2 + i)]).sampled_token_ids))
    sampler = make_sampler(2)
    again: list[int] = []
    for i in range(12):
        row = prefill(i % 2, prompt + again, sampling) if i in (0, 5) else decode(int(i > 5), 2 + i)
        again.append(int(sampler.sample(logits[i], [row]).sampled_token_ids))
    assert again == tokens
    assert tokens != [int(row.argmax()) for row in logits], "the penalties matter"


def test_a_reused_slot_knows_nothing_of_its_former_owner() -> None:
    sampler = make_sampler(1)
    sampling = RowSampling(num_prompt_tokens=2, repetition_penalty=5.0)
    logits = torch.linspace(1, 2, VOCAB)[None]
    assert sampler.sample(logits, [prefill(0, [VOCAB - 1, 3], sampling)]).sampled_token_ids.item() == VOCAB - 2
    other = RowSampling(num_prompt_tokens=1, repetition_penalty=5.0)
    assert sampler.sample(logits, [prefill(0, [4], other, generation=1)]).sampled_token_ids.item() == VOCAB - 1


def test_biases_are_added_and_bans_end_at_their_position() -> None:
    sampler = make_sampler(3)
    logits = torch.zeros(3, VOCAB)
    logits[:, 7], logits[:, 8] = 2.0, 1.0
    rows = [
        prefill(0, [1], RowSampling(logit_bias=[(7, -5.0), (11, 1.5)])),
        prefill(1, [1], RowSampling(banned_token_ids=[7], banned_until=2, logit_bias=[(7, 50.0)])),
        prefill(2, [1], RowSampling()),
    ]
    assert sampler.sample(logits, rows).sampled_token_ids[:, 0].tolist() == [11, 8, 7]
    rows = [decode(0, 1), decode(1, 1), decode(2, 1)]
    assert sampler.sample(logits, rows).sampled_token_ids[:, 0].tolist() == [11, 7, 7]


def test_a_bias_is_added_before_the_temperature() -> None:
    logits = torch.zeros(1, VOCAB).expand(4000, -1)
    sampling = RowSampling(temperature=2.0, seed=1, logit_bias=[(5, 2 * math.log(10))])
    rows = [PlanRow(0, 0, RowKind.DECODE, i, 1, [], [], sampling, True) for i in range(4000)]
    counts = make_sampler(1).sample(logits, rows).sampled_token_ids[:, 0].bincount(minlength=VOCAB)
    assert counts[5].item() == pytest.approx(4000 * 10 / (10 + VOCAB - 1), rel=0.1)


def test_a_row_with_every_token_banned_fails_alone() -> None:
    rows = [
        prefill(0, [1], RowSampling(banned_token_ids=list(range(VOCAB)), banned_until=9)),
        prefill(1, [1], RowSampling(temperature=1.0)),
    ]
    output = make_sampler(2).sample(torch.zeros(2, VOCAB), rows)
    assert output.num_sampled.tolist() == [0, 1]


def test_drawn_rows_of_a_16_bit_model_are_penalised_in_float32() -> None:
    """Two rows of one step, drawn, of which one is changed; the changed one never draws what it has lost."""
    logits = torch.zeros(2, VOCAB, dtype=torch.bfloat16)
    banned = list(range(1, VOCAB))
    samplings = [RowSampling(1.0, seed=3), RowSampling(1.0, seed=3, banned_token_ids=banned, banned_until=100)]
    sampler = make_sampler(2)
    seen: set[int] = set()
    for position in range(1, 30):
        rows = [PlanRow(i, 0, RowKind.DECODE, position - 1, 1, [], [], s, True) for i, s in enumerate(samplings)]
        free, bound = sampler.sample(logits, rows).sampled_token_ids[:, 0].tolist()
        seen.add(free)
        assert bound == 0
    assert len(seen) > 5


def test_penalties_without_a_history_are_refused() -> None:
    with pytest.raises(ValueError, match="slot 0: is penalised, and this sampler keeps no history"):
        Sampler(VOCAB, 1).sample(torch.zeros(1, VOCAB), [prefill(0, [1], RowSampling(presence_penalty=1.0))])
