"""Where a rank stands in the pipeline and which layers it owns. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from stages.errors import ConfigError


@dataclass(frozen=True)
class PPGroup:
    """The pipeline as one rank sees it in one epoch."""

    rank: int
    world_size: int
    epoch: int = 0

    @property
    def is_first_rank(self) -> bool:
        return self.rank == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.last_rank

    @property
    def prev_rank(self) -> int:
        """The rank that sends hidden states to this one; ``ValueError`` on the first rank."""
        if self.is_first_rank:
            raise ValueError("rank 0 has no previous rank")
        return self.rank - 1

    @property
    def next_rank(self) -> int:
        """The rank this one sends hidden states to; ``ValueError`` on the last rank."""
        if self.is_last_rank:
            raise ValueError(f"rank {self.rank} is the last of {self.world_size} and has no next rank")
        return self.rank + 1

    @property
    def last_rank(self) -> int:
        return self.world_size - 1


@dataclass(frozen=True)
class StageInfo:
    """The slice of the model that one rank owns: layers ``first_layer <= i < end_layer`` of ``num_layers``."""

    rank: int
    world_size: int
    first_layer: int
    end_layer: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.world_size - 1

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)


def check_num_stages(num_layers: int, num_stages: int) -> None:
    """Raise ``ConfigError`` unless ``1 <= num_stages <= num_layers``."""
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages}: must be between 1 and the model's number of layers, {num_layers}"
        )


def check_layer_split(split: Sequence[int], num_layers: int, num_stages: int) -> None:
    """Raise ``ConfigError`` unless ``split`` gives each of ``num_stages`` stages >= 1 of exactly ``num_layers`` layers."""
    text = ",".join(map(str, split))
    if len(split) != num_stages:
        raise ConfigError(f"--layer-split {text}: has {len(split)} parts, must have one per stage ({num_stages})")
    if min(split) < 1:
        raise ConfigError(f"--layer-split {text}: every stage must own at least 1 layer")
    if sum(split) != num_layers:
        raise ConfigError(f"--layer-split {text}: adds up to {sum(split)}, must add up to the model's {num_layers} layers")


def balanced_split(layer_bytes: Sequence[int], head_bytes: int, num_stages: int) -> list[int]:
    """Layers per stage, in order, so that the largest stage's bytes are as few as possible.

    ``layer_bytes[i]`` are the weight bytes of layer i, ``head_bytes`` those of the final norm and the
    output head, which every step reads on the last stage. The embedding table is not counted: a step
    gathers a few of its rows. Among equal answers the earlier stages get the more layers.

    The linear-partition problem, by dynamic programming over (stages, layers): O(P · L²).
    """
    num_layers = len(layer_bytes)
    check_num_stages(num_layers, num_stages)
    prefix = [0]
    for size in layer_bytes:
        prefix.append(prefix[-1] + size)
    # best[k][i]: (largest stage's bytes, end of the first stage) for layers i.. on the last k stages
    best: list[list[tuple[int, int]]] = [[], [(prefix[-1] - prefix[i] + head_bytes, num_layers) for i in range(num_layers + 1)]]
    for stages_left in range(2, num_stages + 1):
        row: list[tuple[int, int]] = []
        for i in range(num_layers + 1):
            options = [
                (max(prefix[end] - prefix[i], best[stages_left - 1][end][0]), -end)
                for end in range(i + 1, num_layers - stages_left + 2)
            ]
            largest, negated_end = min(options, default=(2**63, -num_layers))
            row.append((largest, -negated_end))
        best.append(row)
    split: list[int] = []
    start = 0
    for stages_left in range(num_stages, 0, -1):
        end = best[stages_left][start][1]
        split.append(end - start)
        start = end
    return split


def stage_infos(split: Sequence[int]) -> list[StageInfo]:
    """One StageInfo per rank for a split that ``check_layer_split`` accepts."""
    infos: list[StageInfo] = []
    start = 0
    for rank, count in enumerate(split):
        infos.append(StageInfo(rank, len(split), start, start + count, sum(split)))
        start += count
    return infos
