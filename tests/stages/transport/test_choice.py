import msgspec
import pytest

from stages.errors import ConfigError, CopyEngineUnavailable, TransportUnavailable
from stages.plan import Offer, TensorSchema
from stages.transport.choice import choose_transport

NO_CUDA = {"copy_engine": "no CUDA device", "nccl": "no CUDA device", "gloo": "not built in"}


def offer(transports: dict[str, str], host_id: str = "a", process_id: int = 1) -> Offer:
    return Offer(
        host_id=host_id,
        process_id=process_id,
        device="cpu",
        transports=transports,
        boundary=[TensorSchema("hidden_states", "float32", 8)],
        first_layer=0,
        end_layer=1,
        num_layers=2,
        num_parameters=1,
        slice_bytes=1,
        load_growth_bytes=0,
        load_seconds=0.0,
        num_threads=1,
        block_size=16,
        block_bytes=1,
        max_blocks=1,
        tied_embeddings=False,
        embedding_checksum=0,
    )


HOST_RINGS = {**NO_CUDA, "shared_memory": "", "memory": ""}


def test_one_rank_needs_none() -> None:
    assert choose_transport([offer({})], "auto")[0] == "none"
    assert choose_transport([offer({})], "shared_memory")[0] == "none"


def test_auto_takes_the_best_that_all_can_and_names_who_could_not_do_better() -> None:
    name, reason = choose_transport([offer({**HOST_RINGS, "copy_engine": "", "nccl": ""}), offer(HOST_RINGS)], "auto")
    assert name == "shared_memory"
    assert "not copy_engine: rank 1: no CUDA device" in reason
    assert "not nccl: rank 1: no CUDA device" in reason


def test_auto_prefers_the_copy_engine() -> None:
    assert choose_transport([offer({**HOST_RINGS, "copy_engine": ""})] * 2, "auto")[0] == "copy_engine"


def test_auto_never_takes_memory() -> None:
    offers = [offer({"memory": ""})] * 2
    with pytest.raises(
        TransportUnavailable, match="auto: no transport fits every rank; not copy_engine: rank 0: does not offer"
    ):
        choose_transport(offers, "auto")
    assert choose_transport(offers, "memory")[0] == "memory"


def test_ranks_on_two_hosts_share_no_memory() -> None:
    offers = [offer({**HOST_RINGS, "gloo": ""}), offer({**HOST_RINGS, "gloo": ""}, host_id="b")]
    name, reason = choose_transport(offers, "auto")
    assert name == "gloo"
    assert "not shared_memory: rank 1: is on another host than rank 0" in reason
    with pytest.raises(TransportUnavailable, match="--pp-transport shared_memory: rank 1: is on another host"):
        choose_transport(offers, "shared_memory")


def test_memory_needs_one_process() -> None:
    with pytest.raises(TransportUnavailable, match="--pp-transport memory: rank 1: is in another process than rank 0"):
        choose_transport([offer(HOST_RINGS), offer(HOST_RINGS, process_id=2)], "memory")


def test_an_explicit_choice_fails_with_the_rank_and_its_reason() -> None:
    with pytest.raises(CopyEngineUnavailable, match="--pp-transport copy_engine: rank 0: no CUDA device"):
        choose_transport([offer(HOST_RINGS)] * 2, "copy_engine")


@pytest.mark.parametrize(("wanted", "hint"), [("shard_memory", "did you mean shared_memory"), ("xyz", "must be one of auto, ")])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_unknown_name_is_refused(wanted: str, hint: str, num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"--pp-transport {wanted}: unknown transport; {hint}"):
        choose_transport([offer(HOST_RINGS)] * num_ranks, wanted)


# ---- GPUs -------------------------------------------------------------------------------------------------------------


def on_gpu(uuid: str, *peers: str) -> Offer:
    transports = {"copy_engine": "", "nccl": "", "shared_memory": "computes on a GPU"}
    return msgspec.structs.replace(offer(transports), device_uuid=uuid, nvlink_peers=list(peers))


def test_the_copy_engine_needs_nvlink_between_ranks_that_talk() -> None:
    ring = [on_gpu("A", "B", "C"), on_gpu("B", "A", "C"), on_gpu("C", "A", "B")]
    assert choose_transport(ring, "auto")[0] == "copy_engine"
    apart = [on_gpu("A", "B"), on_gpu("B", "A", "C"), on_gpu("C", "B")]  # tokens go from the last rank to the first
    name, reason = choose_transport(apart, "auto")
    assert name == "nccl"
    assert "not copy_engine: rank 0: no NVLink between its GPU A and rank 2's C" in reason
    with pytest.raises(CopyEngineUnavailable, match="--pp-transport copy_engine: rank 0: no NVLink"):
        choose_transport(apart, "copy_engine")


def test_two_ranks_on_one_gpu_do_the_copy_engine_and_not_nccl() -> None:
    shared = [on_gpu("A"), on_gpu("A")]
    assert choose_transport(shared, "auto")[0] == "copy_engine"
    with pytest.raises(TransportUnavailable, match="--pp-transport nccl: rank 1: shares GPU A with rank 0"):
        choose_transport(shared, "nccl")
