"""A stage's modules with weights in them: read from safetensors, or made up."""

import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from stages.errors import ConfigError, one_line
from stages.model.attention import ATTENTION_NAME
from stages.model.build import decoder_parts, ownership, stage_class
from stages.model.safetensors import list_tensors
from stages.model.weights import Progress, no_progress, read_tensors
from stages.topology import StageInfo


def load_config(path: Path) -> PreTrainedConfig:
    """transformers' config of a model directory; ``ConfigError`` when transformers does not know or accept it."""
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError) as exc:
        raise ConfigError(f"--model {path}: transformers cannot read its config.json: {one_line(exc)}") from exc


def load_pretrained(
    path: Path, config: PreTrainedConfig, info: StageInfo, dtype: torch.dtype, progress: Progress = no_progress
) -> PreTrainedModel:
    """This stage's modules with the weights of the safetensors files in ``path``.

    ``ConfigError`` when the files lack one of its tensors or hold it in another shape.
    """
    cls = stage_class(config, info)
    is_owned = ownership(config, info)
    weights = read_tensors((tensor for tensor in list_tensors(path) if is_owned(tensor.name)), dtype, progress)
    logging.disable_progress_bar()
    try:
        # The tensors become the parameters as they are; transformers names them, merges those it stores split, and ties.
        loaded: Any = cls.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        )
    except RuntimeError as exc:
        raise ConfigError(f"--model {path}: the weights do not fit config.json: {one_line(exc)}") from exc
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(f"--model {path}: {missing[0]} is not in the weight files ({len(missing)} tensors missing)")
    return model.eval()


def make_dummy(config: PreTrainedConfig, info: StageInfo, dtype: torch.dtype) -> PreTrainedModel:
    """This stage's modules with random weights that depend on nothing but each module's name in the whole model."""
    with torch.device("meta"):
        model = stage_class(config, info)._from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    model.to_empty(device="cpu")
    with torch.random.fork_rng(devices=()), torch.no_grad():
        for name, module in model.named_modules():
            torch.manual_seed(zlib.crc32(name.encode()))
            model._init_weights(module)  # also what no file holds, as rotary frequencies: to_empty() left them undefined
    model.tie_weights()
    return model.eval()


def whole_model_on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model without storage, for counting."""
    num_layers = config.num_hidden_layers
    with torch.device("meta"):
        return stage_class(config, StageInfo(0, 1, 0, num_layers, num_layers))._from_config(config, dtype=dtype)


def layer_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[list[int], int]:
    """Weight bytes of each layer, and those of what comes after the layers together with the output head."""
    model = whole_model_on_meta(config, dtype)
    parts = decoder_parts(config)
    decoder = model.get_decoder()
    layers = [weight_bytes(layer) for layer in decoder.get_submodule(parts.layers).children()]
    after = [decoder.get_submodule(name) for name in parts.after]
    head = model.get_output_embeddings()
    return layers, sum(map(weight_bytes, [*after, *([head] if head is not None else [])]))


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's weights, tied ones counted once."""
    return sum(p.nbytes for p in module.parameters())
