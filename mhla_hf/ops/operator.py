"""`mhla` and `mhla_step`: the two functions everything else calls. Every input check is here, once, and so is the
choice of implementation; the implementations themselves expect checked inputs.

Checks look at shapes, dtypes and devices; at values only where wrong ones would be silent (`starts`, `cu_seqlens`),
and not where there are none to look at: under `torch.compile`, and while a CUDA graph is captured. The values of
`mixing` are checked when weights are loaded.
"""

import logging
import math

import torch

from .blocks import Blocks
from .reference import FEATURE_EPS, head_norm, mhla_reference, relu_features
from .state import MHLAState
from .torch_decode import absorb, torch_step
from .torch_impl import torch_mhla
from .triton_check import is_capturing, kernel_fault, kernel_kind
from .triton_decode import triton_step
from .triton_operator import triton_mhla, triton_refusal

FORMS = {"reference": mhla_reference, "torch": torch_mhla, "triton": triton_mhla}
IMPLEMENTATIONS = ("auto", *FORMS)
OPERATOR_LOG = logging.getLogger("mhla_hf")
KERNEL_DEVICES = ("cuda",)
ANNOUNCED_CHOICES = set()


def mhla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mixing: torch.Tensor,
    *,
    blocks: Blocks,
    key_blocks: Blocks | None = None,
    causal: bool = False,
    normalize: bool | str = True,
    scale: float | None = None,
    q_den: torch.Tensor | None = None,
    k_den: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    feature_map: str | None = None,
    output_norm: tuple | None = None,
    unrounded: bool = False,
    return_state: bool = False,
    impl: str = "auto",
):
    """Multi-Head Linear Attention (paper eq. 4 to 6; causal form: section 4.3 and appendix C).

    With b(t) the block of token t: o[t] = sum_s w[t, s] v[s], w[t, s] = mixing[b(t), b(s)] * scale * <q[t], k[s]>,
    divided by sum_s w[t, s] if `normalize` (0/0 is 0). q and k are feature-mapped, or by `feature_map`. Returns
    o [B, T, H, V] in v's dtype, or (o, MHLAState) with `return_state`. Sums are at least fp32, also under autocast.
    Differentiable in all tensors, once.

    q: [B, T, H, K]. k: [B, S, G, K], v: [B, S, G, V]; query head h uses key/value head h // (H // G). Floating point.
    mixing: [Mq, Mk] or [H, Mq, Mk], rows for query blocks. Causal: any matrix with at least blocks.num_blocks rows and
        columns; its leading part is used, its upper triangle ignored (zero gradient).
    blocks: the blocks of the T query tokens; key_blocks: of the S keys (the same if None). Causal: `Blocks.sequence`.
    normalize: True, False, or "official", the denominator of the authors' vision code, which is not the paper's (not
        causal, equal blocks). q_den [B, T, H, L], k_den [B, S, G, L]: features for the denominator where they differ.
    scale: a number; None is K**-0.5. It cancels where normalised.
    key_mask: bool [B, S], True for real keys; the others weigh nothing but still count as positions.
    starts: int64 [B], causal only: first real token of each left-padded row; its block 0 begins there, keys before it
        weigh nothing and outputs before it are 0.
    cu_seqlens: int32 or int64 [N + 1], causal only, B = 1: sequence n is tokens cu_seqlens[n] to cu_seqlens[n + 1],
        with blocks of its own. Then mixing needs rows for the longest sequence only.
    feature_map: None where q and k are feature-mapped; "relu" (relu(x) + 1e-6) or "plain_relu" maps them here, which the
        kernels, without causality, do where they read q and k. Not with q_den.
    output_norm: (weight [V], eps) of an RMSNorm over each head of o, before o is rounded to v's dtype; the kernels of the
        linear form take it along where nothing is causal or normalised, no gradient is asked for, q, k and v are all bf16
        or all fp16, and heads up to 128 wide.
    unrounded: o in the dtype of the sums instead of v's, for what follows (fp16 overflows where nothing is normalised).
    return_state: causal only; the state continues with `mhla_step` and has no gradient.
    impl: "reference" (the T x T definition), "torch", "triton" (CPU tensors in triton's interpreter only), or "auto",
        which takes triton on a GPU where it can and where a small call of the kind, run once, agreed with fp64, else
        torch, and logs once what it took and why.

    Raises TypeError or ValueError, in one sentence, for anything else.
    """
    check_features(q, k, v, q_den, k_den, normalize)
    check_options(q, scale, normalize, impl)
    check_taken_along(feature_map, output_norm, q_den, v)
    check_blocks(q, k, blocks, key_blocks, causal, normalize)
    check_padding(q, k, blocks, causal, key_mask, cu_seqlens, starts)
    check_mixing(mixing, q, blocks, key_blocks or blocks, causal, cu_seqlens)
    if return_state and (not causal or cu_seqlens is not None):
        raise ValueError("return_state is True; expected so only with causal=True and without cu_seqlens.")
    options = {
        "blocks": blocks,
        "key_blocks": key_blocks,
        "causal": causal,
        "normalize": normalize,
        "scale": scale,
        "q_den": q_den,
        "k_den": k_den,
        "key_mask": key_mask,
        "cu_seqlens": cu_seqlens,
        "starts": starts,
    }
    options["unrounded"] = unrounded or output_norm is not None
    weight = None if output_norm is None else output_norm[0]
    kind = {"normalize": normalize, "causal": causal, "blocks": blocks, "feature_map": feature_map}
    kind["masked"], kind["backward"] = key_mask is not None, needs_gradients(q, k, v, mixing, q_den, k_den, weight)
    kind["normed"] = output_norm is not None and not (normalize or causal or unrounded or kind["backward"])
    kind["unrounded"] = options["unrounded"] and not kind["normed"]
    choice = choose_implementation(impl, q, k, v, q_den, k_den, **kind)
    o = attend_by(choice, q, k, v, mixing, feature_map, output_norm, kind["normed"], options)
    o = o if unrounded else o.to(v.dtype)
    if not return_state:
        return o
    return o, state_after(q, k, v, blocks.block_size, normalize, k_den, key_mask, starts)


