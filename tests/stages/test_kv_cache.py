import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from stages import kv_cache
from stages.errors import UnsupportedModel
from stages.kv_cache import PagedKVCache
from stages.model.attention import ATTENTION_NAME, paged_attention, register_attention
from stages.plan import PlanRow, RowKind

KV_HEADS, SHARED, DIM, BLOCK = 2, 3, 8, 4
HEADS = KV_HEADS * SHARED
LAYERS = range(5, 7)


def make_cache(num_blocks: int = 64, dtype: torch.dtype = torch.float32) -> PagedKVCache:
    cache = PagedKVCache(LAYERS, num_blocks, BLOCK, KV_HEADS, DIM, dtype)
    cache.memory.fill_(math.nan)
    return cache


def row(slot: int, start: int, num_tokens: int, blocks: list[int], *, decode: bool = False) -> PlanRow:
    kind = RowKind.DECODE if decode else RowKind.PREFILL
    return PlanRow(slot, 0, kind, start, num_tokens, [], blocks, None, True)


class Contexts:
    """Runs steps through a cache, and beside it keeps every sequence's keys and values to attend over them plainly."""

    def __init__(self, cache: PagedKVCache, seed: int = 0) -> None:
        self.cache = cache
        self.kept: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._generator = torch.Generator().manual_seed(seed)
        self._free = list(range(cache.num_blocks))

    def blocks_for(self, slot: int, end: int) -> list[int]:
        num_new = math.ceil(end / BLOCK) - len(self.cache.table(slot))
        return [self._free.pop((7 * i) % len(self._free)) for i in range(max(0, num_new))]

    def rows(self, *parts: tuple[int, int, int, bool]) -> list[PlanRow]:
        return [row(s, start, n, self.blocks_for(s, start + n), decode=decode) for s, start, n, decode in parts]

    def run(self, rows: list[PlanRow]) -> float:
        """One step over all layers; returns the largest difference from plain attention (NaN if there is one)."""
        for r in rows:
            self.cache.extend(r.slot, r.blocks)
        step = self.cache.prepare(rows)
        step.begin()
        worst = torch.zeros(())
        for layer in self.cache.layers:
            q = self._random(HEADS, step.num_tokens)
            k, v = self._random(KV_HEADS, step.num_tokens), self._random(KV_HEADS, step.num_tokens)
            step.write(layer, k, v)
            result = step.attend(layer, q, k, v, 0.3)
            assert result.shape == (1, step.num_tokens, HEADS, DIM)
            worst = torch.maximum(worst, (result[0].float() - self._plain(layer, rows, q, k, v)).abs().max())
        return worst.item()

    def _random(self, num_heads: int, num_tokens: int) -> torch.Tensor:
        # The layout that models give: heads are a transposed view of the projections' output.
        flat = torch.randn(1, num_tokens, num_heads, DIM, generator=self._generator)
        return flat.to(self.cache.dtype).transpose(1, 2)

    def _plain(self, layer: int, rows: list[PlanRow], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outputs, first = [], 0
        for r in rows:
            tokens = slice(first, first + r.num_tokens)
            first += r.num_tokens
            new = torch.stack([k[0, :, tokens], v[0, :, tokens]]).float()
            kept = self.kept.setdefault((layer, r.slot), [])
            kept.append(new)
            keys, values = torch.cat(kept, dim=2).repeat_interleave(SHARED, dim=1)
            scores = 0.3 * q[0, :, tokens].float() @ keys.transpose(1, 2)
            hidden = torch.arange(keys.shape[1]) > torch.arange(r.start, r.start + r.num_tokens)[:, None]
            outputs.append((scores.masked_fill(hidden, -math.inf).softmax(-1) @ values).transpose(0, 1))
        return torch.cat(outputs)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str
)
def test_chunks_and_decodes_together_equal_plain_attention(dtype: torch.dtype, tolerance: float) -> None:
    contexts = Contexts(make_cache(dtype=dtype))
    steps = [
        [(0, 0, 7, False)],
        [(0, 7, 1, True), (1, 0, 4, False), (2, 0, 1, False)],
        [(1, 4, 5, False), (0, 8, 1, True), (2, 1, 9, False)],
        [(2, 10, 1, True), (0, 9, 1, True), (1, 9, 1, True)],
        [(0, 10, 1, True), (3, 0, 13, False), (2, 11, 1, True)],
        [(3, 13, 1, False), (1, 10, 1, True)],
        [(3, 14, 1, True)],
    ]
    for parts in steps:
        assert contexts.run(contexts.rows(*parts)) < tolerance


def test_reused_blocks_full_of_nan_reach_no_result() -> None:
    cache = make_cache(num_blocks=8)
    for slot in range(3):
        contexts = Contexts(cache, seed=slot)
        # Lengths that differ, so that the decode step pads; blocks partly filled, by a chunk and by a decode.
        assert contexts.run(contexts.rows((0, 0, 9, False), (1, 0, 2, False))) < 2e-6
        for n in range(4):
            assert contexts.run(contexts.rows((0, 9 + n, 1, True), (1, 2 + n, 1, True))) < 2e-6
        cache.memory.fill_(math.nan)
        cache.reset(0)
        cache.reset(1)


def test_blocks_given_ahead_of_need_are_cleared_but_a_shared_prefix_is_not() -> None:
    cache = make_cache(num_blocks=8)
    contexts = Contexts(cache)
    assert contexts.run([row(0, 0, 8, [5, 6])]) < 2e-6
    prefix = cache.memory[:, :, :, [5, 6]].clone()
    for layer in LAYERS:
        contexts.kept[layer, 1] = list(contexts.kept[layer, 0])
    assert contexts.run([row(1, 8, 3, [5, 6, 1, 2])]) < 2e-6
    assert torch.equal(cache.memory[:, :, :, [5, 6]], prefix)
    assert not cache.memory[:, :, :, [1, 2]].isnan().any()
    assert cache.memory[:, :, :, [0, 3, 4, 7]].isnan().all()
    assert contexts.run([row(1, 11, 1, [], decode=True), row(0, 8, 1, [0], decode=True)]) < 2e-6


def test_a_row_full_of_nan_harms_no_other() -> None:
    cache = make_cache()
    contexts = Contexts(cache)
    rows = contexts.rows((0, 0, 9, False), (1, 0, 2, False))
    contexts.run(rows)
    for block in cache.table(0):
        cache.memory[:, :, :, block] = math.nan
    rows = contexts.rows((0, 9, 1, True), (1, 2, 1, True))
    cache.extend(0, rows[0].blocks)
    cache.extend(1, rows[1].blocks)
    step = cache.prepare(rows)
    step.begin()
    ones = torch.ones(1, HEADS, 2, DIM)
    step.write(5, ones[:, :KV_HEADS], ones[:, :KV_HEADS])
    result = step.attend(5, ones, ones[:, :KV_HEADS], ones[:, :KV_HEADS], None)
    assert result[0, 0].isnan().all()
    assert not result[0, 1].isnan().any()


def test_lengths_that_differ_a_lot_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "MAX_PADDING_BLOCKS", 3)
    contexts = Contexts(make_cache(num_blocks=128))
    lengths = [3, 40, 5, 41, 44, 6, 90]
    assert contexts.run(contexts.rows(*((slot, 0, n, False) for slot, n in enumerate(lengths)))) < 2e-6
    rows = contexts.rows(*((slot, n, 1, True) for slot, n in enumerate(lengths)))
    assert contexts.run(rows) < 2e-6
    assert sorted(group.num_rows for group in contexts.cache.prepare(rows).decodes) == [1, 3, 3]


def test_decode_rows_of_any_lengths_in_one_group_need_no_reordering() -> None:
    contexts = Contexts(make_cache())
    contexts.run(contexts.rows((0, 0, 2, False), (1, 0, 20, False), (2, 0, 9, False)))
    (group,) = contexts.cache.prepare([row(slot, n, 1, [], decode=True) for slot, n in ((0, 2), (1, 19), (2, 9))]).decodes
    assert group.tokens == slice(0, 3)


def test_a_group_gathers_a_bounded_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = Contexts(make_cache())
    monkeypatch.setattr(kv_cache, "MAX_GATHER_BYTES", 7 * PagedKVCache.block_bytes(1, BLOCK, KV_HEADS, DIM, torch.float32))
    assert contexts.run(contexts.rows(*((slot, 0, 11, False) for slot in range(5)))) < 2e-6
    rows = contexts.rows(*((slot, 11, 1, True) for slot in range(5)))
    assert contexts.run(rows) < 2e-6
    assert [group.num_rows for group in contexts.cache.prepare(rows).decodes] == [2, 2, 1]


