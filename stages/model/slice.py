"""One stage's part of a model: its layers, and the embedding or the head when it is first or last."""

import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from stages.errors import ConfigError
from stages.model.attention import register_attention
from stages.model.load import layer_bytes, load_config, load_pretrained, make_dummy, weight_bytes
from stages.model.memory import PeakGauge
from stages.model.source import ModelSource
from stages.model.support import check_support
from stages.model.weights import Progress, no_progress
from stages.plan import TensorSchema
from stages.topology import StageInfo, balanced_split
from stages.upload import CPU

HIDDEN_STATES = "hidden_states"

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(name: str, device: torch.device = CPU) -> torch.dtype:
    """The dtype that ``--dtype`` names; ``auto`` is bfloat16 where the device multiplies it natively, else float32."""
    if name == "auto" and device.type == "cuda":
        return torch.bfloat16
    if name == "auto":
        has_native_bf16 = any(torch.cpu.get_capabilities().get(cap) for cap in ("avx512_bf16", "amx_bf16", "bf16"))
        return torch.bfloat16 if has_native_bf16 else torch.float32
    if name not in _DTYPES:
        raise ConfigError(f"--dtype {name}: must be one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def default_split(source: ModelSource, dtype: torch.dtype, num_stages: int, *, max_model_len: int | None = None) -> list[int]:
    """Layers per stage so that the largest stage's bytes are as few as possible, the head (also a tied one) counted.

    ``UnsupportedModel`` for a model that cannot be served at ``max_model_len`` tokens (None: the model's own length).
    """
    config = load_config(source.path)
    check_support(config, max_model_len)
    layers, head = layer_bytes(config, dtype)
    return balanced_split(layers, head, num_stages)


def load_stage(
    source: ModelSource,
    info: StageInfo,
    dtype: torch.dtype,
    *,
    max_model_len: int | None = None,
    progress: Progress = no_progress,
) -> "StageModel":
    """Build and load the slice that ``info`` names, and nothing of the other stages.

    ``UnsupportedModel`` for a model that cannot be served at ``max_model_len`` tokens (None: the model's own length).
    """
    config = load_config(source.path)
    check_support(config, max_model_len)
    register_attention()
    gauge = PeakGauge()
    started = time.perf_counter()
    if source.load_format == "dummy":
        model = make_dummy(config, info, dtype)
    else:
        model = load_pretrained(source.path, config, info, dtype, progress)
    return StageModel(model, info, load_seconds=time.perf_counter() - started, load_growth_bytes=gauge.growth_bytes())


class StageModel:
    """What one rank computes with.

    ``num_parameters`` and ``slice_bytes`` count the weights held here, tied ones once. ``load_growth_bytes`` is the growth of
    the process's peak resident memory while loading. ``boundary`` is the schema of the hidden states at each side.
    ``embedding_checksum`` is the CRC-32 of the embedding table's bytes, or 0 unless it is tied and held here.
    """

    def __init__(
        self, model: PreTrainedModel, info: StageInfo, *, load_seconds: float = 0.0, load_growth_bytes: int = 0
    ) -> None:
        config: PreTrainedConfig = model.config
        self.model = model
        self.info = info
        self.config = config
        self.dtype: torch.dtype = model.dtype
        self.device = CPU
        self.load_seconds = load_seconds
        self.load_growth_bytes = load_growth_bytes
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.slice_bytes = weight_bytes(model)
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.boundary = [TensorSchema(HIDDEN_STATES, str(self.dtype).removeprefix("torch."), self.hidden_size)]
        self.tied_embeddings = bool(config.tie_word_embeddings)
        self.embedding_checksum = self._checksum_embedding()
        self._decoder = model.get_decoder()
        self._input_name = "input_ids" if info.is_first else "inputs_embeds"
        self._run: Callable[..., torch.Tensor] = self._to_logits if info.is_last else self._to_hidden

    def move_to(self, device: torch.device) -> None:
        """Compute on ``device`` from now on."""
        module: Any = self.model
        module.to(device)
        self.device = device

    @torch.inference_mode()
    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor, attention: object, logits_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One step over ``T`` flat tokens of any number of sequences.

        ``inputs``: token ids ``[T] int64`` on the first stage, else hidden states ``[T, hidden_size]``. ``positions``:
        ``[T] int64``, each token's place in its sequence. ``attention`` reaches the attention function as its keyword
        ``stagewire``. ``logits_rows``: ``[R] int64``, the rows that need logits (None: all); read by the last stage only.

        Returns hidden states ``[T, hidden_size]``, or logits ``[R, vocab_size]`` from the last stage.
        """
        arguments = {
            self._input_name: inputs.unsqueeze(0),
            "position_ids": positions.unsqueeze(0),
            "use_cache": False,
            "stagewire": attention,
        }
        return self._run(arguments, logits_rows)

    def _to_hidden(self, arguments: dict[str, object], _logits_rows: torch.Tensor | None) -> torch.Tensor:
        return self._decoder(**arguments).last_hidden_state.squeeze(0)

    def _to_logits(self, arguments: dict[str, object], logits_rows: torch.Tensor | None) -> torch.Tensor:
        # The whole causal LM, never its head alone: some scale or cap their logits.
        return self.model(**arguments, logits_to_keep=0 if logits_rows is None else logits_rows).logits.squeeze(0)

    def _checksum_embedding(self) -> int:
        if not self.tied_embeddings or not (self.info.is_first or self.info.is_last):
            return 0
        embedding: Any = self.model.get_input_embeddings()
        return zlib.crc32(embedding.weight.detach().contiguous().view(torch.uint8).numpy().data)
