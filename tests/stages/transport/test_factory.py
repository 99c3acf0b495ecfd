from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from stages.device import HostStream
from stages.errors import ConfigError, TransportError
from stages.plan import TensorSchema
from stages.topology import PPGroup
from stages.transport.factory import TransportConfig, create_pp_handler, create_pp_transport
from tests.stages.transport.harness import HIDDEN, MAX_ROWS, links_for, sizes_for

WIDER = [TensorSchema("hidden_states", "float32", 9)]


@pytest.fixture
def compute() -> Iterator[HostStream]:
    stream = HostStream("compute")
    yield stream
    stream.close()


def config(compute: HostStream, *, world_size: int = 2, with_links: bool = True, **changes: Any) -> TransportConfig:
    links = links_for("memory", world_size, sizes_for(HIDDEN, 2, 2), epoch=1, start_seq=0)[-1] if with_links else None
    group = PPGroup(world_size - 1, world_size, 1)
    defaults = {"name": "memory", "boundary": HIDDEN, "max_rows": MAX_ROWS, "ring_slots": 2}
    return TransportConfig(pp_group=group, compute=compute, links=links, **(defaults | changes))


def test_without_pipeline_parallelism_there_is_neither(compute: HostStream) -> None:
    alone = config(compute, world_size=1, with_links=False, name="none")
    assert create_pp_transport(alone) is None
    assert create_pp_handler(alone) is None


@pytest.mark.parametrize("create", [create_pp_transport, create_pp_handler])
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": "memry"}, ConfigError, "--pp-transport memry: unknown transport; did you mean memory?"),
        (
            {"name": "none"},
            ConfigError,
            "--pp-transport none: unknown transport; must be one of auto, copy_engine, nccl, shared_memory, gloo, memory",
        ),
        ({"with_links": False}, TransportError, "transport memory: rank 1 was given no links"),
    ],
)
def test_what_cannot_be_built_is_refused(
    compute: HostStream,
    create: Callable[[TransportConfig], object],
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error) as info:
        create(config(compute, **changes))
    assert str(info.value) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boundary": WIDER}, "a ring slot has 1024 bytes, 32 rows of the boundary need 1152"),
        ({"max_rows": 33}, "a ring slot has 1024 bytes, 33 rows of the boundary need 1088"),
        ({"ring_slots": 3}, "ring slots 3: the links were made with 2"),
    ],
)
def test_links_of_other_sizes_are_refused(compute: HostStream, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TransportError) as info:
        create_pp_transport(config(compute, **changes))
    assert str(info.value) == message


@pytest.mark.parametrize(
    "persistent",
    [
        torch.empty(MAX_ROWS - 1, 8),
        torch.empty(MAX_ROWS, 9),
        torch.empty(MAX_ROWS, 8, dtype=torch.bfloat16),
        torch.empty(8, MAX_ROWS).T,
    ],
    ids=["short", "wide", "dtype", "strided"],
)
def test_persistent_tensors_must_hold_what_is_received(compute: HostStream, persistent: torch.Tensor) -> None:
    with pytest.raises(
        TransportError, match=r"persistent tensor hidden_states: .*, must be contiguous torch.float32 \[>= 32, 8\]"
    ):
        create_pp_transport(config(compute), {"hidden_states": persistent})


@pytest.mark.parametrize("boundary", [[], [TensorSchema("x", "int8", 4)]])
def test_a_boundary_that_no_ring_carries_is_refused(compute: HostStream, boundary: Sequence[TensorSchema]) -> None:
    with pytest.raises(ConfigError, match="boundary"):
        create_pp_transport(config(compute, boundary=boundary))
