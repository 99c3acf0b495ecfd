"""The tokens of a running pipeline are those of ``transformers``' own ``generate``, one by one, however it is cut and batched.

Every run is disturbed on purpose: requests that are aborted on the way, and, with many at a time, a KV pool too small for
all of them, so that some are preempted and computed again.
"""

import asyncio
import itertools
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from orchestrator.request import SamplingParams
from orchestrator.tokenizer import Tokenizer
from stages.assembly import Slice
from stages.model.attention import register_attention
from stages.model.slice import default_split, load_stage
from stages.model.source import ModelSource
from stages.plan import TokenLogprobs
from stages.runner import StageRunner
from stages.topology import stage_infos
from tests.local_pipeline import LocalPipeline, local_pipeline
from tests.served_engine import Sizes
from tests.stages.model_factory import FAMILIES, write_tiny_model

PROMPTS: list[str] = json.loads((Path(__file__).parent.parent / "prompts.json").read_text())
BLOCK_SIZE = 4  # small, so that every request outgrows what it was admitted with


@dataclass(frozen=True)
class Case:
    num_stages: int
    transport: str
    num_concurrent: int
    chunk: int

    def __str__(self) -> str:
        return f"pp{self.num_stages}-{self.transport}-{self.num_concurrent}x-chunk{self.chunk}"


TRANSPORTS = ("memory", "shared_memory")
MATRIX = [
    *itertools.starmap(Case, itertools.product((1, 2, 3, 4), TRANSPORTS, (1, 16), (16, 512))),
]
DEEP = list(itertools.starmap(Case, itertools.product((30,), ("memory",), (1, 16), (16, 512))))
# Every value of the four factors is in one of these. The tiny model goes through the whole matrix.
SOME = [
    Case(1, "memory", 16, 512),
    Case(2, "shared_memory", 1, 16),
    Case(3, "gloo", 1, 512),
    Case(4, "shared_memory", 16, 16),
]
GLOO_IN_FULL = [*itertools.starmap(Case, itertools.product((2, 3), ("gloo",), (1, 16), (16, 512)))]


@lru_cache(maxsize=2)  # one model cut in one way at a time
def model_slices(source: ModelSource, num_stages: int) -> list[Slice]:
    register_attention()
    torch.set_num_threads(1)
    slices: list[Slice] = []
    for info in stage_infos(default_split(source, torch.float32, num_stages)):
        model = load_stage(source, info, torch.float32)
        slices.append(
            Slice(
                info, model.boundary[0], model.vocab_size, lambda slots, limits, model=model: StageRunner(model, slots, limits)
            )
        )
    return slices


