"""The scheduler without a loop: every decision, on plain state."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.request import FinishReason, QueueFull, Request, SamplingParams, TokenChunk
from orchestrator.scheduler import Scheduler, SchedulerConfig
from stages.errors import ConfigError, ControlError, StageFailed
from stages.plan import RowKind, SampledRow, StepPlan, StepResult
from tests.orchestrator.plan_checker import PlanChecker, expected_tokens, next_token


def make_scheduler(**overrides: object) -> Scheduler:
    settings: dict[str, object] = {
        "num_stages": 2,
        "lane_depth": 2,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "num_blocks": 200,
        "block_size": 4,
        "max_waiting": 100,
        "eos_token_ids": frozenset(),
    }
    return Scheduler(SchedulerConfig(**(settings | overrides)))  # type: ignore[arg-type]


def make_request(name: str, prompt: list[int], max_tokens: int = 4, **params: object) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),  # type: ignore[arg-type]
        seed=0,
    )


class Run:
    """A scheduler and the rank model, with results that come back when the test says so."""

    def __init__(self, scheduler: Scheduler) -> None:
        config = scheduler.config
        self.scheduler = scheduler
        self.checker = PlanChecker(config.max_num_seqs, config.num_blocks, config.block_size, config.max_num_batched_tokens)
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            assert plan.num_in_flight == self.scheduler.num_in_flight <= self.scheduler.config.lane_depth
            self.plans.append(plan)
            self.results.append(self.checker.apply(plan))
        return plan

    def plan_all(self) -> list[StepPlan]:
        plans = []
        while (plan := self.plan()) is not None:
            plans.append(plan)
        return plans

    def result(self) -> None:
        for request, chunk in self.scheduler.update(self.results.popleft()):
            assert isinstance(chunk, TokenChunk)
            assert request.request_id not in self.finished, "no token after the end"
            self.tokens.setdefault(request.request_id, []).extend(chunk.token_ids)
            if chunk.finish_reason is not None:
                self.finished[request.request_id] = chunk.finish_reason

    def to_the_end(self) -> None:
        for _ in range(100_000):
            self.plan_all()
            if not self.results:
                return
            self.result()
        raise AssertionError("does not come to an end")

    def check_nothing_is_left(self) -> None:
        scheduler = self.scheduler
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_in_flight) == (0, 0, 0)
        assert scheduler.num_free_blocks == scheduler.config.num_blocks
        assert scheduler.requests() == []


def test_one_request_prefills_then_decodes() -> None:
    run = Run(make_scheduler())
    run.scheduler.add(make_request("a", [5, 6, 7], max_tokens=3))
    plans = run.plan_all()
    assert [(r.kind, r.start, r.token_ids, r.needs_token) for r in plans[0].rows] == [(RowKind.PREFILL, 0, [5, 6, 7], True)]
    assert len(plans) == 1, "a request is in at most one step in flight"
    run.to_the_end()
    assert run.tokens["a"] == expected_tokens([5, 6, 7], 3)
    assert run.finished["a"] is FinishReason.LENGTH
    run.check_nothing_is_left()


def test_a_long_prompt_is_cut_into_chunks_and_only_the_last_needs_a_token() -> None:
    run = Run(make_scheduler(max_num_batched_tokens=5))
    run.scheduler.add(make_request("a", list(range(12)), max_tokens=2))
    run.to_the_end()
    chunks = [row for plan in run.plans for row in plan.rows if row.kind is RowKind.PREFILL]
    assert [(row.start, row.num_tokens, row.needs_token) for row in chunks] == [(0, 5, False), (5, 5, False), (10, 2, True)]
    assert run.tokens["a"] == expected_tokens(list(range(12)), 2)


def test_decodes_and_prefill_chunks_share_a_step() -> None:
    run = Run(make_scheduler(num_stages=1, lane_depth=1, max_num_batched_tokens=6))
    run.scheduler.add(make_request("a", [1, 2], max_tokens=8))
    run.plan()
    run.result()
    run.scheduler.add(make_request("b", list(range(9)), max_tokens=2))
    plan = run.plan()
    assert plan is not None
    assert [(row.kind, row.num_tokens) for row in plan.rows] == [(RowKind.DECODE, 1), (RowKind.PREFILL, 5)]
    run.to_the_end()
    assert run.tokens["b"] == expected_tokens(list(range(9)), 2)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_requests", [1, 3, 8, 64])
def test_as_many_steps_are_in_flight_as_there_are_stages(num_stages: int, num_requests: int) -> None:
    run = Run(
        make_scheduler(
            num_stages=num_stages, lane_depth=num_stages, max_num_seqs=64, num_blocks=2000, max_num_batched_tokens=512
        )
    )
    for i in range(num_requests):
        run.scheduler.add(make_request(str(i), [i, i + 1, i + 2], max_tokens=100))
    for step in range(10 * num_stages):
        run.plan_all()
        assert run.scheduler.num_in_flight == min(num_stages, num_requests), f"after {step} results"
        run.result()
    sizes = [len(plan.rows) for plan in run.plans[num_stages:]]
    assert max(sizes) <= -(-num_requests // num_stages), "the rows convoy in one step"


def test_a_full_pool_does_not_make_the_running_rows_convoy() -> None:
    # Sixty wait, four fit: the cap must come from the four.
    run = Run(make_scheduler(num_stages=2, num_blocks=32, max_num_seqs=64, max_model_len=32))
    for i in range(64):
        run.scheduler.add(make_request(str(i), [i] * 24, max_tokens=8))
    for _ in range(12):
        run.plan_all()
        assert run.scheduler.num_in_flight == 2
        run.result()


@pytest.mark.parametrize(("num_stages", "max_tokens", "num_old"), [(1, 1, 1), (1, 1, 2), (2, 16, 40), (2, 64, 40)])
def test_nobody_starves_when_a_step_has_not_room_for_all(num_stages: int, max_tokens: int, num_old: int) -> None:
    run = Run(
        make_scheduler(
            num_stages=num_stages,
            lane_depth=num_stages,
            max_num_seqs=64,
            max_num_batched_tokens=max_tokens,
            max_model_len=512,
            num_blocks=20_000,
        )
    )
    for i in range(num_old):
        run.scheduler.add(make_request(f"old {i}", [i], max_tokens=400))
    while len(run.tokens) < num_old:
        run.plan_all()
        run.result()
    before = len(run.plans)
    counts_before = [len(run.tokens[f"old {i}"]) for i in range(num_old)]
    run.scheduler.add(make_request("late", [7], max_tokens=5))
    while "late" not in run.finished:
        run.plan_all()
        run.result()
    rounds = -(-(num_old + 1) // max_tokens)  # steps in which everybody could have had a turn
    assert len(run.plans) - before <= 5 * (rounds + 1) * 2 + 2 * num_stages
    counts = [len(run.tokens[f"old {i}"]) - was for i, was in enumerate(counts_before)]
    assert max(counts) - min(counts) <= 2 + 2 * num_stages, "turns are shared"


def test_end_of_sequence_and_stop_tokens_end_a_request() -> None:
    first, second, *_ = expected_tokens([3], 4)
    for params, eos, reason, count in [
        ({}, {second}, FinishReason.STOP, 2),
        ({"ignore_eos": True}, {second}, FinishReason.LENGTH, 4),
        ({"stop_token_ids": frozenset({first})}, set(), FinishReason.STOP, 1),
    ]:
        run = Run(make_scheduler(eos_token_ids=frozenset(eos)))
        run.scheduler.add(make_request("a", [3], **params))
        run.to_the_end()
        assert (run.finished["a"], len(run.tokens["a"])) == (reason, count)
        run.check_nothing_is_left()


def test_the_context_length_ends_a_request() -> None:
    run = Run(make_scheduler(max_model_len=8, num_blocks=2))
    run.scheduler.add(make_request("a", [1, 2, 3, 4, 5], max_tokens=100))
    run.to_the_end()
    assert (run.finished["a"], len(run.tokens["a"])) == (FinishReason.LENGTH, 3)


def test_a_token_of_an_aborted_request_is_dropped_and_its_slot_reused() -> None:
    run = Run(make_scheduler(max_num_seqs=1))
    run.scheduler.add(make_request("a", [1, 2, 3]))
    run.plan_all()
    assert run.scheduler.abort("a")
    assert not run.scheduler.abort("a")
    run.scheduler.add(make_request("b", [4, 5]))
    plan = run.plan()
    assert plan is not None, "the slot is free at once"
    assert plan.freed == [(0, 0)]
    assert (plan.rows[0].slot, plan.rows[0].generation) == (0, 1)
    run.to_the_end()
    assert "a" not in run.tokens
    assert run.scheduler.num_stale_rows == 1
    assert run.tokens["b"] == expected_tokens([4, 5], 4)
    run.check_nothing_is_left()


def test_the_youngest_is_preempted_and_recomputed_without_a_trace() -> None:
    run = Run(make_scheduler(num_stages=1, lane_depth=1, num_blocks=8, max_model_len=32))
    for name, prompt in [("old", [1, 2, 3]), ("young", [4, 5, 6])]:
        run.scheduler.add(make_request(name, prompt, max_tokens=20))
    run.to_the_end()
    assert run.scheduler.num_preemptions > 0
    assert list(run.finished) == ["old", "young"]
    assert run.tokens["old"] == expected_tokens([1, 2, 3], 20)
    assert run.tokens["young"] == expected_tokens([4, 5, 6], 20)
    run.check_nothing_is_left()


def test_a_failed_row_fails_its_request_alone() -> None:
    run = Run(make_scheduler(num_stages=1, lane_depth=1))
    run.scheduler.add(make_request("a", [1]))
    run.scheduler.add(make_request("b", [2]))
    run.plan()
    good, bad = run.results.popleft().rows
    answers = run.scheduler.update(
        StepResult(0, 0, [good, SampledRow(bad.slot, bad.generation, [], 0, [], "its logits are not finite")])
    )
    assert [(request.request_id, type(chunk)) for request, chunk in answers] == [("a", TokenChunk), ("b", StageFailed)]
    run.to_the_end()
    assert len(run.tokens["a"]) == 3
    run.check_nothing_is_left()


def test_refusals() -> None:
    scheduler = make_scheduler(max_waiting=1, max_model_len=8)
    with pytest.raises(ConfigError, match="prompt: has no tokens"):
        scheduler.add(make_request("a", []))
    with pytest.raises(ConfigError, match=r"prompt: has 8 tokens.*context of 8"):
        scheduler.add(make_request("a", [1] * 8))
    scheduler.add(make_request("a", [1]))
    with pytest.raises(QueueFull, match="--max-queue 1"):
        scheduler.add(make_request("b", [1]))
    assert scheduler.schedule() is not None
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(make_request("a", [1]))
    with pytest.raises(ControlError, match="step 7"):
        scheduler.update(StepResult(0, 7, []))
    with pytest.raises(ConfigError, match="--max-model-len 128: the KV cache holds 124"):
        make_scheduler(num_blocks=31)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_stages=st.integers(1, 5),
    extra_depth=st.integers(0, 1),
    max_num_seqs=st.integers(1, 10),
    max_tokens=st.integers(1, 20),
    block_size=st.sampled_from([1, 3, 4, 16]),
    pool_factor=st.floats(1.0, 4.0),
)
def test_random_lives_of_many_requests(
    seed: int,
    num_stages: int,
    extra_depth: int,
    max_num_seqs: int,
    max_tokens: int,
    block_size: int,
    pool_factor: float,
) -> None:
    """Arrivals, aborts, results and plans in random order, often with far too few blocks: everyone gets the right tokens."""
    chance = random.Random(seed)
    max_model_len = 24
    run = Run(
        make_scheduler(
            num_stages=num_stages,
            lane_depth=num_stages + extra_depth,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=int(pool_factor * -(-max_model_len // block_size)),
        )
    )
    requests: dict[str, Request] = {}
    aborted: set[str] = set()
    for i in range(200):
        match chance.choice(["add", "plan", "plan", "result", "result", "abort"]):
            case "add" if len(requests) < 40:
                prompt = [chance.randrange(50) for _ in range(chance.randint(1, 12))]
                requests[str(i)] = make_request(str(i), prompt, max_tokens=chance.randint(1, 16))
                run.scheduler.add(requests[str(i)])
            case "plan":
                run.plan()
            case "result" if run.results:
                run.result()
            case "abort" if requests and chance.random() < 0.3:
                name = chance.choice(list(requests))
                if run.scheduler.abort(name):
                    aborted.add(name)
            case _:
                pass
    run.to_the_end()
    for name, request in requests.items():
        room = max_model_len - len(request.prompt_token_ids)
        want = expected_tokens(request.prompt_token_ids, min(request.params.max_tokens, room))
        got = run.tokens.get(name, [])
        assert got == (want[: len(got)] if name in aborted else want)
    run.check_nothing_is_left()


def test_the_made_up_tokens_depend_on_every_token() -> None:
    assert next_token([1, 2, 3]) != next_token([2, 1, 3]) != next_token([1, 3])


# ---- lost ranks -------------------------------------------------------------------------------------------------------


def lose_ranks(run: Run) -> list[str]:
    """New ranks, which know nothing; returns the requests that failed."""
    run.results.clear()
    failed = [request.request_id for request in run.scheduler.end_epoch()]
    run.scheduler.begin_epoch(run.scheduler.epoch + 1)
    run.checker.forget()
    return failed


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_is_lost_every_request_gets_its_tokens_once(data: st.DataObject) -> None:
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    num_stages = chance.randint(1, 4)
    run = Run(
        make_scheduler(
            num_stages=num_stages,
            lane_depth=num_stages,
            max_num_seqs=chance.choice([2, 8]),
            max_num_batched_tokens=chance.choice([3, 16]),
            max_model_len=40,
            num_blocks=chance.choice([10, 30, 200]),
        )
    )
    wanted: dict[str, list[int]] = {}
    aborted: set[str] = set()
    num_losses = 0
    while len(wanted) < 12 or run.scheduler.requests():
        match chance.choice(["add", "plan", "plan", "result", "result", "result", "abort", "lose"]):
            case "add" if len(wanted) < 12:
                prompt = [chance.randrange(1000) for _ in range(chance.randint(1, 20))]
                name, count = str(len(wanted)), chance.randint(1, 12)
                run.scheduler.add(make_request(name, prompt, count))
                wanted[name] = expected_tokens(prompt, count)
            case "plan":
                run.plan()
            case "result" if run.results:
                run.result()
            case "abort" if chance.random() < 0.1 and (requests := run.scheduler.requests()):
                request_id = chance.choice(requests).request_id
                run.scheduler.abort(request_id)
                aborted.add(request_id)
            case "lose" if num_losses < 20:
                num_losses += 1
                # What is lost when it is alone and suspected fails; all else goes on.
                aborted.update(lose_ranks(run))
            case _:
                pass
    run.to_the_end()
    for name, tokens in wanted.items():
        got = run.tokens.get(name, [])
        assert got == (tokens[: len(got)] if name in aborted else tokens)
    run.check_nothing_is_left()


def test_what_is_lost_with_a_token_in_between_is_never_suspected() -> None:
    run = Run(make_scheduler())
    for i in range(6):
        run.scheduler.add(make_request(str(i), [i, i + 1], max_tokens=8))
    while run.scheduler.requests():
        done = dict.fromkeys(map(str, range(6)), 0) | {name: len(tokens) for name, tokens in run.tokens.items()}
        while any(
            len(run.tokens.get(request.request_id, ())) == done[request.request_id] for request in run.scheduler.requests()
        ):
            run.plan_all()
            run.result()
        run.plan_all()
        assert lose_ranks(run) == []
        run.plan_all()
        assert sum(len(results.rows) for results in run.results) > 1 or len(run.scheduler.requests()) <= 1
    assert run.tokens == {str(i): expected_tokens([i, i + 1], 8) for i in range(6)}


def test_the_request_that_kills_its_ranks_fails_alone_and_the_others_go_on() -> None:
    run = Run(make_scheduler(num_stages=3, lane_depth=3))
    for i in range(9):
        run.scheduler.add(make_request(str(i), [i, i], max_tokens=6))
    failed: list[str] = []
    num_losses = 0
    while run.scheduler.requests():
        plans = run.plan_all()
        deadly = any(row.token_ids[:2] == [4, 4] for plan in plans for row in plan.rows)
        if deadly:
            num_losses += 1
            failed += lose_ranks(run)
        else:
            run.result()
    assert failed == ["4"]
    assert num_losses == 3, "once, again, and alone"
    assert run.tokens == {str(i): expected_tokens([i, i], 6) for i in range(9) if i != 4}


def test_a_suspect_that_gets_a_token_alone_is_none_any_more() -> None:
    run = Run(make_scheduler(max_num_seqs=2, num_blocks=40, max_model_len=80))
    for i in range(3):
        run.scheduler.add(make_request(str(i), [i] * 60, max_tokens=3))
    for _ in range(2):
        run.plan_all()
        assert lose_ranks(run) == []
    first = run.plan_all()
    assert [len(plan.rows) for plan in first] == [1], "alone"
    run.result()
    assert [len(plan.rows) for plan in run.plan_all()] == [1], (
        "the next suspect, for which there is place only without the first"
    )
    run.result()
    run.to_the_end()
    assert run.tokens == {str(i): expected_tokens([i] * 60, 3) for i in range(3)}
    run.check_nothing_is_left()


def test_a_heartbeat_goes_through_and_changes_nothing() -> None:
    run = Run(make_scheduler())
    plan = run.scheduler.heartbeat()
    assert (plan.rows, plan.step_id, plan.num_in_flight) == ([], 0, 1)
    assert run.scheduler.update(StepResult(0, 0, [])) == []
    run.checker.last_step_id = 0
    run.scheduler.add(make_request("a", [1, 2]))
    run.to_the_end()
    assert run.tokens["a"] == expected_tokens([1, 2], 4)
    run.check_nothing_is_left()
