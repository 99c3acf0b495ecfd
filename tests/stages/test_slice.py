"""One stage's slice: what it holds, and that stages in a row compute exactly what the whole model does."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.errors import ConfigError, UnsupportedModel
from stages.kv_cache import PagedKVCache
from stages.model import load as loading
from stages.model import slice as slicing
from stages.model.load import load_config
from stages.model.safetensors import StoredTensor, list_tensors
from stages.model.slice import StageModel, default_split, load_stage, resolve_dtype
from stages.model.source import ModelSource, locate_model
from stages.model.support import SUPPORTED_FAMILIES, check_support
from stages.model.weights import Progress, read_tensors
from stages.plan import PlanRow, RowKind, TensorSchema
from stages.topology import StageInfo, stage_infos
from tests.stages.model_factory import FAMILIES, tiny_config, write_tiny_model

SPLITS = [[4], [2, 2], [1, 2, 1]]
# Two sequences: a prompt in two chunks, another beside it, then decode rows of both in one step.
LENGTHS = (21, 13)
SCHEDULE = [[(0, 0, 11)], [(0, 11, 19), (1, 0, 12)], [(0, 19, 20), (1, 12, 13)], [(0, 20, 21)]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose time to threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def tiny(directory: Path, family: str, **overrides: Any) -> ModelSource:
    return locate_model(str(write_tiny_model(directory, family, **{**FAMILIES[family], **overrides})), "auto")


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 512, (length,), generator=generator) for length in LENGTHS]


def load(source: ModelSource, split: Sequence[int], dtype: torch.dtype = torch.float32) -> list[StageModel]:
    return [load_stage(source, info, dtype) for info in stage_infos(split)]


def run(stages: Sequence[StageModel]) -> list[torch.Tensor]:
    """The logits of every position of the two sequences, over SCHEDULE, each stage with a cache of its own."""
    caches = [PagedKVCache(s.info.layers, 16, 4, s.num_kv_heads, s.head_dim, s.dtype) for s in stages]
    ids, logits = sequences(), [[], []]
    free = list(range(16))
    for step in SCHEDULE:
        rows = []
        for slot, start, end in step:
            num_blocks = -(-end // 4) - -(-start // 4)
            kind = RowKind.PREFILL if end - start > 1 else RowKind.DECODE
            blocks, free = free[:num_blocks], free[num_blocks:]
            rows.append(PlanRow(slot, 0, kind, start, end - start, [], blocks, None, True))
        hidden = torch.cat([ids[slot][start:end] for slot, start, end in step])
        positions = torch.cat([torch.arange(start, end) for _, start, end in step])
        for stage, cache in zip(stages, caches, strict=True):
            for row in rows:
                cache.extend(row.slot, row.blocks)
            attention = cache.prepare(rows)
            attention.begin()
            hidden = stage.forward(hidden, positions, attention, torch.arange(len(positions)))
        for row, part in zip(rows, hidden.split([row.num_tokens for row in rows]), strict=True):
            logits[row.slot].append(part)
    return [torch.cat(parts) for parts in logits]


def test_every_supported_family_is_tried():
    assert set(FAMILIES) == SUPPORTED_FAMILIES


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_in_a_row_equal_the_whole_model(tmp_path: Path, family: str, is_tied: bool):
    source = tiny(tmp_path, family, tie_word_embeddings=is_tied)
    whole, *cut = [run(load(source, split)) for split in SPLITS]
    for split, logits in zip(SPLITS[1:], cut, strict=True):
        for slot in range(2):
            assert torch.equal(logits[slot], whole[slot]), f"split {split}, sequence {slot}"
    reference = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        for slot, ids in enumerate(sequences()):
            expected = reference(ids.unsqueeze(0), use_cache=False).logits[0]
            spread = expected.std()
            assert spread > 0.01
            assert (whole[slot] - expected).abs().max() < 1e-4 * spread


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stages_in_a_row_equal_the_whole_model_in_lower_precision(tmp_path: Path, dtype: torch.dtype):
    source = tiny(tmp_path, "qwen3", tie_word_embeddings=True)
    whole, *cut = [run(load(source, split, dtype)) for split in SPLITS]
    assert whole[0].dtype == dtype
    for logits in cut:
        assert all(map(torch.equal, logits, whole))


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3_moe"])
def test_dummy_weights_are_the_same_however_the_model_is_cut(tmp_path: Path, family: str):
    tiny_config(family, **FAMILIES[family], tie_word_embeddings=True).save_pretrained(tmp_path)
    source = locate_model(str(tmp_path), "dummy")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    whole, *cut = [run(load(source, split)) for split in SPLITS]
    assert torch.equal(torch.get_rng_state(), before)
    for logits in cut:
        assert all(map(torch.equal, logits, whole))
    # Positions are felt: the rotary frequencies, which no weight file holds, are there.
    assert whole[0].isfinite().all()
    stage = load(source, [4])[0]
    frequencies = stage.model.get_decoder().rotary_emb.inv_freq
    assert frequencies[0] == 1
    assert (frequencies[1:] < frequencies[:-1]).all()


def test_a_stage_holds_its_own_parts_and_no_others(tmp_path: Path):
    source = tiny(tmp_path, "qwen2")
    whole = load(source, [4])[0]
    names = [set(dict(stage.model.named_parameters())) for stage in load(source, [1, 2, 1])]
    assert set.union(*names) == set(dict(whole.model.named_parameters()))
    assert sum(map(len, names)) == len(set.union(*names))
    layers = [{int(name.split(".")[2]) for name in part if ".layers." in name} for part in names]
    assert layers == [{0}, {1, 2}, {3}]
    assert [name for name in names[0] if ".layers." not in name] == ["model.embed_tokens.weight"]
    assert {name for name in names[2] if ".layers." not in name} == {"model.norm.weight", "lm_head.weight"}


def test_parameters_and_bytes_add_up(tmp_path: Path):
    source = tiny(tmp_path, "llama")
    whole = load(source, [4], torch.bfloat16)[0]
    stages = load(source, [1, 2, 1], torch.bfloat16)
    assert sum(stage.num_parameters for stage in stages) == whole.num_parameters
    assert [stage.slice_bytes for stage in stages] == [2 * stage.num_parameters for stage in stages]
    assert whole.num_parameters == 2 * 512 * 64 + 64 + 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64)


def test_tied_embeddings_are_held_first_and_last_and_counted_once(tmp_path: Path):
    source = tiny(tmp_path, "llama", tie_word_embeddings=True)
    whole = load(source, [4])[0]
    first, middle, last = load(source, [1, 2, 1])
    assert first.tied_embeddings
    assert first.num_parameters + middle.num_parameters + last.num_parameters == whole.num_parameters + 512 * 64
    assert first.embedding_checksum == last.embedding_checksum == whole.embedding_checksum != 0
    assert middle.embedding_checksum == 0
    head = last.model.get_output_embeddings().weight
    assert head.data_ptr() == last.model.get_input_embeddings().weight.data_ptr()


def test_checksum_tells_two_embeddings_apart(tmp_path: Path):
    sums = [
        load(tiny(tmp_path / str(seed), "llama", tie_word_embeddings=True, seed=seed), [4])[0].embedding_checksum
        for seed in range(2)
    ]
    assert sums[0] != sums[1]
    assert load(tiny(tmp_path / "untied", "llama"), [4])[0].embedding_checksum == 0


def test_shapes_of_a_stage(tmp_path: Path):
    stage = load(tiny(tmp_path, "qwen3"), [2, 2], torch.bfloat16)[0]
    assert (stage.hidden_size, stage.vocab_size, stage.num_kv_heads, stage.head_dim) == (64, 512, 2, 16)
    assert stage.boundary == [TensorSchema("hidden_states", "bfloat16", 64)]


def test_logits_of_the_rows_asked_for(tmp_path: Path):
    stage = load(tiny(tmp_path, "llama"), [4])[0]
    ids = sequences()[0]

    def logits(rows: torch.Tensor | None) -> torch.Tensor:
        cache = PagedKVCache(stage.info.layers, 16, 4, stage.num_kv_heads, stage.head_dim, stage.dtype)
        cache.extend(0, range(6))
        row = PlanRow(0, 0, RowKind.PREFILL, 0, len(ids), [], list(range(6)), None, True)
        step = cache.prepare([row])
        step.begin()
        return stage.forward(ids, torch.arange(len(ids)), step, rows)

    every = logits(None)
    assert every.shape == (len(ids), 512)
    assert torch.allclose(logits(torch.tensor([3, 20])), every[[3, 20]], atol=1e-5)
    assert logits(torch.tensor([], dtype=torch.int64)).shape == (0, 512)


def test_sharded_weights(tmp_path: Path):
    single = tiny(tmp_path / "single", "llama", tie_word_embeddings=True)
    sharded = tiny(tmp_path / "sharded", "llama", tie_word_embeddings=True, max_shard_size="100KB")
    assert len(list(sharded.path.glob("*.safetensors"))) > 2
    assert all(map(torch.equal, run(load(sharded, [2, 2])), run(load(single, [4]))))


@pytest.mark.parametrize("is_tied", [False, True])
def test_only_the_stages_own_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tied: bool):
    source = tiny(tmp_path, "llama", tie_word_embeddings=is_tied)
    read: list[set[str]] = []

    def recording(wanted: Iterable[StoredTensor], dtype: torch.dtype, progress: Progress) -> dict[str, torch.Tensor]:
        tensors = read_tensors(wanted, dtype, progress)
        read.append(set(tensors))
        return tensors

    monkeypatch.setattr(loading, "read_tensors", recording)
    stages = load(source, [1, 2, 1])
    assert read == [set(dict(stage.model.named_parameters())) for stage in stages]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_progress_is_told_of_every_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    monkeypatch.setattr("stages.model.weights.READ_BYTES", 1000)
    monkeypatch.setattr("stages.model.weights.PIECE_BYTES", 1000)
    source = tiny(tmp_path, "llama")
    stored = list_tensors(source.path)
    total = sum(tensor.num_bytes for tensor in stored)
    told: list[tuple[int, int]] = []
    tensors = read_tensors(stored, dtype, lambda *progress: told.append(progress))
    assert told == sorted(set(told))
    assert told[-1] == (total, total)
    assert {of for _, of in told} == {total}
    steps = [after - before for (before, _), (after, _) in zip([(0, 0), *told], told, strict=False)]
    assert max(steps) <= 1000
    whole = read_tensors(stored, dtype)
    assert all(torch.equal(tensors[name], whole[name]) for name in whole)


def test_missing_tensor_is_refused(tmp_path: Path):
    source = tiny(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    with pytest.raises(ConfigError, match=r"self_attn\.\w+\.bias is not in the weight files \(16 tensors missing\)"):
        load(source, [4])


def test_weights_of_another_shape_are_refused(tmp_path: Path):
    source = tiny(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(ConfigError, match=r"the weights do not fit config\.json"):
        load(source, [4])


@pytest.mark.parametrize(("num_stages", "split"), [(1, [30]), (2, [19, 11])])
def test_default_split_counts_a_tied_head(smollm2: ModelSource, num_stages: int, split: list[int]):
    assert default_split(smollm2, torch.float32, num_stages) == split


@pytest.mark.parametrize(("rank", "dtype"), [(0, "float32"), (1, "bfloat16"), (2, "bfloat16")])
def test_loading_needs_little_more_memory_than_the_slice(smollm2: ModelSource, rank: int, dtype: str):
    script = """
