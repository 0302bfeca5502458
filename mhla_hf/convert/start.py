"""A better start than the uniform one: the mixing, balance and feature maps of a conversion, fitted to its own teacher; and
decays fitted to a dense mixing matrix.

The teacher is in the model: its projections are the base's, so with softmax in the place of its MHLA cores a model that was
just converted is its own original. No second model is held, and every layer is fitted on what it gets there.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from ..models.attention import softmax_attentions
from ..nn.core import MHLA
from ..nn.decay_mixing import DecayMixing
from ..nn.local import DecayMHLA
from ..nn.settings import MHLASettings
from .steps import match_device_and_dtype

REACHES = 0.4 * 250 ** torch.linspace(0, 1, 48)  # blocks after which a decay has fallen to 1 / e, from 0.4 to 100
RATES = torch.cat([torch.ones(1), torch.exp(-1 / REACHES)])  # the lambdas that are tried, the first without decay
SWEEPS = 300  # of coordinate descent
MASS_BATCHES = 4  # at most, for the mass by distance
FLOOR = 1e-3  # of weights, relative: one of exactly zero could not learn
NEGLIGIBLE = 1e-3  # mass beyond the window, of all tokens together, from which nothing is fitted


class SoftmaxCore(nn.Module):
    """Causal softmax in the place of the MHLA core that it holds. see(core, q, k, v, o, options): is told all."""

    def __init__(self, core: nn.Module, see=None):
        super().__init__()
        self.core, self.see = core, see

    def forward(self, q, k, v, *, scale=None, hidden_states=None, **unused):
        """As `MHLA.forward`, of rows without padding."""
        heads = (x.transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)
        if self.see is not None:
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            self.see(self.core, q, k, v, o, {"scale": scale, "hidden_states": hidden_states})
        return o


def mhla_layers(model) -> dict[int, nn.Module]:
    """The attention modules of a language model that are MHLA, by layer index. TypeError, one sentence, without any."""
    found = softmax_attentions(model) if isinstance(model, nn.Module) else {}
    causal = {index: attention for index, attention in found.items() if getattr(attention, "is_causal", True)}
    found = {index: attention for index, attention in causal.items() if hasattr(attention, "mhla")}
    if not found:
        raise TypeError(f"model: got {type(model).__name__}, expected a language model with MHLA layers.")
    return found


@contextmanager
def softmax_instead(model, layers=None, see=None):
    """The model with softmax in those of its MHLA layers that `layers` lists; None: in all, as its original."""
    found = mhla_layers(model)
    cores = {index: found[index].mhla for index in (found if layers is None else layers)}
    for index, core in cores.items():
        found[index].mhla = SoftmaxCore(core, see)
    try:
        yield
    finally:
        for index, core in cores.items():
            found[index].mhla = core


@torch.no_grad()
def log_probabilities(model, ids: torch.Tensor) -> torch.Tensor:
    """What the model says of the next token after each of ids `[B, T]`: `[B, T, vocabulary]`, fp32."""
    if model.training:  # windows and more are dropped in training
        raise ValueError("model: got one in training mode, expected model.eval().")
    return model(input_ids=ids.to(model.device), use_cache=False).logits.float().log_softmax(-1)


def mean_kl(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """KL(wanted, got) of two `log_probabilities`, nats per token."""
    return float(F.kl_div(got, wanted, reduction="sum", log_target=True)) / wanted[..., 0].numel()


def kl_to_teacher(model, batches) -> float:
    """KL of the model's next tokens to those of its softmax original, nats per token over batches of ids `[B, T]`.

    The original is this model with softmax in its MHLA layers: its own only as long as nothing but `mhla.*` was trained.
    """
    total = 0.0
    for ids in batches:
        with softmax_instead(model):
            wanted = log_probabilities(model, ids)
        total += mean_kl(wanted, log_probabilities(model, ids))
    return total / len(batches)


def calibrate(
    model: nn.Module, batches: Sequence[torch.Tensor], *, steps: int = 100, lr: float = 3e-2, progress: bool = True
) -> dict[str, Any]:
    """Start the MHLA layers of a model that was just converted from its teacher; in place.

    With a local softmax, w and lambda of each head follow from how the mass of the teacher's softmax falls with block
    distance, beside that of the feature products, by least squares; the balance makes the far part's mass the teacher's. A
    matrix is the one of these masses, block by block, over the other. Then every layer learns its teacher's output by
    itself, on the teacher's inputs: what mixing cannot mend is the feature maps.

    Args:
        model: a converted language model with `local="softmax"`, or with a matrix (`mixing_form` "softmax" or "direct") and
            `normalize=True`.
        batches: at least two tensors of token ids, int64 `[B, T]` of one shape, without padding; the last is held out.
        steps: steps of Adam, each on one batch and the same for all layers; 0 leaves the feature maps as they are.
        lr: of those steps, falling to zero.
        progress: show bars on stderr.

    Returns:
        kl_start and kl, before and behind it (`kl_to_teacher` on the batch that was held out); steps; and tokens, all that
        were read.

    Raises:
        TypeError, ValueError: one sentence; the model is then unchanged.
    """
    cores = [attention.mhla for attention in mhla_layers(model).values()]
    own = cores[0].settings
    if own.local is None and (own.mixing_form not in ("softmax", "direct") or own.normalize is not True):
        got = f"got None with mixing_form={own.mixing_form!r} and normalize={own.normalize}"
        raise ValueError(f'local: {got}, expected "softmax", or a normalized nonnegative matrix.')
    if len(batches) < 2:
        raise ValueError(f"batches: got {len(batches)}, expected at least two: the last one is held out.")
    window = own.block_size if own.local is None else (cores[0].form.lag + 1) * own.block_size
    if any(ids.is_floating_point() for ids in batches):
        raise TypeError(f"batches: got {batches[0].dtype}, expected token ids of int64.")
    shapes = {tuple(ids.shape) for ids in batches}
    if len(shapes) > 1 or min(shapes)[1] <= window:
        wanted = f"one shape [B, T], T over {window} (a smaller block_size needs fewer tokens)"
        raise ValueError(f"batches: got {', '.join(map(str, sorted(shapes)))}, expected {wanted}.")
    *fitted, held_out = batches
    report = {"kl_start": kl_to_teacher(model, [held_out]), "steps": steps}
    masses = {core: BlockMass() for core in cores}
    for ids in tqdm(fitted[:MASS_BATCHES], desc="attention by distance", unit="batch", disable=not progress):
        ask_teacher(model, ids, lambda core, *seen: masses[core].read(core, *seen))
    for core, mass in masses.items():
        mass.fit(core)
    if steps:
        learn_outputs(model, cores, fitted, steps, lr, progress)
    tokens = fitted[0].numel() * (min(len(fitted), MASS_BATCHES) + steps)
    return {**report, "kl": kl_to_teacher(model, [held_out]), "tokens": tokens}


@torch.no_grad()
def ask_teacher(model, ids, see) -> None:
    """Run ids `[B, T]` through the softmax original; see(core, q, k, v, o, options) for each layer."""
    with softmax_instead(model, see=see):
        model.base_model(input_ids=ids.to(model.device), use_cache=False)


def learn_outputs(model, cores, batches, steps: int, lr: float, progress: bool) -> None:
    """Feature maps and mixing of every core take `steps` steps of Adam towards its teacher's output, in fp32."""
    parts = {core: nn.ModuleList([core.q_map, core.k_map, core.mixing]) for core in cores}
    learned = {core: [x for x in part.parameters() if x.requires_grad] for core, part in parts.items()}
    dtypes = {x: x.dtype for parameters in learned.values() for x in parameters}
    for x in dtypes:
        x.data = x.data.float()
    optimizers = {core: torch.optim.Adam(parameters, lr=lr) for core, parameters in learned.items()}

    def learn(core, q, k, v, o, options):
        with torch.enable_grad():
            error = (core(q, k, v, **options).float() - o.float()).square().sum() / o.float().square().sum()
            gradients = torch.autograd.grad(error, learned[core])
        for x, gradient in zip(learned[core], gradients, strict=True):
            x.grad = gradient
        optimizers[core].step()
        optimizers[core].zero_grad()

    for step in tqdm(range(steps), desc="calibrate", unit="step", disable=not progress):
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        ask_teacher(model, batches[step % len(batches)], learn)
    for x, dtype in dtypes.items():
        x.data = x.data.to(dtype)


