"""Which device each rank computes on."""

import pytest

from orchestrator.config import ServeConfig
from orchestrator.devices import check_devices, choose_devices
from stages.errors import ConfigError

NONE = (0, "torch 2.13.0+cpu is built without CUDA")


def test_auto_takes_gpus_when_there_is_one_for_every_rank() -> None:
    assert choose_devices("auto", 2, (2, "")) == (["cuda:0", "cuda:1"], "there is a GPU for every rank")
    assert choose_devices("auto", 3, (2, "")) == (["cpu"] * 3, "2 GPUs are too few for 3 ranks")
    assert choose_devices("auto", 1, NONE) == (["cpu"], NONE[1])


@pytest.mark.parametrize(
    ("wanted", "devices"),
    [("cpu", ["cpu", "cpu"]), ("cuda", ["cuda:0", "cuda:1"]), ("cuda:1,cuda:1", ["cuda:1", "cuda:1"])],
)
def test_what_is_asked_for_is_taken(wanted: str, devices: list[str]) -> None:
    assert choose_devices(wanted, 2, (2, "")) == (devices, "asked for")


@pytest.mark.parametrize(
    ("wanted", "found", "message"),
    [
        ("cuda", NONE, "--device cuda: needs a GPU, but torch 2.13.0+cpu is built without CUDA"),
        ("cuda", (1, ""), "--device cuda: needs a GPU for each of 2 ranks, there are 1"),
        ("cuda:0", (2, ""), "--device cuda:0: must name a device for each of 2 ranks, names 1"),
        ("cuda:0,cuda:2", (2, ""), "--device cuda:0,cuda:2: there is no cuda:2, the GPUs are cuda:0 to cuda:1"),
    ],
)
def test_what_is_impossible_names_the_option_and_the_rule(wanted: str, found: tuple[int, str], message: str) -> None:
    with pytest.raises(ConfigError) as info:
        choose_devices(wanted, 2, found)
    assert str(info.value).startswith(message)


def test_memory_is_for_ranks_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match="--pp-transport memory: must be used with --device cpu"):
        check_devices(ServeConfig(pp_transport="memory"), ["cuda:0", "cuda:0"])
