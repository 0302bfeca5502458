"""The attention processor of MHLA layers in which tokens of text and of a grid share one attention, as in Flux."""

import functools
import math
from typing import Any

import torch

from ...nn.grid import rotate_both
from ...nn.joint import TextTokens, split_grids
from .inputs import ROTARY_FORMS, attention_parts, project_heads
from .processor import GridAttnProcessor

ProjectedHeads = tuple[torch.Tensor, ...]  # q, k, and v


class TextGridAttnProcessor(GridAttnProcessor):
    """Base class of processors that compute joint attention, with MHLA among the tokens of the grid (`JointMHLA`)."""

    def count_text(self, num_tokens: int) -> int:
        """Return the number of text tokens in one sequence of text and grid."""
        grid = self.state.current_grid()
        num_text = num_tokens - sum(map(math.prod, split_grids(grid)))
        if num_text < 0:
            raise ValueError(f"grid: got {grid} for {num_tokens} tokens, expected at most as many.")
        return num_text

    def attend(
        self,
        heads: ProjectedHeads,
        text_heads: ProjectedHeads,
        mask: torch.Tensor | None,
        rotary_emb: Any,
        hidden_states: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate and attend; return the outputs of the grid [B, T, H * V] and of the text [B, S, H * V].

        `mask` has a form that `text_masks` reads. `rotary_emb` is that of the text and then the grid, or of the grid alone.
        """
        text_q, text_k, text_v = text_heads
        num_grid, num_text, rotate = hidden_states.shape[1], text_q.shape[1], None
        if rotary_emb is not None:
            cos, sin, distance = ROTARY_FORMS[self.rotary](rotary_emb, text_q.shape[2])
            rotate = functools.partial(rotate_both, angles=(cos[-num_grid:], sin[-num_grid:], distance))
            if len(cos) > num_grid:
                text_q, text_k = rotate_both(text_q, text_k, (cos[:num_text], sin[:num_text], distance))
        text = TextTokens(text_q, text_k, text_v, *text_masks(mask, num_text, num_grid, self.text_last))
        grid = self.state.current_grid()
        o, text_o = self.mhla(*heads, text, grid=grid, hidden_states=hidden_states, rotate=rotate)
        return o.flatten(2), text_o.flatten(2)


class JointAttnProcessor(TextGridAttnProcessor):
    """Attention processor of layers with separate projections of q, k, and v. See `GridAttnProcessor` for arguments."""

    def forward(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
        *,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        ip_hidden_states: Any = None,
    ) -> Any:
        """Attend over the text [B, S, C'] and the grid [B, T, C], which come and return as a pair or in one sequence.

        `attn` has the projections, and `add_q_proj` and others if those of the text are its own.
        """
        if ip_hidden_states is not None:
            raise ValueError("ip_hidden_states: got image prompts, expected None: MHLA layers have no IP-Adapter.")
        mask = attention_mask if encoder_hidden_states_mask is None else encoder_hidden_states_mask
        self.state.current_grid()  # without one, nothing is computed
        is_single = encoder_hidden_states is None
        if encoder_hidden_states is None:
            num_text = self.count_text(hidden_states.shape[1])
            encoder_hidden_states, hidden_states = hidden_states[:, :num_text], hidden_states[:, num_text:]
        heads = project_heads(attn, hidden_states, self.head_norm)
        text_heads = project_heads(attn, encoder_hidden_states, self.head_norm, text=True)
        o, text_o = self.attend(heads, text_heads, mask, image_rotary_emb, hidden_states)
        for module in attention_parts(attn).outputs:
            o = module(o)
        for module in attention_parts(attn, text=True).outputs:
            text_o = module(text_o)
        return torch.cat([text_o, o], 1) if is_single else (o, text_o)


class FusedJointAttnProcessor(TextGridAttnProcessor):
    """Processor of layers that project q, k, v, and the MLP at once (the single blocks of Flux 2)."""

    def forward(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> torch.Tensor:
        """Attend over the text and the whole grid, and apply the MLP: [B, S + T, C] -> [B, S + T, C]."""
        num_text = self.count_text(hidden_states.shape[1])
        projected = attn.to_qkv_mlp_proj(hidden_states)
        q, k, v, inner = projected.split([*[attn.inner_dim] * 3, projected.shape[-1] - 3 * attn.inner_dim], -1)
        q, k, v = (x.unflatten(-1, (-1, attn.head_dim)) for x in (q, k, v))
        heads = (attn.norm_q(q), attn.norm_k(k), v)
        text_heads, heads = tuple(x[:, :num_text] for x in heads), tuple(x[:, num_text:] for x in heads)
        o, text_o = self.attend(heads, text_heads, attention_mask, image_rotary_emb, hidden_states[:, num_text:])
        return attn.to_out(torch.cat([torch.cat([text_o, o], 1), attn.mlp_act_fn(inner)], -1))


def text_masks(
    mask: torch.Tensor | None, num_text: int, num_grid: int, text_last: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Split a mask, [B, S] or [B, 1, 1 or S + T, S + T], bool or added to the scores, into the two of `TextTokens`."""
    if mask is None:
        return None, None
    if mask.ndim == 2:
        mask = mask.bool()[:, None, None]  # [B, 1, 1, S]
        return mask, torch.nn.functional.pad(mask, (0, num_grid), value=True)
    if text_last:
        mask = mask.roll(num_text, -1)
        mask = mask if mask.shape[2] == 1 else mask.roll(num_text, 2)
    of_grid = mask[:, :, -1:, :num_text]
    if mask.dtype != torch.bool:  # relative to the keys of the grid
        of_grid = of_grid - mask[:, :, -1:, -1:]
    return of_grid, mask[:, :, :num_text]
