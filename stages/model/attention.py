"""The attention function that transformers' modules call, and its registration."""

from typing import Any

import torch
from transformers import AttentionInterface

from stages.errors import UnsupportedModel
from stages.kv_cache import AttentionStep

ATTENTION_NAME = "stagewire"

# What a module may ask of its attention and we do not compute: ignoring any of these gives wrong tokens, not an error.
_UNHANDLED = {
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "head_mask": "a head mask",
}


def register_attention() -> None:
    """Make ``attn_implementation="stagewire"`` known to transformers. May be called again.

    Registered for attention only, not for masks: transformers then builds none.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    stagewire: AttentionStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **unhandled: Any,
) -> tuple[torch.Tensor, None]:
    """Store the step's keys and values (``[1, num_kv_heads, T, head_dim]``) and attend over each row's whole context.

    ``query`` is ``[1, num_heads, T, head_dim]``; returns ``[1, T, num_heads, head_dim]`` and no weights. ``module.layer_idx``
    is the global layer index, ``scaling`` None is ``head_dim ** -0.5``. ``UnsupportedModel`` when the module asks for more.
    """
    for name, meaning in _UNHANDLED.items():
        if unhandled.get(name) is not None:
            raise UnsupportedModel(f"{type(module).__name__} needs {meaning} ({name}), which the paged attention does not have")
    if is_causal is False or attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} asks for a mask of its own, paged attention is causal")
    max_context_len = stagewire.cache.max_context_len
    if sliding_window is not None and sliding_window < max_context_len:
        raise UnsupportedModel(
            f"{type(module).__name__} has a sliding window of {sliding_window} tokens: "
            f"must be at least --max-model-len {max_context_len}"
        )
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    stagewire.write(layer, key, value)
    return stagewire.attend(layer, query, key, value, scaling), None
