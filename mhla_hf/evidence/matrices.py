"""The attention matrices of any model, row by row, from what its layers saw in one forward pass.

Unusual: nothing is asked of the model. An MHLA layer is known by its core (so one from a checkpoint's own source is too),
whose inputs a hook keeps; a softmax layer by its call of torch's `scaled_dot_product_attention`. The T x T numbers are made
afterwards, in fp64, one head and as many rows at a time as the caller wants.
"""

import contextlib
import copy
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ..ops.blocks import Blocks
from ..ops.reference import divide_or_zero, official_denominator


@dataclasses.dataclass
class Attention:
    """What one layer saw in one call, and from it the weights that it gave to the values.

    layer: the module's name in the model. kind: "softmax", "mhla" or "linear" (MHLA with uniform mixing).
    q: `[B, T, H, K]`, k: `[B, S, G, K]`, feature-mapped (and rotated) in MHLA layers. scale: of <q, k>. causal: bool.
    The rest is the operator's, see `mhla`; attn_mask that of softmax, broadcastable to `[B, H, T, S]`, bool or added.
    """

    layer: str
    kind: str
    q: torch.Tensor
    k: torch.Tensor
    scale: float
    causal: bool = False
    attn_mask: torch.Tensor | None = None
    mixing: torch.Tensor | None = None
    blocks: Blocks | None = None
    normalize: bool | str = True
    q_den: torch.Tensor | None = None
    k_den: torch.Tensor | None = None
    key_mask: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    grid: tuple | None = None
    prefix: int = 0

    @property
    def samples(self) -> int:
        """B."""
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        """H."""
        return self.q.shape[2]

    def rows(self, sample: int, head: int, rows: slice = slice(None)) -> torch.Tensor:
        """The weights of some query tokens on all key tokens, fp64 `[rows, S]`, as the layer applied them to v."""
        weights = self._softmax_rows if self.kind == "softmax" else self._mhla_rows
        return weights(sample, head, rows)

    def _scores(self, q, k, sample, head, rows):
        key_head = head // (q.shape[2] // k.shape[2])
        return self.scale * (q[sample, rows, head].double() @ k[sample, :, key_head].double().mT)

    def _visible(self, rows):
        """Which keys the rows may see by causality, bool `[rows, S]`."""
        token = torch.arange(self.q.shape[1])[rows]
        return token[:, None] >= torch.arange(self.k.shape[1])[None, :]

    def _softmax_rows(self, sample, head, rows):
        scores = self._scores(self.q, self.k, sample, head, rows)
        if self.causal:
            scores = scores.masked_fill(~self._visible(rows), float("-inf"))
        if self.attn_mask is not None:
            shape = (self.q.shape[0], self.heads, self.q.shape[1], self.k.shape[1])
            mask = self.attn_mask.expand(shape)[sample, head, rows]
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.double()
        return scores.softmax(-1).nan_to_num(0.0)

    def _mhla_rows(self, sample, head, rows):
        block = self.blocks.index()
        seen = torch.ones(1, self.k.shape[1], dtype=torch.bool)
        if self.starts is not None:
            start = int(self.starts[sample])
            block = (torch.arange(self.q.shape[1]) - start).clamp(min=0) // self.blocks.block_size
            seen = seen & (torch.arange(self.k.shape[1]) >= start)
        if self.key_mask is not None:
            seen = seen & self.key_mask[sample]
        if self.causal:
            seen = seen & self._visible(rows)
        mixing = self.mixing[head if len(self.mixing) > 1 else 0].double()[block[rows]][:, block] * seen
        weights = mixing * self._scores(self.q, self.k, sample, head, rows)
        if not self.normalize:
            return weights
        if self.normalize == "official":
            return divide_or_zero(weights, self._official(sample)[rows, head])
        if self.q_den is None:
            return divide_or_zero(weights, weights.sum(-1))
        return divide_or_zero(weights, (mixing * self._scores(self.q_den, self.k_den, sample, head, rows)).sum(-1))

    def _official(self, sample):
        """The released vision code's denominator of one sample, fp64 `[T, H]`."""
        one = slice(sample, sample + 1)
        own = [x if x is None else x[one] for x in (self.q, self.k, self.q_den, self.k_den, self.key_mask)]
        q, k, q_den, k_den, key_mask = own
        if key_mask is not None:
            k, k_den = (x if x is None else x.masked_fill(~key_mask[:, :, None, None], 0) for x in (k, k_den))
        return official_denominator(q, k, self.mixing.double(), self.blocks, self.scale, q_den, k_den)[0]


