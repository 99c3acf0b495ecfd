"""What the engine's process writes into its ledger: requests, tokens, the cost of its own work. Times in nanoseconds."""

import platform
from collections.abc import Mapping

from metrics.catalog import (
    BUILD_INFO,
    CONFIG_INFO,
    DETOKENIZE,
    E2E_REQUEST_LATENCY,
    ENGINE_READY,
    GENERATED_TOKENS,
    INTER_TOKEN_LATENCY,
    LANE_DEPTH,
    LOOP_LAG,
    PREEMPTIONS,
    PROMPT_TOKENS,
    REQUEST_PHASE,
    REQUESTS_FINISHED,
    REQUESTS_REJECTED,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    SCHEDULE,
    STALE_RESULTS,
    STEPS_IN_FLIGHT,
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
    Metric,
)
from metrics.ledger import Counter, Histogram, LedgerWriter


class EngineMetrics:
    """Every series that the engine writes; a labelled one is a mapping from its value."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer
        self.is_ready = writer.gauge(ENGINE_READY)
        self.requests_running = writer.gauge(REQUESTS_RUNNING)
        self.requests_waiting = writer.gauge(REQUESTS_WAITING)
        self.requests_finished = self._counters(REQUESTS_FINISHED)
        self.requests_rejected = self._counters(REQUESTS_REJECTED)
        self.prompt_tokens = writer.counter(PROMPT_TOKENS)
        self.generated_tokens = writer.counter(GENERATED_TOKENS)
        self.time_to_first_token = writer.histogram(TIME_TO_FIRST_TOKEN)
        self.inter_token_latency = writer.histogram(INTER_TOKEN_LATENCY)
        self.time_per_output_token = writer.histogram(TIME_PER_OUTPUT_TOKEN)
        self.e2e_request_latency = writer.histogram(E2E_REQUEST_LATENCY)
        self.request_phase: Mapping[str, Histogram] = {
            values[0]: writer.histogram(REQUEST_PHASE, *values) for values in REQUEST_PHASE.labels.series(writer.place)
        }
        self.steps_in_flight = writer.gauge(STEPS_IN_FLIGHT)
        self.lane_depth = writer.gauge(LANE_DEPTH)
        self.preemptions = writer.counter(PREEMPTIONS)
        self.stale_results = writer.counter(STALE_RESULTS)
        self.schedule = writer.histogram(SCHEDULE)
        self.detokenize = writer.histogram(DETOKENIZE)
        self.loop_lag = writer.histogram(LOOP_LAG)

    def describe(self, version: str, config: Mapping[str, object]) -> None:
        """What runs, and what it was told to serve: a value for each label of ``config_info``, None where there is none."""
        self._writer.set_info(BUILD_INFO, version=version, python=platform.python_version(), torch="")
        self._writer.set_info(
            CONFIG_INFO, **{name: "" if config[name] is None else str(config[name]) for name in CONFIG_INFO.labels.names}
        )

    def _counters(self, metric: Metric) -> Mapping[str, Counter]:
        return {values[0]: self._writer.counter(metric, *values) for values in metric.labels.series(self._writer.place)}
