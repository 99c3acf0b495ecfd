"""Every metric, once: name, help, labels, buckets. ``Metrics`` makes them for one registry."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

PREFIX = "stagewire_"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric. ``values`` are all the values that its one label can have; without a ``label`` it has one series."""

    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _one_two_five(first: float, last: float) -> tuple[float, ...]:
    """1-2-5 steps from ``first`` to ``last``, both of them such steps."""
    steps = [float(f"{digit}e{power}") for power in range(-6, 6) for digit in (1, 2, 5)]
    return tuple(step for step in steps if first <= step <= last)


REQUESTS_FINISHED = Metric(
    name="requests_finished_total",
    help="Requests that ended: stop (end of sequence or stop string), length, abort (the client went away), error (5xx).",
    label="reason",
    values=("stop", "length", "abort", "error"),
)
REQUESTS_REJECTED = Metric(
    name="requests_rejected_total",
    help="Requests that were not admitted: queue_full (429), not_ready (503), invalid (other 4xx).",
    label="reason",
    values=("queue_full", "not_ready", "invalid"),
)
REQUESTS_RUNNING = Metric(name="requests_running", help="Requests that hold a sequence slot.")
REQUESTS_WAITING = Metric(name="requests_waiting", help="Admitted requests that wait for a sequence slot.")
PROMPT_TOKENS = Metric(name="prompt_tokens_total", help="Prompt tokens of requests that got their first token.")
GENERATED_TOKENS = Metric(name="generated_tokens_total", help="Tokens generated for requests.")
TIME_TO_FIRST_TOKEN = Metric(
    name="time_to_first_token_seconds",
    help="From the arrival of a request to its first token.",
    buckets=_one_two_five(0.01, 100),
)
INTER_TOKEN_LATENCY = Metric(
    name="inter_token_latency_seconds",
    help="Between two steps that gave tokens to a request.",
    buckets=_one_two_five(0.001, 10),
)
E2E_REQUEST_LATENCY = Metric(
    name="e2e_request_latency_seconds",
    help="From the arrival of a request to its last token, for those that ended with stop or length.",
    buckets=_one_two_five(0.01, 1000),
)

CATALOG = (
    REQUESTS_FINISHED,
    REQUESTS_REJECTED,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    PROMPT_TOKENS,
    GENERATED_TOKENS,
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    E2E_REQUEST_LATENCY,
)


class Metrics:
    """The metrics of one registry, every series present from the start. A labelled one is a mapping from the label's value."""

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # a second line for each series that nobody graphs
        self.registry = registry
        self.requests_finished = self._counters(REQUESTS_FINISHED)
        self.requests_rejected = self._counters(REQUESTS_REJECTED)
        self.requests_running = self._gauge(REQUESTS_RUNNING)
        self.requests_waiting = self._gauge(REQUESTS_WAITING)
        self.prompt_tokens = self._counter(PROMPT_TOKENS)
        self.generated_tokens = self._counter(GENERATED_TOKENS)
        self.time_to_first_token = self._histogram(TIME_TO_FIRST_TOKEN)
        self.inter_token_latency = self._histogram(INTER_TOKEN_LATENCY)
        self.e2e_request_latency = self._histogram(E2E_REQUEST_LATENCY)

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.full_name, metric.help, registry=self.registry)

    def _counters(self, metric: Metric) -> Mapping[str, Counter]:
        family = Counter(metric.full_name, metric.help, [metric.label], registry=self.registry)
        return {value: family.labels(value) for value in metric.values}

    def _gauge(self, metric: Metric) -> Gauge:
        return Gauge(metric.full_name, metric.help, registry=self.registry)

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(metric.full_name, metric.help, buckets=metric.buckets, registry=self.registry)
