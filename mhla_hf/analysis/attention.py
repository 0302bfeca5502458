"""Record the attention of any model in one forward pass, and compute its attention matrices.

In MHLA layers, a hook records the inputs of the core; in softmax layers, the calls of torch's
`scaled_dot_product_attention` are recorded. A matrix is the output of the attention's reference implementation in fp64
with unit vectors as values.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ..nn.core import without_padding
from ..ops.api import mhla
from ..ops.blocks import Blocks
from ..ops.decays import Decays
from ..ops.inputs import WindowedInputs
from ..ops.reference import local_reference


@dataclasses.dataclass
class Attention:
    """The inputs of one call of an attention layer; `matrix` computes its attention weights.

    B is the batch size; T, S, H, G and M are the numbers of queries, keys, query heads, KV heads and blocks; K is the width
    of a key.

    Attributes:
        layer: Name of the attention module in the model.
        kind: "softmax", "mhla" or "linear" (MHLA with uniform mixing).
        q: Queries [B, T, H, K]; in MHLA layers, after feature map and RoPE.
        k: Keys [B, S, G, K]; in MHLA layers, after feature map and RoPE.
        options: Arguments of `scaled_dot_product_attention`; or of `mhla`, including "mixing" [H or 1, M, M] and
            "blocks". A layer that mixes by decays also has "form", "decays", "balance" and "near", a tuple of q and k for
            the softmax window; see `WindowedInputs`. Without such a window, "balance" is None.
        grid: Size of the grid that the tokens form; None for a sequence.
    """

    layer: str
    kind: str
    q: torch.Tensor
    k: torch.Tensor
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    grid: tuple[int, ...] | None = None

    def matrix(self, sample: int = 0, head: int = 0) -> torch.Tensor:
        """Return the attention weights of one head in one sample, by which the values are multiplied, fp64 [T, S]."""
        heads = self.q.shape[2]
        options = dict(self.options)

        def select(x: torch.Tensor) -> torch.Tensor:
            group = head * x.shape[2] // heads
            return x[sample, :, group : group + 1].double()[None]

        q, k = select(self.q), select(self.k)
        units = torch.eye(k.shape[1], dtype=torch.float64)[None, :, None]
        if self.kind == "softmax":
            if (mask := options.pop("attn_mask", None)) is not None:
                mask = mask.expand(len(self.q), heads, q.shape[1], k.shape[1])[sample, head]
                options["attn_mask"] = mask if mask.dtype == torch.bool else mask.double()
            q, k, units = (x.transpose(1, 2) for x in (q, k, units))
            return F.scaled_dot_product_attention(q, k, units, **options)[0, 0].nan_to_num(0.0)
        mixing = options.pop("mixing").double()
        for name in ("q_den", "k_den"):
            if options.get(name) is not None:
                options[name] = select(options[name])
        for name in ("key_mask", "starts"):
            if options.get(name) is not None:
                options[name] = options[name][[sample]]
        if "form" in options:
            near_q, near_k = map(select, options["near"])
            balance = options["balance"]
            balance = None if balance is None else balance[[head]].double()
            decays = options["decays"]
            log_rate = decays.log_rate[[head * len(decays.log_rate) // heads]]
            power = None if decays.power is None else decays.power[[head]]
            decays = Decays(decays.weight[[head]], log_rate, power)
            padding = {name: options[name] for name in ("key_mask", "starts")}
            inputs = WindowedInputs(near_q, near_k, units, q, decays, balance, options["form"], **padding)
            return local_reference(inputs, k)[0, :, 0]
        o = mhla(q, k, units, mixing[[head if len(mixing) > 1 else 0]], **options, impl="reference")
        assert isinstance(o, torch.Tensor)  # no state was asked for
        return o[0, :, 0]

    def far_share(self, sample: int = 0, head: int = 0) -> float:
        """Return the share of the weights on tokens outside the window, from 0 to 1.

        It is averaged over the queries that see such tokens, and 0 if there are none. The layer must mix by decays. If it
        has no softmax window, the query's own block counts as the window.
        """
        form = self.options["form"]
        blocks = self.options["blocks"].index()
        distance = blocks[:, None] - blocks[None, :]
        if not self.options["causal"]:
            distance = distance.abs()
        far = (distance >= form.lag) & (torch.arange(len(blocks)) >= form.sinks)
        weights = self.matrix(sample, head)[far.any(1)]
        return (weights * far[far.any(1)]).sum(-1).mean().item() if len(weights) else 0.0

    @functools.cached_property
    def is_causal(self) -> bool:
        """Whether no token attends to a later one, according to the layer's options or, if there is one, its mask."""
        if self.options.get("attn_mask") is not None:
            return self.matrix().triu(1).abs().max().item() == 0.0
        return self.options.get("is_causal" if self.kind == "softmax" else "causal", False)


