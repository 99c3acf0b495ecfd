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