@contextlib.contextmanager
def recorded_attention(model: nn.Module):
    """Keep what the attention layers see while the block runs: a list of `Attention`, in the order of the calls.

    Cross-attention (as many keys as queries is what tells them apart) is left out. Tensors are kept on the CPU.
    """
    found: list[Attention] = []
    stack = [""]
    handles = []

    def enter(name):
        return lambda module, args: stack.append(name)

    def leave(module, args, output):
        stack.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave, always_call=True))
        if is_core(module):
            hook = _core_hook(name, found)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        with _SoftmaxCalls(found, stack):
            yield found
    finally:
        for handle in handles:
            handle.remove()


def is_core(module: nn.Module) -> bool:
    """True for the core of an MHLA layer, whether from this package or from a checkpoint's own source."""
    return all(hasattr(module, name) for name in ("map_features", "mixing", "settings", "q_map", "k_map"))


def layer_of(core: str) -> str:
    """The attention module that owns the core of this name (in diffusers its processor does)."""
    return core.removesuffix(".mhla").removesuffix(".processor")


class _SoftmaxCalls(TorchFunctionMode):
    """Notes every call of torch's attention function."""

    def __init__(self, found, stack):
        super().__init__()
        self.found, self.stack = found, stack

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._keep(*args, **kwargs)
        return func(*args, **kwargs)

    def _keep(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if query.ndim != 4 or query.shape[-2] != key.shape[-2]:
            return
        self.found.append(
            Attention(
                layer=self.stack[-1].removesuffix(".softmax"),
                kind="softmax",
                q=_kept(query.transpose(1, 2)),
                k=_kept(key.transpose(1, 2)),
                scale=query.shape[-1] ** -0.5 if scale is None else scale,
                causal=is_causal,
                attn_mask=_kept(attn_mask),
            )
        )


def _core_hook(name, found):
    def keep(core, args, kwargs):
        given = {**dict(zip(("q", "k", "v"), args, strict=False)), **kwargs}
        found.append(_core_call(layer_of(name), core, given))

    return keep


@torch.no_grad()
def _core_call(layer: str, core: Any, given: dict) -> Attention:
    """What the operator will get in this call of a core."""
    if given.get("cu_seqlens") is not None or given.get("cache") is not None:
        raise ValueError(f"inputs: {layer} got packed sequences or a cache, expected whole sequences, one per row.")
    key_mask = given.get("key_mask")
    q, k, q_den, k_den = core.map_features(given["q"], given["k"], key_mask, given.get("rotate"))
    grid = given.get("grid")
    if grid is None:
        blocks = Blocks.sequence(q.shape[1], core.settings.block_size)
        mixing = core.mixing(blocks.num_blocks)
    else:
        blocks = Blocks.grid(grid, core.settings.layout, prefix=core.prefix)
        mixing = core.mixing(blocks.counts)
    mixing = _kept(mixing).reshape(-1, *mixing.shape[-2:])
    return Attention(
        layer=layer,
        kind="linear" if is_uniform(mixing, causal=grid is None) else "mhla",
        q=_kept(q),
        k=_kept(k),
        scale=q.shape[-1] ** -0.5,
        causal=grid is None,
        mixing=mixing,
        blocks=blocks,
        normalize=core.settings.normalize,
        q_den=_kept(q_den),
        k_den=_kept(k_den),
        key_mask=_kept(key_mask),
        starts=_kept(given.get("starts")),
        grid=None if grid is None else tuple(grid),
        prefix=blocks.prefix,
    )


def _kept(value):
    return None if value is None else value.detach().cpu()


def is_uniform(mixing: torch.Tensor, causal: bool) -> bool:
    """Whether every row of `[H, M, M]` weighs all blocks that it sees alike: then MHLA is plain linear attention."""
    seen = torch.ones(mixing.shape[-2:], dtype=torch.bool).tril() if causal else torch.ones(mixing.shape[-2:]).bool()
    first = mixing[..., :1]
    return bool(((mixing - first).abs() <= 1e-6 * first.abs())[..., seen].all())


@torch.no_grad()
def mixing_matrices(model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor, list | None]]:
    """layer -> (start, learned, layout) of every MHLA layer: mixing weights, fp32 `[M, M]`, the mean over heads where each
    has its own; blocks per axis of a grid, None for a sequence."""
    found = {}
    for name, module in model.named_modules():
        if is_core(module):
            learned = module.mixing
            start = copy.deepcopy(learned)
            start.weight.copy_(start.initial_values()["weight"])
            layout = getattr(learned, "layout", None)
            pair = (mixing(layout or learned.weight.shape[-1]).float().cpu() for mixing in (start, learned))
            both = (m.reshape(-1, *m.shape[-2:]).mean(0) for m in pair)
            found[layer_of(name)] = (*both, list(layout) if layout else None)
    return found