def reference_tokens(source: ModelSource, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens of ``transformers``, one prompt at a time, in float32."""
    torch.set_num_threads(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    answers: list[list[int]] = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def sizes_for(case: Case, prompts: Sequence[list[int]], num_tokens: int) -> Sizes:
    """With many requests at a time: hardly more room than the longest of them needs, so that some are preempted."""
    longest = max(map(len, prompts)) + num_tokens + 1
    blocks_of_longest = -(-longest // BLOCK_SIZE)
    return Sizes(
        max_num_seqs=case.num_concurrent + 2,
        max_num_batched_tokens=case.chunk,
        max_model_len=longest,
        num_blocks=blocks_of_longest + (2 if case.num_concurrent > 1 else blocks_of_longest),
        block_size=BLOCK_SIZE,
    )


async def run_prompts(
    pipeline: LocalPipeline, prompts: Sequence[list[int]], num_concurrent: int, num_tokens: int
) -> list[list[int]]:
    """The greedy tokens of every prompt, ``num_concurrent`` at a time, with other requests aborted in between."""
    seats = asyncio.Semaphore(num_concurrent)

    async def one(i: int) -> list[int]:
        async with seats:
            if i % 5 == 2:
                await abort_one(f"aborted {i}", prompts[i], num_tokens_before=i % 3)
            return await pipeline.tokens(str(i), prompts[i], max_tokens=num_tokens, ignore_eos=True)

    async def abort_one(name: str, prompt: list[int], num_tokens_before: int) -> None:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        async with aclosing(pipeline.engine.generate(name, prompt[::-1], params)) as chunks:
            for _ in range(num_tokens_before + 1):
                await anext(chunks)

    return list(await asyncio.gather(*(one(i) for i in range(len(prompts)))))


async def check_case(source: ModelSource, case: Case, prompts: Sequence[list[int]], wanted: Sequence[list[int]]) -> None:
    num_tokens = len(wanted[0])
    sizes = sizes_for(case, prompts, num_tokens)
    async with local_pipeline(model_slices(source, case.num_stages), case.transport, sizes) as pipeline:
        answers = await run_prompts(pipeline, prompts, case.num_concurrent, num_tokens)
        scheduler = pipeline.engine.scheduler
        if case.num_concurrent > 1 and case.num_stages <= 4:  # thirty stages take one row a step: few run at a time
            assert scheduler.num_preemptions > 0, "the pool was meant to be too small"
        assert scheduler.num_free_blocks == sizes.num_blocks
    for prompt, answer, want in zip(prompts, answers, wanted, strict=True):
        assert answer == want, f"{len(prompt)} prompt tokens"


# ---- tiny models: everything ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return ModelSource("tiny", write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama"), None, "auto")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """With a layer for each of thirty stages."""
    return ModelSource("deep", write_tiny_model(tmp_path_factory.mktemp("deep"), "llama", num_hidden_layers=30), None, "auto")


@pytest.fixture(scope="module")
def tiny_prompts() -> list[list[int]]:
    return [[3 + byte for byte in prompt.encode()][:120] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def tiny_wanted(tiny: ModelSource, tiny_prompts: list[list[int]]) -> list[list[int]]:
    return reference_tokens(tiny, tiny_prompts, 16)


@pytest.fixture(scope="module")
def deep_wanted(deep: ModelSource, tiny_prompts: list[list[int]]) -> list[list[int]]:
    return reference_tokens(deep, tiny_prompts, 8)


@pytest.mark.parametrize("case", [*MATRIX, *GLOO_IN_FULL], ids=str)
async def test_a_tiny_model(tiny: ModelSource, tiny_prompts: list[list[int]], tiny_wanted: list[list[int]], case: Case) -> None:
    await check_case(tiny, case, tiny_prompts, tiny_wanted)


@pytest.mark.parametrize("case", DEEP[2:3], ids=str)
async def test_a_deep_model(deep: ModelSource, tiny_prompts: list[list[int]], deep_wanted: list[list[int]], case: Case) -> None:
    await check_case(deep, case, tiny_prompts, deep_wanted)


@pytest.mark.full
@pytest.mark.parametrize("case", [*DEEP[:2], *DEEP[3:]], ids=str)
async def test_a_deep_model_in_full(
    deep: ModelSource, tiny_prompts: list[list[int]], deep_wanted: list[list[int]], case: Case
) -> None:
    await check_case(deep, case, tiny_prompts, deep_wanted)


VARIANTS: list[tuple[str, dict[str, object]]] = [
    *FAMILIES.items(),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("qwen3", {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=lambda value: str(value).replace(" ", ""))
async def test_a_family(tmp_path: Path, family: str, overrides: dict[str, object], num_stages: int) -> None:
    source = ModelSource(family, write_tiny_model(tmp_path, family, **overrides), None, "auto")
    prompts = [[(7 * i + 3 * j) % 500 + 3 for j in range(length)] for i, length in enumerate((1, 5, 23, 40))]
    wanted = reference_tokens(source, prompts, 8)
    async with local_pipeline(
        model_slices(source, num_stages), "shared_memory", Sizes(max_num_batched_tokens=16, max_model_len=64)
    ) as pipeline:
        assert await run_prompts(pipeline, prompts, 4, 8) == wanted


# ---- seeds ------------------------------------------------------------------------------------------------------------


async def test_a_seed_gives_the_same_tokens_for_any_pipeline_and_company(
    tiny: ModelSource, tiny_prompts: list[list[int]]
) -> None:
    prompts = [prompt[:40] for prompt in tiny_prompts[:16]]
    params = {"max_tokens": 12, "temperature": 0.8, "top_p": 0.95, "top_k": 100, "min_p": 0.001, "ignore_eos": True}
    seen: set[tuple[int, ...]] = set()
    others: set[tuple[int, ...]] = set()
    for num_stages in (1, 2, 4):
        async with local_pipeline(model_slices(tiny, num_stages), "shared_memory") as pipeline:
            alone = await pipeline.tokens("alone", prompts[3], seed=42, **params)
            among = await asyncio.gather(
                *(pipeline.tokens(str(i), prompt, seed=42 if i == 3 else i, **params) for i, prompt in enumerate(prompts))
            )
            other = await pipeline.tokens("other", prompts[3], seed=43, **params)
        seen |= {tuple(alone), tuple(among[3])}
        others.add(tuple(other))
    assert len(seen) == 1
    assert len(others) == 1
    assert seen != others


# ---- SmolLM2 ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_prompts(smollm2: ModelSource) -> list[list[int]]:
    tokenizer = Tokenizer.from_directory(smollm2.path)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def smollm2_wanted(smollm2: ModelSource, smollm2_prompts: list[list[int]]) -> list[list[int]]:
    return reference_tokens(smollm2, smollm2_prompts, 16)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", SOME, ids=str)
async def test_smollm2(
    smollm2: ModelSource, smollm2_prompts: list[list[int]], smollm2_wanted: list[list[int]], case: Case
) -> None:
    wanted = [tokens[:8] for tokens in smollm2_wanted] if case.num_concurrent == 1 else smollm2_wanted
    await check_case(smollm2, case, smollm2_prompts, wanted)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [*MATRIX, *DEEP, *GLOO_IN_FULL], ids=str)
async def test_smollm2_in_full(
    smollm2: ModelSource, smollm2_prompts: list[list[int]], smollm2_wanted: list[list[int]], case: Case
) -> None:
    await check_case(smollm2, case, smollm2_prompts, smollm2_wanted)


async def test_smollm2_seeds(smollm2: ModelSource, smollm2_prompts: list[list[int]]) -> None:
    params = {"max_tokens": 8, "temperature": 1.0, "top_p": 0.9, "ignore_eos": True}
    seen: set[tuple[int, ...]] = set()
    for num_stages in (1, 2, 4):
        async with local_pipeline(model_slices(smollm2, num_stages), "memory", Sizes(max_num_batched_tokens=256)) as pipeline:
            alone = await pipeline.tokens("alone", smollm2_prompts[3], seed=7, **params)
            among = await asyncio.gather(
                *(pipeline.tokens(str(i), smollm2_prompts[i], seed=7 + i - 3, **params) for i in range(16))
            )
        seen |= {tuple(alone), tuple(among[3])}
    assert len(seen) == 1


@pytest.fixture(scope="module")
def smollm2_logprobs(
    smollm2: ModelSource, smollm2_prompts: list[list[int]], smollm2_wanted: list[list[int]]
) -> list[torch.Tensor]:
    """Of every next token ``[len(prompt) + 7, vocab]``, for some prompts and their answers."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32)
    with torch.inference_mode():
        return [
            model(torch.tensor([smollm2_prompts[i] + smollm2_wanted[i][:7]])).logits[0].double().log_softmax(1) for i in TOLD
        ]


TOLD = (0, 3, 9)  # prompts of several lengths


@pytest.mark.parametrize("num_stages", [1, 2])
async def test_smollm2_logprobs(
    smollm2: ModelSource,
    smollm2_prompts: list[list[int]],
    smollm2_wanted: list[list[int]],
    smollm2_logprobs: list[torch.Tensor],
    num_stages: int,
) -> None:
    """Of prompts in chunks and of what is generated, those of ``transformers`` to 1e-4."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, num_logprobs=5, num_prompt_logprobs=5)
    num_chunked = 0
    async with local_pipeline(model_slices(smollm2, num_stages), "memory", Sizes(max_num_batched_tokens=16)) as pipeline:

        async def told(i: int) -> list[TokenLogprobs]:
            chunks = [chunk async for chunk in pipeline.engine.generate(str(i), smollm2_prompts[i], params)]
            assert [t for chunk in chunks for t in chunk.token_ids] == smollm2_wanted[i][:8]
            return [*chunks[0].prompt_logprobs, *(one for chunk in chunks for one in chunk.logprobs)]

        answers = await asyncio.gather(*map(told, TOLD))
    for i, answer, expected in zip(TOLD, answers, smollm2_logprobs, strict=True):
        tokens = smollm2_prompts[i] + smollm2_wanted[i][:8]
        num_chunked += len(smollm2_prompts[i]) > 16
        own = expected[range(len(tokens) - 1), tokens[1:]]
        assert [one.logprob for one in answer] == pytest.approx(own.tolist(), abs=1e-4)
        best = expected.topk(5).values
        assert [one.top_logprobs for one in answer] == [pytest.approx(row, abs=1e-4) for row in best.tolist()]
        for place, one in enumerate(answer):
            assert expected[place, one.top_token_ids].tolist() == pytest.approx(one.top_logprobs, abs=1e-4)
    assert num_chunked > 0


def test_the_prompts_are_varied(smollm2_prompts: list[list[int]]) -> None:
    lengths = [len(prompt) for prompt in smollm2_prompts]
    assert len(lengths) == 20
    assert min(lengths) <= 2
    assert sum(length > 64 for length in lengths) >= 4, "several chunks of 16 long"
