"""The paper's language model, from scratch (sections 4, 5.4 and C).

Unusual beside a Llama: no softmax anywhere; q and k are half as wide as the model and v as wide; RoPE turns the features
after the map (relu); an RMSNorm per head and an output gate stand where the normaliser was; and no T x T mask exists.
"""

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..nn.core import MHLA
from ..nn.settings import MHLASettings
from .attention import ATTENTION_NAME, hand_on_padding, refuse_softmax_only
from .cache import mhla_cache_layer
from .configuration import MHLAConfig
from .pretrained import MHLAPreTrainedMixin


class MHLALanguageMixer(nn.Module):
    """Projections around the MHLA core: `[B, T, hidden]` to `[B, T, hidden]`."""

    def __init__(self, config: MHLAConfig, layer_idx: int):
        super().__init__()
        settings = MHLASettings.from_dict(config.mhla)
        heads, self.layer_idx = config.num_attention_heads, layer_idx
        self.head_dim, self.value_dim = config.head_dim, config.value_dim
        self.rotate_features = settings.rope == "after"
        self.q_proj = nn.Linear(config.hidden_size, heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, heads * config.value_dim, bias=False)
        self.o_proj = nn.Linear(heads * config.value_dim, config.hidden_size, bias=False)
        self.mhla = MHLA(
            settings,
            num_heads=heads,
            num_kv_heads=heads,
            key_dim=config.head_dim,
            value_dim=config.value_dim,
            hidden_size=config.hidden_size,
            norm_eps=config.rms_norm_eps,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """One layer's attention; `mhla_padding` and `cu_seq_lens_q` in `kwargs` as `hand_on_padding` gives them."""
        refuse_softmax_only(kwargs)
        shape = (*hidden_states.shape[:-1], -1)
        q = self.q_proj(hidden_states).view(*shape, self.head_dim)
        k = self.k_proj(hidden_states).view(*shape, self.head_dim)
        v = self.v_proj(hidden_states).view(*shape, self.value_dim)
        cos, sin = position_embeddings

        def rotate(x, y):
            return apply_rotary_pos_emb(x, y, cos, sin, unsqueeze_dim=2)

        if not self.rotate_features:
            q, k = rotate(q, k)
        cache = mhla_cache_layer(past_key_values, self.layer_idx)
        starts, key_mask = kwargs.get("mhla_padding") or (None, None)
        output = self.mhla(
            q,
            k,
            v,
            hidden_states=hidden_states,
            rotate=rotate if self.rotate_features else None,
            starts=starts,
            key_mask=key_mask,
            cu_seqlens=kwargs.get("cu_seq_lens_q") if cache is None else None,
            cache=cache,
        )
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


class MHLAPreTrainedModel(MHLAPreTrainedMixin, PreTrainedModel):
    """Loading, saving and starting weights of the from-scratch model."""

    config: MHLAConfig
    source_entry = "models.language"
    auto_name = "AutoModel"
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MHLADecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _can_record_outputs = {"hidden_states": MHLADecoderLayer}
    # Whatever attention a caller asks for, there is no softmax to apply it to; and no T x T mask is made for it.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True

    def __init__(self, config: MHLAConfig):
        super().__init__(config)
        config._attn_implementation_internal = ATTENTION_NAME


class MHLAModel(MHLAPreTrainedModel):
    """The body: token ids `[B, T]` to hidden states `[B, T, hidden]`."""

    def __init__(self, config: MHLAConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([MHLADecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.register_forward_pre_hook(hand_on_padding, with_kwargs=True)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """As any decoder of transformers; `attention_mask` `[B, S]` marks padding on either side.

        Packed sequences (B is 1) come as `position_ids`, `seq_idx` or `cu_seq_lens_q`; the last compiles to one graph.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids: got both or neither of input_ids and inputs_embeds, expected exactly one.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen)[None]
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids=position_ids)
        hidden_states = inputs_embeds
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, position_embeddings=position_embeddings, past_key_values=past_key_values, **kwargs
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class MHLAForCausalLM(MHLAPreTrainedModel, GenerationMixin):
    """The language model: token ids to logits, loss and text."""

    auto_name = "AutoModelForCausalLM"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: MHLAConfig):
        super().__init__(config)
        self.model = MHLAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """As any causal LM of transformers: `labels` `[B, T]` are shifted inside; -100 is not scored."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )
