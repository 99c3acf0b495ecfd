"""Where things are in a ledger: a fixed layout of 64-bit words that follows from the catalogue and from whose ledger it is.

    header | what is being done now | a word for each counter and gauge, a run of words for each histogram | infos | spans

A histogram of n buckets has n + 2 words: how many observations fell into each bucket (not cumulative), how many above the last
one, and their sum. What the catalogue gives in seconds is written in nanoseconds.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

from metrics.catalog import STATES, Kind, LabelValues, Metric, Place, metrics_of

MAGIC = int.from_bytes(b"SWledger", "little") >> 1  # fits a signed word
WORD_BYTES = 8
NUM_SPANS = 32768  # of the last seconds: a rank writes about six a step
SPAN_WORDS = 8
INFO_BYTES = 4096
NO_PEER = -1
NO_STEP = -1

SpanKind = Literal[
    "recv",
    "forward",
    "send",
    "token_broadcast",
    "token_receive",
    "wait_input",
    "wait_slot",
    "wait_token",
    "transfer",
    "host",
    "idle",
]
"""What a span tells of: an operation of a step, or how a rank's compute stream spent the time before a step's forward."""

SPAN_KINDS: tuple[SpanKind, ...] = get_args(SpanKind)
OPERATIONS = SPAN_KINDS[:5]
"""The kinds of which the ledger also says which one is being done now; the stream of an operation does one at a time."""

# Words of the header.
MAGIC_WORD = 0
LAYOUT_WORD = 1
WRITER_WORD = 2
RANK_WORD = 3
WORLD_SIZE_WORD = 4
PROCESS_WORD = 5  # id of the process that writes, 0 before the first
PROCESS_START_WORD = 6  # when the kernel started it, in clock ticks since boot: a process id is used again
NUM_PROCESSES_WORD = 7
WALL_OFFSET_WORD = 8  # Unix time minus perf_counter, nanoseconds
STATE_WORD = 9  # index of the present state in STATES, -1 before the first
STATES_SINCE_WORD = 10  # since when the states' counters add up to the time that passed
NUM_SPANS_WORD = 11  # ever written; span n is in entry n % NUM_SPANS
INFO_VERSION_WORD = 12  # odd while the infos are written
INFO_LENGTH_WORD = 13
DOING_WORD = 16  # two words for each of OPERATIONS: step, and since when
HEADER_WORDS = 32

WRITERS = ("rank", "engine")


@dataclass(frozen=True)
class Series:
    """Where one series is: ``first`` is its first word."""

    metric: Metric
    values: LabelValues
    first: int


class Layout:
    """The ledger of one rank, or of the engine."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.series: dict[tuple[str, LabelValues], Series] = {}
        first = HEADER_WORDS
        for metric in metrics_of(place.writer):
            for values in metric.labels.series(place):
                self.series[metric.name, values] = Series(metric, values, first)
                first += len(metric.buckets) + 2 if metric.kind is Kind.HISTOGRAM else 1
        self.info_offset = first * WORD_BYTES
        self.spans_word = (self.info_offset + INFO_BYTES) // WORD_BYTES
        self.num_words = self.spans_word + NUM_SPANS * SPAN_WORDS
        self.hash = self._hash()

    @property
    def num_bytes(self) -> int:
        return self.num_words * WORD_BYTES

    def find(self, metric: Metric, values: LabelValues) -> Series:
        """``KeyError`` for a series that this ledger does not have."""
        return self.series[metric.name, values]

    def _hash(self) -> int:
        lines = [repr((STATES, SPAN_KINDS, NUM_SPANS, SPAN_WORDS, INFO_BYTES, HEADER_WORDS, self.place))]
        lines += [repr((s.metric.name, s.values, s.first, s.metric.buckets)) for s in self.series.values()]
        return int.from_bytes(hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest(), "little") >> 1


def scaled_buckets(metric: Metric) -> tuple[int, ...]:
    """The bounds as they are written: nanoseconds, or counts."""
    scale = 1_000_000_000 if metric.is_time else 1
    return tuple(round(bucket * scale) for bucket in metric.buckets)
