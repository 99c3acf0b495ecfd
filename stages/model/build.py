"""The modules of one stage, cut out of any causal LM that names its parts in ``base_model_pp_plan``."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from stages.errors import UnsupportedModel
from stages.topology import StageInfo


class Absent(nn.Module):
    """Stands where a module of another stage would be: returns its first argument."""

    def forward(self, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return hidden_states


@dataclass(frozen=True)
class DecoderParts:
    """The decoder's children by name: what comes before its list of layers, the list, and what comes after."""

    before: Sequence[str]
    layers: str
    after: Sequence[str]


def causal_lm_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The ``*ForCausalLM`` class of a config; ``UnsupportedModel`` when there is none."""
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)  # pyright: ignore[reportArgumentType]
    if found is None:
        raise UnsupportedModel(f"model type {config.model_type}: has no causal language model in transformers")
    return found[0] if isinstance(found, tuple) else found


def decoder_parts(config: PreTrainedConfig) -> DecoderParts:
    """The decoder's parts as the pipeline plan of its config names them; ``UnsupportedModel`` without a usable plan."""
    names = list(config.base_model_pp_plan or ())
    if "layers" not in names:
        raise UnsupportedModel(f"model type {config.model_type}: transformers gives no pipeline plan for it")
    at = names.index("layers")
    return DecoderParts(names[:at], "layers", names[at + 1 :])


def ownership(config: PreTrainedConfig, info: StageInfo) -> Callable[[str], bool]:
    """Whether this stage needs the stored tensor of a name, as it is called in the weight files of the whole model."""
    parts = decoder_parts(config)
    layer = re.compile(rf"(?:^|\.){parts.layers}\.(\d+)\.")
    keeps_before = info.is_first or _keeps_embedding(config, info)
    elsewhere = {
        *(() if keeps_before else parts.before),
        *(() if info.is_last else (*parts.after, *(causal_lm_class(config)._pp_plan or ()))),
    }

    def is_owned(name: str) -> bool:
        found = layer.search(name)
        return int(found[1]) in info.layers if found else elsewhere.isdisjoint(name.split("."))

    return is_owned


def stage_class(config: PreTrainedConfig, info: StageInfo) -> type[PreTrainedModel]:
    """The model's own class, except that an instance holds only what ``info`` owns.

    Layer numbers and parameter names stay those of the whole model, so the stock ``from_pretrained`` knows what to do with
    the tensors of this stage. The last stage of a model with tied embeddings holds the embedding table, for its head.
    """
    base = causal_lm_class(config)
    parts = decoder_parts(config)
    keeps_embedding = _keeps_embedding(config, info)

    def __init__(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        _drop_other_stages(self, parts, info, keeps_embedding=keeps_embedding)

    # transformers looks some behaviour up by the class's name, and resolves relative imports by its module.
    return type(
        base.__name__,
        (base,),
        {
            "__init__": __init__,
            "__module__": base.__module__,
            "_keys_to_ignore_on_load_unexpected": [r".*"],
            "_tied_weights_keys": base._tied_weights_keys if keeps_embedding else None,
        },
    )


def _keeps_embedding(config: PreTrainedConfig, info: StageInfo) -> bool:
    """Whether the stage's head is the embedding table."""
    return info.is_last and bool(config.tie_word_embeddings)


def _drop_other_stages(model: PreTrainedModel, parts: DecoderParts, info: StageInfo, *, keeps_embedding: bool) -> None:
    decoder = model.get_decoder()
    layers = decoder.get_submodule(parts.layers)
    assert isinstance(layers, nn.ModuleList)
    assert len(layers) == info.num_layers, f"{len(layers)} layers built, the split has {info.num_layers}"
    for i in range(info.num_layers):
        if i not in info.layers:
            layers[i] = Absent()
    if not info.is_first:
        embedding = model.get_input_embeddings()
        for name in parts.before:
            if not (keeps_embedding and decoder.get_submodule(name) is embedding):
                setattr(decoder, name, Absent())
        if hasattr(decoder, "embedding_multiplier"):
            # Granite's: the decoder would scale what it receives once more.
            decoder.embedding_multiplier = 1.0  # pyright: ignore[reportArgumentType]
    if not info.is_last:
        for name in parts.after:
            setattr(decoder, name, Absent())
        model.set_output_embeddings(Absent())
