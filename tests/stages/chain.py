"""Stages chained by hand in one thread, and tiny models with what transformers generates with them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

    def __init__(
        self, models: Sequence[StageModel], limits: Limits = LIMITS, make_slots: Callable[[int, int], SlotTable] = SlotTable
    ) -> None:
        self.limits = limits
        self.runners = [StageRunner(model, make_slots(limits.max_num_seqs, limits.max_sample_len), limits) for model in models]
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


def make_tiny(directory: Path, family: str) -> Tiny:
    path = write_tiny_model(directory, family, **FAMILIES[family])
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


def prefill(slot: int, prompt: list[int], blocks: list[int], *, needs_token: bool = True, generation: int = 0) -> PlanRow:
    return PlanRow(slot, generation, RowKind.PREFILL, 0, len(prompt), prompt, blocks, RowSampling(), needs_token)


def decode(slot: int, start: int, *, generation: int = 0, blocks: list[int] | None = None) -> PlanRow:
    return PlanRow(slot, generation, RowKind.DECODE, start, 1, [], blocks or [], None, True)
