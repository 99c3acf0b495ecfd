import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from stages.errors import ConfigError, TransportError
from stages.plan import Limits, TensorSchema
from stages.topology import PPGroup
from stages.transport.links import (
    FDS_PER_LINK,
    LinkSizes,
    check_boundary,
    create_links_for,
    link_ids,
    link_sizes,
    shared_links_from_fds,
)
from stages.transport.memory import MemoryHub
from stages.transport.ring import RingLayout
from tests.stages.transport.harness import open_fds

SIZES = LinkSizes(RingLayout(2, 128), RingLayout(3, 64))


def close(fds: list[list[int]]) -> None:
    for fd in [fd for rank in fds for fd in rank]:
        os.close(fd)


def test_the_order_of_a_rank_s_links() -> None:
    assert [str(link_id) for rank in range(3) for link_id in link_ids(rank, 3)] == [
        "boundary link from rank 0 to rank 1",
        "tokens link from rank 2 to rank 0",
        "boundary link from rank 0 to rank 1",
        "boundary link from rank 1 to rank 2",
        "tokens link from rank 2 to rank 1",
        "boundary link from rank 1 to rank 2",
        "tokens link from rank 2 to rank 0",
        "tokens link from rank 2 to rank 1",
    ]
    assert link_ids(0, 1) == []


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_descriptor_belongs_to_one_list(world_size: int) -> None:
    fds = create_links_for(world_size, SIZES, epoch=1)
    assert [len(rank) for rank in fds] == [FDS_PER_LINK * len(link_ids(rank, world_size)) for rank in range(world_size)]
    listed = [fd for rank in fds for fd in rank]
    assert len(set(listed)) == len(listed)
    assert not any(os.get_inheritable(fd) for fd in listed)
    close(fds)


def test_a_rank_takes_its_descriptors_over() -> None:
    fds = create_links_for(2, SIZES, epoch=1)
    links = [shared_links_from_fds(fds[rank], PPGroup(rank, 2, 1), SIZES) for rank in range(2)]
    assert links[0].to_next is not None
    assert links[0].from_prev is None
    assert links[1].from_prev is not None
    assert links[1].to_next is None
    for rank_links in links:
        rank_links.close()
        rank_links.close()


def swap_segment_and_bell(fds: list[int]) -> list[int]:
    return [fds[1], fds[0], *fds[2:]]


def swap_links(fds: list[int]) -> list[int]:
    return [*fds[FDS_PER_LINK:], *fds[:FDS_PER_LINK]]


def drop_one(fds: list[int]) -> list[int]:
    os.close(fds[-1])
    return fds[:-1]


@pytest.mark.parametrize(
    ("change", "epoch", "sizes", "message"),
    [
        (drop_one, 1, SIZES, "rank 0 was sent 5 file descriptors of links, expected 6"),
        (swap_segment_and_bell, 1, SIZES, "boundary link from rank 0 to rank 1: the segment has 0 bytes"),
        (swap_links, 1, SIZES, "boundary link from rank 0 to rank 1: the segment's sender is 1, expected 0"),
        (list, 2, SIZES, "boundary link from rank 0 to rank 1: the segment's epoch is 1, expected 2"),
        (list, 1, LinkSizes(RingLayout(2, 192), SIZES.tokens), "the segment has 4480 bytes, expected 4608"),
        (list, 1, LinkSizes(RingLayout(2, 127), SIZES.tokens), "the segment's slot_bytes is 128, expected 127"),
        (list, 1, LinkSizes(SIZES.boundary, RingLayout(4, 64)), "tokens link from rank 1 to rank 0: the segment has"),
    ],
)
def test_links_of_the_wrong_kind_are_refused_and_closed(
    change: Callable[[list[int]], list[int]], epoch: int, sizes: LinkSizes, message: str
) -> None:
    fds = create_links_for(2, SIZES, epoch=1)
    with pytest.raises(TransportError, match=message):
        shared_links_from_fds(change(fds[0]), PPGroup(0, 2, epoch), sizes)
    close(fds[1:])