@torch.no_grad()
def mhla_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mixing: torch.Tensor,
    state: MHLAState,
    *,
    normalize: bool = True,
    scale: float | None = None,
    q_den: torch.Tensor | None = None,
    k_den: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    unrounded: bool = False,
    impl: str = "auto",
) -> tuple:
    """Continue causal MHLA by T >= 1 tokens: the outputs `mhla` gives for them in the whole sequence (paper appendix
    C).

    q [B, T, H, K], k [B, T, G, K], v [B, T, G, V] and the options as in `mhla`; state: from `mhla(...,
    return_state=True)`, an earlier step or `MHLAState.empty`, changed in place. starts: int64 [B]; tokens of this
    call before it are ignored and not counted (left padding in a first chunk). mixing must have a row for every block
    reached. Returns (o [B, T, H, V] in v's dtype, state). No gradients. There is one form of the step;
    impl="reference" feeds it one token at a time; "triton" has kernels for a single token, which a CUDA graph can hold
    (`pin_state` in ops/triton_decode.py).

    Raises TypeError or ValueError, in one sentence, before the state is touched.
    """
    check_features(q, k, v, q_den, k_den, normalize)
    check_options(q, scale, normalize, impl)
    check_state(state, q, k, v, normalize, k_den)
    single = q.shape[1] == 1 and starts is None  # what there are kernels for
    impl = "torch" if impl == "auto" and not single else impl
    choice = choose_implementation(impl, q, k, v, q_den, k_den, normalize=normalize, unrounded=unrounded, decode=True)
    pinned = choice == "triton" and single
    if not pinned:
        state.unpin()
    if k.shape[1] != q.shape[1]:
        raise ValueError(f"k has {k.shape[1]} tokens; expected q's {q.shape[1]}.")
    if starts is not None:
        check_starts(starts, q)
    longest = int((state.length if starts is None else state.length - starts.cpu()).max()) + q.shape[1]
    reached = max(1, -(-longest // state.block_size))
    check_mixing_shape(mixing, q)
    if min(mixing.shape[-2:]) < reached:
        raise ValueError(
            f"mixing is {list(mixing.shape)}; expected at least {reached} rows and columns, the blocks reached."
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        if pinned:
            return triton_step(q, k, v, mixing, state, scale, q_den, k_den, unrounded), state
        if choice != "reference":
            return torch_step(q, k, v, mixing, state, scale, q_den, k_den, starts, unrounded), state
        outputs = []
        for t in range(q.shape[1]):
            now = [None if x is None else x[:, t : t + 1] for x in (q, k, v, q_den, k_den)]
            late = None if starts is None else (starts > t).long()
            outputs.append(torch_step(*now[:3], mixing, state, scale, *now[3:], late, unrounded))
        return torch.cat(outputs, 1), state


@torch.no_grad()
def state_after(q, k, v, block_size, normalize, k_den, key_mask, starts):
    """The state of a decoder that has seen all of k and v."""
    state = MHLAState.empty(
        q.shape[0],
        k.shape[2],
        q.shape[2],
        k.shape[3],
        v.shape[3],
        block_size,
        normalize=normalize,
        separate_den=k_den is not None,
        den_dim=None if k_den is None else k_den.shape[3],
        dtype=torch.promote_types(k.dtype, v.dtype),
        device=k.device,
    )
    if key_mask is not None:
        k, v, k_den = (None if x is None else torch.where(key_mask[:, :, None, None], x, 0) for x in (k, v, k_den))
    with torch.autocast(q.device.type, enabled=False):
        absorb(k, v, state, k_den, starts)
    return state


def choose_implementation(impl, q, k, v, q_den, k_den, **kind):
    """The implementation for these tensors; says once what "auto" took. ValueError where Triton is asked in vain.

    kind: the options of `kernel_kind`.
    """
    if impl not in ("auto", "triton"):
        return impl
    on_cpu = q.device.type not in KERNEL_DEVICES
    refusal = None if impl == "auto" and on_cpu else triton_refusal(q, k, v, k_den)
    if impl == "triton":
        if refusal is not None:
            raise ValueError(f"impl is 'triton'; expected another one, for {refusal}.")
        return impl
    choice, why, level = "torch", refusal, logging.INFO
    if on_cpu:
        why = f"the fastest form this version has for {q.device.type} tensors"
    elif refusal is None:
        why = kernel_fault(*kernel_kind(q, k, v, q_den, **kind))
        level = logging.WARNING if why is not None else level
    if why is None:
        choice, why = "triton", f"whose kernels agreed with fp64 on {q.device}"
    if not torch.compiler.is_compiling() and (choice, why) not in ANNOUNCED_CHOICES:
        ANNOUNCED_CHOICES.add((choice, why))
        OPERATOR_LOG.log(level, "mhla: impl='auto' took %r, %s.", choice, why)
    return choice


def attend_by(choice, q, k, v, mixing, feature_map, output_norm, normed, options):
    """o by an implementation, with the feature map and the norm (`normed`) in its kernels, else around it."""
    if feature_map is not None and choice == "triton" and not options["causal"]:
        options = {**options, "eps": FEATURE_EPS[feature_map]}
    elif feature_map is not None:
        q, k = relu_features(q, feature_map), relu_features(k, feature_map)
    if choice == "triton" and normed:
        return triton_mhla(q, k, v, mixing, norm=output_norm, **options)
    o = FORMS[choice](q, k, v, mixing, **options)
    return o if output_norm is None else head_norm(o, *output_norm)


def needs_gradients(*tensors):
    """Whether autograd will ask for the gradient of one of these, some of which may be None."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def check_features(q, k, v, q_den, k_den, normalize):
    """Shapes, dtypes and devices of the five feature tensors."""
    if (q_den is None) != (k_den is None):
        given, missing = ("k_den", "q_den") if q_den is None else ("q_den", "k_den")
        raise ValueError(f"{given} came without {missing}; expected both or neither.")
    if q_den is not None and not normalize:
        raise ValueError("q_den and k_den came with normalize=False; expected them only where there is a denominator.")
    named = [("q", q), ("k", k), ("v", v)] + ([("q_den", q_den), ("k_den", k_den)] if q_den is not None else [])
    for name, x in named:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a torch.Tensor.")
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(
                f"{name} is {list(x.shape)}; expected four axes [batch, tokens, heads, width], none of them empty."
            )
        if not x.is_floating_point():
            raise TypeError(f"{name} is {x.dtype}; expected a floating-point dtype.")
        if x.is_meta:
            raise ValueError(f"{name} is on the meta device, which holds no numbers; expected a real device.")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; expected {q.device}, where q is.")
    (batch, tokens, heads, width), (_, keys, groups, _) = q.shape, k.shape
    if k.shape[0] != batch or k.shape[3] != width:
        raise ValueError(f"k is {list(k.shape)}; expected [{batch}, S, G, {width}] to go with q {list(q.shape)}.")
    if heads % groups != 0:
        raise ValueError(f"k has {groups} heads; expected a divisor of q's {heads}.")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v is {list(v.shape)}; expected [{batch}, {keys}, {groups}, V] to go with k {list(k.shape)}.")
    if q_den is not None and q_den.shape[:3] != q.shape[:3]:
        raise ValueError(f"q_den is {list(q_den.shape)}; expected [{batch}, {tokens}, {heads}, L] as in q.")
    if k_den is not None and k_den.shape != (batch, keys, groups, q_den.shape[3]):
        raise ValueError(f"k_den is {list(k_den.shape)}; expected {[batch, keys, groups, q_den.shape[3]]}.")


def check_options(q, scale, normalize, impl):
    """The options that are not tensors."""
    if not isinstance(normalize, bool) and normalize != "official":
        raise ValueError(f"normalize is {normalize!r}; expected True, False or 'official'.")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"scale is {scale!r}; expected a number or None.")
    if scale is not None and (not math.isfinite(scale) or scale == 0):
        raise ValueError(f"scale is {scale!r}; expected a finite number other than 0.")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; expected one of {', '.join(map(repr, IMPLEMENTATIONS))}.")


def check_blocks(q, k, blocks, key_blocks, causal, normalize):
    """That the blocks cover the tokens, and fit the form asked for."""
    for name, cut, tokens, kind in (
        ("blocks", blocks, q.shape[1], "query"),
        ("key_blocks", key_blocks, k.shape[1], "key"),
    ):
        if cut is None and name == "key_blocks":
            continue
        if not isinstance(cut, Blocks):
            raise TypeError(f"{name} is {cut!r}; expected a Blocks.")
        if cut.length != tokens:
            raise ValueError(f"{name} covers {cut.length} tokens; expected the {tokens} {kind} tokens.")
    if key_blocks is None and k.shape[1] != q.shape[1]:
        raise ValueError(
            f"k has {k.shape[1]} tokens and q {q.shape[1]}; expected key_blocks to say how the keys are cut."
        )
    same = key_blocks is None or key_blocks == blocks
    if causal and (blocks.block_size is None or not same):
        raise ValueError("causal is True; expected blocks from Blocks.sequence, the same ones for queries and keys.")
    if normalize == "official" and (causal or not same or not blocks.equal):
        raise ValueError(
            "normalize is 'official'; expected equal blocks, the same ones for queries and keys, and causal=False."
        )


def check_padding(q, k, blocks, causal, key_mask, cu_seqlens, starts):
    """The three ways to say which tokens are real."""
    if key_mask is not None:
        if not isinstance(key_mask, torch.Tensor) or key_mask.dtype != torch.bool:
            raise TypeError(f"key_mask is {describe_dtype(key_mask)}; expected a bool tensor, True for real keys.")
        if key_mask.shape != k.shape[:2]:
            raise ValueError(f"key_mask is {list(key_mask.shape)}; expected {list(k.shape[:2])}, [batch, keys].")
        if key_mask.device != q.device:
            raise ValueError(f"key_mask is on {key_mask.device}; expected {q.device}, where q is.")
    if starts is not None:
        if not causal or cu_seqlens is not None:
            raise ValueError("starts came; expected it only with causal=True and without cu_seqlens.")
        check_starts(starts, q)
    if cu_seqlens is not None:
        if not causal or q.shape[0] != 1:
            raise ValueError(
                f"cu_seqlens came with causal={causal} and batch {q.shape[0]}; expected causal=True and batch 1."
            )
        check_cu_seqlens(cu_seqlens, q)


def values_can_be_read(device):
    """Not where torch.compile traces, nor while a CUDA graph is captured, which a copy to the host would break."""
    return not (torch.compiler.is_compiling() or is_capturing(device))


def check_starts(starts, q):
    """int64 [B], 0 to T."""
    if not isinstance(starts, torch.Tensor) or starts.dtype != torch.int64:
        raise TypeError(f"starts is {describe_dtype(starts)}; expected an int64 tensor.")
    if starts.shape != q.shape[:1]:
        raise ValueError(f"starts is {list(starts.shape)}; expected [{q.shape[0]}], one number per sequence.")
    if not values_can_be_read(q.device):
        return
    if int(starts.min()) < 0 or int(starts.max()) > q.shape[1]:
        raise ValueError(
            f"starts holds {int(starts.min())} to {int(starts.max())}; expected numbers from 0 to {q.shape[1]}."
        )


def check_cu_seqlens(cu_seqlens, q):
    """int32 or int64 [N + 1], rising from 0 to T."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens is {describe_dtype(cu_seqlens)}; expected an int32 or int64 tensor.")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens is {list(cu_seqlens.shape)}; expected one axis, [sequences + 1].")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}; expected {q.device}, where q is.")
    if not values_can_be_read(q.device):
        return
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != q.shape[1] or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.tolist()}; expected numbers rising from 0 to {q.shape[1]}, the tokens of q."
        )


