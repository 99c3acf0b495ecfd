"""A stage: one rank's runner, sampler, links and streams, put together for one epoch.

A stage enqueues and returns Points. What it does in a step follows from where it stands in the pipeline and is fixed
when it is built: ``operations`` lists it, in the order in which it is enqueued.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from metrics.layout import SpanKind
from stages.device import HostStream, Point, Stream
from stages.plan import RowsFailed, SampledRow, StepPlan, StepResult, TensorSchema
from stages.pp_handler import PPHandler
from stages.sampler import Sampler, SamplerOutput, SamplerOutputs
from stages.slots import SlotTable, void
from stages.topology import PPGroup
from stages.transport.base import IntermediateTensors, PPTransport, StepShape
from stages.transport.links import row_bytes

NO_PEER = -1


class Runner(Protocol):
    """What a stage computes: ``StageRunner`` for a model."""

    @property
    def num_blocks_used(self) -> int: ...

    def prepare(self, plan: StepPlan) -> None:
        """Apply the plan's frees and blocks and build its inputs. In plan order, on the caller's thread; never waits."""
        ...

    def forward(self, plan: StepPlan, hidden: torch.Tensor | None) -> torch.Tensor:
        """In stream order: hidden states ``[num_tokens, width]``, or logits ``[num_reqs, vocab]`` on the last stage."""
        ...

    def take_row_errors(self, step_id: int) -> list[tuple[int, int, str]]:
        """The rows of a computed step that failed by themselves: slot, generation, why."""
        ...


class Work(NamedTuple):
    """What was enqueued on a stream between two Points. ``tokens`` and ``slot`` are what a forward waits for besides: tokens
    of earlier steps, and the end of the send that its output buffer was used for."""

    start: Point
    end: Point
    tokens: Sequence[Point] = ()
    slot: Point | None = None


@dataclass(frozen=True)
class Operation:
    """One thing a stage does in every step; ``peer`` is the rank at the other end, ``NO_PEER`` for none."""

    kind: SpanKind
    peer: int
    enqueue: Callable[[StepPlan], Work]


class Stage:
    """One rank's part of the pipeline, for one epoch.

    ``begin(plan)``, then each of ``operations`` in order, once for each plan in plan order. All of them enqueue and return;
    all are called from one thread. ``transport`` and ``handler`` are None without pipeline parallelism. ``compute`` is the
    stream the transport was built with; the stage owns it, and closes it. ``outputs`` is where sampled tokens are written.
    """

    operations: tuple[Operation, ...]

    def __init__(
        self,
        *,
        group: PPGroup,
        boundary: TensorSchema,
        compute: Stream,
        runner: Runner,
        sampler: Sampler,
        outputs: SamplerOutputs,
        slots: SlotTable,
        transport: PPTransport | None,
        handler: PPHandler | None,
    ) -> None:
        self._group = group
        self._compute = compute
        self._runner = runner
        self._sampler = sampler
        self._outputs = outputs
        self._slots = slots
        self._transport = transport
        self._handler = handler
        self._boundary = boundary
        self._hidden_in: IntermediateTensors | None = None
        self._hidden_out: IntermediateTensors | None = None
        self._forward_work: Work | None = None
        self._steps_needed: list[int] = []
        self._token_points: dict[int, Point] = {}  # step_id -> its sampled tokens are in ``slots`` here
        self._sampled: SamplerOutput | None = None  # last rank: of the step that is being enqueued
        self._results: dict[int, SamplerOutput] = {}  # those of all steps, on the host, until ``result`` takes them

        operations: list[Operation] = []
        if transport is not None and not group.is_first_rank:
            operations.append(Operation("recv", group.prev_rank, self._enqueue_recv))
        forward = Operation("forward", NO_PEER, self._enqueue_forward)
        if handler is None:
            operations.append(forward)
        elif group.is_last_rank:
            operations += [forward, Operation("token_broadcast", NO_PEER, self._enqueue_broadcast)]
        else:
            token_receive = Operation("token_receive", group.last_rank, self._enqueue_receive_tokens)
            send = Operation("send", group.next_rank, self._enqueue_send)
            # First, where it may be: what is enqueued after the forward, which runs at once, competes with it for the
            # interpreter.
            operations += [forward, send, token_receive] if handler.receives_after_sending else [token_receive, forward, send]
        self.operations = tuple(operations)
        self._compute_step = self._sample_step if group.is_last_rank else self._hidden_step

    def begin(self, plan: StepPlan) -> None:
        """Take up the next plan: its operations may be enqueued now."""
        self._runner.prepare(plan)
        # What compute waits for: the tokens that this step reads, and those still to come for a slot that it gives anew.
        self._steps_needed = [*plan.needs_tokens_of, *self._slots.reopened_after(plan.rows)]
        if self._transport is not None and self._handler is not None:
            self._transport.begin_step(StepShape(plan.step_id, plan.num_tokens, plan.num_in_flight))
            self._handler.begin_step(plan.step_id)

    @property
    def row_bytes(self) -> int:
        """What one token's hidden states have at a boundary."""
        return row_bytes(self._boundary)

    @property
    def has_device_clock(self) -> bool:
        """Whether its Points are of a device with a clock of its own."""
        return not isinstance(self._compute, HostStream)

    @property
    def num_blocks_used(self) -> int:
        """KV blocks that sequences hold."""
        return self._runner.num_blocks_used

    @property
    def num_stale_rows(self) -> int:
        """Sampled tokens dropped so far because their request had ended or moved."""
        return self._slots.num_stale_rows

    def result(self, plan: StepPlan) -> StepResult | None:
        """What was sampled in a step, once its forward is reached; None unless this is the last rank. Once for each step."""
        output = self._results.pop(plan.step_id, None)
        if output is None:
            return None
        token_ids = output.sampled_token_ids.tolist()
        num_sampled = output.num_sampled.tolist()
        num_rejected = output.num_rejected.tolist()
        rows = [
            SampledRow(row.slot, row.generation, ids[:count], rejected, [], "" if count else "its logits are not finite")
            for row, ids, count, rejected in zip(plan.sampled_rows, token_ids, num_sampled, num_rejected, strict=True)
        ]
        if output.logprobs is None:
            return StepResult(plan.epoch, plan.step_id, rows)
        for i, logprobs in output.logprobs.of_sampled().items():
            rows[i].logprobs.extend([logprobs] * len(rows[i].token_ids))
        return StepResult(plan.epoch, plan.step_id, rows, output.logprobs.of_scored())

    def row_errors(self, plan: StepPlan) -> RowsFailed | None:
        """The rows of a step that failed here, once its forward is reached; None when none did. Once for each step."""
        errors = self._runner.take_row_errors(plan.step_id)
        return RowsFailed(plan.epoch, plan.step_id, self._group.rank, errors) if errors else None

    def poison(self, cause: BaseException) -> None:
        """Local and immediate: every wait for a peer falls through with ``cause``. Never blocks, never raises."""
        if self._transport is not None and self._handler is not None:
            self._transport.poison(cause)
            self._handler.poison(cause)

    def close(self) -> None:
        """Free streams and links. Waits for what is enqueued, which after ``poison`` is at once. May be called twice."""
        if self._transport is not None and self._handler is not None:
            self._transport.close()
            self._handler.close()
        self._compute.close()
        self._slots.close()

    # ---- operations -----------------------------------------------------------------------------------------------

    def _enqueue_recv(self, plan: StepPlan) -> Work:
        assert self._transport is not None
        start = self._forward_work.end if self._forward_work is not None else self._compute.record(is_told=False)
        self._hidden_in = self._transport.recv(self._group)
        return Work(start, self._hidden_in.ready)

    def _enqueue_forward(self, plan: StepPlan) -> Work:
        tokens = [point for step_id in self._steps_needed if (point := self._token_points.get(step_id)) is not None]
        for point in tokens:
            self._compute.wait(point)
        received = self._hidden_in
        start = received.ready if received is not None and not plan.needs_tokens_of else self._compute.record(is_told=False)
        end = self._compute_step(plan, None if received is None else received[self._boundary.name])
        if received is not None:
            received.release(self._compute)
            self._hidden_in = None
        slot = None if self._transport is None else self._transport.output_free
        self._forward_work = Work(start, end, tokens, slot)
        return self._forward_work

    def _hidden_step(self, plan: StepPlan, received: torch.Tensor | None) -> Point:
        assert self._transport is not None
        outputs = self._transport.outputs(self._group)
        out = outputs[self._boundary.name]
        self._compute.launch(lambda: void(out.copy_(self._runner.forward(plan, received))))
        end = self._compute.record(is_told=not self._transport.sends_inline(plan.num_tokens))  # else the send tells of it
        self._hidden_out = IntermediateTensors(outputs, end)
        return end

    def _sample_step(self, plan: StepPlan, received: torch.Tensor | None) -> Point:
        rows = plan.sampled_rows
        output = self._sampled = self._outputs.next(len(rows), plan.max_sample_len)

        def run() -> None:
            self._sampler.sample(self._runner.forward(plan, received), plan.rows, plan.max_sample_len, output)

        self._compute.launch(run)
        tokens = (output.sampled_token_ids, output.num_sampled, output.num_rejected)
        self._slots.enqueue_scatter(self._compute, plan.step_id, rows, tokens)
        self._results[plan.step_id] = self._outputs.to_host(self._compute, output)
        return self._compute.record()

    def _enqueue_send(self, plan: StepPlan) -> Work:
        assert self._transport is not None
        assert self._hidden_out is not None
        end = self._transport.send(self._hidden_out, self._group)
        start, self._hidden_out = self._hidden_out.ready, None
        return Work(start, end)

    def _enqueue_broadcast(self, plan: StepPlan) -> Work:
        assert self._handler is not None
        assert self._forward_work is not None
        assert self._sampled is not None
        output, self._sampled = self._sampled, None
        end = self._handler.maybe_broadcast_sampled_tokens(output, output.num_sampled, output.num_rejected)
        assert end is not None
        return Work(self._forward_work.end, end)

    def _enqueue_receive_tokens(self, plan: StepPlan) -> Work:
        assert self._handler is not None
        rows = plan.sampled_rows
        start = self._handler.stream.record(is_told=False)
        tokens = self._handler.maybe_receive_sampled_tokens(len(rows), plan.max_sample_len)
        assert tokens is not None
        self._slots.enqueue_scatter(self._handler.stream, plan.step_id, rows, tokens)
        end = self._handler.stream.record()
        self._forget_reached_token_points()
        self._token_points[plan.step_id] = end
        return Work(start, end)

    def _forget_reached_token_points(self) -> None:
        """Drop the Points whose tokens have arrived: nobody needs to wait for them. Leaves the steps in flight."""
        for step_id in [step_id for step_id, point in self._token_points.items() if point.reached_at_ns]:
            del self._token_points[step_id]
