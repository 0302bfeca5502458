"""DiT with MHLA in its self-attentions (section 5.2): converted, or from scratch in the sizes S, B, L and XL.

DiG (table 3, arXiv 2405.18428) is DiT with other blocks: narrow q and k, gate, norm per head, SwiGLU, a local convolution.
The paper replaces its gated linear attention and keeps the rest. DiG turns the order of the tokens from block to block,
because gated linear attention looks back only; that falls away, for MHLA sees the whole grid.
"""

import re

import torch
from diffusers import DiTTransformer2DModel
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from torch import nn

from ..nn.grid import GridConv
from ..nn.settings import MHLASettings
from .diffusion import MHLATransformerMixin, holds_mhla
from .families import DIT

DIT_SIZES = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16)}  # depth, width, heads
DIT_SIZES |= {"XL": (28, 1152, 16), "DiG-XL": (28, 1152, 18)}
DIG_SETTINGS = {"gate": True, "output_norm": True, "normalize": False}


class LocalConv(GridConv):
    """A depthwise 3x3 convolution of the tokens of a grid, the identity at the start; it takes the place of what it gets."""

    def __init__(self, width: int):
        super().__init__(width, 3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity."""
        nn.init.dirac_(self.conv.weight, groups=self.conv.groups)
        nn.init.zeros_(self.conv.bias)


class DiGBlock(BasicTransformerBlock):
    """A block of DiT that `become_dig_block` has turned into one of DiG."""

    def forward(self, *args, **kwargs) -> torch.Tensor:
        """As the base, and then the local convolution."""
        return self.local(super().forward(*args, **kwargs), self.grid_state.grid)


def become_dig_block(block: BasicTransformerBlock) -> None:
    """Turn a DiT block with new weights into DiG's, in place: its attention is still to become MHLA."""
    attn = block.attn1
    width = attn.to_q.in_features
    narrow = width // 2
    attn.to_q, attn.to_k = nn.Linear(width, narrow, bias=False), nn.Linear(width, narrow, bias=False)
    attn.to_v = nn.Linear(width, width, bias=False)
    attn.to_out[0] = nn.Linear(width, width, bias=False)
    attn.use_bias = False  # read by diffusers when it fuses the projections
    hidden = 256 * -(-int(width * 8 / 3) // 256)  # two thirds of four times the width, in full 256s
    block.ff = FeedForward(width, inner_dim=hidden, activation_fn="swiglu", bias=False)
    block.local = LocalConv(width)
    block.__class__ = DiGBlock


def dit_preset(name: str) -> dict:
    """Arguments of the model for "DiT-S/2" and the like, or "DiG-S/2"; ValueError, one sentence, for another name."""
    found = re.fullmatch(r"(DiT|DiG)-(S|B|L|XL)/([248])", name)
    if found is None:
        expected = "DiT- or DiG-, S, B, L or XL and /2, /4 or /8, such as 'DiT-S/2'"
        raise ValueError(f"preset: got {name!r}, expected {expected}.")
    kind, size, patch = found.groups()
    depth, width, heads = DIT_SIZES.get(f"{kind}-{size}") or DIT_SIZES[size]
    dig = {"dig_block": True} if kind == "DiG" else {}
    sizes = {"num_layers": depth, "num_attention_heads": heads, "attention_head_dim": width // heads}
    return {**dig, **sizes, "patch_size": int(patch)}


class MHLADiTTransformer2DModel(MHLATransformerMixin, DiTTransformer2DModel):
    """`DiTTransformer2DModel` with MHLA in the layers that `mhla` lists.

    The paper's CPE and gate are the settings `cpe=3` and `gate=True`. `dig_block=True` gives every block DiG's form, for
    training from scratch (`from_preset("DiG-S/2")`). `shared_embeddings=True` gives all blocks one embedding of time and
    class, as DiT and DiG have and table 1 of the DiT paper counts; diffusers' class has one in every block, in its files
    equal copies, and so have the files of such a model. Two arguments are for the authors' checkpoints: `input_norm` puts
    a LayerNorm before the projections of MHLA layers, `timestep_freq_shift=0` gives the timesteps the frequencies of the
    original DiT, from which diffusers' differ by a little.
    """

    family = DIT
    mhla_arguments = {"input_norm": False, "timestep_freq_shift": 1, "dig_block": False, "shared_embeddings": False}
    _repeated_blocks = ["BasicTransformerBlock", "DiGBlock"]
    _no_split_modules = ["BasicTransformerBlock", "DiGBlock"]

    def install_mhla(self, settings: MHLASettings) -> None:
        """As every model, and what the further arguments ask for."""
        for block in self.transformer_blocks if self.config.get("dig_block", False) else ():
            become_dig_block(block)
        if self.config.get("shared_embeddings", False):
            for block in self.transformer_blocks[1:]:
                block.norm1.emb = self.transformer_blocks[0].norm1.emb
            self.register_state_dict_post_hook(_copy_embeddings)
        super().install_mhla(settings)
        for block in self.transformer_blocks:
            block.grid_state = self.mhla_state  # read by DiG's
            block.norm1.emb.time_proj.downscale_freq_shift = self.config.get("timestep_freq_shift", 1)
            if self.config.get("input_norm", False) and holds_mhla(block.attn1.processor):
                block.attn1.input_norm = nn.LayerNorm(self.inner_dim)

    @classmethod
    def from_preset(
        cls, preset: str, *, input_size: int = 32, num_classes: int = 1000, mhla: dict | None = None, **kwargs
    ):
        """A model from scratch, with DiT's start of weights and one embedding of time and class for all blocks.

        Args:
            preset: "DiT-S/2" and the like: size S, B, L or XL, patch 2, 4 or 8; "DiG-S/2" for DiG's blocks.
            input_size: side of the (square) latents; 32 for images of 256 pixels.
            num_classes: labels; one more stands for none.
            mhla: settings, such as {"cpe": 3, "gate": True}; the family's defaults fill the rest, for DiG with its gate and
                its norm per head in place of the normalizer.
            **kwargs: further arguments of `DiTTransformer2DModel`; out_channels is twice in_channels unless given.
        """
        sizes = {"in_channels": 4, "shared_embeddings": True, **dit_preset(preset), **kwargs}
        if sizes.get("dig_block"):
            mhla = {**DIG_SETTINGS, **(mhla or {})}
        sizes.setdefault("out_channels", 2 * sizes["in_channels"])
        model = cls(sample_size=input_size, num_embeds_ada_norm=num_classes, mhla=mhla, **sizes)
        model.initialize_weights()
        return model

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """DiT's start (arXiv 2212.09748, section 3.2): Xavier for linear layers, every block the identity, output zero."""
        for name, module in self.named_modules():
            if ".mhla." in name:
                continue
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.xavier_uniform_(module.weight.flatten(1))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, LocalConv):
                module.reset_parameters()
        for block in self.transformer_blocks:
            embedder = block.norm1.emb.timestep_embedder
            nn.init.normal_(embedder.linear_1.weight, std=0.02)
            nn.init.normal_(embedder.linear_2.weight, std=0.02)
            nn.init.zeros_(block.norm1.linear.weight)
        nn.init.zeros_(self.proj_out_1.weight)
        nn.init.zeros_(self.proj_out_2.weight)

    def token_grid(self, hidden_states: torch.Tensor) -> tuple:
        """As every model; the base puts its patches back as a square, so nothing else is let in."""
        grid = super().token_grid(hidden_states)
        if grid[0] != grid[1]:
            raise ValueError(f"hidden_states: got a grid of {grid}, expected a square, as diffusers' DiT makes of it.")
        return grid


def _copy_embeddings(model, state, prefix, metadata):
    """A state dict holds the shared embedding once for every block: files have diffusers' names, and no shared memory."""
    for name in [name for name in state if name.startswith(f"{prefix}transformer_blocks.") and ".norm1.emb." in name]:
        if not name.startswith(f"{prefix}transformer_blocks.0.") and not isinstance(state[name], nn.Parameter):
            state[name] = state[name].clone()
