"""Tiny random models of every family, as directories that transformers reads."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    # Ten times the usual spread: layers, biases and norms all move the logits, and top-2 gaps are wide.
    "initializer_range": 0.2,
}

# What a family needs to be small, and multipliers that are not 1, so that one applied twice or not at all shows.
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 512},
    "gemma": {},
    "gemma2": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 24,
        "sliding_window": 512,
    },
    "gemma3_text": {"query_pre_attn_scalar": 24, "sliding_window": 512},
    "glm4": {},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
    },
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmo2": {},
    "phi3": {"sliding_window": None},
    "qwen2": {},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "smollm3": {},
    "starcoder2": {"use_bias": True, "sliding_window": None},
}
"""Every family that is served, with the settings that make its own parts matter: scales that are not 1, experts, caps."""


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """The config of a small model of a family, named by its ``model_type``."""
    return AutoConfig.for_model(family, **{**SIZES, **overrides})


def write_tiny_model(
    directory: Path, family: str, *, seed: int = 0, max_shard_size: str = "50GB", **config_overrides: Any
) -> Path:
    """Write a random model of ``family`` to ``directory`` as safetensors (several with a small ``max_shard_size``)."""
    config = tiny_config(family, **config_overrides)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms start as ones and biases as zeros, which would hide one that is lost
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory
