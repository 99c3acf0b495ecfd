"""Stages chained by hand in one thread, against transformers' own generate."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.model.attention import register_attention
from stages.model.slice import StageModel, load_stage
from stages.model.source import ModelSource, locate_model
from stages.plan import Limits, PlanRow, RowKind, RowSampling, StepPlan
from stages.runner import StageRunner
from stages.sampler import Sampler
from stages.slots import SlotTable
from stages.topology import stage_infos
from tests.stages.model_factory import SIZES, write_tiny_model

NUM_LAYERS: int = SIZES["num_hidden_layers"]
VOCAB: int = SIZES["vocab_size"]
SPLITS = {1: [4], 2: [3, 1], 3: [1, 2, 1]}
LIMITS = Limits(
    max_num_seqs=6,
    max_num_batched_tokens=600,
    max_model_len=256,
    max_sample_len=1,
    num_blocks=48,
    block_size=16,
    lane_depth=2,
    ring_slots=2,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {},
    "olmo2": {},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
}


def load_stages(source: ModelSource, split: Sequence[int], dtype: torch.dtype = torch.float32) -> list[StageModel]:
    register_attention()
    return [load_stage(source, info, dtype) for info in stage_infos(split)]


@dataclass
class Generation:
    """One request of a hand-made schedule: its prompt, how many tokens it wants, and how far it is."""

    prompt: list[int]
    num_wanted: int
    sampling: RowSampling = field(default_factory=RowSampling)
    first_step: int = 0
    tokens: list[int] = field(default_factory=list)
    slot: int = -1
    generation: int = -1
    num_computed: int = 0


class Chain:
    """All stages of a pipeline in one thread: every plan goes through all of them, then its tokens come back to each."""

    def __init__(self, models: Sequence[StageModel], limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.runners = [StageRunner(model, SlotTable(limits.max_num_seqs, limits.max_sample_len), limits) for model in models]
        for runner in self.runners:
            runner.cache.memory.fill_(math.nan)
        self.sampler = Sampler(models[-1].vocab_size, limits.max_num_seqs)
        self.logits: list[torch.Tensor] = []
        self._step_id = 0
        self._free_slots = list(range(limits.max_num_seqs))
        self._free_blocks = list(range(limits.num_blocks))
        self._held: dict[int, list[int]] = {}
        self._generations = [0] * limits.max_num_seqs
        self._freed: list[tuple[int, int]] = []

    def plan(self, rows: list[PlanRow], freed: list[tuple[int, int]] | None = None) -> StepPlan:
        self._step_id += 1
        return StepPlan(0, self._step_id, rows, freed or [], [], self.limits.max_sample_len, 1)

    def prepare(self, plan: StepPlan) -> None:
        for runner in self.runners:
            runner.prepare(plan)

    def forward(self, plan: StepPlan) -> torch.Tensor:
        hidden = None
        for runner in self.runners:
            hidden = runner.forward(plan, hidden)
        assert hidden is not None
        return hidden

    def finish(self, plan: StepPlan, logits: torch.Tensor) -> list[int]:
        output = self.sampler.sample(logits, plan.rows, self.limits.max_sample_len)
        assert output.num_sampled.all()
        for runner in self.runners:
            runner.slots.scatter(plan.sampled_rows, output.sampled_token_ids, output.num_sampled, output.num_rejected)
        return output.sampled_token_ids[:, 0].tolist()

    def step(self, rows: list[PlanRow], freed: list[tuple[int, int]] | None = None) -> list[int]:
        plan = self.plan(rows, freed)
        self.prepare(plan)
        logits = self.forward(plan)
        self.logits.append(logits.clone())
        return self.finish(plan, logits)

    def run(self, requests: Sequence[Generation], chunk: int) -> list[list[int]]:
        """The tokens of ``requests``, each served from its first step on, its prompt in chunks of at most ``chunk``."""
        waiting = list(requests)
        running: list[Generation] = []
        for step in range(10_000):
            while waiting and waiting[0].first_step <= step and self._free_slots:
                running.append(self._admit(waiting.pop(0)))
            if not running and not waiting:
                return [r.tokens for r in requests]
            rows = [self._row(r, chunk) for r in running]
            freed, self._freed = self._freed, []
            sampled = iter(self.step(rows, freed))
            for request, row in zip(running, rows, strict=True):
                request.num_computed += row.num_tokens
                if row.needs_token:
                    request.tokens.append(next(sampled))
            for request in [r for r in running if len(r.tokens) == r.num_wanted]:
                running.remove(request)
                self._release(request)
        raise AssertionError("the requests do not finish")

    def _admit(self, request: Generation) -> Generation:
        request.slot = self._free_slots.pop(0)
        request.generation = self._generations[request.slot]
        self._held[request.slot] = []
        return request

    def _release(self, request: Generation) -> None:
        self._freed.append((request.slot, request.generation))
        self._generations[request.slot] += 1
        self._free_slots.insert(0, request.slot)
        self._free_blocks.extend(self._held.pop(request.slot))

    def _row(self, request: Generation, chunk: int) -> PlanRow:
        start = request.num_computed
        is_decode = start >= len(request.prompt)
        num_tokens = 1 if is_decode else min(chunk, len(request.prompt) - start)
        held = self._held[request.slot]
        num_new = math.ceil((start + num_tokens) / self.limits.block_size) - len(held)
        blocks = [self._free_blocks.pop(0) for _ in range(num_new)]
        held.extend(blocks)
        return PlanRow(
            slot=request.slot,
            generation=request.generation,
            kind=RowKind.DECODE if is_decode else RowKind.PREFILL,
            start=start,
            num_tokens=num_tokens,
            token_ids=[] if is_decode else request.prompt[start : start + num_tokens],
            blocks=blocks,
            sampling=request.sampling if start == 0 else None,
            needs_token=start + num_tokens >= len(request.prompt),
        )


@dataclass
class Tiny:
    """A tiny model and what transformers generates with it."""

    source: ModelSource
    prompts: list[list[int]]
    expected: list[list[int]]
    reference: Any

    def requests(self) -> list[Generation]:
        """More than there are slots for and of different lengths, so that slots and blocks are used again."""
        return [
            Generation(prompt, len(tokens), first_step=2 * (i // 5))
            for i, (prompt, tokens) in enumerate(zip(self.prompts, self.expected, strict=True))
        ]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """More threads than these sizes can use wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    @cache
    def make(family: str) -> Tiny:
        path: Path = write_tiny_model(tmp_path_factory.mktemp(family) / "model", family, **FAMILIES[family])
        generator = torch.Generator().manual_seed(1)
        lengths = [1, 37, 6, 16, 90, 3, 17, 2]
        prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
        reference: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
        reference.generation_config.eos_token_id = None
        expected = [
            reference.generate(torch.tensor([prompt]), max_new_tokens=6 + i % 3, do_sample=False)[0, len(prompt) :].tolist()
            for i, prompt in enumerate(prompts)
        ]
        assert len({tuple(tokens[:3]) for tokens in expected}) == len(expected)  # the prompts matter
        return Tiny(locate_model(str(path), "auto"), prompts, expected, reference)

    return make


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


def prefill(slot: int, prompt: list[int], blocks: list[int], *, needs_token: bool = True, generation: int = 0) -> PlanRow:
    return PlanRow(slot, generation, RowKind.PREFILL, 0, len(prompt), prompt, blocks, RowSampling(), needs_token)


def decode(slot: int, start: int, *, generation: int = 0, blocks: list[int] | None = None) -> PlanRow:
    return PlanRow(slot, generation, RowKind.DECODE, start, 1, [], blocks or [], None, True)


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
        with pytest.raises(ZeroDivisionError):
            last.forward(plan, hidden)
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
