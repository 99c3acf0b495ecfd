"""Where a rank's loop reports what it saw. The rank is handed one; it does not know what becomes of the spans."""

from collections import deque
from typing import Literal, NamedTuple, Protocol

SpanKind = Literal["recv", "forward", "send", "token_broadcast", "token_receive"]


class Span(NamedTuple):
    """Work of one step on one stream; ``peer`` is the rank at the other end, -1 for none; times of ``perf_counter_ns``."""

    step_id: int
    kind: SpanKind
    peer: int
    start_ns: int
    end_ns: int


class Recorder(Protocol):
    def record(self, span: Span) -> None:
        """Keep a span. Called once for each piece of work of each step, from the rank's loop: must be quick."""
        ...


class SpanLog:
    """Keeps the last ``capacity`` spans in memory."""

    def __init__(self, capacity: int = 16384) -> None:
        self.spans: deque[Span] = deque(maxlen=capacity)

    def record(self, span: Span) -> None:
        self.spans.append(span)
