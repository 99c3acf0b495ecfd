"""What each sampling field does to the answer, through the API, on a model whose logits ``transformers`` gives too."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from orchestrator.api.app import create_app
from orchestrator.config import ServeConfig
from orchestrator.engine import Engine
from orchestrator.request import SamplingParams, TokenChunk
from orchestrator.tokenizer import Tokenizer
from stages.model.source import ModelSource
from tests.integration.test_parity import model_slices
from tests.ledgers import EngineLedger
from tests.local_pipeline import LocalPipeline, local_pipeline
from tests.orchestrator.small_tokenizer import write_tokenizer
from tests.served_engine import Sizes
from tests.stages.model_factory import write_tiny_model

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = [(7 * i) % 300 + 3 for i in range(23)]
OTHERS = [[(11 * i + k) % 300 + 3 for i in range(5 + 9 * k)] for k in range(6)]
NO_EXPORTER = ("127.0.0.1", 0)
NUM_PENALISED = 20
NUM_TOLD = 16
# Blocks for hardly more than one request: of several at a time some are preempted.
CRAMPED = Sizes(max_num_batched_tokens=16, max_model_len=80, num_blocks=22, block_size=4)
CHUNKED = Sizes(max_num_batched_tokens=5, max_model_len=96)


@dataclass(frozen=True)
class Reference:
    """The whole model, and its tokenizer."""

    source: ModelSource
    model: Any
    tokenizer: Tokenizer

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """``[len(token_ids), vocab]``"""
        return self.model(torch.tensor([token_ids])).logits[0]

    def greedy(
        self, prompt: Sequence[int], count: int, change: Callable[[torch.Tensor, list[int]], None] = lambda logits, new: None
    ) -> list[int]:
        """``change`` alters the logits of the next token in place, given those generated so far."""
        generated: list[int] = []
        for _ in range(count):
            logits = self.logits([*prompt, *generated])[-1].clone()
            change(logits, generated)
            generated.append(int(logits.argmax()))
        return generated


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    torch.set_num_threads(1)
    source = ModelSource("tiny", write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama"), None, "auto")
    tokenizer = Tokenizer.from_directory(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    return Reference(source, AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32).eval(), tokenizer)


class Listener:
    """An engine for the API that keeps the tokens it passes on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.token_ids: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[TokenChunk, None]:
        async with aclosing(self._engine.generate(request_id, prompt_token_ids, params)) as chunks:
            async for chunk in chunks:
                self.token_ids += chunk.token_ids
                yield chunk


@dataclass(frozen=True)
class Client:
    http: httpx.AsyncClient
    listener: Listener
    pipeline: LocalPipeline

    async def ask(self, route: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
        fields = {"temperature": 0, "max_tokens": 8, **fields}
        if route == COMPLETIONS:
            fields.setdefault("prompt", PROMPT)
        response = await self.http.post(route, json=fields)
        assert response.status_code == 200, response.text
        return response.json()

    async def tokens(self, **fields: Any) -> list[int]:
        """The generated tokens of a completion."""
        self.listener.token_ids.clear()
        await self.ask(**fields)
        return list(self.listener.token_ids)

    async def events(self, route: str = COMPLETIONS, **fields: Any) -> list[dict[str, Any]]:
        fields = {"temperature": 0, "max_tokens": 8, "stream": True, **fields}
        if route == COMPLETIONS:
            fields.setdefault("prompt", PROMPT)
        response = await self.http.post(route, json=fields)
        *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert done == "[DONE]"
        return [json.loads(event) for event in events]


@asynccontextmanager
async def serving(reference: Reference, num_stages: int, sizes: Sizes | None = None) -> AsyncIterator[Client]:
    async with local_pipeline(model_slices(reference.source, num_stages), "memory", sizes or Sizes()) as pipeline:
        listener = Listener(pipeline.engine)
        metrics = EngineLedger().metrics
        app = create_app(listener, lambda: reference.tokenizer, ServeConfig(), metrics, NO_EXPORTER)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://stagewire", timeout=60) as http:
            yield Client(http, listener, pipeline)


def penalties(
    prompt: Sequence[int], repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0
) -> Callable[[torch.Tensor, list[int]], None]:
    def change(logits: torch.Tensor, generated: list[int]) -> None:
        for token_id in {*prompt, *generated}:
            logits[token_id] = logits[token_id] / repetition if logits[token_id] > 0 else logits[token_id] * repetition
        for token_id in set(generated):
            logits[token_id] -= presence + frequency * generated.count(token_id)

    return change


# ---- penalties, biases, bans ------------------------------------------------------------------------------------------


PENALTIES: list[dict[str, float]] = [
    {"repetition_penalty": 2.0},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.5},
    {"frequency_penalty": -2.0},
    {"repetition_penalty": 1.2, "presence_penalty": -1.0, "frequency_penalty": 0.8},
]


@dataclass(frozen=True)
class Penalised:
    """A request, and what transformers generates for it."""

    prompt: list[int]
    penalties: dict[str, float]
    tokens: list[int]


@pytest.fixture(scope="module")
def penalised(reference: Reference) -> list[Penalised]:
    found: list[Penalised] = []
    for i, prompt in enumerate([PROMPT, *OTHERS]):
        asked = PENALTIES[i % len(PENALTIES)]
        change = penalties(prompt, **{name.removesuffix("_penalty"): value for name, value in asked.items()})
        found.append(Penalised(prompt, asked, reference.greedy(prompt, NUM_PENALISED, change)))
    plain = [reference.greedy(one.prompt, NUM_PENALISED) for one in found]
    assert sum(a != b.tokens for a, b in zip(plain, found, strict=True)) >= 5, "the penalties matter"
    return found


@pytest.mark.parametrize("num_stages", [1, 2])
async def test_penalties_give_the_tokens_of_their_definition(
    reference: Reference, penalised: list[Penalised], num_stages: int
) -> None:
    """Together, in chunks, and in a KV pool so small that some are preempted and prefilled again with what they generated."""
    async with serving(reference, num_stages, CRAMPED) as client:
        answers = await asyncio.gather(
            *(
                client.pipeline.tokens(str(i), one.prompt, max_tokens=NUM_PENALISED, ignore_eos=True, **one.penalties)
                for i, one in enumerate(penalised)
            )
        )
        assert answers == [one.tokens for one in penalised]
        assert client.pipeline.engine.scheduler.num_preemptions > 0
        for one in (penalised[0], penalised[4]):
            asked = await client.tokens(prompt=one.prompt, max_tokens=NUM_PENALISED, **one.penalties)
            assert asked == one.tokens, "through the API"


async def test_a_bias_forces_and_forbids(reference: Reference) -> None:
    free = reference.greedy(PROMPT, 4)
    async with serving(reference, 2) as client:
        assert await client.tokens(max_tokens=4, logit_bias={"77": 100}) == [77] * 4
        forbidden = await client.tokens(max_tokens=4, logit_bias={str(free[0]): -100})
        assert await client.tokens(max_tokens=4, logit_bias={str(free[0]): -1e-6}) == free

    def forbid(logits: torch.Tensor, _generated: list[int]) -> None:
        logits[free[0]] -= 100

    assert forbidden == reference.greedy(PROMPT, 4, forbid) != free