def check_taken_along(feature_map, output_norm, q_den, v):
    """What comes before and after the sum over keys, and may be done in the kernels."""
    if feature_map is not None and (feature_map not in list(FEATURE_EPS) or q_den is not None):
        given = repr(feature_map) if q_den is None else f"{feature_map!r} with q_den"
        raise ValueError(f"feature_map is {given}; expected None, 'relu' or 'plain_relu', the last two without q_den.")
    if output_norm is None:
        return
    if not (isinstance(output_norm, tuple) and len(output_norm) == 2 and isinstance(output_norm[0], torch.Tensor)):
        raise TypeError(
            f"output_norm is a {type(output_norm).__name__}; expected (weight, eps), a tensor and a number."
        )
    weight, eps = output_norm
    if not weight.is_floating_point():
        raise TypeError(f"output_norm has a weight of {weight.dtype}; expected a floating-point dtype.")
    if weight.shape != v.shape[3:] or weight.device != v.device:
        raise ValueError(
            f"output_norm has a weight {list(weight.shape)} on {weight.device}; expected {[v.shape[3]]} on {v.device}."
        )
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise ValueError(f"output_norm has eps {eps!r}; expected a finite number of at least 0.")


def check_mixing_shape(mixing, q):
    """[Mq, Mk] or [H, Mq, Mk], floating point, where q is."""
    if not isinstance(mixing, torch.Tensor) or not mixing.is_floating_point():
        raise TypeError(f"mixing is {describe_dtype(mixing)}; expected a floating-point tensor.")
    if mixing.dim() not in (2, 3) or (mixing.dim() == 3 and mixing.shape[0] != q.shape[2]):
        raise ValueError(f"mixing is {list(mixing.shape)}; expected [Mq, Mk] or [{q.shape[2]}, Mq, Mk].")
    if mixing.device != q.device:
        raise ValueError(f"mixing is on {mixing.device}; expected {q.device}, where q is.")


