"""The paper's language model, from scratch (sections 4, 5.4 and C).

It has the forward of a Llama, but no softmax. q and k are half as wide as the model, v has full width. RoPE rotates the
features, after the map (relu). An RMSNorm per head and an output gate replace the normalizer.
"""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from ...nn.core import MHLA
from ...nn.settings import MHLASettings
from ..derived_classes import wrap_forward
from ..pretrained import MHLAPreTrainedMixin
from ..transformers_api import set_attention_function
from .cache import take_cache_layer
from .causal_attention import ATTENTION_NAME, mhla_attention, pass_padding
from .configuration import MHLAConfig


class MHLALanguageMixer(nn.Module):
    """The attention of one layer: an MHLA core with projections for q, k, v, and the output."""

    def __init__(self, config: MHLAConfig, layer_idx: int):
        super().__init__()
        self.layer_idx, num_heads = layer_idx, config.num_attention_heads
        # None of these is None after `MHLAConfig.__post_init__`.
        mhla: Any = config.mhla
        head_dim: Any = config.head_dim
        value_dim: Any = config.value_dim
        self.head_dim, self.value_dim = head_dim, value_dim
        self.q_proj = nn.Linear(config.hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, num_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, num_heads * value_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * value_dim, config.hidden_size, bias=False)
        sizes = {"num_heads": num_heads, "num_kv_heads": num_heads, "key_dim": head_dim, "value_dim": value_dim}
        settings = MHLASettings.from_dict(mhla)
        self.mhla = MHLA(settings, hidden_size=config.hidden_size, norm_eps=config.rms_norm_eps, **sizes)

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Tensor:
        """Attend causally, [B, T, C] -> [B, T, C]; cosines and sines are [B or 1, T, K], and the KV cache is in `kwargs`."""
        projections = ((self.q_proj, self.head_dim), (self.k_proj, self.head_dim), (self.v_proj, self.value_dim))
        # [B, H, T, K or V]; tensor parallelism splits H
        heads = [project(hidden_states).unflatten(-1, (-1, width)).transpose(1, 2) for project, width in projections]

        def rotate(x: Tensor, y: Tensor) -> Any:
            return apply_rotary_pos_emb(x, y, *position_embeddings, unsqueeze_dim=2)

        cache = take_cache_layer(kwargs, self.layer_idx)
        mhla_arguments = {"mhla_cache": cache, "mhla_hidden_states": hidden_states, "mhla_rotate": rotate}
        output, _ = mhla_attention(self, *heads, **{"attention_mask": None, **kwargs, **mhla_arguments})
        if cache is not None:
            cache.count(hidden_states)
        return self.o_proj(output.flatten(2))


class MHLADecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: MHLAConfig, layer_idx: int):
        super().__init__()
        self.self_attn = MHLALanguageMixer(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class MHLAPreTrainedModel(MHLAPreTrainedMixin, LlamaPreTrainedModel):
    """Base class of the language models from scratch: loading, saving, and initial weights."""

    config: MHLAConfig
    source_entry = "models.language.language_model"
    saved_classes = ("MHLAModel", "MHLAForCausalLM")
    _no_split_modules = ["MHLADecoderLayer"]
    _can_record_outputs = {"hidden_states": MHLADecoderLayer}

    def __init__(self, config: MHLAConfig) -> None:
        PreTrainedModel.__init__(self, config)  # skips `LlamaModel.__init__`, which would make Llama's layers
        set_attention_function(config, ATTENTION_NAME)  # overrides `attn_implementation`: there is no softmax


class MHLAModel(MHLAPreTrainedModel, LlamaModel):
    """Maps token ids [B, T] to hidden states [B, T, C], without a head, by Llama's forward.

    `attention_mask` [B, S] marks padding on either side. Sequences may be packed into one row (B = 1), with their borders in
    `position_ids`, `seq_idx`, or `cu_seq_lens_q`; only `cu_seq_lens_q` compiles to one graph.
    """

    def __init__(self, config: MHLAConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([MHLADecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    forward = wrap_forward(LlamaModel.forward, pass_padding)


class MHLAForCausalLM(MHLAPreTrainedModel, LlamaForCausalLM):
    """Maps token ids [B, T] to logits [B, T, vocabulary] and, with labels, a loss; can `generate`."""

    def __init__(self, config: MHLAConfig) -> None:
        super().__init__(config)
        self.model = MHLAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
