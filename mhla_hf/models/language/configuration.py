"""The configuration of the from-scratch language model."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.llama.configuration_llama import LlamaConfig

from ...nn.settings import FOREIGN_ENTRIES, MHLASettings

PAPER_SETTINGS = {"feature_map": "relu", "normalize": False, "output_norm": True, "gate": True, "rope": "after"}
MHLA_PRESETS: dict[str, dict[str, Any]] = {
    "340M": {},
    "tiny": {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4},
}


@strict
class MHLAConfig(PreTrainedConfig):
    """The configuration of the paper's language model (sections 4 and 5.4, appendix C), by default with 340 M parameters.

    Args:
        expand_k: Width of all q heads together, divided by `hidden_size` (0.5 gives heads of width 128).
        expand_v: Width of all v heads together, divided by `hidden_size` (1.0 gives heads of width 256).
        head_dim: Width of a q head. Default: computed from `expand_k`, which is ignored otherwise.
        value_dim: Width of a v head. Default: computed from `expand_v`, which is ignored otherwise.
        mhla: Settings as a dictionary (`MHLASettings`). Default: relu, RoPE after the map, an RMSNorm per head instead of a
            normalizer, output gate, 32 blocks of 64 tokens.

    Other arguments are as in `LlamaConfig`. `MHLAConfig.preset("340M")` and `MHLAConfig.preset("tiny")` return ready ones.
    """

    model_type = "mhla"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = LlamaConfig.base_model_tp_plan

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 4
    expand_k: float = 0.5
    expand_v: float = 1.0
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True
    rope_parameters: dict | None = None
    mlp_bias: bool = False
    head_dim: int | None = None
    value_dim: int | None = None
    mhla: dict | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name in FOREIGN_ENTRIES:
            kwargs.pop(name, None)
        heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = int(self.hidden_size * self.expand_k) // heads
        if self.value_dim is None:
            self.value_dim = int(self.hidden_size * self.expand_v) // heads
        settings = MHLASettings.from_dict(PAPER_SETTINGS if self.mhla is None else self.mhla)
        all_layers = list(range(self.num_hidden_layers))
        if settings.resolve_layers(len(all_layers)) != all_layers:
            raise ValueError(f'layers: got {settings.layers!r}, expected "all", as only converted models keep softmax.')
        settings.layers = all_layers
        self.mhla = settings.to_dict()
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), **FOREIGN_ENTRIES}

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "MHLAConfig":
        """Return the configuration "340M" or "tiny"; `overrides` replace its arguments. Raise ValueError for other names."""
        if name not in MHLA_PRESETS:
            raise ValueError(f"name: got {name!r}, expected one of {sorted(MHLA_PRESETS)}.")
        return cls(**{**MHLA_PRESETS[name], **overrides})
