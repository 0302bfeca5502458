"""The attention processors of MHLA layers in transformers of diffusers, and the grid of tokens that they read."""

import functools
import inspect
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn
from torch import Tensor, nn

from ...nn.core import CORE_LOG, softmax_attention
from ...nn.grid import rotate_both
from ...nn.joint import TextTokens, split_grids
from ..families import DiffusionKind
from .context_parallel import shard_of_grid
from .inputs import attention_parts, project_heads, read_rotary

# Found here and not in each call, because torch.compile cannot read the values of this enum.
EIGHT_BIT_BACKENDS = tuple(backend for backend in AttentionBackendName if "sage" in backend.value)


@functools.cache
def warn_of_backend(backend: AttentionBackendName, reason: str) -> None:
    CORE_LOG.warning("mhla_hf: attention backend %r %s; this softmax uses PyTorch.", backend.value, reason)


class GridState(threading.local):
    """The grid of the current thread's forward pass, which a model's `forward` writes for its processors."""

    def __init__(self) -> None:  # once in every thread
        self.grid: tuple[Any, ...] | None = None  # tokens per axis, or a tuple per image; None between forward passes
        self.uses_base = False  # whether MHLA layers attend as the base does (`use_base_attention`)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()  # a copied or pickled model is in no forward pass

    def current_grid(self) -> tuple[Any, ...]:
        if self.grid is None:
            expected = "one inside it (to recompute blocks in the backward pass: enable_gradient_checkpointing())"
            raise ValueError(f"grid: got a call outside of the transformer's forward, expected {expected}.")
        return self.grid

    def run(self, grid: tuple[Any, ...] | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function with `grid` as the current grid."""
        if grid == self.grid:
            return function(*args, **kwargs)
        previous, self.grid = self.grid, grid
        try:
            return function(*args, **kwargs)
        finally:
            self.grid = previous


class GridCheckpoint:
    """Wraps a gradient checkpointing function, so that each block is recomputed with the grid of its forward pass.

    It is a class and not a closure, so that a deep copy of a model refers to the copy's own state.
    """

    def __init__(self, state: GridState, function: Callable[..., Any]):
        self.state = state
        self.function = function

    def __call__(self, block: Callable[..., Any], *args: Any) -> Any:
        return self.function(functools.partial(self.state.run, self.state.grid, block), *args)


class GridAttnProcessor(nn.Module):
    """Base class of processors that attend by an MHLA core or, while `state.uses_base` is set, by `base_processor`.

    All parameters are in the one child, `mhla`, because offloading hooks the calls of modules.
    """

    # What diffusers writes here: its context-parallel configuration, and the backend of `set_attention_backend`, or None.
    _parallel_config: Any = None
    _attention_backend: Any = None

    def __init_subclass__(cls) -> None:
        """Make `__call__` with the signature of `forward`: diffusers passes only the arguments that it finds there."""
        if "forward" not in vars(cls):
            return

        @functools.wraps(cls.forward)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.state.uses_base:
                return nn.Module.__call__(self, *args, **kwargs)
            return self.base_processor(*args, **{k: v for k, v in kwargs.items() if k in self.base_arguments})

        cls.__call__ = __call__  # type: ignore[method-assign]

    def __init__(self, core: Any, state: GridState, kind: DiffusionKind, base_processor: Any):
        super().__init__()
        self.mhla = core
        self.windowed = core.settings.windowed  # a fit replaces `mhla` by cores without settings
        self.state = state
        self.head_norm, self.rotary, self.text_last = kind.head_norm, kind.rotary, kind.text_last
        self.set_base_processor(base_processor)

    def set_base_processor(self, processor: Any) -> None:
        """Set the base's processor. It must have no weights, which would get into the state dict of the MHLA processor."""
        self.base_processor = processor
        self.base_arguments = frozenset(inspect.signature(processor.__call__).parameters)

    def softmax(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Call diffusers' backend; PyTorch if it takes no mask, or if it rounds q, which may hold a score, to 8 bits."""
        backend = self._attention_backend or _AttentionBackendRegistry.get_active_backend()[0]
        if backend in EIGHT_BIT_BACKENDS:
            if not torch.compiler.is_compiling():
                warn_of_backend(backend, "rounds queries to 8 bits")
            return softmax_attention(q, k, v, mask=mask, scale=scale)
        parallel = self._parallel_config
        try:
            return dispatch_attention_fn(
                q, k, v, attn_mask=mask, scale=scale, backend=backend, parallel_config=parallel
            )
        except ValueError as error:
            if mask is None or "mask" not in str(error):
                raise
            if not torch.compiler.is_compiling():
                warn_of_backend(backend, "takes no mask")
            return softmax_attention(q, k, v, mask=mask, scale=scale)


class MHLAAttnProcessor(GridAttnProcessor):
    """Processor that computes self-attention by MHLA over the grid, where no text tokens share the attention."""

    def forward(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
        key_rotary_emb: None = None,
        *,
        image_rotary_emb: Any = None,
        sparse_params: dict[str, Any] | None = None,
        perturbation_mask: Tensor | None = None,
        all_perturbed: Any = None,
        rotary_emb_kv: Any = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend to the whole grid, [B, T, C] -> [B, T, C]; T tokens are all, or this process's in context parallelism.

        `perturbation_mask` [B, 1, 1] is the fraction of attention in the output, the rest is v; `all_perturbed` says whether
        all of it is 0 (LTX-2). In self-attention, `key_rotary_emb` is None, and `rotary_emb_kv` is `rotary_emb`.
        """
        rotary_emb = image_rotary_emb if rotary_emb is None else rotary_emb
        if encoder_hidden_states is not None:
            raise ValueError("encoder_hidden_states: got a tensor, expected None: an MHLA layer is self-attention.")
        if attention_mask is not None or attn_mask is not None:
            raise ValueError("attention_mask: got a tensor, expected None: MHLA layers see the whole grid.")
        if sparse_params is not None:
            expected = 'None: set attention_type to "regular" in the config, since MHLA needs tokens in grid order'
            raise ValueError(f"sparse_params: got a dictionary, expected {expected}.")
        grid = self.state.current_grid()
        if hasattr(attn, "input_norm"):
            hidden_states = attn.input_norm(hidden_states)
        q, k, v = project_heads(attn, hidden_states, self.head_norm)
        rotate = None
        if rotary_emb is not None:
            rotate = functools.partial(rotate_both, angles=read_rotary(self.rotary, rotary_emb, q.shape[2]))
        shard = None if self._parallel_config is None else shard_of_grid(self._parallel_config, grid)
        options = {"grid": grid, "hidden_states": hidden_states, "rotate": rotate, "softmax": self.softmax}
        if self.windowed:  # a `JointMHLA`
            o, _ = self.mhla(q, k, v, TextTokens(q[:, :0], k[:, :0], v[:, :0]), **options)
        else:
            o = self.mhla(q, k, v, shard=shard, **options)
        if perturbation_mask is not None:
            o = torch.lerp(v, o, perturbation_mask[..., None].to(o))  # [B, 1, 1, 1]
        if getattr(attn, "to_gate_logits", None) is not None:
            o = o * (2.0 * attn.to_gate_logits(hidden_states).sigmoid())[..., None]  # [B, T, H, 1]
        o = o.flatten(2)
        for module in attention_parts(attn).outputs:
            o = module(o)
        return o.clip(-65504, 65504) if o.dtype == torch.float16 else o  # as Sana's own processor


QKV = tuple[Tensor, ...]


class TextGridAttnProcessor(GridAttnProcessor):
    """Base class of processors that compute joint attention, with MHLA among the tokens of the grid (`JointMHLA`)."""

    def count_text(self, num_tokens: int) -> int:
        """Return how many of `num_tokens` of text and grid are text; raise ValueError if the grid alone has more."""
        grid = self.state.current_grid()
        num_text = num_tokens - sum(map(math.prod, split_grids(grid)))
        if num_text < 0:
            raise ValueError(f"grid: got {grid}, expected at most the {num_tokens} tokens of the whole sequence.")
        return num_text

    def attend(
        self, heads: QKV, text_heads: QKV, mask: Tensor | None, rotary_emb: Any, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate and attend; return the outputs of the grid [B, T, H * V] and of the text [B, S, H * V]."""
        text_q, text_k, text_v = text_heads
        num_grid, num_text, rotate = hidden_states.shape[1], text_q.shape[1], None
        if rotary_emb is not None:
            cos, sin, distance = read_rotary(self.rotary, rotary_emb, text_q.shape[2])
            rotate = functools.partial(rotate_both, angles=(cos[-num_grid:], sin[-num_grid:], distance))
            if len(cos) > num_grid:  # else the angles are those of the grid alone
                text_q, text_k = rotate_both(text_q, text_k, (cos[:num_text], sin[:num_text], distance))
        text = TextTokens(text_q, text_k, text_v, *text_masks(mask, num_text, num_grid, self.text_last))
        grid = self.state.current_grid()
        options = {"hidden_states": hidden_states, "rotate": rotate, "softmax": self.softmax}
        o, text_o = self.mhla(*heads, text, grid=grid, **options)
        return o.flatten(2), text_o.flatten(2)


class JointAttnProcessor(TextGridAttnProcessor):
    """Processor of layers with separate projections of q, k, and v."""

    def forward(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
        *,
        encoder_hidden_states_mask: Tensor | None = None,
        ip_hidden_states: Any = None,
    ) -> Any:
        """Attend over the text [B, S, C'] and the grid [B, T, C]; return (grid, text), or one sequence if given as one."""
        if ip_hidden_states is not None:
            raise ValueError("ip_hidden_states: got image prompts, expected None: MHLA layers have no IP-Adapter.")
        mask = attention_mask if encoder_hidden_states_mask is None else encoder_hidden_states_mask
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
        self, attn: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, image_rotary_emb: Any = None
    ) -> Tensor:
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
    mask: Tensor | None, num_text: int, num_grid: int, text_last: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Make the two masks of `TextTokens` from one, [B, S] or [B, 1, 1 or S + T, S + T], bool or added to the scores."""
    if mask is None:
        return None, None
    if mask.ndim == 2:
        mask = mask.bool()[:, None, None]  # [B, 1, 1, S]
        return mask, nn.functional.pad(mask, (0, num_grid), value=True)
    if text_last:
        mask = mask.roll(num_text, -1)
        mask = mask if mask.shape[2] == 1 else mask.roll(num_text, 2)
    of_grid = mask[:, :, -1:, :num_text]
    if mask.dtype != torch.bool:  # shifted so that keys of the grid, to which MHLA adds no mask, get 0
        of_grid = of_grid - mask[:, :, -1:, -1:]
    return of_grid, mask[:, :, :num_text]


def holds_mhla(processor: Any) -> bool:
    """Return whether a processor is MHLA's; `isinstance` fails as diffusers redefines classes when it loads a checkpoint."""
    return hasattr(processor, "mhla")
