"""Layer splits and the pipeline's shape."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import ConfigError
from stages.topology import PPGroup, balanced_split, check_layer_split, check_num_stages, stage_infos


@pytest.mark.parametrize("num_layers", range(1, 101, 9))
@pytest.mark.parametrize("num_stages", range(1, 17))
def test_a_split_is_disjoint_complete_and_ordered_or_refused(num_layers: int, num_stages: int) -> None:
    if num_stages > num_layers:
        with pytest.raises(ConfigError, match=f"--pipeline-parallel-size {num_stages}: .* number of layers, {num_layers}"):
            balanced_split([7] * num_layers, 20, num_stages)
        return
    split = balanced_split([7] * num_layers, 20, num_stages)
    check_layer_split(split, num_layers, num_stages)
    owned = [layer for info in stage_infos(split) for layer in info.layers]
    assert owned == list(range(num_layers))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(0, 100), st.data())
def test_no_other_split_has_a_smaller_largest_stage(layer_bytes: list[int], head_bytes: int, data: st.DataObject) -> None:
    num_layers = len(layer_bytes)
    num_stages = data.draw(st.integers(1, num_layers))

    def largest(ends: tuple[int, ...]) -> int:
        bounds = [0, *ends, num_layers]
        sizes = [sum(layer_bytes[a:b]) for a, b in pairwise(bounds)]
        sizes[-1] += head_bytes
        return max(sizes)

    split = balanced_split(layer_bytes, head_bytes, num_stages)
    ends = tuple(sum(split[: i + 1]) for i in range(num_stages - 1))
    assert largest(ends) == min(largest(other) for other in combinations(range(1, num_layers), num_stages - 1))


def test_a_heavy_head_moves_layers_to_the_earlier_stage() -> None:
    assert balanced_split([354] * 30, 2831, 2) == [19, 11]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ([16, 13], r"--layer-split 16,13: adds up to 29, must add up to the model's 30 layers"),
        ([30], r"--layer-split 30: has 1 parts, must have one per stage \(2\)"),
        ([30, 0], r"--layer-split 30,0: every stage must own at least 1 layer"),
    ],
)
def test_bad_splits_are_refused_with_the_rule(split: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layer_split(split, 30, 2)


@pytest.mark.parametrize("num_stages", [0, -1, 31])
def test_a_stage_needs_a_layer(num_stages: int) -> None:
    with pytest.raises(ConfigError, match=f"--pipeline-parallel-size {num_stages}"):
        check_num_stages(30, num_stages)


def test_neighbours() -> None:
    first, middle, last = (PPGroup(rank, 3) for rank in range(3))
    assert (first.is_first_rank, first.is_last_rank, first.next_rank) == (True, False, 1)
    assert (middle.prev_rank, middle.next_rank, middle.last_rank) == (0, 2, 2)
    assert (last.is_first_rank, last.is_last_rank, last.prev_rank) == (False, True, 1)
    with pytest.raises(ValueError, match="rank 0"):
        _ = first.prev_rank
    with pytest.raises(ValueError, match="rank 2 is the last of 3"):
        _ = last.next_rank