import sys
from pathlib import Path
from stages.model.slice import load_stage, resolve_dtype
from stages.model.source import ModelSource
from stages.topology import stage_infos
import transformers.models.llama.modeling_llama
source = ModelSource("smollm2", Path(sys.argv[1]), None, "auto")
stage = load_stage(source, stage_infos([13, 12, 5])[int(sys.argv[3])], resolve_dtype(sys.argv[2]))
print(stage.load_growth_bytes, stage.slice_bytes, max(p.nbytes for p in stage.model.parameters()))
"""
    command = [sys.executable, "-c", script, str(smollm2.path), dtype, str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    growth, slice_bytes, largest = map(int, done.stdout.split())
    assert slice_bytes <= growth <= 1.15 * slice_bytes + largest


def test_dtype_by_name(monkeypatch: pytest.MonkeyPatch):
    assert resolve_dtype("float32") == torch.float32
    assert resolve_dtype("bfloat16") == torch.bfloat16
    monkeypatch.setattr(slicing.torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert resolve_dtype("auto") == torch.bfloat16
    monkeypatch.setattr(slicing.torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    assert resolve_dtype("auto") == torch.float32
    with pytest.raises(ConfigError, match="--dtype int8: must be one of auto, float32, bfloat16, float16"):
        resolve_dtype("int8")


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("gpt2", {}, "no pipeline plan"),
        ("gpt_oss", {}, "not among those proven"),
        ("t5", {}, "no causal language model|encoder-decoder"),
        ("gemma2", {}, "attn_logit_softcapping 50.0"),
        ("gemma2", {"attn_logit_softcapping": None, "sliding_window": 128}, "--max-model-len 512: must be at most 128"),
        ("mistral", {"sliding_window": 128}, "sliding window of 128 tokens"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type dynamic"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ("smollm3", {"layer_types": ["chunked_attention"] * 4}, "layer type chunked_attention"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(family: str, overrides: dict[str, Any], reason: str):
    with pytest.raises(UnsupportedModel, match=reason):
        check_support(tiny_config(family, **overrides))


def test_a_window_no_sequence_outgrows_is_served():
    config = tiny_config("mistral", sliding_window=128)
    check_support(config, max_model_len=128)
    with pytest.raises(UnsupportedModel, match="--max-model-len 129"):
        check_support(config, max_model_len=129)
    check_support(tiny_config("qwen2", sliding_window=128, use_sliding_window=False))


def test_unknown_model_type_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_family"}))
    with pytest.raises(ConfigError, match=r"transformers cannot read its config\.json"):
        load_config(tmp_path)


def test_split_of_another_model_is_our_bug(tmp_path: Path):
    source = tiny(tmp_path, "llama")
    with pytest.raises(AssertionError, match="4 layers built, the split has 5"):
        load_stage(source, StageInfo(0, 1, 0, 5, 5), torch.float32)
