"""Which models can be cut into stages and attended by our backend, and the reason for the others."""

from typing import Any

from transformers import PreTrainedConfig

from stages.errors import UnsupportedModel
from stages.model.build import causal_lm_class, decoder_parts

SUPPORTED_FAMILIES = frozenset(
    {
        "cohere",
        "cohere2",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm4",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    }
)
"""The model types whose stages the tests prove equal to the whole model, and the whole to transformers."""

# The others (dynamic, longrope) choose their frequencies by the longest sequence of the batch.
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def check_support(config: PreTrainedConfig, max_model_len: int | None = None) -> None:
    """Raise ``UnsupportedModel`` with the reason why a model cannot be served.

    ``max_model_len`` is the longest sequence that will be asked for, in tokens; None is the model's own. A sliding window
    that no sequence outgrows needs no support.
    """

    def refuse_if(is_refused: bool, reason: str) -> None:
        if is_refused:
            raise UnsupportedModel(f"model type {config.model_type}: {reason}")

    refuse_if(bool(getattr(config, "is_encoder_decoder", False)), "is an encoder-decoder; only decoders can be served")
    model_class = causal_lm_class(config)
    decoder_parts(config)
    refuse_if(not model_class._supports_attention_backend, "its attention cannot be replaced by ours")
    refuse_if(
        config.model_type not in SUPPORTED_FAMILIES,
        f"is not among those proven to give equal answers in stages: {', '.join(sorted(SUPPORTED_FAMILIES))}",
    )
    refuse_if(getattr(config, "quantization_config", None) is not None, "quantized weights cannot be served")
    softcap = getattr(config, "attn_logit_softcapping", None)
    refuse_if(softcap is not None, f"attn_logit_softcapping {softcap}: soft-capped attention cannot be served")
    for rope_type in sorted(_rope_types(config) - _ROPE_TYPES):
        refuse_if(True, f"rope_type {rope_type}: must be one of {', '.join(sorted(_ROPE_TYPES))}")
    layer_types = set(getattr(config, "layer_types", None) or ())
    for layer_type in sorted(layer_types - _LAYER_TYPES):
        refuse_if(True, f"layer type {layer_type}: must be one of {', '.join(sorted(_LAYER_TYPES))}")
    window = getattr(config, "sliding_window", None)
    longest = max_model_len or config.max_position_embeddings
    refuse_if(
        window is not None and (not layer_types or "sliding_attention" in layer_types) and window < longest,
        f"has a sliding window of {window} tokens; --max-model-len {longest}: must be at most {window}",
    )


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """The kinds of rotary embedding in use: of the whole model, or of each kind of layer."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return {parameters["rope_type"]}
    return {nested["rope_type"] for nested in parameters.values() if isinstance(nested, dict) and "rope_type" in nested}
