"""How many bytes the cache of a converted language model takes, counted without weights."""

import copy
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ..models.transformers_api import forward_cached
from ..nn.settings import MHLASettings
from ..ops.local_state import LocalState
from .teacher import mhla_layers, replaced_cores
from .transformers_models import convert_in_place


class LayerSizes(NamedTuple):
    """KV heads of a layer; of one sequence, the bytes of a token if all keep softmax, and of the state if all are MHLA."""

    heads: int
    token: int
    state: int


class CountingCore(nn.Module):
    """In the place of a `DecayMHLA`: counts the state that this would keep, and returns zeros."""

    def __init__(self, core: nn.Module):
        super().__init__()
        self.core, self.token, self.state = core, 0, 0

    def forward(self, q, k, v, *, angles=None, **unused):
        """As `DecayMHLA.forward`."""
        mixing, features = self.core.mixing.num_decays, self.core.k_map.num_features
        self.token = (k[:, :1].numel() + v[:, :1].numel()) * v.element_size()
        angles = None if angles is None else angles.to(v.dtype)
        self.state = LocalState.empty(k.to(v.dtype), v, mixing, features, self.core.form, angles).nbytes()
        return v.new_zeros(*q.shape[:3], v.shape[3])


def sizes_of_layers(model: nn.Module) -> dict[int, LayerSizes]:
    """The sizes of each MHLA layer of a converted language model, by its index; the model is on the meta device.

    Latent attention keeps one latent and one rotated key of a token for all heads, others keys and values.
    """
    ids, sizes = torch.zeros(1, 1, dtype=torch.long, device="meta"), {}
    model.set_experts_implementation("batched_mm")  # others read how many tokens an expert got
    with replaced_cores(model, CountingCore) as cores, torch.device("meta"), torch.no_grad():
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool)  # a mask of four axes, in which nobody looks for padding
        forward_cached(model.base_model, ids, attention_mask=seen, mhla_padding=(None, None))
    for index, attention in mhla_layers(model).items():
        core, token = cores[index], cores[index].token
        if (latent := getattr(attention, "kv_lora_rank", None)) is not None:
            token = (latent + attention.qk_rope_head_dim) * model.dtype.itemsize
        sizes[index] = LayerSizes(core.core.num_kv_heads, token, core.state)
    return sizes


def sizes_of_conversion(model: nn.Module, settings: MHLASettings) -> dict[int, LayerSizes]:
    """`sizes_of_layers` of a softmax language model, if it were converted with these settings."""
    with torch.device("meta"):
        config = copy.deepcopy(model.config)
        student = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
    return sizes_of_layers(convert_in_place(student, settings, None, {}))
