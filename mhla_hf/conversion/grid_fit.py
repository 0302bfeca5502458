"""Fits the MHLA layers of diffusion and vision models to the softmax attention that they replace, and measures errors."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

from ..models.diffusion.inputs import find_self_attentions
from ..models.vision.grid_attention import find_grid_attentions
from ..nn.core import softmax_attention
from ..nn.joint import TextTokens, attend_jointly, far_block_mask, split_grids
from ..ops.blocks import Blocks
from .fit import OutputFit, center_maps, set_balance
from .model_family import is_of_diffusers, keep_new_images
from .teacher import SoftmaxCore, replaced_cores

TINY = torch.finfo(torch.float32).tiny  # in place of a sum of squares that is zero
PROBES = 4  # random directions of the output per call, in which the damage of heads is measured
START_QUERIES = 256  # at most, from which the balance of a layer with text tokens is initialized


class Call(NamedTuple):
    """Arguments of one forward pass of a model, with tensors on the CPU."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class GridSoftmaxCore(SoftmaxCore):
    """Computes softmax attention in place of a `GridMHLA` or, with text tokens, of a `JointMHLA`; see `SoftmaxCore`.

    `observe` gets the output o of the grid's tokens only: that of text tokens is softmax in the MHLA core, too.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, text: TextTokens | None = None, *,
        rotate: Any = None, shard: None = None, softmax: Any = None, **options: Any
    ) -> Any:  # fmt: skip
        """Attend by softmax, and call `observe`. See `GridMHLA` and `JointMHLA` for the arguments and the result."""
        rotated_q, rotated_k = (x.to(v.dtype) for x in ((q, k) if rotate is None else rotate(q, k)))
        if text is None:
            o = softmax_attention(rotated_q, rotated_k, v)
            result: Any = o
        else:
            options["text"] = text = text._replace(q=text.q.to(v.dtype), k=text.k.to(v.dtype), v=text.v.to(v.dtype))
            result = attend_jointly(text, rotated_q, rotated_k, v)
            o = result[0]
        if self.observe is not None:
            self.observe(self.core, q, k, v, o, {"rotate": rotate, **options})
        return result


class ChangedGridCore(GridSoftmaxCore):
    """Computes softmax attention plus `change` [B, 1, H, 1], 0 and made anew in each pass, times what MHLA would change."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Attend by softmax, with a gradient of the output for `change`. See `GridMHLA` and `JointMHLA`."""
        result = super().forward(q, k, v, *args, **options)
        o = result[0] if isinstance(result, tuple) else result
        with torch.no_grad():
            mhla = self.core(q, k, v, *args, **options)
            difference = (mhla[0] if isinstance(mhla, tuple) else mhla) - o
        self.change = torch.zeros(len(q), 1, q.shape[2], 1, device=q.device, requires_grad=True)
        o = o + self.change.to(o.dtype) * difference
        return (o, result[1]) if isinstance(result, tuple) else o


def grid_layers(model: Any) -> dict[int, Any]:
    """Return the modules that hold the MHLA cores of a diffusion or vision model, by layer index."""
    if is_of_diffusers(model):
        holders: dict[int, Any] = {i: attn.processor for i, attn in enumerate(find_self_attentions(model))}
    else:
        holders = find_grid_attentions(model)
    return {index: holder for index, holder in holders.items() if hasattr(holder, "mhla")}


