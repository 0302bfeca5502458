"""How a grid core takes the place of softmax inside a vision tower of transformers, unchanged around it.

As in language models the base keeps its projections and its positions and calls "the attention function", which is ours in
the converted modules alone. No attention of these towers is told the grid of its tokens: the body is asked for it before it
runs (`pass_grid`, from the size of the pixels), and it travels to the layers as a keyword argument.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
from transformers.modeling_utils import AttentionInterface

from ..nn.grid import GridMHLA
from ..nn.settings import MHLASettings
from ..ops.namespace import NAMESPACE
from .families import family_of_type
from .overlay import overlay_class, swap_attention

GRID_ATTENTION_NAME = f"mhla_grid_{NAMESPACE}"


class GridCall(NamedTuple):
    """What an MHLA layer must know of one call. It goes where the mask would: the one argument that every base hands on."""

    grid: tuple[int, int]
    hidden_states: torch.Tensor


def mhla_grid_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """The attention function of converted vision layers: q, k, v `[B, H, T, K]`; o is `[B, T, H, V]`.

    attention_mask: a `GridCall`.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return module.mhla(q, k, v, grid=attention_mask.grid, hidden_states=attention_mask.hidden_states), None


AttentionInterface.register(GRID_ATTENTION_NAME, mhla_grid_attention)
AttentionMaskInterface.register(GRID_ATTENTION_NAME, flash_attention_mask)


class MHLAGridMixer:
    """Mixed into a vision attention class of transformers; the module has a child `mhla` (`GridMHLA`)."""

    def forward(self, hidden_states, attention_mask=None, mhla_grid=None, **kwargs):
        """As the base, without a mask; `mhla_grid` is what `pass_grid` gives."""
        if attention_mask is not None:
            raise ValueError("attention_mask: got a tensor, expected None for MHLA layers of image models.")
        if mhla_grid is None:
            raise ValueError("mhla_grid: got None, expected rows and columns of tokens; call the whole model.")
        return super().forward(hidden_states, attention_mask=GridCall(mhla_grid, hidden_states), **kwargs)


def grid_attentions(model: nn.Module) -> dict[int, nn.Module]:
    """The attention modules of a vision tower that can become MHLA, by their place in it."""
    needed = ("q_proj", "k_proj", "v_proj", "head_dim", "config")
    return dict(enumerate(module for module in model.modules() if all(hasattr(module, name) for name in needed)))


def prefix_tokens(config) -> int:
    """How many class, distillation and register tokens come before the grid."""
    family = family_of_type(getattr(config, "base_model_type", config.model_type))
    return family.prefix + (getattr(config, "num_register_tokens", 0) or 0)


def install_grid_mhla(model: nn.Module, settings: MHLASettings) -> None:
    """Turn the attention modules that `settings.layers` lists into MHLA, in place; `model` holds one vision tower."""
    config = model.config
    attentions = grid_attentions(model)
    chosen = settings.resolve_layers(config.num_hidden_layers)
    sizes = {
        "num_heads": config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "prefix": prefix_tokens(config),
    }
    for index in chosen:
        attention = attentions[index]
        core = GridMHLA(settings, key_dim=attention.head_dim, value_dim=attention.head_dim, **sizes)
        mixed = overlay_class(type(attention), MHLAGridMixer, "models.converted_vision")
        swap_attention(attention, mixed, core, GRID_ATTENTION_NAME)
    body = next(module for module in model.modules() if hasattr(module, "embeddings"))
    body.register_forward_pre_hook(pass_grid, with_kwargs=True)


def pass_grid(body: nn.Module, args: tuple, kwargs: dict):
    """Before a vision tower runs: `mhla_grid`, rows and columns of whole patches, to the layers below."""
    pixels, patch = args[0] if args else kwargs.get("pixel_values"), body.config.patch_size
    if pixels is None or pixels.ndim != 4:
        got = "None" if pixels is None else f"{pixels.ndim} axes"
        raise ValueError(f"pixel_values: got {got}, expected [batch, channels, height, width].")
    patch = patch if isinstance(patch, (list, tuple)) else (patch, patch)
    grid = tuple(int(side) // int(part) for side, part in zip(pixels.shape[2:], patch, strict=True))
    return args, {**kwargs, "mhla_grid": grid}