@contextlib.contextmanager
def record_attention(model: nn.Module) -> Iterator[list[Attention]]:
    """Context manager that yields a list to which each call of an attention layer is appended, with tensors on the CPU.

    Within the block, all modules have hooks. An MHLA layer that is called with packed sequences, a cache, or padding that
    cannot be represented raises ValueError. Cross-attention, that is, attention with different numbers of queries and
    keys, is not recorded.
    """
    calls: list[Attention] = []
    stack: list[str] = []  # names of the modules whose forward is running
    handles = []

    def enter(name: str, module: nn.Module, args: Any) -> None:
        stack.append(name)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(functools.partial(enter, name)))
        handles.append(module.register_forward_hook(leave, always_call=True))
        if is_core(module):
            record = functools.partial(_record_core, calls, layer_of(name))
            handles.append(module.register_forward_pre_hook(record, with_kwargs=True))
    try:
        with _SoftmaxRecorder(calls, stack):
            yield calls
    finally:
        for handle in handles:
            handle.remove()


def is_core(module: nn.Module) -> bool:
    """Return whether a module is the core of an MHLA layer, of this package or from the source in a checkpoint."""
    return all(getattr(module, name, None) is not None for name in ("mixing", "settings", "q_map", "k_map"))


def layer_of(core_name: str) -> str:
    """Return the name of the attention module that contains a core (in diffusers, in its processor)."""
    return core_name.removesuffix(".mhla").removesuffix(".processor")