class BlockMass:
    """What the heads of one layer give to each block, by the block of the query: sums over tokens, each `[H, M, M]`."""

    def __init__(self):
        self.teacher = self.features = 0.0

    def read(self, core, q, k, v, o, options) -> None:
        """Add the rows of a batch: the mass of its softmax and of the feature products, beyond a window if there is one."""
        (length, heads), window = q.shape[1:3], getattr(core, "form", None)
        token = torch.arange(length, device=q.device)
        block = token // core.settings.block_size
        seen = counted = token[:, None] >= token
        if window:
            counted = (block[:, None] - block >= window.lag) & (token >= window.sinks)
        member = F.one_hot(block).float()

        def by_block(weights):
            return (member.T @ weights.masked_fill(~counted, 0) @ member).double().cpu()

        for q_row, k_row in zip(q[:, None].float(), k[:, None].float(), strict=True):
            fq, fk = core.q_map(q_row), core.k_map(k_row)
            q_row, k_row, fq, fk = (
                x[0].transpose(0, 1).repeat_interleave(heads // x.shape[2], 0) for x in (q_row, k_row, fq, fk)
            )
            score = (q_row @ k_row.mT * options["scale"]).masked_fill(~seen, float("-inf"))
            total, product = score.logsumexp(-1, keepdim=True), fq @ fk.mT
            unit = total.exp() if window else product.masked_fill(~seen, 0).sum(-1, keepdim=True).clamp_min(1e-30)
            self.teacher = self.teacher + by_block((score - total).exp())
            self.features = self.features + by_block(product / unit)

    def fit(self, core: MHLA | DecayMHLA) -> None:
        """Give the core's mixing what makes its mass the teacher's; a head that looks at nothing far stays as it is."""
        if isinstance(core, MHLA):
            fit_matrix(core.mixing, self.teacher, self.features)
            return
        distances = range(self.teacher.shape[-1])
        by_distance = ([x.diagonal(-back, 1, 2).sum(-1) for back in distances] for x in (self.teacher, self.features))
        fit_far(core, *(torch.stack(sums, -1) for sums in by_distance))


def fit_matrix(mixing, teacher: torch.Tensor, features: torch.Tensor) -> None:
    """A matrix of the mass `[H, M, M]` of the teacher over that of features; rows that the text does not reach stay."""
    if not mixing.learn:
        return
    if not mixing.by_head:
        teacher, features = teacher.sum(0), features.sum(0)
    rows = min(teacher.shape[-1], mixing.num_blocks)
    weight = torch.where(features > 0, teacher / features, 0)[..., :rows, :rows].tril()
    weight = (weight / weight.sum(-1, keepdim=True).clamp_min(1e-30)).clamp_min(FLOOR)
    learned = mixing.weight.data[..., :rows, :rows]
    learned.copy_((weight.log() if mixing.form == "softmax" else weight).tril())


def fit_far(core: DecayMHLA, teacher: torch.Tensor, features: torch.Tensor) -> None:
    """The decays that make a core's mass by distance `[H, M]`, and then in all, the teacher's."""
    mixing = core.mixing
    powers = RATES.double()[:, None] ** torch.arange(teacher.shape[1])
    basis = powers * features[:, None]  # [H, L, M]
    cross = (basis @ teacher[..., None])[..., 0]
    count = mixing.num_decays if mixing.learn else 1
    chosen, weight = best_decays(basis @ basis.mT, cross, core.num_kv_heads, count)
    weight[..., 0] += torch.finfo(weight.dtype).tiny  # of nothing far, all to the first: no decay
    weight = (weight / weight.sum(-1, keepdim=True)).clamp_min(FLOOR)
    set_decays(mixing, weight, RATES[chosen])
    far = (weight[..., None] * powers[of_heads(chosen, len(weight))]).sum(1) / weight.sum(-1, keepdim=True)
    teacher, own = teacher.sum(-1), (far * features).sum(-1)
    balance = torch.where((teacher > NEGLIGIBLE) & (own > 0), (teacher / own).log(), mixing.balance.cpu())
    mixing.balance.data.copy_(balance)


def of_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """`[G, ..]` -> `[H, ..]`."""
    return x.repeat_interleave(heads // len(x), 0)


def nonnegative_fit(gram: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
    """x >= 0 `[.., R]` of the least x G x / 2 - c x, for G `[.., R, R]` and c `[.., R]`, by coordinate descent."""
    x = torch.zeros_like(cross)
    for _ in range(SWEEPS):
        for r in range(cross.shape[-1]):
            slope = cross[..., r] - (gram[..., r, :] * x).sum(-1)
            x[..., r] = (x[..., r] + slope / gram[..., r, r].clamp_min(1e-30)).clamp_min(0)
    return x


def best_decays(gram: torch.Tensor, cross: torch.Tensor, groups: int, count: int):
    """Of the L lambdas of gram `[H, L, L]` and cross `[H, L]`, the first and those that, added one by one, leave least.

    Returns their places `[G, R]`, the same for all query heads of a key/value head, and their weights `[H, R]`.
    """
    heads, rates = cross.shape

    def fit(chosen):
        index = of_heads(chosen, heads)
        head = torch.arange(heads).view(-1, 1, 1, 1)
        part, right = gram[head, index[..., :, None], index[..., None, :]], cross[head[..., 0], index]
        x = nonnegative_fit(part, right)
        return x, (x * ((part @ x[..., None])[..., 0] / 2 - right)).sum(-1)

    chosen = torch.zeros(groups, 1, dtype=torch.long)
    while chosen.shape[1] < count:
        others = torch.arange(rates).expand(groups, -1)[..., None]
        left = fit(torch.cat([chosen[:, None].expand(-1, rates, -1), others], -1))[1].unflatten(0, (groups, -1)).sum(1)
        chosen = torch.cat([chosen, left.scatter(1, chosen, float("inf")).argmin(-1, keepdim=True)], -1)
    return chosen, fit(chosen[:, None])[0][:, 0]


def set_decays(mixing: DecayMixing, weight: torch.Tensor, rates: torch.Tensor) -> None:
    """Give a learned mixing the weights `[H, R]`, up to their sum, and the lambdas `[G, R]`, the first of which is one."""
    if mixing.learn:
        mixing.weight.data.copy_((weight / weight.sum(-1, keepdim=True)).clamp_min(FLOOR).log())
        if mixing.num_decays > 1:
            mixing.rate.data.copy_(torch.logit(rates[:, 1:]))


@torch.no_grad()
def fit_decays(model: nn.Module, num_decays: int, batches: Sequence[torch.Tensor] = ()) -> dict[str, Any]:
    """Turn the dense learned mixing of a converted language model into decays, in place: a constant decoding state.

    The weights of a row are divided by their sum, so that what decays have to match is their shape by distance: of the
    rows of the lower half of the matrix, by least squares with positive weights.

    Args:
        model: a converted language model with `mixing_form` "softmax" or "direct" and `normalize=True`.
        num_decays: R, at least 1; one of them does not decay.
        batches: tensors of token ids, int64 `[B, T]`, for the KL.

    Returns:
        r2: of every layer the share of the variance of those rows that the decays have, the least of its heads; kl: of the
        logits, before to behind, nats per token, if there are batches.

    Raises:
        TypeError, ValueError: one sentence; the model is then unchanged.
    """
    layers = mhla_layers(model)
    settings = MHLASettings.from_dict(model.config.mhla)
    if settings.mixing_form not in ("softmax", "direct"):
        raise ValueError(f'mixing_form: got {settings.mixing_form!r}, expected "softmax" or "direct".')
    if settings.normalize is not True:
        raise ValueError(f"normalize: got {settings.normalize}, expected true: decays know weights up to a factor.")
    settings = replace(settings, mixing_form="decay", num_decays=num_decays, local=None)
    wanted = [log_probabilities(model, ids) for ids in batches]
    r2 = {}
    for index, attention in layers.items():
        attention.mhla, r2[index] = with_decays(attention.mhla, settings, model.config)
        match_device_and_dtype(attention.mhla, next(attention.parameters()).device, model.dtype)
    model.config.mhla = settings.to_dict()
    kls = [mean_kl(before, log_probabilities(model, ids)) for before, ids in zip(wanted, batches, strict=True)]
    return {"r2": r2, "kl": sum(kls) / len(kls)} if kls else {"r2": r2}


def with_decays(core: MHLA, settings: MHLASettings, config):
    """The core with decays in the place of its matrix, and the R^2 of the worst of its heads."""
    sizes = {"num_heads": core.num_heads, "num_kv_heads": core.num_kv_heads, "hidden_size": config.hidden_size}
    own = DecayMHLA(settings, key_dim=core.q_map.head_dim, value_dim=core.value_dim, **sizes).train(core.training)
    matrix = core.mixing.core().double().cpu().expand(core.num_heads, -1, -1)
    size = matrix.shape[-1]
    rows = torch.arange(size // 2, size)
    distance = torch.arange(size)
    there = distance <= rows[:, None]
    seen = matrix[:, rows[:, None], (rows[:, None] - distance).clamp_min(0)] * there  # [H, rows, distance]
    seen = seen / seen[..., : size // 2 + 1].mean(-1, keepdim=True)
    basis = RATES.double()[:, None, None] ** distance * there  # [L, rows, distance]
    gram = (basis.flatten(1) @ basis.flatten(1).T).expand(core.num_heads, -1, -1)
    cross = seen.flatten(1) @ basis.flatten(1).T
    chosen, x = best_decays(gram, cross, core.num_kv_heads, settings.num_decays)
    set_decays(own.mixing, x, RATES[chosen])
    error = seen - torch.einsum("hr,hrid->hid", x, basis[of_heads(chosen, len(x))])
    spread = (seen - (seen.sum((1, 2)) / there.sum())[:, None, None]) * there
    r2 = 1 - error.square().sum((1, 2)) / spread.square().sum((1, 2)).clamp_min(1e-9 * there.sum())
    for name, part in core.named_children():
        if name != "mixing":
            own.add_module(name, part)
    return own, float(r2.min())
