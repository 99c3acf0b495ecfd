"""Stages chained by hand in one thread, against transformers' own generate."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.model.source import ModelSource
from stages.plan import PlanRow, RowKind, RowSampling
from tests.stages.chain import FAMILIES, SPLITS, VOCAB, Chain, Generation, Tiny, decode, load_stages, prefill
from tests.stages.model_factory import SIZES


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """More threads than these sizes can use wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_transformers(family: str, num_stages: int, tiny: Callable[[str], Tiny]) -> None:
    model = tiny(family)
    stages = load_stages(model.source, SPLITS[num_stages])
    for chunk in (3, 512):
        assert Chain(stages).run(model.requests(), chunk) == model.expected, f"chunks of {chunk}"


def test_logits_are_close_to_those_of_transformers(tiny: Callable[[str], Tiny]) -> None:
    model = tiny("qwen3")
    chain = Chain(load_stages(model.source, SPLITS[2]))
    prompt, tokens = model.prompts[4], model.expected[4]
    chain.run([Generation(prompt, len(tokens))], 7)
    with torch.inference_mode():
        logits = model.reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    assert (torch.cat(chain.logits) - logits).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_slicing_changes_no_bit_on_the_same_schedule(family: str, dtype: torch.dtype, tiny: Callable[[str], Tiny]) -> None:
    model = tiny(family)
    logits: list[torch.Tensor] = []
    for num_stages in SPLITS:
        chain = Chain(load_stages(model.source, SPLITS[num_stages], dtype))
        chain.run(model.requests(), 16)
        logits.append(torch.cat(chain.logits))
    assert logits[0].dtype == dtype
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@pytest.fixture
def chain(tiny: Callable[[str], Tiny]) -> Chain:
    return Chain(load_stages(tiny("llama").source, SPLITS[2]))


def test_sampled_tokens_do_not_depend_on_the_batch_or_the_number_of_stages(tiny: Callable[[str], Tiny]) -> None:
    model = tiny("llama")

    def requests() -> list[Generation]:
        requests = model.requests()
        for i, request in enumerate(requests):
            request.sampling = RowSampling(temperature=0.9, top_p=0.95, top_k=50 * (i % 2), seed=i)
        return requests

    together = [Chain(load_stages(model.source, split)).run(requests(), 16) for split in SPLITS.values()]
    stages = load_stages(model.source, SPLITS[2])
    alone = []
    for request in requests():
        request.first_step = 0
        alone += Chain(stages).run([request], 512)
    assert together == [alone] * 3
    assert alone != model.expected


def test_a_step_without_rows_or_tokens(chain: Chain, tiny: Callable[[str], Tiny]) -> None:
    empty = chain.plan([])
    chain.prepare(empty)
    assert chain.runners[0].forward(empty, None).shape == (0, SIZES["hidden_size"])
    assert chain.runners[1].forward(empty, torch.empty(0, SIZES["hidden_size"])).shape == (0, VOCAB)
    prompt, expected = tiny("llama").prompts[1], tiny("llama").expected[1]
    assert chain.step([prefill(2, prompt[:20], [5, 6], needs_token=False)]) == []
    rest = PlanRow(2, 0, RowKind.PREFILL, 20, 17, prompt[20:], [7], None, True)
    assert chain.step([rest]) == expected[:1]
    assert chain.step([decode(2, 37)]) == expected[1:2]