class _SoftmaxRecorder(TorchFunctionMode):
    """Torch function mode that records the calls of `scaled_dot_product_attention` for self-attention.

    Args:
        calls: List to which the calls are appended.
        stack: Names of the modules whose forward is running, the innermost last; without any, nothing is recorded.
    """

    def __init__(self, calls: list[Attention], stack: list[str]) -> None:
        super().__init__()
        self.calls = calls
        self.stack = stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.stack:
            self._record(*args, **kwargs)
        return func(*args, **kwargs)

    def _record(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> None:  # fmt: skip
        if query.ndim == 4 and query.shape[-2] == key.shape[-2]:
            layer = self.stack[-1].removesuffix(".softmax")
            options = {"is_causal": is_causal, "scale": scale, "attn_mask": _to_cpu(attn_mask)}
            q, k = _to_cpu(query.transpose(1, 2)), _to_cpu(key.transpose(1, 2))
            self.calls.append(Attention(layer, "softmax", q, k, options))


@torch.no_grad()
def _record_core(calls: list[Attention], layer: str, core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of an MHLA core that appends the call to `calls`. See `record_attention` for the errors."""
    inputs = {**dict(zip("qkv", args, strict=False)), **kwargs}
    if inputs.get("cu_seqlens") is not None or inputs.get("cache") is not None:
        raise ValueError(f"inputs: {layer} got packed sequences or a cache, expected whole sequences, one per row.")
    grid = inputs.get("grid") and tuple(inputs["grid"])
    key_mask = inputs.get("key_mask")
    settings = core.settings
    if grid is None:
        blocks = Blocks.sequence(inputs["q"].shape[1], settings.block_size)
    else:
        blocks = Blocks.grid(grid, settings.layout, prefix=core.prefix)
    layout = getattr(core.mixing, "layout", None)
    form = getattr(core, "form", None)
    is_causal = layout is None and not getattr(form, "both_ways", False)
    if not is_causal and inputs.get("starts") is not None:
        raise ValueError(f"inputs: {layer} got rows that begin with padding, expected it at their end.")
    options = {name: _to_cpu(inputs.get(name)) for name in ("key_mask", "starts")}
    options["causal"] = is_causal
    options["blocks"] = blocks
    if form is not None:
        calls.append(_windowed_attention(layer, core, inputs, options))
        return
    q, k, _, operands = core.prepare_operands(inputs["q"], inputs["k"], inputs["v"], key_mask, inputs.get("rotate"))
    mixing = _to_cpu(core.mixing(blocks.counts if grid else layout or blocks.num_blocks))
    mixing = mixing.reshape(-1, *mixing.shape[-2:])[:, : blocks.num_blocks, : blocks.num_blocks]
    options.update({name: _to_cpu(value) for name, value in operands.items() if name != "unrounded"})
    options["mixing"] = mixing
    kind = "linear" if is_uniform(mixing, causal=is_causal) else "mhla"
    calls.append(Attention(layer, kind, _to_cpu(q), _to_cpu(k), options, grid))


def _windowed_attention(layer: str, core: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Attention:
    """Return the `Attention` of a core that mixes by decays, with a softmax window or without.

    Args:
        layer: Name of the attention module.
        core: The MHLA core.
        inputs: Arguments of the core's forward, by name.
        options: "key_mask", "starts", "causal" and "blocks" of the result; the others are added.
    """
    scale = inputs.get("scale")
    form = core.form if scale is None else dataclasses.replace(core.form, scale=scale)
    decays, balance = core.mixing(core.heads)
    q, k = without_padding(inputs.get("key_mask"), inputs["q"], inputs["k"])
    num_blocks = options["blocks"].num_blocks
    if options["causal"]:
        cos_sin = inputs.get("cos_sin")
        cos_sin = q.new_zeros(1, q.shape[1], 1, 0) if cos_sin is None else cos_sin
        mapped = core.q_map(core.unrotate(q, cos_sin), core.heads), core.map_keys(k, cos_sin)
        mixing = _to_cpu(decays.matrix(num_blocks, form.lag))
    else:
        mapped = core.q_map(q, core.heads), core.k_map(k, core.heads)
        mixing = _to_cpu(decays.matrix(num_blocks, form.lag, both_ways=True))
    near = tuple(map(_to_cpu, mapped if balance is None else (q, k)))
    decays = Decays(*map(_to_cpu, (decays.weight, decays.log_rate, decays.power)))
    options = {**options, "mixing": mixing, "form": form, "decays": decays, "near": near, "balance": _to_cpu(balance)}
    return Attention(layer, "mhla", _to_cpu(mapped[0]), _to_cpu(mapped[1]), options)


def _to_cpu(value: Any) -> Any:
    """Return a tensor detached and on the CPU, and any other value unchanged."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def is_uniform(mixing: torch.Tensor, causal: bool) -> bool:
    """Return whether mixing is uniform, as in plain linear attention: each row is constant over the blocks that it sees.

    Args:
        mixing: Mixing matrices [H, M, M], of H heads and M blocks.
        causal: Whether a row sees only the blocks up to its own.
    """
    first_block = mixing[..., :1]
    is_equal = (mixing - first_block).abs() <= 1e-6 * first_block.abs()
    if causal:
        is_equal = is_equal | is_equal.new_ones(is_equal.shape[-2:]).triu(1)
    return bool(is_equal.all())