def check_mixing(mixing, q, blocks, key_blocks, causal, cu_seqlens):
    """That the mixing matrix has the rows and columns the blocks need."""
    check_mixing_shape(mixing, q)
    rows, columns = mixing.shape[-2:]
    if not causal:
        if (rows, columns) != (blocks.num_blocks, key_blocks.num_blocks):
            raise ValueError(
                f"mixing is {list(mixing.shape)}; expected {blocks.num_blocks} rows, {key_blocks.num_blocks} columns."
            )
        return
    needed = blocks.num_blocks
    if cu_seqlens is not None:
        if not values_can_be_read(q.device):
            return
        needed = (int(cu_seqlens.diff().max()) - 1) // blocks.block_size + 1
    if min(rows, columns) < needed:
        raise ValueError(f"mixing is {list(mixing.shape)}; expected at least {needed} rows and columns, one per block.")


def check_state(state, q, k, v, normalize, k_den):
    """That the state was made for tensors like these."""
    if not isinstance(state, MHLAState):
        raise TypeError(f"state is a {type(state).__name__}; expected an MHLAState.")
    if normalize == "official" or state.normalize != normalize:
        raise ValueError(f"normalize is {normalize!r}; expected {state.normalize}, as in the state.")
    if (state.window_k_den is not None) != (k_den is not None):
        raise ValueError(
            f"k_den {'is missing' if k_den is None else 'came'}; expected the same as in the calls before."
        )
    batch, groups, _, width, value_width = state.summaries.shape
    if (q.shape[0], q.shape[2], *k.shape[2:], v.shape[3]) != (batch, state.prefix.shape[1], groups, width, value_width):
        raise ValueError(
            f"state is for batch {batch}, {state.prefix.shape[1]} query and {groups} key heads, "
            f"widths {width} and {value_width}; "
            f"expected one for q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}."
        )
    if k_den is not None and k_den.shape[3] != state.window_k_den.shape[3]:
        raise ValueError(f"k_den is {k_den.shape[3]} wide; expected {state.window_k_den.shape[3]}, as in the state.")
    if state.summaries.device != q.device:
        raise ValueError(f"state is on {state.summaries.device}; expected {q.device}, where q is.")


def describe_dtype(x):
    """What came, for a message: the dtype of a tensor, else the type."""
    return str(x.dtype) if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