def test_steps_prepared_ahead_keep_their_inputs(chain: Chain, tiny: Callable[[str], Tiny]) -> None:
    model = tiny("llama")
    prompts, expected = model.prompts, model.expected
    first, second, third = prompts[2], prompts[3], prompts[5]
    plans = [
        chain.plan([prefill(0, first, [3])]),
        chain.plan([decode(0, 6)]),
        # While the step before is still to run, its slot is given to one request and its block to another.
        chain.plan([prefill(0, second, [5], generation=1), prefill(1, third, [3])], [(0, 0)]),
        chain.plan([decode(0, 16, generation=1, blocks=[4]), decode(1, 3)]),
    ]
    for plan in plans:
        chain.prepare(plan)
    # The decode row's generation is no longer current: its input was dropped, and it runs on for nobody.
    chain.finish(plans[0], chain.forward(plans[0]))
    chain.finish(plans[1], chain.forward(plans[1]))
    assert [runner.slots.num_stale_rows for runner in chain.runners] == [2, 2]
    assert chain.finish(plans[2], chain.forward(plans[2])) == [expected[3][0], expected[5][0]]
    assert chain.finish(plans[3], chain.forward(plans[3])) == [expected[3][1], expected[5][1]]


def test_a_decode_position_that_differs_from_the_plan_is_an_error_and_the_next_step_runs(
    chain: Chain, tiny: Callable[[str], Tiny]
) -> None:
    prompt, expected = tiny("llama").prompts[2], tiny("llama").expected[2]
    chain.step([prefill(1, prompt, [0])])
    plan = chain.plan([decode(1, 7)])
    chain.prepare(plan)
    with pytest.raises(ValueError, match="slot 1, generation 0: the plan decodes at position 7, the slot is at 6"):
        chain.forward(plan)
    chain.runners[1]._prepared.pop(plan.step_id)
    assert chain.step([decode(1, 6)]) == expected[1:2]


def test_an_exception_in_a_layer_leaves_the_runner_usable(
    chain: Chain, tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, expected = tiny("llama").prompts[2], tiny("llama").expected[2]
    first, last = chain.runners
    chain.step([prefill(1, prompt, [0])])
    plan = chain.plan([decode(1, 6)])
    chain.prepare(plan)
    hidden = first.forward(plan, None)
    with monkeypatch.context() as patched:
        patched.setattr(last.model.model.lm_head, "forward", lambda _x: 1 / 0)
        assert last.forward(plan, hidden).isnan().all()
    assert last.take_row_errors(plan.step_id) == [(1, 0, "ZeroDivisionError: division by zero")]
    again = chain.plan([decode(1, 6)])
    chain.prepare(again)
    assert chain.finish(again, chain.forward(again)) == expected[1:2]


def test_a_token_id_outside_the_vocabulary_in_a_message_cannot_hurt(chain: Chain, tiny: Callable[[str], Tiny]) -> None:
    chain.step([prefill(1, tiny("llama").prompts[2], [0])])
    for runner in chain.runners:
        runner.slots.last_tokens[1] = 2**62
    assert len(chain.step([decode(1, 6)])) == 1
    for runner in chain.runners:
        runner.slots.last_tokens[1] = -5
    assert len(chain.step([decode(1, 7)])) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (decode(1, 3, generation=1), "slot 1: generation 1 is not current, and the row does not open it"),
        (decode(2, 3), "slot 2: generation 0 is not current"),
        (decode(9, 3), "slot 9: generation 0 is not current"),
        (prefill(1, [5], [3], generation=1), "slot 1: still belongs to generation 0"),
        (prefill(6, [5], [3]), "slot 6: must be between 0 and 5"),
        (prefill(2, [5, VOCAB], [3]), "slot 2: token ids must be between 0 and 511"),
        (prefill(2, [-1], [3]), "slot 2: token ids must be between 0 and 511"),
        (prefill(2, [5], [48]), "slot 2: block 48 must be between 0 and 47"),
        (prefill(2, [5] * 17, [4]), "slot 2: 0 [+] 1 blocks of 16 tokens cannot hold 17 tokens"),
        (prefill(2, [5] * 257, list(range(17))), "slot 2: 257 tokens from 0 do not fit 0..256"),
        (prefill(2, [5] * 601, list(range(40))), "601 tokens, the most are 600"),
        (decode(1, -1), "slot 1: 1 tokens from -1"),
        (PlanRow(1, 0, RowKind.DECODE, 3, 2, [], [], None, True), "slot 1: a decode row has 1 token, not 2"),
        (PlanRow(1, 0, RowKind.PREFILL, 3, 2, [5], [], None, True), "slot 1: 1 token ids for 2 tokens"),
    ],
)
def test_plans_that_break_a_rule_are_refused(row: PlanRow, message: str, chain: Chain) -> None:
    chain.step([prefill(1, [7, 8, 9], [0])])
    with pytest.raises(ValueError, match=message):
        chain.runners[0].prepare(chain.plan([row]))


