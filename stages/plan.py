"""What travels on the control channels between the engine and the ranks. No torch.

Every message is a msgspec struct in the ``Message`` union, encoded as msgpack; ``PROTOCOL_VERSION`` changes
with any of them. Plans are applied by every rank in ``step_id`` order, exactly once.
"""

import zlib
from enum import IntEnum

import msgspec

PROTOCOL_VERSION = 4
NO_LOGPROBS = -1
MAX_LOGPROBS = 20  # top tokens of a position: what clients ask for, and what a result can carry without weight
# Prompt positions whose logits a step may compute. They are as wide as the vocabulary: 256 take 150 MB with 150,000 tokens.
MAX_SCORED_TOKENS = 256


class RowKind(IntEnum):
    PREFILL = 0  # a chunk of the prompt: its token ids are in the plan
    DECODE = 1  # one position whose input id is last_tokens[slot] on the rank's device


class RowSampling(msgspec.Struct, frozen=True, array_like=True):
    """How the last rank samples a sequence slot's tokens; fixed for the slot's generation.

    ``temperature`` 0 means greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. A draw is a pure
    function of (``seed``, position of the sampled token).

    ``repetition_penalty`` 1 and the other penalties 0 are off; tokens from position ``num_prompt_tokens`` on count as
    generated, also those that come as token ids of a prefill. ``logit_bias`` lists token ids and what is added to their
    logits. ``banned_token_ids`` are not sampled at positions before ``banned_until``. ``num_logprobs`` is the number of top
    tokens whose log-probabilities come with each sampled token's own, ``num_prompt_logprobs`` the same for
    ``PlanRow.scored``; ``NO_LOGPROBS`` is none at all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    num_prompt_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[tuple[int, float]] = []
    banned_token_ids: list[int] = []
    banned_until: int = 0
    num_logprobs: int = NO_LOGPROBS
    num_prompt_logprobs: int = NO_LOGPROBS

    @property
    def is_penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


class PlanRow(msgspec.Struct, frozen=True, array_like=True):
    """One request's part of a step.

    ``start`` is the position of the first of ``num_tokens`` tokens. ``token_ids`` holds them for a prefill
    row and is empty for a decode row. ``blocks`` are KV block numbers appended to the slot's block table
    before the step. ``sampling`` is given with the first row of a (slot, generation) and None after that.
    ``needs_token``: the last rank samples from the row's last position. ``scored`` are the tokens that follow the row's first
    positions in the prompt, for as many of them as log-probabilities are wanted.
    """

    slot: int
    generation: int
    kind: RowKind
    start: int
    num_tokens: int
    token_ids: list[int]
    blocks: list[int]
    sampling: RowSampling | None
    needs_token: bool
    scored: list[int] = []


class StepPlan(msgspec.Struct, frozen=True, tag="plan"):
    """One step, the same for every rank.

    ``freed`` lists the (slot, generation) pairs freed since the previous plan; a rank applies them before the
    rows. ``needs_tokens_of`` lists the earlier steps whose sampled tokens this plan's decode rows read.
    ``max_sample_len`` is the width of this step's token message. ``num_in_flight`` counts the planned steps whose result is
    not back, this one included. A plan without rows still goes through every boundary.
    """

    epoch: int
    step_id: int
    rows: list[PlanRow]
    freed: list[tuple[int, int]]
    needs_tokens_of: list[int]
    max_sample_len: int
    num_in_flight: int

    @property
    def num_tokens(self) -> int:
        """Rows of the hidden states of this step."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def sampled_rows(self) -> list[PlanRow]:
        """The rows that get a token, in the order of the token message; its ``num_reqs`` is their number."""
        return [row for row in self.rows if row.needs_token]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of a token, and the most probable tokens at its place with theirs, best first.

    They are the log-softmax of the model's own logits in float32, before anything that a request asks of sampling.
    """

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]


class SampledRow(msgspec.Struct, frozen=True, array_like=True):
    """One sampled row of a result: ``token_ids`` are the accepted tokens, in order, ``logprobs`` one for each if asked for.

    ``error`` is empty, or one line that says why nothing could be sampled; the request fails then, and no other.
    """

    slot: int
    generation: int
    token_ids: list[int]
    num_rejected: int
    logprobs: list[TokenLogprobs]
    error: str = ""


class ScoredRow(msgspec.Struct, frozen=True, array_like=True):
    """The log-probabilities of a plan row's ``scored`` tokens, in their order."""

    slot: int
    generation: int
    logprobs: list[TokenLogprobs]


class StepResult(msgspec.Struct, frozen=True, tag="result"):
    """What the last rank sampled in a step: ``rows`` has one entry for each of the plan's ``sampled_rows``, ``scored`` one for
    each row with ``scored`` tokens."""

    epoch: int
    step_id: int
    rows: list[SampledRow]
    scored: list[ScoredRow] = []


class RowsFailed(msgspec.Struct, frozen=True, tag="rows_failed"):
    """A rank could not compute some rows of a step, each for a reason of its own; the other rows are right. The last rank finds
    their logits not finite. ``rows`` are (slot, generation, one line that says why)."""

    epoch: int
    step_id: int
    rank: int
    rows: list[tuple[int, int, str]]


