"""Every metric, once: name, help, labels and their values, buckets.

``writers`` says who writes a metric: each rank, the engine, or the exporter. Whoever shows them puts the label ``rank`` before
the labels of what a rank writes, the rank's number. What the engine and the ranks both write (``build_info``) has the engine's
with ``rank="engine"``.

A stage's states exclude each other, so ``sum by (rank) (rate(stagewire_stage_state_seconds_total[1m]))`` is 1. The bubble of a
rank is the share of the time with load in which it neither computed nor transferred:
``(wait_input + wait_slot + wait_token + host) / (1 - idle)``, of the states' rates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

PREFIX = "stagewire_"
RANK_LABEL = "rank"
ENGINE_RANK = "engine"  # the value of ``RANK_LABEL`` where the engine writes what the ranks write, too
ALL_PEERS = "all"  # the peer of a message that goes to every other rank

STATES = ("compute", "wait_input", "wait_slot", "wait_token", "transfer", "host", "idle")
"""What a stage can be doing; at each instant it is one of them.

compute      its forward runs
wait_input   waits for hidden states from the stage before it
wait_slot    waits until a buffer is free: the next stage has not yet taken what it was sent
wait_token   waits for sampled tokens: on the first stage also for those that let the engine plan the next step
transfer     its compute stream itself copies or sends
host         all that it needs is there, and it has not begun: the engine has to plan, or a loop or a thread to wake up
idle         nothing is in flight in the pipeline and nothing was there to be planned
"""


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"  # a gauge that is 1, and whose labels are what it says


class Writer(StrEnum):
    RANK = "rank"
    ENGINE = "engine"
    EXPORTER = "exporter"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Whose series: a rank's depend on where in the pipeline it stands. ``rank`` is -1 for the engine."""

    writer: Writer
    rank: int
    world_size: int


LabelValues = tuple[str, ...]


@dataclass(frozen=True)
class Labels:
    """The names of a metric's labels, and the values that its series at a place have: all of them, fixed from the start."""

    names: tuple[str, ...]
    series: Callable[[Place], Sequence[LabelValues]]


def one_of(**values: Sequence[str]) -> Labels:
    """Closed sets of values, each combination a series; without any label, one series."""
    series = tuple(product(*values.values()))
    return Labels(tuple(values), lambda place: series)


UNLABELLED = one_of()


def said(*names: str) -> Labels:
    """Of an info, whose values are known only once it is written."""
    return Labels(names, lambda place: ())


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric. ``buckets`` are upper bounds in the unit of its name."""

    name: str
    kind: Kind
    writers: tuple[Writer, ...]
    help: str
    labels: Labels = UNLABELLED
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def is_time(self) -> bool:
        """Shown in seconds, written in nanoseconds."""
        return self.name.endswith(("_seconds", "_seconds_total"))


def _one_two_five(first: float, last: float) -> tuple[float, ...]:
    """1-2-5 steps from ``first`` to ``last``, both of them such steps."""
    steps = [float(f"{digit}e{power}") for power in range(-6, 6) for digit in (1, 2, 5)]
    return tuple(step for step in steps if first <= step <= last)


WAIT_BUCKETS = _one_two_five(1e-6, 1)
STEP_BUCKETS = _one_two_five(1e-4, 10)
TOKEN_BUCKETS = _one_two_five(1e-3, 10)
REQUEST_BUCKETS = _one_two_five(1e-2, 1000)
ROW_BUCKETS = _one_two_five(1, 1000)
SIZE_BUCKETS = _one_two_five(1, 20_000)


def transfers(place: Place) -> list[LabelValues]:
    """Every (op, peer) of a rank."""
    rank, last = place.rank, place.world_size - 1
    found: list[LabelValues] = []
    if rank > 0:
        found.append(("recv", str(rank - 1)))
    if rank < last:
        found += [("send", str(rank + 1)), ("token_receive", str(last))]
    elif last > 0:
        found.append(("token_broadcast", ALL_PEERS))
    return found


def waits(place: Place) -> list[LabelValues]:
    """Every (reason, peer) for which a rank's compute can wait."""
    rank, last = place.rank, place.world_size - 1
    found: list[LabelValues] = []
    if rank > 0:
        found.append(("input", str(rank - 1)))
    if rank < last:
        found += [("slot", str(rank + 1)), ("token", str(last))]
    return found


def peers(place: Place) -> list[LabelValues]:
    """Every rank that a rank has a link with."""
    rank, last = place.rank, place.world_size - 1
    linked = range(last) if rank == last else sorted({rank - 1, rank + 1, last} - {-1})
    return [(str(peer),) for peer in linked]


_TRANSFER = Labels(("op", "peer"), transfers)
_RANK = (Writer.RANK,)
_ENGINE = (Writer.ENGINE,)

# ---- written by each rank -----------------------------------------------------------------------------------------------

STAGE_STATE = Metric(
    name="stage_state_seconds_total",
    kind=Kind.COUNTER,
    writers=_RANK,
    help="Time a stage spent in each state; at each instant it is in one of them, so their rates add up to 1.",
    labels=one_of(state=STATES),
)
STAGE_WAIT = Metric(
    name="stage_wait_seconds",
    kind=Kind.HISTOGRAM,
    writers=_RANK,
    help="How long a step's forward waited for input, an output slot or tokens, and on which rank; 0 when it had not to.",
    labels=Labels(("reason", "peer"), waits),
    buckets=WAIT_BUCKETS,
)
TRANSFER = Metric(
    name="transfer_seconds",
    kind=Kind.HISTOGRAM,
    writers=_RANK,
    help="A step's transfer on the host's clock, from when it could begin (data and slot there) to its end. "
    "Of a receive, from when the message was there.",
    labels=_TRANSFER,
    buckets=WAIT_BUCKETS,
)
TRANSFER_DEVICE = Metric(
    name="transfer_device_seconds",
    kind=Kind.HISTOGRAM,
    writers=_RANK,
    help="The same by the clock of the device that transferred: event pairs on a GPU, the thread's own on a CPU.",
    labels=_TRANSFER,
    buckets=WAIT_BUCKETS,
)
TRANSFER_BYTES = Metric(
    name="transfer_bytes_total",
    kind=Kind.COUNTER,
    writers=_RANK,
    help="Payload bytes transferred, without headers.",
    labels=_TRANSFER,
)
TRANSFER_ERRORS = Metric(
    name="transfer_errors_total",
    kind=Kind.COUNTER,
    writers=_RANK,
    help="Transfers that failed: peer_lost (or the epoch ended), header_mismatch, device, other. Counted once for each stream.",
    labels=one_of(kind=("peer_lost", "header_mismatch", "device", "other")),
)
EVENT_WAKE = Metric(
    name="event_wake_seconds",
    kind=Kind.HISTOGRAM,
    writers=_RANK,
    help="From when a point of a stream was reached to when the coroutine that awaited it went on.",
    buckets=WAIT_BUCKETS,
)
EVENT_WAKES = Metric(
    name="event_wakes_total",
    kind=Kind.COUNTER,
    writers=_RANK,
    help="Awaited points by how the loop came to see them: spin (it looked), park (it slept and was woken), "
    "timer (the safety net found it).",
    labels=one_of(mode=("spin", "park", "timer")),
)
STEP_DURATION = Metric(
    name="step_duration_seconds",
    kind=Kind.HISTOGRAM,
    writers=_RANK,
    help="The forward of a step with rows, sampling included, by what its rows are: prefill, decode, or mixed.",
    labels=one_of(phase=("prefill", "decode", "mixed")),
    buckets=STEP_BUCKETS,
)
STEP_ROWS = Metric(
    name="step_rows",
    kind=Kind.HISTOGRAM,
    writers=_RANK,
    help="Rows of a step: requests that have a part in it.",
    buckets=ROW_BUCKETS,
)
STEP_TOKENS = Metric(
    name="step_tokens",
    kind=Kind.HISTOGRAM,
    writers=_RANK,
    help="Tokens of a step: positions that it computes.",
    buckets=SIZE_BUCKETS,
)
INFLIGHT_STEPS = Metric(
    name="inflight_steps",
    kind=Kind.GAUGE,
    writers=_RANK,
    help="Steps that the rank has begun and not finished.",
)
RING_SLOTS = Metric(
    name="ring_slots",
    kind=Kind.GAUGE,
    writers=_RANK,
    help="Ring slots at a stage's boundaries, by what the rank does with them: receiving (asked for, not there yet), "
    "reading (a forward has not released it), sending (waits for the receiver's slot, or is copied), free.",
    labels=one_of(state=("receiving", "reading", "sending", "free")),
)
KV_BLOCKS = Metric(
    name="kv_blocks",
    kind=Kind.GAUGE,
    writers=_RANK,
    help="Blocks of the rank's KV cache.",
    labels=one_of(state=("used", "free")),
)
STALE_ROWS = Metric(
    name="stale_rows_total",
    kind=Kind.COUNTER,
    writers=_RANK,
    help="Sampled tokens dropped on the rank because their request had ended or moved when they came.",
)
LAST_STEP_TIMESTAMP = Metric(
    name="last_step_timestamp_seconds",
    kind=Kind.GAUGE,
    writers=_RANK,
    help="Unix time at which the rank last finished a step; 0 before the first.",
)
PEER_CONNECTED = Metric(
    name="peer_connected",
    kind=Kind.GAUGE,
    writers=_RANK,
    help="1 while the rank's links with a peer are built, proven, and not broken.",
    labels=Labels(("peer",), peers),
)
READY = Metric(
    name="ready",
    kind=Kind.GAUGE,
    writers=_RANK,
    help="1 while the rank takes steps.",
)
EPOCH = Metric(
    name="epoch",
    kind=Kind.GAUGE,
    writers=_RANK,
    help="The epoch that the rank last linked for.",
)
RANK_RESTARTS = Metric(
    name="rank_restarts_total",
    kind=Kind.COUNTER,
    writers=_RANK,
    help="Processes that served the rank after the first.",
)
STAGE_INFO = Metric(
    name="stage_info",
    kind=Kind.INFO,
    writers=_RANK,
    help="The rank's part of the pipeline; its layers as 'first-last', its transport as of the last epoch.",
    labels=said("layers", "transport", "device", "host"),
)

# ---- written by each rank and by the engine -----------------------------------------------------------------------------

BUILD_INFO = Metric(
    name="build_info",
    kind=Kind.INFO,
    writers=(Writer.RANK, Writer.ENGINE),
    help="What runs; torch is empty where it is not loaded.",
    labels=said("version", "python", "torch"),
)

# ---- written by the engine ----------------------------------------------------------------------------------------------

CONFIG_INFO = Metric(
    name="config_info",
    kind=Kind.INFO,
    writers=_ENGINE,
    help="What the worker was told to serve, and how.",
    labels=said(
        "model",
        "dtype",
        "device",
        "pipeline_parallel_size",
        "pp_transport",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "block_size",
        "ring_slots",
    ),
)
ENGINE_READY = Metric(
    name="engine_ready",
    kind=Kind.GAUGE,
    writers=_ENGINE,
    help="1 while requests are admitted.",
)
REQUESTS_RUNNING = Metric(
    name="requests_running",
    kind=Kind.GAUGE,
    writers=_ENGINE,
    help="Requests that hold a sequence slot.",
)
REQUESTS_WAITING = Metric(
    name="requests_waiting",
    kind=Kind.GAUGE,
    writers=_ENGINE,
    help="Admitted requests that wait for a sequence slot.",
)
REQUESTS_FINISHED = Metric(
    name="requests_finished_total",
    kind=Kind.COUNTER,
    writers=_ENGINE,
    help="Requests that ended: stop (end of sequence or stop string), length, abort (the client went away), error (5xx).",
    labels=one_of(reason=("stop", "length", "abort", "error")),
)
REQUESTS_REJECTED = Metric(
    name="requests_rejected_total",
    kind=Kind.COUNTER,
    writers=_ENGINE,
    help="Requests that were not admitted: queue_full (429), not_ready (503), invalid (other 4xx).",
    labels=one_of(reason=("queue_full", "not_ready", "invalid")),
)
PROMPT_TOKENS = Metric(
    name="prompt_tokens_total",
    kind=Kind.COUNTER,
    writers=_ENGINE,
    help="Prompt tokens of requests that got their first token.",
)
GENERATED_TOKENS = Metric(
    name="generated_tokens_total",
    kind=Kind.COUNTER,
    writers=_ENGINE,
    help="Tokens generated for requests.",
)
TIME_TO_FIRST_TOKEN = Metric(
    name="time_to_first_token_seconds",
    kind=Kind.HISTOGRAM,
    writers=_ENGINE,
    help="From the arrival of a request to its first token.",
    buckets=REQUEST_BUCKETS[: REQUEST_BUCKETS.index(100) + 1],
)
INTER_TOKEN_LATENCY = Metric(
    name="inter_token_latency_seconds",
    kind=Kind.HISTOGRAM,
    writers=_ENGINE,
    help="Between two steps that gave tokens to a request.",
    buckets=TOKEN_BUCKETS,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    name="time_per_output_token_seconds",
    kind=Kind.HISTOGRAM,
    writers=_ENGINE,
    help="Of a request that ended with stop or length: its decode phase over its tokens but the first.",
    buckets=TOKEN_BUCKETS,
)
E2E_REQUEST_LATENCY = Metric(
    name="e2e_request_latency_seconds",
    kind=Kind.HISTOGRAM,
    writers=_ENGINE,
    help="From the arrival of a request to its last token, for those that ended with stop or length.",
    buckets=REQUEST_BUCKETS,
)
REQUEST_PHASE = Metric(
    name="request_phase_seconds",
    kind=Kind.HISTOGRAM,
    writers=_ENGINE,
    help="The phases of those requests, which add up to their latency: queue (until first planned), prefill (until the first "
    "token), decode (until the last).",
    labels=one_of(phase=("queue", "prefill", "decode")),
    buckets=_one_two_five(1e-4, 1000),
)
STEPS_IN_FLIGHT = Metric(
    name="steps_in_flight",
    kind=Kind.GAUGE,
    writers=_ENGINE,
    help="Steps planned whose result is not back.",
)
LANE_DEPTH = Metric(
    name="lane_depth",
    kind=Kind.GAUGE,
    writers=_ENGINE,
    help="The most steps that may be in flight.",
)
PREEMPTIONS = Metric(
    name="preemptions_total",
    kind=Kind.COUNTER,
    writers=_ENGINE,
    help="Requests put back into the queue because no KV block was free; they are prefilled anew.",
)
STALE_RESULTS = Metric(
    name="stale_results_total",
    kind=Kind.COUNTER,
    writers=_ENGINE,
    help="Rows of results dropped by the engine because their request had ended or moved.",
)
SCHEDULE = Metric(
    name="schedule_seconds",
    kind=Kind.HISTOGRAM,
    writers=_ENGINE,
    help="The engine's time to plan one step, to encode it and to hand it to every channel.",
    buckets=WAIT_BUCKETS,
)
DETOKENIZE = Metric(
    name="detokenize_seconds",
    kind=Kind.HISTOGRAM,
    writers=_ENGINE,
    help="The time to turn the tokens that one step gave a request into text.",
    buckets=WAIT_BUCKETS,
)
LOOP_LAG = Metric(
    name="event_loop_lag_seconds",
    kind=Kind.HISTOGRAM,
    writers=_ENGINE,
    help="How much later than asked a timer of the engine's loop was called.",
    buckets=WAIT_BUCKETS,
)

# ---- written by the exporter --------------------------------------------------------------------------------------------

RANK_UP = Metric(
    name="rank_up",
    kind=Kind.GAUGE,
    writers=(Writer.EXPORTER,),
    help="1 while the process that writes a rank's record lives; the exporter looks at each scrape.",
    labels=Labels((RANK_LABEL,), lambda place: [(str(rank),) for rank in range(place.world_size)]),
)
ENGINE_UP = Metric(
    name="engine_up",
    kind=Kind.GAUGE,
    writers=(Writer.EXPORTER,),
    help="1 while the process that writes the engine's record lives.",
)


def _processes(place: Place) -> list[LabelValues]:
    return [*((str(rank),) for rank in range(place.world_size)), (ENGINE_RANK,)]


_PROCESS = Labels((RANK_LABEL,), _processes)
PROCESS_CPU = Metric(
    name="process_cpu_seconds_total",
    kind=Kind.COUNTER,
    writers=(Writer.EXPORTER,),
    help="CPU time of the process that serves a rank, or of the engine, in user and system mode; gone while there is none.",
    labels=_PROCESS,
)
PROCESS_RESIDENT = Metric(
    name="process_resident_memory_bytes",
    kind=Kind.GAUGE,
    writers=(Writer.EXPORTER,),
    help="Memory that the process of a rank, or of the engine, has resident; gone while there is none.",
    labels=_PROCESS,
)
PROCESS_OPEN_FDS = Metric(
    name="process_open_fds",
    kind=Kind.GAUGE,
    writers=(Writer.EXPORTER,),
    help="File descriptors that the process of a rank, or of the engine, has open; gone while there is none.",
    labels=_PROCESS,
)

CATALOG = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order above."""


def metrics_of(writer: Writer) -> tuple[Metric, ...]:
    """What ``writer`` writes."""
    return tuple(metric for metric in CATALOG if writer in metric.writers)