def test_the_segment_cannot_be_resized() -> None:
    fds = create_links_for(2, SIZES, epoch=1)
    with pytest.raises(PermissionError):
        os.ftruncate(fds[0][0], 0)
    close(fds)


def test_nothing_is_left_when_descriptors_run_out() -> None:
    script = """
import os, resource
from stages.transport.links import LinkSizes, create_links_for
from stages.transport.ring import RingLayout
open_now = len(os.listdir("/proc/self/fd")) - 1
for spare in range(0, 12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + spare, 4096))
    try:
        create_links_for(2, LinkSizes(RingLayout(2, 64), RingLayout(2, 64)), epoch=1)
    except OSError:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        assert len(os.listdir("/proc/self/fd")) - 1 == open_now, spare
    else:
        raise SystemExit(f"12 descriptors were made of {spare}")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_engine_s_side_loads_no_torch() -> None:
    script = (
        "import sys, stages.transport.links, stages.transport.choice, stages.transport.memory; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_sizes_follow_from_the_limits() -> None:
    limits = Limits(
        max_num_seqs=8,
        max_num_batched_tokens=16,
        max_model_len=64,
        max_sample_len=2,
        num_blocks=4,
        block_size=16,
        lane_depth=3,
        ring_slots=2,
    )
    sizes = link_sizes([TensorSchema("hidden_states", "bfloat16", 10), TensorSchema("residual", "float32", 16)], limits)
    assert sizes.boundary == RingLayout(2, 320 + 1024)
    assert sizes.tokens == RingLayout(4, 8 * (2 * 8 + 4 + 4))


@pytest.mark.parametrize(
    ("boundary", "message"),
    [
        ([], "boundary of 0 tensors: must have 1 to 16"),
        ([TensorSchema("x", "int8", 4)], "boundary tensor x: dtype int8: must be one of float32, bfloat16, float16"),
        ([TensorSchema("x", "float32", 0)], "boundary tensor x: width 0: must be at least 1"),
        ([TensorSchema("x", "float32", 1)] * 2, "boundary tensors x, x: names must differ"),
    ],
)
def test_a_boundary_that_no_ring_carries_is_refused(boundary: list[TensorSchema], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_boundary(boundary)


def test_a_hub_serves_epoch_after_epoch() -> None:
    hub = MemoryHub()
    abandoned = hub.join(PPGroup(0, 2, 1), SIZES)
    first = hub.join(PPGroup(0, 2, 2), SIZES)
    with pytest.raises(TransportError, match="rank 1 joins epoch 1, but epoch 2 has begun"):
        hub.join(PPGroup(1, 2, 1), SIZES)
    second = hub.join(PPGroup(1, 2, 2), SIZES)
    assert first.to_next is not None
    assert second.from_prev is not None
    assert first.to_next.buffer is second.from_prev.buffer
    assert abandoned.to_next is not None
    assert abandoned.to_next.buffer is not first.to_next.buffer


def test_a_hub_refuses_ranks_that_disagree() -> None:
    hub = MemoryHub()
    hub.join(PPGroup(0, 2, 1), SIZES)
    with pytest.raises(TransportError, match="boundary link from rank 0 to rank 1: rank 1 expects RingLayout"):
        hub.join(PPGroup(1, 2, 1), LinkSizes(RingLayout(4, 128), SIZES.tokens))


def test_closing_a_link_leaves_no_descriptor_open() -> None:
    before = open_fds()
    fds = create_links_for(2, SIZES, epoch=1)
    links = [shared_links_from_fds(fds[rank], PPGroup(rank, 2, 1), SIZES) for rank in range(2)]
    assert len(open_fds() - before) == 2 * 2 * FDS_PER_LINK
    for rank_links in links:
        rank_links.close()
    assert open_fds() == before
