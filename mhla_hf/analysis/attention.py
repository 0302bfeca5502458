"""The attention matrices of any model, from what its layers saw in one forward pass.

An MHLA layer is known by its core, whose inputs a hook keeps; a softmax layer by its call of torch's
`scaled_dot_product_attention`. The matrix is what the definition in fp64 makes of unit vectors in place of the values.
"""

import contextlib
import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ..nn.core import without_padding
from ..ops.blocks import Blocks
from ..ops.reference import local_reference, mhla_reference


@dataclasses.dataclass
class Attention:
    """What one layer saw in one call, and from it the weights that it gave to the values.

    layer: the module's name in the model. kind: "softmax", "mhla" or "linear" (MHLA with uniform mixing).
    q: `[B, T, H, K]`, k: `[B, S, G, K]`, feature-mapped (and rotated) in MHLA layers. grid: its tokens, None for a sequence.
    options: of `scaled_dot_product_attention`, or of `mhla`, its mixing `[H or 1, M, M]` and blocks among them; with a local
    softmax also "form", "balance" and what is not mapped, "near" (q, k): see `local_reference`.
    """

    layer: str
    kind: str
    q: torch.Tensor
    k: torch.Tensor
    options: dict = dataclasses.field(default_factory=dict)
    grid: tuple | None = None

    def matrix(self, sample: int = 0, head: int = 0) -> torch.Tensor:
        """The weights of all query tokens on all key tokens, fp64 `[T, S]`, as the layer applied them to v."""
        heads, options = self.q.shape[2], dict(self.options)

        def own(x):
            group = head * x.shape[2] // heads
            return x[sample, :, group : group + 1].double()[None]

        q, k = own(self.q), own(self.k)
        units = torch.eye(k.shape[1], dtype=torch.float64)[None, :, None]
        if self.kind == "softmax":
            if (mask := options.pop("attn_mask", None)) is not None:
                mask = mask.expand(len(self.q), heads, q.shape[1], k.shape[1])[sample, head]
                options["attn_mask"] = mask if mask.dtype == torch.bool else mask.double()
            q, k, units = (x.transpose(1, 2) for x in (q, k, units))
            return F.scaled_dot_product_attention(q, k, units, **options)[0, 0].nan_to_num(0.0)
        mixing = options.pop("mixing").double()
        options |= {name: own(options[name]) for name in ("q_den", "k_den") if options.get(name) is not None}
        options |= {name: options[name][[sample]] for name in ("key_mask", "starts") if options.get(name) is not None}
        if "form" in options:
            (near_q, near_k), balance = map(own, options["near"]), options["balance"]
            balance = None if balance is None else balance[[head]].double()
            padding, form = {name: options[name] for name in ("key_mask", "starts")}, options["form"]
            return local_reference(near_q, near_k, units, q, k, mixing[[head]], balance, form, **padding)[0, :, 0]
        return mhla_reference(q, k, units, mixing[[head if len(mixing) > 1 else 0]], **options)[0, :, 0]

    def far_share(self, sample: int = 0, head: int = 0) -> float:
        """The share of all weights that tokens outside the window have, over the queries that have such tokens."""
        form, blocks = self.options["form"], self.options["blocks"].index()
        far = (blocks[:, None] - blocks[None, :] >= form.lag) & (torch.arange(len(blocks)) >= form.sinks)
        weights = self.matrix(sample, head)[far.any(1)]
        return (weights * far[far.any(1)]).sum(-1).mean().item() if len(weights) else 0.0

    @functools.cached_property
    def is_causal(self) -> bool:
        """Whether no token sees a later one, by the layer's nature or by its mask."""
        if self.options.get("attn_mask") is not None:
            return self.matrix().triu(1).abs().max().item() == 0.0
        return self.options.get("is_causal" if self.kind == "softmax" else "causal", False)


@contextlib.contextmanager
def recorded_attention(model: nn.Module):
    """Keep what the attention layers see while the block runs: a list of `Attention`, in the order of the calls.

    Cross-attention (as many keys as queries is what tells them apart) is left out. Tensors are kept on the CPU.
    """
    found, stack, handles = [], [], []

    def leave(module, args, output):
        stack.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda module, args, name=name: stack.append(name)))
        handles.append(module.register_forward_hook(leave, always_call=True))
        if is_core(module):
            keep = functools.partial(_keep_core, found, layer_of(name))
            handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        with _SoftmaxCalls(found, stack):
            yield found
    finally:
        for handle in handles:
            handle.remove()


