"""What the scheduler makes of the sampling that a request asks for."""

import random

import pytest

from orchestrator.request import FinishReason, SamplingParams, TokenChunk
from orchestrator.scheduler import Scheduler
from stages.errors import ConfigError
from stages.plan import MAX_SCORED_TOKENS, RowSampling, SampledRow, StepResult, TokenLogprobs
from tests.orchestrator.plan_checker import PlanChecker, expected_tokens, score
from tests.orchestrator.test_scheduler import make_request, make_scheduler


class Run:
    """A scheduler over the rank model, with the chunks of every request."""

    def __init__(self, scheduler: Scheduler) -> None:
        config = scheduler.config
        self.scheduler = scheduler
        self.checker = PlanChecker(config.max_num_seqs, config.num_blocks, config.block_size, config.max_num_batched_tokens)
        self.chunks: dict[str, list[TokenChunk]] = {}
        self.num_scored: list[int] = []

    def step(self) -> bool:
        results: list[StepResult] = []
        while (plan := self.scheduler.schedule()) is not None:
            self.num_scored.append(sum(len(row.scored) for row in plan.rows))
            results.append(self.checker.apply(plan))
        for result in results:
            for request, chunk in self.scheduler.update(result):
                assert isinstance(chunk, TokenChunk)
                self.chunks.setdefault(request.request_id, []).append(chunk)
        return bool(results)

    def to_the_end(self) -> None:
        while self.step():
            pass

    def tokens(self, name: str) -> list[int]:
        return [token_id for chunk in self.chunks[name] for token_id in chunk.token_ids]


def scores(prompt: list[int]) -> list[TokenLogprobs]:
    return [score(prompt[:i], prompt[i]) for i in range(1, len(prompt))]


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("length", [1, 2, 5, 6, 30])
def test_every_token_of_a_prompt_but_the_first_is_scored_once(chunk: int, length: int) -> None:
    run = Run(make_scheduler(max_num_batched_tokens=chunk))
    prompt = [(7 * i) % 50 for i in range(length)]
    run.scheduler.add(make_request("a", prompt, max_tokens=3, num_prompt_logprobs=0))
    run.scheduler.add(make_request("b", prompt, max_tokens=3))
    run.to_the_end()
    assert [list(chunk.prompt_logprobs) for chunk in run.chunks["a"]] == [scores(prompt), [], []]
    assert not any(chunk.prompt_logprobs for chunk in run.chunks["b"])
    assert run.tokens("a") == run.tokens("b") == expected_tokens(prompt, 3)
    assert sum(run.num_scored) == length - 1


def test_a_step_scores_no_more_than_it_may() -> None:
    run = Run(make_scheduler(max_num_batched_tokens=600, max_model_len=700, num_blocks=2000))
    prompts = [[(i * k) % 50 for i in range(550)] for k in (3, 7)]
    for k, prompt in enumerate(prompts):
        run.scheduler.add(make_request(str(k), prompt, max_tokens=1, num_prompt_logprobs=0))
    run.to_the_end()
    assert max(run.num_scored) == MAX_SCORED_TOKENS
    for k, prompt in enumerate(prompts):
        assert run.chunks[str(k)][0].prompt_logprobs == scores(prompt)


def test_preempted_requests_score_each_token_once() -> None:
    """In a pool with room for one and a bit: many are preempted, some of them half way through their prompts."""
    chance = random.Random(5)
    scheduler = make_scheduler(max_num_batched_tokens=9, num_blocks=34, max_num_seqs=8)
    run = Run(scheduler)
    prompts = {str(i): [chance.randrange(50) for _ in range(chance.randrange(1, 60))] for i in range(12)}
    for name, prompt in prompts.items():
        scheduler.add(make_request(name, prompt, max_tokens=20, num_prompt_logprobs=0))
    run.to_the_end()
    assert scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert run.tokens(name) == expected_tokens(prompt, 20)
        assert run.chunks[name][0].prompt_logprobs == scores(prompt)
        assert not any(chunk.prompt_logprobs for chunk in run.chunks[name][1:])


def test_a_prompt_that_is_begun_again_drops_what_is_known() -> None:
    scheduler = make_scheduler(num_stages=1, lane_depth=1, max_num_batched_tokens=4)
    run = Run(scheduler)
    prompt = list(range(10))
    scheduler.add(make_request("a", prompt, max_tokens=1, num_prompt_logprobs=0))
    run.step()
    [request] = scheduler.requests()
    assert request.prompt_logprobs == scores(prompt)[:4]
    scheduler._preempt(scheduler._running[0])
    run.to_the_end()
    assert run.chunks["a"][0].prompt_logprobs == scores(prompt)


def test_no_token_is_wanted() -> None:
    run = Run(make_scheduler(max_num_batched_tokens=50))
    prompt = [(7 * i) % 50 for i in range(128)]  # as long as the context: nothing has to follow
    run.scheduler.add(make_request("a", prompt, max_tokens=0, num_prompt_logprobs=0))
    with pytest.raises(ConfigError, match="prompt: has 128 tokens"):
        run.scheduler.add(make_request("b", prompt, max_tokens=1))
    run.to_the_end()
    assert run.chunks["a"] == [TokenChunk([], FinishReason.LENGTH, prompt_logprobs=scores(prompt))]
    assert run.scheduler.num_free_blocks == run.scheduler.config.num_blocks


def test_logprobs_go_with_their_tokens() -> None:
    scheduler = make_scheduler(eos_token_ids=frozenset({2}))
    scheduler.add(make_request("a", [1], max_tokens=3, num_logprobs=1))
    plan = scheduler.schedule()
    assert plan is not None
    of_tokens = [TokenLogprobs(-1.0, [9], [-0.5]), TokenLogprobs(-2.0, [2], [-2.0]), TokenLogprobs(-3.0, [4], [-3.0])]
    row = SampledRow(plan.rows[0].slot, plan.rows[0].generation, [9, 2, 4], 0, of_tokens)
    [(_, chunk)] = scheduler.update(StepResult(0, plan.step_id, [row]))
    assert isinstance(chunk, TokenChunk)
    assert (chunk.token_ids, chunk.logprobs, chunk.finish_reason) == ([9, 2], of_tokens[:2], FinishReason.STOP)


def test_what_the_last_rank_is_told() -> None:
    scheduler = make_scheduler(eos_token_ids=frozenset({2, 30}))
    asked = {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {7: 1.5, 3: -100.0},
        "num_logprobs": 4,
        "num_prompt_logprobs": 2,
    }
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=9, min_tokens=5, stop_token_ids=frozenset({8}), **asked))
    scheduler.add(make_request("b", [1], min_tokens=2, stop_token_ids=frozenset({8}), ignore_eos=True))
    scheduler.add(make_request("c", [1], stop_token_ids=frozenset({8})))
    told: list[RowSampling | None] = []
    run = Run(scheduler)
    while (plan := scheduler.schedule()) is not None:
        told += [row.sampling for row in plan.rows]
        run.checker.apply(plan)
    assert told[0] == RowSampling(
        num_prompt_tokens=3,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=[(7, 1.5), (3, -100.0)],
        banned_token_ids=[2, 8, 30],
        banned_until=8,
        num_logprobs=4,
        num_prompt_logprobs=2,
    )
    assert told[1] == RowSampling(num_prompt_tokens=1, banned_token_ids=[8], banned_until=3)
    assert told[2] == RowSampling(num_prompt_tokens=1)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"min_tokens": 5}, "min_tokens 5: must be between 0 and max_tokens, 4"),
        ({"min_tokens": -1}, "min_tokens -1: must be between 0 and max_tokens, 4"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0: must be above 0 and at most 100"),
        ({"presence_penalty": 2.5}, "presence_penalty 2.5: must be between -2 and 2"),
        ({"frequency_penalty": -3.0}, "frequency_penalty -3.0: must be between -2 and 2"),
        ({"logit_bias": {5: 101.0}}, "logit_bias 101.0: of token 5 must be between -100 and 100"),
        ({"num_logprobs": 21}, "num_logprobs 21: must be between 0 and 20"),
        ({"num_prompt_logprobs": -1}, "num_prompt_logprobs -1: must be between 0 and 20"),
    ],
)
def test_values_that_break_a_rule(asked: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(max_tokens=4, **asked)  # type: ignore[arg-type]
    assert str(caught.value) == said