@pytest.mark.parametrize("chunk", [1, 3, 5, 64])
def test_chunks_longer_than_one_call_and_masks_of_many_starts(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "QUERIES_PER_CALL", 5)
    contexts = Contexts(make_cache())
    for start in range(0, 120, chunk):
        assert contexts.run(contexts.rows((0, start, min(chunk, 120 - start), False))) < 2e-6
    # A shorter start after a longer one: the mask that serves both is the same memory.
    assert contexts.run(contexts.rows((1, 0, 4, False))) < 2e-6
    assert contexts.run(contexts.rows((1, 4, 6, False))) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_lie_where_attention_on_a_gpu_can_read_them(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[torch.Tensor] = []
    attend = kv_cache.scaled_dot_product_attention

    def keep_mask(*arguments: torch.Tensor, attn_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        if attn_mask is not None:
            masks.append(attn_mask)
        return attend(*arguments, attn_mask=attn_mask, **options)

    monkeypatch.setattr(kv_cache, "scaled_dot_product_attention", keep_mask)
    contexts = Contexts(make_cache(1024, dtype=dtype))
    starts = [0, 16, 19, 24, 27, 40, 41, 43, 400, 401, 406, 535]
    for slot in (0, 1):
        for start, end in pairwise(starts):
            contexts.run(contexts.rows((slot, start, end - start, False)))
        contexts.run(contexts.rows((slot + 2, 0, 3 + slot, False)))
    contexts.run(contexts.rows((0, 535, 1, True), (2, 3, 1, True), (1, 535, 1, True), (3, 4, 1, True)))
    assert len(masks) > 40
    for mask in masks:
        assert mask.data_ptr() % 16 == 0
        assert mask.stride(-1) == 1
        assert all(stride % 8 == 0 for stride in mask.stride()[:-1])


def test_block_bytes_are_those_of_the_memory() -> None:
    cache = make_cache(num_blocks=3, dtype=torch.bfloat16)
    assert cache.memory.nbytes == 3 * PagedKVCache.block_bytes(len(LAYERS), BLOCK, KV_HEADS, DIM, torch.bfloat16)


def test_a_step_keeps_its_blocks_when_later_plans_change_the_table() -> None:
    contexts = Contexts(make_cache())
    assert contexts.run(contexts.rows((0, 0, 6, False))) < 2e-6
    rows = contexts.rows((0, 6, 1, True))
    prepare = contexts.cache.prepare

    def prepare_then_free(rows: list[PlanRow]) -> kv_cache.AttentionStep:
        step = prepare(rows)
        contexts.cache.reset(0)
        contexts.cache.extend(0, [60])
        return step

    contexts.cache.prepare = prepare_then_free  # pyright: ignore[reportAttributeAccessIssue]
    assert contexts.run(rows) < 2e-6


@pytest.mark.parametrize(
    ("blocks", "num_tokens", "message"),
    [
        ([0, 64], 8, "slot 0: block 64 must be between 0 and 63"),
        ([-1], 4, "slot 0: block -1"),
        ([1, 2], 9, r"slot 0: 0 \+ 2 blocks of 4 tokens cannot hold 9 tokens"),
    ],
)
def test_rows_that_do_not_fit_are_refused(blocks: list[int], num_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_cache().check(row(0, 0, num_tokens, blocks), 0)


class _Module(torch.nn.Module):
    layer_idx = 5


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"softcap": 50.0}, "_Module needs soft-capped attention scores"),
        ({"s_aux": torch.zeros(HEADS)}, "attention sinks"),
        ({"position_bias": torch.zeros(1)}, "position bias"),
        ({"sliding_window": 255}, "sliding window of 255 tokens: must be at least --max-model-len 256"),
        ({"is_causal": False}, "a mask of its own"),
    ],
)
def test_attention_the_cache_cannot_do_is_refused(extra: dict[str, object], message: str) -> None:
    cache = make_cache(num_blocks=64)
    cache.extend(0, [3])
    step = cache.prepare([row(0, 0, 2, [3])])
    q = torch.ones(1, HEADS, 2, DIM)
    kv = torch.ones(1, KV_HEADS, 2, DIM)
    with pytest.raises(UnsupportedModel, match=message):
        paged_attention(_Module(), q, kv, kv, None, stagewire=step, **extra)  # pyright: ignore[reportArgumentType]
    output, weights = paged_attention(_Module(), q, kv, kv, None, stagewire=step, softcap=None, sliding_window=256, dropout=0.0)
    assert torch.equal(output, torch.ones(1, 2, HEADS, DIM))
    assert weights is None


def test_registering_twice() -> None:
    from transformers import AttentionInterface

    register_attention()
    register_attention()
    assert AttentionInterface()[ATTENTION_NAME] is paged_attention