def test_hidden_states_of_another_shape_are_refused(chain: Chain) -> None:
    plan = chain.plan([prefill(1, [7, 8, 9], [0])])
    chain.prepare(plan)
    with pytest.raises(ValueError, match=r"hidden states \(2, 64\): must be \(3, 64\)"):
        chain.runners[1].forward(plan, torch.zeros(2, 64))


def test_smollm2_says_what_it_says_under_transformers(smollm2: ModelSource) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32).eval()
    prompt = [1, 504, 3575, 282, 4649, 314]  # "The capital of France is", after the start token
    wanted = reference.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)[
        0, len(prompt) :
    ].tolist()
    del reference
    requests = [Generation(prompt, 8), Generation(prompt[::-1], 3), Generation(prompt, 8, first_step=1)]
    tokens = Chain(load_stages(smollm2, [19, 11])).run(requests, 4)
    assert tokens[0] == tokens[2] == wanted


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_row_that_cannot_be_computed_fails_alone(
    failing_rank: int, tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the exception is, on whatever stage, and whether the step has prefills or decodes."""
    model = tiny("llama")
    chain = Chain(load_stages(model.source, SPLITS[2]))
    prompts, expected = model.prompts, model.expected
    good, bad, late = prompts[2], prompts[3], prompts[5]
    assert chain.step([prefill(0, good, [3]), prefill(1, bad, [4, 5])]) == [expected[2][0], expected[3][0]]
    runner, compute = chain.runners[failing_rank], chain.runners[failing_rank]._compute

    def fail_with_the_bad_one(step: Any, hidden: torch.Tensor | None) -> torch.Tensor:
        if len(bad) in step.positions.tolist():
            raise IndexError("index 7 is out of range\nand more")
        return compute(step, hidden)

    monkeypatch.setattr(runner, "_compute", fail_with_the_bad_one)
    plan = chain.plan([decode(0, len(good)), decode(1, len(bad)), prefill(2, late, [6])])
    chain.prepare(plan)
    output = chain.sampler.sample(chain.forward(plan), plan.rows, chain.limits.max_sample_len)
    assert output.num_sampled.tolist() == [1, 0, 1]
    assert output.sampled_token_ids[[0, 2], 0].tolist() == [expected[2][1], expected[5][0]]
    assert runner.take_row_errors(plan.step_id) == [(1, 0, "IndexError: index 7 is out of range")]
    assert runner.take_row_errors(plan.step_id) == []
    assert chain.runners[1 - failing_rank].take_row_errors(plan.step_id) == []


def test_a_stage_that_can_compute_nothing_is_broken(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("broken")

    monkeypatch.setattr(chain.runners[0], "_compute", fail)
    plan = chain.plan([prefill(0, [3, 4], [3]), prefill(1, [5], [4])])
    chain.prepare(plan)
    with pytest.raises(RuntimeError, match="broken"):
        chain.forward(plan)
    for i in range(4):
        chunk = PlanRow(1, 0, RowKind.PREFILL, i + 1, 1, [9], [], None, True)
        plan = chain.plan([chunk])
        chain.prepare(plan)
        if i < 3:
            assert chain.runners[0].forward(plan, None).isnan().all()
        else:
            with pytest.raises(RuntimeError, match="broken"):
                chain.runners[0].forward(plan, None)
