"""The paper's language model, from scratch (sections 4, 5.4 and C).

Unlike a Llama, whose forward it has, it has no softmax anywhere; q and k are half as wide as the model and v as wide; RoPE
turns the features after the map (relu); an RMSNorm per head and an output gate stand where the normalizer was.
"""

import torch
from torch import nn
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
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

from ..nn.core import MHLA
from ..nn.settings import MHLASettings
from .attention import ATTENTION_NAME, mhla_attention, pass_padding
from .cache import mhla_cache_layer
from .configuration import MHLAConfig
from .overlay import forward_preparing
from .pretrained import MHLAPreTrainedMixin
from .transformers_api import find_cache, set_attention_function


class MHLALanguageMixer(nn.Module):
    """Projections around the MHLA core: `[B, T, hidden]` to `[B, T, hidden]`."""

    def __init__(self, config: MHLAConfig, layer_idx: int):
        super().__init__()
        settings = MHLASettings.from_dict(config.mhla)
        heads, self.layer_idx = config.num_attention_heads, layer_idx
        self.head_dim, self.value_dim = config.head_dim, config.value_dim
        self.q_proj = nn.Linear(config.hidden_size, heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, heads * config.value_dim, bias=False)
        self.o_proj = nn.Linear(heads * config.value_dim, config.hidden_size, bias=False)
        sizes = {"num_heads": heads, "num_kv_heads": heads, "key_dim": config.head_dim, "value_dim": config.value_dim}
        self.mhla = MHLA(settings, hidden_size=config.hidden_size, norm_eps=config.rms_norm_eps, **sizes)

    def forward(self, hidden_states, position_embeddings, **kwargs) -> torch.Tensor:
        """One layer's attention; position_embeddings: cosines and sines. What else `mhla_attention` reads is in `kwargs`."""
        widths = (self.head_dim, self.head_dim, self.value_dim)
        projected = [project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj)]
        heads = [x.unflatten(-1, (-1, width)).transpose(1, 2) for x, width in zip(projected, widths, strict=True)]

        def rotate(x, y):
            return apply_rotary_pos_emb(x, y, *position_embeddings, unsqueeze_dim=2)

        name = find_cache(kwargs)
        cache = mhla_cache_layer(kwargs.pop(name), self.layer_idx) if name is not None else None
        own = {"mhla_cache": cache, "mhla_hidden_states": hidden_states, "mhla_rotate": rotate}
        output, _ = mhla_attention(self, *heads, **{"attention_mask": None, **kwargs, **own})
        if cache is not None:
            cache.count(hidden_states)
        return self.o_proj(output.flatten(2))


class MHLADecoderLayer(GradientCheckpointingLayer):
    """Norm, attention, norm, SwiGLU, each with its residual."""

    def __init__(self, config: MHLAConfig, layer_idx: int):
        super().__init__()
        self.self_attn = MHLALanguageMixer(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class MHLAPreTrainedModel(MHLAPreTrainedMixin, LlamaPreTrainedModel):
    """Loading, saving and starting weights of the from-scratch model."""

    config: MHLAConfig
    source_entry = "models.language"
    _no_split_modules = ["MHLADecoderLayer"]
    _can_record_outputs = {"hidden_states": MHLADecoderLayer}

    def __init__(self, config: MHLAConfig) -> None:
        PreTrainedModel.__init__(self, config)  # without Llama's layers
        # Whatever attention a caller asks for, there is no softmax to apply it to; and no T x T mask is made for it.
        set_attention_function(config, ATTENTION_NAME)

    def class_names(self) -> list[str]:
        """Of the body and its heads."""
        return [cls.__name__ for cls in HEADS_FROM_SCRATCH]


class MHLAModel(MHLAPreTrainedModel, LlamaModel):
    """The body: token ids `[B, T]` to hidden states `[B, T, hidden]`, by Llama's forward.

    `attention_mask` `[B, S]` marks padding on either side. Packed sequences (B is 1) come as `position_ids`, `seq_idx` or
    `cu_seq_lens_q`; the last compiles to one graph.
    """

    def __init__(self, config: MHLAConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([MHLADecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    forward = forward_preparing(LlamaModel.forward, pass_padding)


class MHLAForCausalLM(MHLAPreTrainedModel, LlamaForCausalLM):
    """The language model: token ids to logits, loss and text, as any causal LM of transformers."""

    def __init__(self, config: MHLAConfig) -> None:
        super().__init__(config)
        self.model = MHLAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class MHLAForSequenceClassification(GenericForSequenceClassification, MHLAPreTrainedModel):
    """One label, or a reward with `num_labels=1`, for each sequence, from its last token that is no padding."""

    def __init__(self, config: MHLAConfig) -> None:
        MHLAPreTrainedModel.__init__(self, config)  # without the search for a body
        self.num_labels, self.model = config.num_labels, MHLAModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class MHLAForTokenClassification(GenericForTokenClassification, MHLAPreTrainedModel):
    """A label for each token."""

    def __init__(self, config: MHLAConfig) -> None:
        MHLAPreTrainedModel.__init__(self, config)
        self.num_labels, self.model = config.num_labels, MHLAModel(config)
        self.dropout, self.score = nn.Dropout(0.1), nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class MHLAForQuestionAnswering(GenericForQuestionAnswering, MHLAPreTrainedModel):
    """Where an answer begins and ends."""

    def __init__(self, config: MHLAConfig) -> None:
        MHLAPreTrainedModel.__init__(self, config)
        self.model, self.qa_outputs = MHLAModel(config), nn.Linear(config.hidden_size, 2)
        self.post_init()


HEADS_FROM_SCRATCH = (
    *(MHLAModel, MHLAForCausalLM, MHLAForSequenceClassification, MHLAForTokenClassification, MHLAForQuestionAnswering),
)