class GridFit(OutputFit):
    """Fits all parameters of the MHLA cores of a diffusion or vision model; see `OutputFit`. Its steps take a `Call`."""

    def fitted_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        cores = [holder.mhla for holder in grid_layers(self.model).values()]
        return {core: [x for x in core.parameters() if x.requires_grad] for core in cores}

    def observe_softmax(self, inputs: Call) -> None:
        with softmax_layers(grid_layers(self.model), self.learn):
            run_call(self.model, inputs)

    def start(self, core: Any, q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> None:
        rotate, text = options["rotate"], options.get("text")
        rotated_q, rotated_k = (q, k) if rotate is None else rotate(q, k)
        far_q, far_k = (rotated_q, rotated_k) if core.settings.rope == "before" else (q, k)
        center_maps(core, far_q, far_k)
        if text is None:
            return
        grids = split_grids(options["grid"])
        blocks = Blocks.grid(grids[0], core.mixing.layout, others=grids[1:])
        index = blocks.index(q.device)
        rows = torch.linspace(0, len(index) - 1, min(START_QUERIES, len(index)), device=q.device).long()
        mixing = core.mixing(blocks.counts)[0].expand(q.shape[2], -1, -1)  # [H, M, M]
        is_far = torch.ones_like(mixing[0])  # [M, M]
        if core.settings.windowed:
            is_far = far_block_mask(blocks.counts, core.settings.window, q.device)
        is_far, mixing = (x[..., index[rows], :][..., index] for x in (is_far, mixing * is_far))  # [Q, T], [H, Q, T]
        q_features, k_features = core.q_map(far_q), core.k_map(far_k)
        keys = torch.cat([text.k.to(rotated_k.dtype), rotated_k], 1)

        def weights(head: int, row: int) -> Sequence[torch.Tensor]:
            score = (rotated_q[row, rows, head] @ keys[row, :, head].T).float() * q.shape[3] ** -0.5  # [Q, S + T]
            if text.mask is not None:
                mask = text.mask.expand(len(q), -1, -1, -1)[row, 0]  # [1, S]
                mask = torch.where(mask, 0.0, float("-inf")) if mask.dtype == torch.bool else mask.float()
                score = score + F.pad(mask, (0, score.shape[1] - mask.shape[1]))
            weight = (q_features[row, rows, head] @ k_features[row, :, head].T).float() * mixing[head]
            return score[:, -len(index) :], score.logsumexp(-1, keepdim=True), weight

        set_balance(core, weights, len(q), is_far)

    def attend(
        self, core: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Compute the output of a core, whose parameters are fp32 during the fit, for the tokens of the grid."""
        if options.get("hidden_states") is not None:
            options = {**options, "hidden_states": options["hidden_states"].float()}
        return attend_grid(core, q.float(), k.float(), v.float(), options)


def attend_grid(core: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Compute the output of a core for the tokens of the grid, [B, T, H, V]; see `SoftmaxCore` for the arguments."""
    o = core(q, k, v, **options)
    return o[0] if isinstance(o, tuple) else o


def move(value: Any, device: Any, copy: bool = False) -> Any:
    """Return a value with all of its tensors, also those in lists, tuples, and dictionaries, on a device."""
    return tree_map_only(torch.Tensor, lambda x: x.detach().to(device, copy=copy), value)


def run_with_gradients(model: Any, call: Call) -> torch.Tensor:
    """Run a model with recorded arguments, and return its first output, without the tokens of images to edit."""
    args, kwargs = move(tuple(call), model.device)
    output = model(*args, **kwargs)[0]
    return keep_new_images(model, output, args, kwargs) if is_of_diffusers(model) else output


run_call = torch.no_grad()(run_with_gradients)


def softmax_layers(
    layers: dict[int, Any], observe: Callable[..., None] | None = None
) -> AbstractContextManager[dict[int, Any]]:
    """Return a context manager in which `layers`, returned by `grid_layers`, compute softmax; see `GridSoftmaxCore`."""
    return replaced_cores(layers, lambda core: GridSoftmaxCore(core, observe))


def output_error(model: Any, calls: Sequence[Call], expected: Sequence[torch.Tensor]) -> float:
    """Compute the squared error of a model's outputs, divided by the sum of squares of the expected ones."""
    pairs = zip(calls, expected, strict=True)
    errors = torch.stack([(run_call(model, call).float() - x.float()).square().sum() for call, x in pairs])
    energy = torch.stack([x.float().square().sum() for x in expected]).sum()
    return float(errors.sum() / energy.clamp_min(TINY))


def errors_of_layers(model: Any, calls: Sequence[Call]) -> dict[int, float]:
    """Compute each MHLA layer's error, as `output_error` does, on its inputs in the softmax original: {layer: error}."""
    layers = grid_layers(model)
    sums = {holder.mhla: torch.zeros(2, device=model.device) for holder in layers.values()}

    def measure(
        core: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, options: dict[str, Any]
    ) -> None:
        error = attend_grid(core, q, k, v, options).float() - o.float()
        sums[core] += torch.stack([error.square().sum(), o.float().square().sum()])

    with softmax_layers(layers, measure):
        for call in calls:
            run_call(model, call)
    errors = {index: sums[holder.mhla] for index, holder in layers.items()}
    return {index: float(error / energy.clamp_min(TINY)) for index, (error, energy) in errors.items()}


@torch.enable_grad()
def damage_of_heads(model: Any, calls: Sequence[Call], seed: int) -> dict[int, list[float]]:
    """Estimate the squared error of the model's output if one head alone is MHLA, over its square: {layer: one per head}.

    To first order, the output changes by J d, with the Jacobian J of the softmax original and the change d of a head. For
    random normal r, (r . J d)^2 is |J d|^2 on average, and one backward pass has r . J d of all heads.
    """
    layers, generator = grid_layers(model), torch.Generator().manual_seed(seed)
    sums = {index: torch.zeros(holder.mhla.num_heads) for index, holder in layers.items()}
    energy, trainable = 0.0, [x for x in model.parameters() if x.requires_grad]
    try:
        for x in trainable:  # so that linear layers save no inputs for gradients of their weights
            x.requires_grad_(False)
        with replaced_cores(layers, ChangedGridCore) as cores:
            for call in calls:
                for core in cores.values():
                    core.change = None
                output = run_with_gradients(model, call).float()
                energy += PROBES * float(output.detach().square().sum())
                # A call may skip layers; gradient checkpointing replaces `change` when it computes a layer anew.
                changes = {index: core.change for index, core in cores.items() if core.change is not None}
                for _ in range(PROBES):
                    probe = torch.randn(output.shape, generator=generator).to(output.device)
                    gradients = torch.autograd.grad((output * probe).sum(), [*changes.values()], retain_graph=True)
                    for index, gradient in zip(changes, gradients, strict=True):
                        sums[index] += gradient.square().sum((0, 1, 3)).cpu()
    finally:
        for x in trainable:
            x.requires_grad_()
    return {index: (values / max(energy, TINY)).tolist() for index, values in sums.items()}