class StepDone(msgspec.Struct, frozen=True, tag="done"):
    """A rank finished a step. ``plan_hash`` is that of the plan it applied; ``verdict`` is False when a
    header did not match; ``stage_seconds`` is the time its forward took; ``error`` is empty or one line."""

    epoch: int
    step_id: int
    rank: int
    plan_hash: int
    verdict: bool
    stage_seconds: float
    error: str


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The engine's first message to a rank: what to load. The rank answers with its Hello.

    ``model_path`` is a Hugging Face directory; ``layer_split`` the number of layers of each rank, empty for the balanced
    split. The rank computes with ``num_threads`` threads on the CPUs ``cpus``, on any when that is empty.
    ``kv_cache_bytes`` is this rank's KV pool, 0 to size it from the free memory, shared by ``ranks_on_host`` ranks.
    ``device`` is ``cpu`` or ``cuda:N``, N counted as the CUDA driver lists the GPUs of this process, and shared by
    ``ranks_on_device`` ranks. ``spin_us`` is how long the rank's loop looks for progress of the GPU before it sleeps until it
    is woken.
    """

    rank: int
    world_size: int
    model_name: str
    model_path: str
    load_format: str
    dtype: str
    layer_split: list[int]
    num_threads: int
    cpus: list[int]
    ranks_on_host: int
    block_size: int
    kv_cache_bytes: int
    max_num_seqs: int
    max_model_len: int
    device: str = "cpu"
    ranks_on_device: int = 1
    spin_us: int = 0


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """How far a rank is with reading its weights, in bytes of the files; some between its Setup and its Hello."""

    rank: int
    loaded_bytes: int
    total_bytes: int


class TensorSchema(msgspec.Struct, frozen=True):
    """One of the intermediate tensors of a boundary: ``[rows, width]`` of ``dtype`` (torch's name, as 'float32')."""

    name: str
    dtype: str
    width: int


class Offer(msgspec.Struct, frozen=True):
    """What a rank has and can do.

    ``transports`` maps each transport's name to '' when this rank can do it, else to the reason why not.
    ``max_blocks`` is the number of KV blocks of ``block_size`` tokens that fit this rank's memory, each of
    ``block_bytes`` bytes here. ``embedding_checksum`` is 0 unless the model's embeddings are tied and this rank holds them.
    ``load_growth_bytes`` is the growth of peak RSS while loading, ``slice_bytes`` the bytes of the weights it owns.
    ``device`` is the device's name; ``device_uuid`` tells GPUs apart and is empty on a CPU; ``nvlink_peers`` are the UUIDs of
    the GPUs of this host that this rank's GPU reaches over NVLink.
    """

    host_id: str
    process_id: int
    device: str
    transports: dict[str, str]
    boundary: list[TensorSchema]
    first_layer: int
    end_layer: int
    num_layers: int
    num_parameters: int
    slice_bytes: int
    load_growth_bytes: int
    load_seconds: float
    num_threads: int
    block_size: int
    block_bytes: int
    max_blocks: int
    tied_embeddings: bool
    embedding_checksum: int
    device_uuid: str = ""
    nvlink_peers: list[str] = []


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A rank's first message: it has loaded its slice."""

    protocol: int
    version: str
    rank: int
    world_size: int
    offer: Offer


class Limits(msgspec.Struct, frozen=True):
    """Sizes every rank agrees on for an epoch."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_sample_len: int
    num_blocks: int
    block_size: int
    lane_depth: int
    ring_slots: int


class Epoch(msgspec.Struct, frozen=True, tag="epoch"):
    """A new life of the set of ranks: everybody's offers, and what is wanted of the links.

    Every rank applies ``choose_transport(offers, wanted_transport)`` and builds its links. ``num_fds`` file
    descriptors travel with the frame (``stages.transport.links`` gives their order); 0 where none are needed. Where the
    ends of links are made by the ranks, each answers with ``Exported`` and waits for ``Peers``.
    """

    epoch: int
    offers: list[Offer]
    wanted_transport: str
    limits: Limits
    num_fds: int


class Exported(msgspec.Struct, frozen=True, tag="exported"):
    """What the other ranks need to reach this rank's end of its links: bytes that only the transport understands."""

    epoch: int
    rank: int
    data: bytes


class Peers(msgspec.Struct, frozen=True, tag="peers"):
    """Every rank's ``Exported.data``, in rank order. The ranks now connect their links and probe them."""

    epoch: int
    exports: list[bytes]


class Linked(msgspec.Struct, frozen=True, tag="linked"):
    """A rank's links of this epoch are built and probed."""

    epoch: int
    rank: int
    transport: str
    reason: str


class LinkFailed(msgspec.Struct, frozen=True, tag="link_failed"):
    """A rank could not build its links of this epoch over ``transport``."""

    epoch: int
    rank: int
    transport: str
    reason: str


class EndEpoch(msgspec.Struct, frozen=True, tag="end_epoch"):
    """The engine has closed the epoch: poison the links, drain, report nothing more of it."""

    epoch: int
    cause: str


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """A rank has ended an epoch: nothing of it is under way here any more, and its links may be taken down elsewhere."""

    epoch: int
    rank: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """No plan follows: finish what was planned, then end the process with exit code 0."""


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A rank is about to end because of ``cause`` (one line); ``is_config_error``: the user's input is at fault."""

    rank: int
    cause: str
    is_config_error: bool


Message = (
    Setup
    | Loading
    | Hello
    | Epoch
    | Exported
    | Peers
    | Linked
    | LinkFailed
    | StepPlan
    | StepDone
    | RowsFailed
    | StepResult
    | EndEpoch
    | Drained
    | Drain
    | RankFailed
)
"""Everything a control channel carries."""

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """The msgpack bytes of a message."""
    return _encoder.encode(message)


_decoder = msgspec.msgpack.Decoder(Message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """The message in ``data``; ``msgspec.DecodeError`` (a ``ValueError``) when it is not one."""
    return _decoder.decode(data)


def plan_hash(encoded_plan: bytes) -> int:
    """CRC-32 of an encoded plan: the engine compares each rank's with its own, so that no rank can drift unseen."""
    return zlib.crc32(encoded_plan)
