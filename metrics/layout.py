"""Where things are in a ledger: a fixed layout of 64-bit words that follows from the catalogue and from whose ledger it is.

    header | a word for each counter and gauge, a run of words for each histogram | infos | a ring of step records

A histogram of n buckets has n + 2 words: how many observations fell into each bucket (not cumulative), how many above the last
one, and their sum. What the catalogue gives in seconds is written in nanoseconds.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from metrics.catalog import STATES, Kind, LabelValues, Metric, Place, Writer, metrics_of

MAGIC = int.from_bytes(b"SWledger", "little") >> 1  # fits a signed word
WORD_BYTES = 8
NUM_RECORDS = 16384  # of the last steps: each gives about six spans
RECORD_WORDS = 26  # a number, the fields of ``metrics.steps.StepRecord``, the number again
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
"""The kinds that are operations of a step; a stream of its own does each of them, one at a time."""

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
NUM_RECORDS_WORD = 9  # ever written; record n is in entry n % NUM_RECORDS
INFO_VERSION_WORD = 10  # odd while the infos are written
INFO_LENGTH_WORD = 11
ROW_BYTES_WORD = 12  # of hidden states, as they pass a boundary
NUM_SLOTS_WORD = 13  # of the ring of a boundary

# What the rank is at, as numbers of steps since its links were built: lane by lane (``metrics.steps``) how many have ended.
NUM_BEGUN_WORD = 16
LAST_STEP_WORD = 17  # the step that was begun last
NEEDED_STEP_WORD = 18  # the newest step whose tokens it needs
NUM_ENDED_WORD = 20  # a word for each lane
SINCE_WORD = 24  # a word for each lane: when its last operation ended, or when the one it is at was begun, if that is later
LANES_WORD = 28  # a bit for each lane that the rank has
COMPUTED_WORD = 29  # time in forwards that have ended, of all processes together
IDLE_UNTIL_WORD = 30  # when the rank last took up a plan after it had had nothing to do

# Written by whoever folds the records into counters (``metrics.fold``).
NUM_FOLDED_WORD = 32
UNTIL_WORD = 33  # up to when the states' counters account for the time
TOKENS_AT_WORD = 34
COMPUTED_FOLDED_WORD = 35  # of ``COMPUTED_WORD``, what the records had that were folded
HEADER_WORDS = 48

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
        self.records_word = (self.info_offset + INFO_BYTES) // WORD_BYTES
        self.num_words = self.records_word + (NUM_RECORDS * RECORD_WORDS if place.writer is Writer.RANK else 0)
        self.hash = self._hash()

    @property
    def num_bytes(self) -> int:
        return self.num_words * WORD_BYTES

    def find(self, metric: Metric, values: LabelValues) -> Series:
        """``KeyError`` for a series that this ledger does not have."""
        return self.series[metric.name, values]

    def _hash(self) -> int:
        lines = [repr((STATES, NUM_RECORDS, RECORD_WORDS, INFO_BYTES, HEADER_WORDS, self.place))]
        lines += [repr((s.metric.name, s.values, s.first, s.metric.buckets)) for s in self.series.values()]
        return int.from_bytes(hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest(), "little") >> 1


@cache
def scaled_buckets(metric: Metric) -> tuple[int, ...]:
    """The bounds as they are written: nanoseconds, or counts."""
    scale = 1_000_000_000 if metric.is_time else 1
    return tuple(round(bucket * scale) for bucket in metric.buckets)
