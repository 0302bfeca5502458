"""DiT with MHLA in its self-attention (section 5.2): converted, or from scratch in the sizes S, B, L, and XL.

DiG (table 3, arXiv 2405.18428) is DiT with other blocks: narrow q and k, gate, norm per head, SwiGLU, and a local
convolution. DiG's own attention is causal, in another order of tokens in each block; MHLA sees the whole grid instead.
"""

import re
from typing import Any

import torch
from diffusers import DiTTransformer2DModel
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from torch import Tensor, nn

from ...nn.grid import GridConv
from ...nn.settings import MHLASettings
from ..families import DIT
from .processor import holds_mhla
from .transformer import MHLATransformerMixin

# Name -> depth, width, number of heads
DIT_SIZES = {"S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16), "DiG-XL": (28, 1152, 18)}
DIG_SETTINGS = {"gate": True, "output_norm": True, "normalize": False}


class LocalConv(GridConv):
    """A depthwise 3x3 convolution of the tokens of a grid, initially the identity."""

    def __init__(self, width: int):
        super().__init__(width, 3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.dirac_(self.conv.weight, groups=self.conv.groups)
        bias: Any = self.conv.bias
        nn.init.zeros_(bias)


class DiGBlock(BasicTransformerBlock):
    """A block of DiT, changed by `become_dig_block`, followed by a local convolution."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.local(super().forward(*args, **kwargs), self.grid_state.grid)


def become_dig_block(block: Any) -> None:
    """Turn a block of DiT into a block of DiG with new weights, in place; its attention stays softmax."""
    attn = block.attn1
    width = attn.to_q.in_features
    narrow = width // 2
    attn.to_q, attn.to_k = nn.Linear(width, narrow, bias=False), nn.Linear(width, narrow, bias=False)
    attn.to_v = nn.Linear(width, width, bias=False)
    attn.to_out[0] = nn.Linear(width, width, bias=False)
    attn.use_bias = False  # diffusers reads this when it fuses the projections
    # SwiGLU has three matrices instead of two: two thirds of 4 x width, rounded up to a multiple of 256.
    hidden = 256 * -(-int(width * 8 / 3) // 256)
    block.ff = FeedForward(width, inner_dim=hidden, activation_fn="swiglu", bias=False)
    block.local = LocalConv(width)
    block.__class__ = DiGBlock


def dit_preset(name: str) -> dict[str, Any]:
    """Return a model's arguments for a preset: DiT or DiG, size, and patch size, as in "DiT-S/2"; ValueError for others."""
    match = re.fullmatch(r"(DiT|DiG)-(S|B|L|XL)/([248])", name)
    if match is None:
        expected = "DiT- or DiG-, S, B, L or XL, and /2, /4 or /8, such as 'DiT-S/2'"
        raise ValueError(f"preset: got {name!r}, expected {expected}.")
    kind, size, patch = match.groups()
    depth, width, heads = DIT_SIZES.get(f"{kind}-{size}") or DIT_SIZES[size]
    sizes = {"num_layers": depth, "num_attention_heads": heads, "attention_head_dim": width // heads}
    return {**sizes, "patch_size": int(patch), "dig_block": kind == "DiG"}


class MHLADiTTransformer2DModel(MHLATransformerMixin, DiTTransformer2DModel):
    """`DiTTransformer2DModel` with MHLA in some layers; the paper's CPE and gate are `cpe=3` and `gate=True`.

    Args:
        dig_block: Whether all blocks are those of DiG, for training from scratch (`from_preset("DiG-S/2")`).
        shared_embeddings: Whether all blocks share one embedding of time and class, as in DiT and DiG. In diffusers' class
            every block has its own; files always have one per block.
        input_norm: Whether MHLA layers have a LayerNorm before the projections, as the authors' checkpoints need.
        timestep_freq_shift: 0 for the timestep frequencies of the original DiT, which the authors' checkpoints need; 1 for
            those of diffusers, which differ a little.
        mhla, **kwargs: As in `MHLATransformerMixin`.
    """

    family = DIT
    mhla_arguments = {
        **MHLATransformerMixin.mhla_arguments, "input_norm": False, "timestep_freq_shift": 1, "dig_block": False,
        "shared_embeddings": False,
    }  # fmt: skip
    _repeated_blocks = ["BasicTransformerBlock", "DiGBlock"]
    _no_split_modules = ["BasicTransformerBlock", "DiGBlock"]

    def install_mhla(self: Any, settings: MHLASettings) -> None:
        for block in self.transformer_blocks if self.config.get("dig_block", False) else ():
            become_dig_block(block)
        if self.config.get("shared_embeddings", False):
            for block in self.transformer_blocks[1:]:
                block.norm1.emb = self.transformer_blocks[0].norm1.emb
            self.register_state_dict_post_hook(_copy_embeddings)
        super().install_mhla(settings)
        for block in self.transformer_blocks:
            block.grid_state = self.mhla_state  # read by blocks of DiG
            block.norm1.emb.time_proj.downscale_freq_shift = self.config.get("timestep_freq_shift", 1)
            if self.config.get("input_norm", False) and holds_mhla(block.attn1.processor):
                block.attn1.input_norm = nn.LayerNorm(self.inner_dim)

    @classmethod
    def from_preset(
        cls: Any,
        preset: str,
        *,
        input_size: int = 32,
        num_classes: int = 1000,
        mhla: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Create a model from scratch, with DiT's initial weights and one embedding of time and class for all blocks.

        Args:
            preset: Name such as "DiT-S/2", of size S, B, L, or XL and patch size 2, 4, or 8; "DiG-S/2" for blocks of DiG.
            input_size: Side of the square latents; 32 for images of 256 pixels.
            num_classes: Number of labels. The model has one more, for no label.
            mhla: Settings that differ from the family's, such as {"cpe": 3, "gate": True}, or for DiG, from `DIG_SETTINGS`.
            **kwargs: Further arguments of `DiTTransformer2DModel`; `out_channels` defaults to twice `in_channels`.

        Raises:
            ValueError: There is no such preset, or the settings do not fit.
        """
        sizes = {"in_channels": 4, "shared_embeddings": True, **dit_preset(preset), **kwargs}
        if sizes.get("dig_block"):
            mhla = {**DIG_SETTINGS, **(mhla or {})}
        sizes.setdefault("out_channels", 2 * sizes["in_channels"])
        model = cls(sample_size=input_size, num_embeds_ada_norm=num_classes, mhla=mhla, **sizes)
        model.initialize_weights()
        return model

    @torch.no_grad()
    def initialize_weights(self: Any) -> None:
        """Set the initial weights of DiT (arXiv 2212.09748, section 3.2), in place, except for those of MHLA."""
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

    def token_grid(self, hidden_states: Tensor, **arguments: Any) -> tuple[int, ...]:
        """Return rows and columns of tokens; raise ValueError unless they are a square, as diffusers' DiT assumes."""
        grid = super().token_grid(hidden_states, **arguments)
        if grid[0] != grid[1]:
            raise ValueError(f"hidden_states: got a grid of {grid}, expected a square, as diffusers' DiT requires.")
        return grid


def _copy_embeddings(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Post-hook of `state_dict` that copies the shared embedding for each block: safetensors cannot save shared memory."""
    for name in [name for name in state if name.startswith(f"{prefix}transformer_blocks.") and ".norm1.emb." in name]:
        if not name.startswith(f"{prefix}transformer_blocks.0.") and not isinstance(state[name], nn.Parameter):
            state[name] = state[name].clone()