async def test_what_leaves_one_token_gives_the_greedy_one(reference: Reference) -> None:
    free = reference.greedy(PROMPT, 8)
    async with serving(reference, 2) as client:
        for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}, {"temperature": 0}):
            assert await client.tokens(**{"temperature": 2.0, "seed": 1, **narrow}) == free
        hot = [await client.tokens(temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    assert free not in hot


async def test_ends_of_a_generation(reference: Reference) -> None:
    """The model's own end, one more that the client names, and neither before there are enough tokens."""
    free = reference.greedy(PROMPT, 12)
    eos, stop = free[2], free[5]
    assert len({*free[:6]}) == 6

    def without(*banned: int) -> Callable[[torch.Tensor, list[int]], None]:
        def change(logits: torch.Tensor, generated: list[int]) -> None:
            if len(generated) < 4:
                logits[list(banned)] = -math.inf

        return change

    async with serving(reference, 2, Sizes(eos_token_ids=frozenset({eos}))) as client:

        async def ends(**fields: Any) -> tuple[list[int], str, int | None, int]:
            answer = await client.ask(max_tokens=12, **fields)
            [choice] = answer["choices"]
            tokens = await client.tokens(max_tokens=12, **fields)
            return tokens, choice["finish_reason"], choice["stop_reason"], answer["usage"]["completion_tokens"]

        assert await ends() == (free[:3], "stop", None, 3)
        assert await ends(ignore_eos=True) == (free, "length", None, 12)
        assert await ends(ignore_eos=True, stop_token_ids=[stop]) == (free[:6], "stop", stop, 6)
        tokens, reason, _, _ = await ends(min_tokens=4)
        wanted = reference.greedy(PROMPT, 12, without(eos))
        assert tokens == (wanted if eos not in wanted else wanted[: wanted.index(eos) + 1])
        assert len(tokens) > 4
        assert reason == ("stop" if eos in wanted else "length")
        tokens, *_ = await ends(min_tokens=4, ignore_eos=True, stop_token_ids=[free[3]])
        assert tokens[:4] == reference.greedy(PROMPT, 4, without(free[3])) != free[:4]
        answer = await client.ask(max_tokens=12, stop_token_ids=[stop], ignore_eos=True)
        assert answer["choices"][0]["text"] == reference.tokenizer.decode(free[:5]), "without the one that ended it"


async def test_a_stop_string_is_not_looked_for_among_the_first_tokens(reference: Reference) -> None:
    free = reference.greedy(PROMPT, 12)
    stop = reference.tokenizer.decode(free[:1])
    assert stop
    async with serving(reference, 1) as client:
        [choice] = (await client.ask(max_tokens=12, stop=[stop]))["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        [choice] = (await client.ask(max_tokens=12, stop=[stop], min_tokens=1))["choices"]
        assert choice["text"].startswith(stop)


# ---- log-probabilities ------------------------------------------------------------------------------------------------


def close(found: Sequence[float], expected: torch.Tensor) -> None:
    assert found == pytest.approx(expected.tolist(), abs=1e-4)


def legacy_name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def check_completion(reference: Reference, choice: Mapping[str, Any], tokens: Sequence[int]) -> None:
    """That an echoed completion tells of every token what transformers would; ``tokens`` are prompt and answer."""
    told = choice["logprobs"]
    expected = reference.logits(tokens).double().log_softmax(1)
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    close(told["token_logprobs"][1:], expected[range(len(tokens) - 1), tokens[1:]])
    for i, (own, name, top) in enumerate(
        zip(told["token_logprobs"][1:], told["tokens"][1:], told["top_logprobs"][1:], strict=True)
    ):
        best = expected[i].topk(3)
        wanted: dict[str, float] = {}
        for token_id, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            wanted.setdefault(legacy_name(reference.tokenizer.token_bytes(token_id)), value)  # some read alike
        wanted.setdefault(name, own)
        assert list(top) == list(wanted)
        assert top == pytest.approx(wanted, abs=1e-4)
    assert len(told["tokens"]) == len(told["text_offset"]) == len(tokens)


@pytest.fixture(scope="module")
def told_tokens(reference: Reference) -> list[list[int]]:
    return [reference.greedy(prompt, NUM_TOLD) for prompt in [PROMPT, *OTHERS]]


@pytest.mark.parametrize(("num_stages", "chunk"), [(1, 64), (1, 5), (2, 64), (2, 5)])
async def test_logprobs_are_those_of_transformers(
    reference: Reference, told_tokens: list[list[int]], num_stages: int, chunk: int
) -> None:
    prompts = [PROMPT, *OTHERS]
    async with serving(reference, num_stages, replace(CRAMPED, max_num_batched_tokens=chunk)) as client:
        answer = await client.ask(prompt=prompts, echo=True, logprobs=3, max_tokens=NUM_TOLD)
        assert len(answer["choices"]) == len(prompts)
        for choice, prompt, tokens in zip(answer["choices"], prompts, told_tokens, strict=True):
            check_completion(reference, choice, [*prompt, *tokens])
        assert client.pipeline.engine.scheduler.num_preemptions > 0
        alone = await client.ask(prompt=PROMPT, logprobs=2, max_tokens=NUM_TOLD)
        assert alone["choices"][0]["logprobs"]["tokens"] == answer["choices"][0]["logprobs"]["tokens"][len(PROMPT) :]


async def test_logprobs_are_of_the_raw_logits(reference: Reference) -> None:
    asked = {"temperature": 1.5, "seed": 3, "top_k": 5, "logit_bias": {"40": 8}, "repetition_penalty": 1.3, "logprobs": 0}
    async with serving(reference, 2) as client:
        tokens = await client.tokens(**asked)
        [choice] = (await client.ask(**asked))["choices"]
    expected = reference.logits([*PROMPT, *tokens]).double().log_softmax(1)
    close(choice["logprobs"]["token_logprobs"], expected[range(len(PROMPT) - 1, len(PROMPT) + 7), tokens])
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [[name] for name in choice["logprobs"]["tokens"]]


async def test_scoring_as_an_evaluation_harness_does(reference: Reference) -> None:
    """Log-likelihood of a continuation: the prompt echoed, one token more that is dropped, or none at all."""
    contexts, continuations = [PROMPT, OTHERS[2]], [[9, 30, 4], reference.greedy(OTHERS[2], 5)]
    prompts = [a + b for a, b in zip(contexts, continuations, strict=True)]
    async with serving(reference, 2, CHUNKED) as client:
        one = await client.ask(prompt=prompts, echo=True, logprobs=1, max_tokens=1, seed=1234)
        none = await client.ask(prompt=prompts, echo=True, logprobs=1, max_tokens=0)
    assert none["usage"]["completion_tokens"] == 0
    assert one["usage"] == {
        "prompt_tokens": sum(map(len, prompts)),
        "completion_tokens": 2,
        "total_tokens": sum(map(len, prompts)) + 2,
    }
    for i, (context, prompt) in enumerate(zip(contexts, prompts, strict=True)):
        choice, other = one["choices"][i], none["choices"][i]
        assert choice["index"] == other["index"] == i
        assert other["finish_reason"] == "length"
        assert other["text"] == reference.tokenizer.decode(prompt)
        scored = choice["logprobs"]["token_logprobs"][len(context) : -1]
        expected = reference.logits(prompt).double().log_softmax(1)
        close(scored, expected[range(len(context) - 1, len(prompt) - 1), prompt[len(context) :]])
        assert other["logprobs"]["token_logprobs"][len(context) :] == scored
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        is_greedy = all(own == max(top.values()) for own, top in zip(scored, tops, strict=True))
        assert is_greedy == (i == 1), "the most probable token has exactly the highest value"


@pytest.mark.parametrize("prompt", ["naïve café – 你好 👍🏽 one two", "one<|im_end|>two"])
async def test_offsets_point_into_the_text(reference: Reference, prompt: str) -> None:
    async with serving(reference, 1) as client:
        [choice] = (await client.ask(prompt=prompt, echo=True, logprobs=0, max_tokens=20, skip_special_tokens=False))["choices"]
        [bare] = (await client.ask(prompt=prompt, logprobs=0, max_tokens=20, skip_special_tokens=False))["choices"]
    text, told = choice["text"], choice["logprobs"]
    assert text == prompt + bare["text"]
    assert told["tokens"][-20:] == bare["logprobs"]["tokens"]
    assert told["text_offset"][-20:] == [len(prompt) + offset for offset in bare["logprobs"]["text_offset"]]
    whole = [i for i, token in enumerate(told["tokens"]) if not token.startswith("bytes:")]
    for i in whole:
        offset = told["text_offset"][i]
        if "�" not in text[offset : offset + len(told["tokens"][i])]:
            assert text[offset:].startswith(told["tokens"][i])
    assert len(whole) > 5


async def test_chat_logprobs(reference: Reference) -> None:
    messages = [{"role": "user", "content": "one two"}]
    prompt = reference.tokenizer.apply_chat_template(messages)
    tokens = reference.greedy(prompt, 6)
    expected = reference.logits([*prompt, *tokens]).double().log_softmax(1)
    async with serving(reference, 2) as client:
        answer = await client.ask(CHAT, messages=messages, max_tokens=6, logprobs=True, top_logprobs=4)
        bare = await client.ask(CHAT, messages=messages, max_tokens=6, logprobs=True)
        events = await client.events(CHAT, messages=messages, max_tokens=6, logprobs=True, top_logprobs=4)
        without = await client.ask(CHAT, messages=messages, max_tokens=6)
    content = answer["choices"][0]["logprobs"]["content"]
    close([one["logprob"] for one in content], expected[range(len(prompt) - 1, len(prompt) + 5), tokens])
    for i, (one, token_id) in enumerate(zip(content, tokens, strict=True)):
        assert bytes(one["bytes"]) == reference.tokenizer.token_bytes(token_id)
        assert one["token"] == bytes(one["bytes"]).decode(errors="replace")
        best = expected[len(prompt) - 1 + i].topk(4)
        close([top["logprob"] for top in one["top_logprobs"]], best.values)
        assert [bytes(top["bytes"]) for top in one["top_logprobs"]] == [
            reference.tokenizer.token_bytes(top_id) for top_id in best.indices.tolist()
        ]
    assert [one["top_logprobs"] for one in bare["choices"][0]["logprobs"]["content"]] == [[]] * 6
    streamed = [choice["logprobs"]["content"] for event in events for choice in event["choices"] if choice["logprobs"]]
    assert [one for part in streamed for one in part] == content
    assert without["choices"][0]["logprobs"] is None


# ---- several choices --------------------------------------------------------------------------------------------------


DRAWN = {"temperature": 1.2, "seed": 42, "max_tokens": 10}


def texts(answer: Mapping[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


async def test_choices_differ_and_repeat(reference: Reference) -> None:
    seen: list[list[str]] = []
    for num_stages in (1, 2):
        async with serving(reference, num_stages) as client:
            answer = await client.ask(n=4, **DRAWN)
            seen.append(texts(answer))
            assert answer["usage"] == {"prompt_tokens": 23, "completion_tokens": 40, "total_tokens": 63}
            assert texts(await client.ask(n=2, best_of=2, **DRAWN)) == seen[0][:2]
            assert texts(await client.ask(**DRAWN)) == seen[0][:1], "the first choice is that of a single one"
            unseeded = texts(await client.ask(n=4, temperature=1.2, max_tokens=10))
            assert len(set(unseeded)) == 4
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 4


async def test_prompts_in_a_list_are_answered_each_as_alone(reference: Reference) -> None:
    prompts = [PROMPT, "one two", OTHERS[3]]
    async with serving(reference, 2, CHUNKED) as client:
        alone = [texts(await client.ask(prompt=prompt, n=2, **DRAWN)) for prompt in prompts]
        answer = await client.ask(prompt=prompts, n=2, **DRAWN)
        num_prompt = len(PROMPT) + len(reference.tokenizer.encode("one two")) + len(OTHERS[3])
    assert texts(answer) == [text for pair in alone for text in pair]
    assert answer["usage"] == {"prompt_tokens": num_prompt, "completion_tokens": 60, "total_tokens": num_prompt + 60}


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
async def test_choices_are_streamed_side_by_side(reference: Reference, route: str) -> None:
    fields: dict[str, Any] = {**DRAWN, "n": 3}
    if route == CHAT:
        fields["messages"] = [{"role": "user", "content": "one two"}]
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(reference, 2) as client:
        whole = await client.ask(route, **fields)
        *events, last = await client.events(route, **fields, stream_options=options)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    counts = [event["usage"]["completion_tokens"] for event in events if "usage" in event]
    assert counts == sorted(counts)
    order: list[int] = []
    for choice in whole["choices"]:
        mine = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        if route == CHAT:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(one["delta"].get("content", "") for one in mine) == choice["message"]["content"]
        else:
            assert "".join(one["text"] for one in mine) == choice["text"]
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
    order = [one["index"] for event in events for one in event["choices"]]
    assert order != sorted(order), "none waits for the end of another"


async def test_echo_and_logprobs_in_a_stream_are_those_of_the_whole(reference: Reference) -> None:
    fields = {"prompt": ["one two", PROMPT], "echo": True, "logprobs": 2, "max_tokens": 6}
    async with serving(reference, 1, CHUNKED) as client:
        whole = await client.ask(**fields)
        events = await client.events(**fields)
        nothing = await client.events(**{**fields, "max_tokens": 0, "prompt": "one two"})
    for choice in whole["choices"]:
        mine = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for one in mine for value in one["logprobs"][name]] == values
    assert whole["choices"][0]["text"].startswith("one two")
    [event] = nothing
    assert (event["choices"][0]["text"], event["choices"][0]["finish_reason"]) == ("one two", "length")


async def test_a_client_that_leaves_ends_all_choices(reference: Reference) -> None:
    async with serving(reference, 2, Sizes(max_model_len=256)) as client:
        engine = client.pipeline.engine
        asking = asyncio.create_task(client.ask(n=5, max_tokens=200, ignore_eos=True))
        async with asyncio.timeout(20):
            while engine.num_running + engine.num_waiting < 5:
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            while engine.num_running or engine.num_waiting:
                await asyncio.sleep(0)
        assert await client.tokens(max_tokens=8) == reference.greedy(PROMPT, 8), "nothing of them is left"


async def test_a_queue_with_no_room_for_all_choices_takes_none(reference: Reference) -> None:
    async with serving(reference, 1, Sizes(max_waiting=2, max_num_seqs=1)) as client:
        response = await client.http.post(COMPLETIONS, json={"prompt": PROMPT, "n": 8, "stream": True})
        assert response.status_code == 429
        assert client.pipeline.engine.num_waiting == 0
        assert len(await client.tokens(max_tokens=3)) == 3
