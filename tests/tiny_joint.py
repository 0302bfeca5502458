"""Sizes and inputs of tiny transformers of diffusers in which text and grid share one attention, as `tiny_grids.py` has them
of others."""

import torch
from diffusers import FluxTransformer2DModel

FLUX = {
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 8,
    "axes_dims_rope": (4, 4, 4),
}
JOINT_SIZES = {
    "flux": (FluxTransformer2DModel, FLUX),
}

# Families whose stock code puts the text after the grid
TEXT_LAST = ()


def joint_size(family, frames=3, rows=4, columns=5):
    """Size of the latents whose grid has this many tokens along each axis."""
    return {"flux": (rows, columns)}[family]


def image_positions(height, width):
    """Positions of the tokens of an image, in the form of Flux."""
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    return torch.cat([torch.zeros(len(places), 1), places], 1)


def flux(size, noise):
    """Arguments of Flux, whose latents are tokens already."""
    texts = {"encoder_hidden_states": noise(6, 32), "pooled_projections": noise(8), "txt_ids": torch.zeros(6, 3)}
    return {
        "hidden_states": noise(size[0] * size[1], 8),
        **texts,
        "img_ids": image_positions(*size),
        "timestep": noise().abs(),
    }


JOINT_ARGUMENTS = {
    "flux": flux,
}
