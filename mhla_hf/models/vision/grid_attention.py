"""Replaces softmax attention with an MHLA core in transformers' vision towers, as `causal_attention.py` does in decoders."""

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
from transformers.modeling_utils import AttentionInterface

from ...nn.grid import GridMHLA
from ...nn.settings import MHLASettings
from ...ops.namespace import NAMESPACE
from ..derived_classes import AttentionSwap
from ..families import family_of_type

GRID_ATTENTION_NAME = f"mhla_grid_{NAMESPACE}"


class GridCall(NamedTuple):
    """The grid and the layer's input [B, T, C], in place of `attention_mask`, which the attention function receives."""

    grid: tuple[int, ...]
    hidden_states: Tensor


def mhla_grid_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: GridCall, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute the attention of an MHLA layer, [B, H, T, K] -> [B, T, H, V], as an attention function of transformers."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return module.mhla(q, k, v, grid=attention_mask.grid, hidden_states=attention_mask.hidden_states), None


AttentionInterface.register(GRID_ATTENTION_NAME, mhla_grid_attention)
AttentionMaskInterface.register(GRID_ATTENTION_NAME, flash_attention_mask)


class MHLAGridMixer:
    """Passes a `GridCall` in place of the mask; a mixin for attention classes with a child `mhla`."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        mhla_grid: tuple[int, ...] | None = None,
        **kwargs: Any,
    ) -> Any:
        if attention_mask is not None:
            raise ValueError("attention_mask: got a tensor, expected None for MHLA layers of image models.")
        if mhla_grid is None:
            raise ValueError("mhla_grid: got None, expected rows and columns of tokens; call the whole model.")
        call = GridCall(mhla_grid, hidden_states)
        return super().forward(hidden_states, attention_mask=call, **kwargs)  # type: ignore[misc]


def find_grid_attentions(model: nn.Module) -> dict[int, Any]:
    attributes = ("q_proj", "k_proj", "v_proj", "head_dim", "config")
    return dict(enumerate(module for module in model.modules() if all(hasattr(module, name) for name in attributes)))


def prefix_tokens(config: Any) -> int:
    family: Any = family_of_type(getattr(config, "base_model_type", config.model_type))
    return family.prefix + (getattr(config, "num_register_tokens", 0) or 0)


def grid_core_sizes(attention: Any, config: Any) -> dict[str, Any]:
    sizes = {"num_heads": config.num_attention_heads, "hidden_size": config.hidden_size}
    return {**sizes, "prefix": prefix_tokens(config), "key_dim": attention.head_dim, "value_dim": attention.head_dim}


def finish_tower(model: Any, settings: MHLASettings) -> None:
    """Let `settings.softmax_heads` keep softmax, and register the hook that passes the grid to the layers, in place."""
    attentions = find_grid_attentions(model)
    for index, heads in (settings.softmax_heads or {}).items():
        attentions[int(index)].mhla = attentions[int(index)].mhla.with_softmax_heads(heads)
    body = next(module for module in model.modules() if hasattr(module, "embeddings"))
    body.register_forward_pre_hook(pass_grid, with_kwargs=True)


def pass_grid(body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass the grid of tokens to the layers of a vision tower, as `mhla_grid`; a pre-forward hook."""
    pixels, patch = args[0] if args else kwargs.get("pixel_values"), body.config.patch_size
    if pixels is None or pixels.ndim != 4:
        got = "None" if pixels is None else f"{pixels.ndim} axes"
        raise ValueError(f"pixel_values: got {got}, expected [batch, channels, height, width].")
    patch = patch if isinstance(patch, (list, tuple)) else (patch, patch)
    grid = tuple(int(side) // int(part) for side, part in zip(pixels.shape[2:], patch, strict=True))
    return args, {**kwargs, "mhla_grid": grid}


GRID_SWAP = AttentionSwap(
    function_name=GRID_ATTENTION_NAME,
    mixin=MHLAGridMixer,
    find_attentions=find_grid_attentions,
    core_sizes=grid_core_sizes,
    matrix_core=GridMHLA,
    finish=finish_tower,
    replaces_masks=False,
)
