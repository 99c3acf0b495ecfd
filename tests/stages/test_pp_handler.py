import random
import threading
from collections import deque
from dataclasses import dataclass

import pytest
import torch

from stages.errors import HeaderMismatch, TransportError
from stages.pp_handler import SampledTokens
from tests.stages.transport.harness import (
    EMULATED_NCCL,
    KINDS,
    MAX_REQS,
    MAX_SAMPLE_LEN,
    no_leaks,
    pipeline,
    reach,
    wait_for_sleeper,
)

__all__ = ["no_leaks"]  # every test here checks for leaks


@dataclass
class SamplerOutput:
    sampled_token_ids: torch.Tensor


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def sample(rng: random.Random, num_reqs: int, max_sample_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a sampler with ``max_sample_len - 1`` draft tokens may give: some accepted, the others rejected."""
    num_sampled = [rng.randint(1, max_sample_len) for _ in range(num_reqs)]
    ids = [[rng.randrange(2**40) if i < count else -1 for i in range(max_sample_len)] for count in num_sampled]
    return (
        torch.tensor(ids, dtype=torch.int64).view(num_reqs, max_sample_len),
        torch.tensor(num_sampled, dtype=torch.int32),
        torch.tensor([max_sample_len - count for count in num_sampled], dtype=torch.int32),
    )


def assert_same(got: SampledTokens, expected: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    for tensor, want in zip(got, expected, strict=True):
        assert tensor.dtype == want.dtype
        assert tensor.shape == want.shape
        assert torch.equal(tensor, want)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("max_sample_len", range(1, MAX_SAMPLE_LEN + 1))
def test_every_rank_gets_every_step_s_tokens(kind: str, world_size: int, max_sample_len: int) -> None:
    rng = random.Random(world_size * 10 + max_sample_len)
    with pipeline(kind, world_size) as ranks:
        *others, last = ranks
        expected: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = deque()
        received: deque[list[SampledTokens]] = deque()
        for step_id in range(100):
            num_reqs = rng.choice([0, 1, rng.randint(0, MAX_REQS), MAX_REQS])
            for rank in ranks:
                rank.handler.begin_step(step_id)
            ids, num_sampled, num_rejected = sample(rng, num_reqs, max_sample_len)
            expected.append((ids.clone(), num_sampled.clone(), num_rejected.clone()))
            output = SamplerOutput(ids) if step_id % 2 else ids
            sent = last.handler.maybe_broadcast_sampled_tokens(output, num_sampled, num_rejected)
            assert sent is not None
            assert last.handler.maybe_receive_sampled_tokens(num_reqs, max_sample_len) is None
            step: list[SampledTokens] = []
            for rank in others:
                assert rank.handler.maybe_broadcast_sampled_tokens(output, num_sampled, num_rejected) is None
                tokens = rank.handler.maybe_receive_sampled_tokens(num_reqs, max_sample_len)
                assert tokens is not None
                step.append(tokens)
            received.append(step)
            reach(sent)
            for tensor in (ids, num_sampled, num_rejected):
                tensor.fill_(-7)  # after the Point they may be overwritten
            if len(received) > 3:
                want = expected.popleft()
                for tokens in received.popleft():
                    reach(tokens.ready)
                    assert_same(tokens, want)
        for step, want in zip(received, expected, strict=True):
            for tokens in step:
                reach(tokens.ready)
                assert_same(tokens, want)


def test_the_three_tensors_have_names(kind: str) -> None:
    with pipeline(kind, 2) as (first, last):
        first.handler.begin_step(0)
        last.handler.begin_step(0)
        last.handler.maybe_broadcast_sampled_tokens(torch.tensor([[5, 6]]), int32(2), int32(0))
        tokens = first.handler.maybe_receive_sampled_tokens(1, 2)
        assert tokens is not None
        reach(tokens.ready)
        ids, num_sampled, num_rejected = tokens
        assert ids is tokens.sampled_token_ids
        assert num_sampled is tokens.num_sampled
        assert num_rejected is tokens.num_rejected


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_the_broadcast_reads_what_compute_has_written_by_then(kind: str) -> None:
    gate = threading.Event()
    with pipeline(kind, 2) as (first, last):
        ids = torch.zeros(1, 1, dtype=torch.int64)

        def compute() -> None:
            gate.wait()
            ids.fill_(42)

        first.handler.begin_step(0)
        last.handler.begin_step(0)
        last.compute.launch(compute)
        last.handler.maybe_broadcast_sampled_tokens(ids, int32(1), int32(0))
        tokens = first.handler.maybe_receive_sampled_tokens(1)
        assert tokens is not None
        wait_for_sleeper(first, "tokens")
        assert not tokens.ready.is_reached()
        gate.set()
        reach(tokens.ready)
        assert tokens.sampled_token_ids.item() == 42


def test_a_pending_receive_does_not_hold_compute_up(kind: str) -> None:
    with pipeline(kind, 2) as (first, last):
        first.handler.begin_step(0)
        last.handler.begin_step(0)
        tokens = first.handler.maybe_receive_sampled_tokens(1)
        assert tokens is not None
        reach(first.compute.record())
        assert not tokens.ready.is_reached()
        last.handler.maybe_broadcast_sampled_tokens(torch.tensor([[1]]), int32(1), int32(0))
        reach(tokens.ready)


def test_steps_run_ahead_by_the_token_ring_s_slots(kind: str) -> None:
    with pipeline(kind, 3, token_slots=3) as (first, middle, last):
        sent = []
        for step_id in range(5):
            last.handler.begin_step(step_id)
            sent.append(last.handler.maybe_broadcast_sampled_tokens(torch.tensor([[step_id]]), int32(1), int32(0)))
        if kind != EMULATED_NCCL:  # NCCL's stand-in holds nothing for a receiver that has not come
            reach(sent[2])
            wait_for_sleeper(last, "tokens")
        assert not sent[3].is_reached()
        for rank in (first, middle):
            for step_id in range(5):
                rank.handler.begin_step(step_id)
                tokens = rank.handler.maybe_receive_sampled_tokens(1)
                assert tokens is not None
        reach(sent[4])


@pytest.mark.parametrize(
    ("field", "sent", "expected"),
    [("step_id", (6, 2, 3), (7, 2, 3)), ("num_reqs", (7, 3, 2), (7, 2, 2)), ("width", (7, 2, 2), (7, 2, 3))],
)
@pytest.mark.parametrize("receiver", [0, 1])
def test_a_message_of_another_step_count_or_width_names_both_sides(
    kind: str, field: str, sent: tuple[int, int, int], expected: tuple[int, int, int], receiver: int
) -> None:
    index = ("step_id", "num_reqs", "width").index(field)
    with pipeline(kind, 3) as ranks:
        ranks[2].handler.begin_step(sent[0])
        ranks[2].handler.maybe_broadcast_sampled_tokens(*sample(random.Random(0), sent[1], sent[2]))
        ranks[receiver].handler.begin_step(expected[0])
        tokens = ranks[receiver].handler.maybe_receive_sampled_tokens(expected[1], expected[2])
        assert tokens is not None
        message = f"step 7: header field {field}: rank {receiver} expected {expected[index]}, rank 2 sent {sent[index]}"
        with pytest.raises(HeaderMismatch) as info:
            reach(tokens.ready)
        assert str(info.value) == message


def test_what_is_no_sampler_output_is_refused(kind: str) -> None:
    with pipeline(kind, 2) as (first, last):
        ids = torch.zeros(2, 1, dtype=torch.int64)
        with pytest.raises(ValueError, match="no step was announced"):
            last.handler.maybe_broadcast_sampled_tokens(ids, int32(1, 1), int32(0, 0))
        last.handler.begin_step(0)
        for wrong, message in [
            (
                (ids[0], int32(1, 1), int32(0, 0)),
                r"sampled_token_ids: torch.int64 \(1,\), must be int64 \[num_reqs, max_sample_len",
            ),
            ((ids.int(), int32(1, 1), int32(0, 0)), "sampled_token_ids: torch.int32"),
            ((ids, int32(1), int32(0, 0)), r"num_sampled: torch.int32 \(1,\), must be int32 \[2\]"),
            ((ids, int32(1, 1), int32(0, 0).long()), "num_rejected: torch.int64"),
        ]:
            with pytest.raises(TransportError, match=message):
                last.handler.maybe_broadcast_sampled_tokens(*wrong)
        first.handler.begin_step(3)
        with pytest.raises(TransportError, match="step 3: 9 requests of 6 tokens need 504 bytes, but a token slot holds 448"):
            first.handler.maybe_receive_sampled_tokens(MAX_REQS + 1, MAX_SAMPLE_LEN)