def is_core(module: nn.Module) -> bool:
    """True for the core of an MHLA layer, whether from this package or from a checkpoint's own source."""
    return all(getattr(module, name, None) is not None for name in ("mixing", "settings", "q_map", "k_map"))


def layer_of(core: str) -> str:
    """The attention module that owns the core of this name (in diffusers its processor does)."""
    return core.removesuffix(".mhla").removesuffix(".processor")


class _SoftmaxCalls(TorchFunctionMode):
    """Notes every call of torch's attention function inside the model."""

    def __init__(self, found, stack):
        super().__init__()
        self.found, self.stack = found, stack

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.stack:
            self._keep(*args, **kwargs)
        return func(*args, **kwargs)

    def _keep(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if query.ndim == 4 and query.shape[-2] == key.shape[-2]:
            layer, options = self.stack[-1].removesuffix(".softmax"), {"is_causal": is_causal, "scale": scale}
            q, k = _kept(query.transpose(1, 2)), _kept(key.transpose(1, 2))
            self.found.append(Attention(layer, "softmax", q, k, options | {"attn_mask": _kept(attn_mask)}))


@torch.no_grad()
def _keep_core(found, layer, core, args, kwargs):
    """What the operator will get in this call of a core."""
    given = {**dict(zip("qkv", args, strict=False)), **kwargs}
    if given.get("cu_seqlens") is not None or given.get("cache") is not None:
        raise ValueError(f"inputs: {layer} got packed sequences or a cache, expected whole sequences, one per row.")
    grid, key_mask, settings = given.get("grid") and tuple(given["grid"]), given.get("key_mask"), core.settings
    blocks = Blocks.sequence(given["q"].shape[1], settings.block_size) if grid is None else None
    blocks = blocks or Blocks.grid(grid, settings.layout, prefix=core.prefix)
    layout = getattr(core.mixing, "layout", None)  # only causal cores have none
    if layout and given.get("starts") is not None:
        raise ValueError(f"inputs: {layer} got rows that begin with padding, expected it at their end.")
    options = {name: _kept(given.get(name)) for name in ("key_mask", "starts")}
    options |= {"causal": layout is None, "blocks": blocks}
    if hasattr(core, "form"):  # by decays
        form = core.form if given.get("scale") is None else dataclasses.replace(core.form, scale=given["scale"])
        (decays, balance), plain = core.mixing(core.heads), without_padding(key_mask, given["q"], given["k"])
        angles = given.get("angles")
        angles = plain[0].new_zeros(1, plain[0].shape[1], 1, 0) if angles is None else angles
        mapped = core.q_map(core.unrotate(plain[0], angles), core.heads), core.map_keys(plain[1], angles)
        near = tuple(map(_kept, mapped if balance is None else plain))
        options |= {"mixing": _kept(decays.matrix(blocks.num_blocks, form.lag)), "form": form, "near": near}
        found.append(Attention(layer, "mhla", *map(_kept, mapped), options | {"balance": _kept(balance)}))
        return
    q, k, _, own = core.operands(given["q"], given["k"], given["v"], key_mask, given.get("rotate"))
    mixing = _kept(core.mixing(blocks.counts if grid else layout or blocks.num_blocks))
    mixing = mixing.reshape(-1, *mixing.shape[-2:])[:, : blocks.num_blocks, : blocks.num_blocks]
    options |= {name: _kept(value) for name, value in own.items() if name != "unrounded"} | {"mixing": mixing}
    kind = "linear" if is_uniform(mixing, causal=layout is None) else "mhla"
    found.append(Attention(layer, kind, _kept(q), _kept(k), options, grid))


def _kept(value):
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def is_uniform(mixing: torch.Tensor, causal: bool) -> bool:
    """Whether every row of `[H, M, M]` weighs all blocks that it sees alike: then MHLA is plain linear attention."""
    first = mixing[..., :1]
    alike = (mixing - first).abs() <= 1e-6 * first.abs()
    return bool((alike | alike.new_ones(alike.shape[-2:]).triu(1)).all() if causal else alike.all())
