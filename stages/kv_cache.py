"""The paged KV cache of a stage, and attention over it.

Per layer the memory is ``[2, num_kv_heads, num_blocks, block_size, head_dim]``, keys then values. The contexts of a group of
decode rows, or of a prefill chunk, are gathered by one ``index_select`` of whole blocks (a third cheaper than two gathers
along the block dimension of the same layout), and grouped-query attention runs packed: the query heads that share a KV head
are the query positions of that head.

Memory is taken with ``torch.empty`` and blocks are reused as they are, so they may hold NaN, which a mask does not hide
(0 * NaN). Three rules keep such values from every result: a new block that the step does not fill is zeroed before the step,
a context padded to its group's longest repeats a block of its own row, and what is beyond the longest is sliced off.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch.nn.functional import scaled_dot_product_attention

from stages.plan import PlanRow, RowKind
from stages.upload import CPU, upload

# Decode rows are padded to the longest of their group. Padding up to this many blocks costs less than one more gather and
# attention call (measured with 3 KV heads of 64, fp32: ~60 µs a call, ~2 µs a block).
MAX_PADDING_BLOCKS = 32
# A decode group gathers at most this much, unless a single row needs more.
MAX_GATHER_BYTES = 64 << 20
# Queries of a prefill chunk that attend at once: bounds the mask to this many rows, and skips most of the masked half.
QUERIES_PER_CALL = 128
# Attention on a GPU reads a mask in pieces of 16 bytes: its first element and its rows lie at multiples of this many elements.
# One with other strides is copied in every layer; one that begins elsewhere, with such strides, is an invalid access.
MASK_ALIGNMENT = 8


class PagedKVCache:
    """KV blocks of the ``layers`` (global indices) of a stage.

    The memory is used in the order of one compute stream. The block tables and ``prepare`` belong to the loop's thread, which
    calls them in plan order. No context is longer than ``max_context_len``, by default all blocks.
    """

    def __init__(
        self,
        layers: range,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        max_context_len: int | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.layers = layers
        self.device = device
        self.max_context_len = num_blocks * block_size if max_context_len is None else max_context_len
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.memory = torch.empty(len(layers), 2, num_kv_heads, num_blocks, block_size, head_dim, dtype=dtype, device=device)
        by_token = self.memory.view(len(layers), 2, num_kv_heads, num_blocks * block_size, head_dim)
        self._key_tokens = {layer: by_token[i, 0] for i, layer in enumerate(layers)}
        self._value_tokens = {layer: by_token[i, 1] for i, layer in enumerate(layers)}
        by_block = self.memory.view(len(layers), 2 * num_kv_heads * num_blocks, block_size * head_dim)
        self._blocks = {layer: by_block[i] for i, layer in enumerate(layers)}
        self._all_layers = self.memory.view(-1, num_blocks, block_size * head_dim)
        self._head_offsets = torch.arange(2 * num_kv_heads, device=device)[:, None] * num_blocks
        self.num_used = 0  # blocks in the tables
        self._workspace = torch.empty(0, block_size * head_dim, dtype=dtype, device=device)
        self._causal_mask = torch.empty(0, 0, dtype=dtype, device=device)
        self._tables: dict[int, list[int]] = {}

    @staticmethod
    def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one block over ``num_layers`` layers, keys and values."""
        return num_layers * 2 * num_kv_heads * block_size * head_dim * dtype.itemsize

    def reset(self, slot: int) -> None:
        """Empty the slot's block table: its blocks belong to the scheduler again."""
        self.num_used -= len(self._tables.pop(slot, ()))

    def extend(self, slot: int, blocks: Sequence[int]) -> None:
        """Append ``blocks`` to the slot's block table."""
        self._tables.setdefault(slot, []).extend(blocks)
        self.num_used += len(blocks)

    def table(self, slot: int) -> Sequence[int]:
        """The slot's block numbers in the order of its context."""
        return self._tables.get(slot, ())

    def check(self, row: PlanRow, num_held: int) -> None:
        """Raise ``ValueError`` unless ``row``'s blocks exist and, after the ``num_held`` the slot has, hold its context."""
        for block in row.blocks:
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"slot {row.slot}: block {block} must be between 0 and {self.num_blocks - 1}")
        end = row.start + row.num_tokens
        if end > (num_held + len(row.blocks)) * self.block_size:
            raise ValueError(
                f"slot {row.slot}: {num_held} + {len(row.blocks)} blocks of {self.block_size} tokens cannot hold {end} tokens"
            )

    def prepare(self, rows: Sequence[PlanRow]) -> "AttentionStep":
        """The attention context of a step over ``rows``, whose block tables are already extended.

        It keeps what it needs of the tables, so later plans may change them before the step runs.
        """
        decodes: list[_DecodeRow] = []
        chunks: list[_Chunk] = []
        slots: list[int] = []
        cleared: list[int] = []
        first = 0
        for row in rows:
            table, end = self._tables[row.slot], row.start + row.num_tokens
            num_blocks = ceil(end / self.block_size)
            slots.extend(
                table[position // self.block_size] * self.block_size + position % self.block_size
                for position in range(row.start, end)
            )
            # The new blocks that this step leaves partly unwritten. New full blocks may hold a shared prefix: never cleared.
            first_cleared = max(len(table) - len(row.blocks), end // self.block_size)
            cleared.extend(table[first_cleared:])
            if row.kind is RowKind.DECODE:
                decodes.append(_DecodeRow(first, end, table[:num_blocks]))
            elif row.start == 0:
                chunks.append(_Chunk(first, 0, row.num_tokens, None))
            else:
                chunks.append(_Chunk(first, row.start, row.num_tokens, self._block_index(table[:num_blocks])))
            first += row.num_tokens
        return AttentionStep(
            cache=self,
            num_tokens=first,
            token_slots=upload(slots, torch.int64, self.device),
            cleared=upload(cleared, torch.int64, self.device) if cleared else None,
            decodes=[self._decode_group(group) for group in self._grouped(decodes)],
            chunks=chunks,
        )

    def _grouped(self, rows: "list[_DecodeRow]") -> "list[list[_DecodeRow]]":
        """Rows in groups of similar length, longest first; within a group in the order of the step."""
        max_blocks = max(
            1, MAX_GATHER_BYTES // self.block_bytes(1, self.block_size, self.num_kv_heads, self.head_dim, self.dtype)
        )
        groups: list[list[_DecodeRow]] = []
        longest = padding = 0
        for row in sorted(rows, key=lambda row: -len(row.blocks)):
            padding += longest - len(row.blocks)
            if not groups or padding > MAX_PADDING_BLOCKS or (len(groups[-1]) + 1) * longest > max_blocks:
                groups.append([])
                longest, padding = len(row.blocks), 0
            groups[-1].append(row)
        for group in groups:
            group.sort(key=lambda row: row.token)
        return groups

    def _decode_group(self, rows: "list[_DecodeRow]") -> "_DecodeGroup":
        num_blocks = max(len(row.blocks) for row in rows)
        context_len = max(row.context_len for row in rows)
        first = rows[0].token
        is_contiguous = [row.token for row in rows] == list(range(first, first + len(rows)))
        mask = None
        if any(row.context_len != context_len for row in rows):
            lengths = upload([row.context_len for row in rows], torch.int64, self.device)
            width = _aligned(context_len)
            mask = torch.zeros(len(rows), 1, 1, width, dtype=self.dtype, device=self.device)
            mask.masked_fill_(torch.arange(width, device=self.device) >= lengths[:, None, None, None], float("-inf"))
            mask = mask[..., :context_len]
        padded = [block for row in rows for block in row.blocks + row.blocks[:1] * (num_blocks - len(row.blocks))]
        return _DecodeGroup(
            tokens=slice(first, first + len(rows))
            if is_contiguous
            else upload([row.token for row in rows], torch.int64, self.device),
            num_rows=len(rows),
            context_len=context_len,
            block_index=self._block_index(padded),
            mask=mask,
        )

    def _block_index(self, blocks: list[int]) -> torch.Tensor:
        """Rows of a layer's ``[2 * num_kv_heads * num_blocks, ...]`` memory that hold ``blocks``, keys before values."""
        return (self._head_offsets + upload(blocks, torch.int64, self.device)).view(-1)

    def _gather(self, layer: int, block_index: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[num_rows, num_kv_heads, context, head_dim]``: views, valid until the next gather."""
        if len(self._workspace) < len(block_index):
            self._workspace = self._workspace.new_empty(len(block_index) + len(block_index) // 4, self._workspace.shape[1])
        gathered = torch.index_select(self._blocks[layer], 0, block_index, out=self._workspace[: len(block_index)])
        keys, values = gathered.view(2, self.num_kv_heads, num_rows, -1, self.head_dim).transpose(1, 2).unbind(0)
        return keys, values

    def _chunk_mask(self, start: int, num_queries: int) -> torch.Tensor:
        """``[num_queries, start + num_queries]``: query i sees the positions up to ``start + i``.

        A view of one matrix that serves every start: the columns are counted from its right edge, to the nearest that is
        aligned, and the rest goes down the rows.
        """
        num_rows, width = QUERIES_PER_CALL + MASK_ALIGNMENT - 1, self._causal_mask.shape[1]
        if start > width - num_rows:
            width = _aligned(start + 2 * QUERIES_PER_CALL + width // 2)
            mask = torch.zeros(num_rows, width, dtype=self.dtype, device=self.device)
            limits = torch.arange(width - num_rows, width, device=self.device)[:, None]
            self._causal_mask = mask.masked_fill_(torch.arange(width, device=self.device) > limits, float("-inf"))
        last_left = width - num_rows - start
        left = _aligned(last_left)
        top = left - last_left
        return self._causal_mask[top : top + num_queries, left : left + start + num_queries]


def _aligned(num_elements: int) -> int:
    return -(-num_elements // MASK_ALIGNMENT) * MASK_ALIGNMENT


@dataclass(frozen=True)
class _DecodeRow:
    token: int  # index in the step's flat tokens
    context_len: int
    blocks: list[int]


@dataclass(frozen=True)
class _DecodeGroup:
    tokens: slice | torch.Tensor
    num_rows: int
    context_len: int
    block_index: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Chunk:
    first: int  # index in the step's flat tokens
    start: int
    num_tokens: int
    block_index: torch.Tensor | None  # None: the chunk is its whole context


@dataclass(frozen=True)
class AttentionStep:
    """What attention needs of one step, computed once and used by every layer. The step's tokens are flat, in row order."""

    cache: PagedKVCache
    num_tokens: int
    token_slots: torch.Tensor
    cleared: torch.Tensor | None
    decodes: list[_DecodeGroup]
    chunks: list[_Chunk]

    def begin(self) -> None:
        """Before the first layer, in compute order: clear the new blocks that this step leaves partly unwritten."""
        if self.cleared is not None:
            self.cache._all_layers.index_fill_(1, self.cleared, 0)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the step's keys and values, each ``[1, num_kv_heads, num_tokens, head_dim]``."""
        self.cache._key_tokens[layer].index_copy_(1, self.token_slots, key[0])
        self.cache._value_tokens[layer].index_copy_(1, self.token_slots, value[0])

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Causal attention of ``query [1, num_heads, num_tokens, head_dim]`` over each row's context, as
        ``[1, num_tokens, num_heads, head_dim]``. ``key`` and ``value`` are what ``write`` was given for this layer."""
        num_heads, head_dim = query.shape[1], query.shape[3]
        by_token = query[0].transpose(0, 1)
        if len(self.decodes) == 1 and self.decodes[0].num_rows == self.num_tokens:
            return self._attend_decodes(layer, self.decodes[0], by_token, scaling).unsqueeze(0)
        output = query.new_empty(self.num_tokens, num_heads, head_dim)
        for group in self.decodes:
            output[group.tokens] = self._attend_decodes(layer, group, by_token[group.tokens], scaling)
        for chunk in self.chunks:
            self._attend_chunk(layer, chunk, query, key, value, scaling, output)
        return output.unsqueeze(0)

    def _attend_decodes(self, layer: int, group: _DecodeGroup, query: torch.Tensor, scaling: float | None) -> torch.Tensor:
        keys, values = self.cache._gather(layer, group.block_index, group.num_rows)
        packed = query.reshape(group.num_rows, self.cache.num_kv_heads, -1, self.cache.head_dim)
        attended = scaled_dot_product_attention(
            packed,
            keys[:, :, : group.context_len],
            values[:, :, : group.context_len],
            attn_mask=group.mask,
            scale=scaling,
        )
        return attended.reshape(query.shape)

    def _attend_chunk(
        self,
        layer: int,
        chunk: _Chunk,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        output: torch.Tensor,
    ) -> None:
        tokens = slice(chunk.first, chunk.first + chunk.num_tokens)
        packed = query[0, :, tokens].unflatten(0, (self.cache.num_kv_heads, -1))
        num_shared = packed.shape[1]
        if chunk.block_index is None:
            keys, values = key[:, :, tokens], value[:, :, tokens]
        else:
            keys, values = self.cache._gather(layer, chunk.block_index, 1)
        keys, values = (x[0, :, None].expand(-1, num_shared, -1, -1) for x in (keys, values))
        if chunk.block_index is None:
            attended = scaled_dot_product_attention(packed, keys, values, is_causal=True, scale=scaling)
            output[tokens] = attended.flatten(0, 1).transpose(0, 1)
            return
        for first in range(0, chunk.num_tokens, QUERIES_PER_CALL):
            num_queries = min(QUERIES_PER_CALL, chunk.num_tokens - first)
            context_len = chunk.start + first + num_queries
            attended = scaled_dot_product_attention(
                packed[:, :, first : first + num_queries],
                keys[:, :, :context_len],
                values[:, :, :context_len],
                attn_mask=self.cache._chunk_mask(chunk.start + first, num_queries)[None, None],
                scale=scaling,
            )
            output[chunk.first + first :][:num_queries] = attended.flatten(0, 1).transpose(0, 1)
