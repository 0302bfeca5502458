"""What MHLA is timed against that others have written: torch's softmax attention, fla's linear attention, a copy."""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SOFTMAX_BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}
MATH_TOKENS = 4096


def fla_kernels(device):
    """fla's linear attention in chunks and token by token, on a GPU where fla is installed; else None."""
    if torch.device(device).type != "cuda":
        return None
    try:
        from fla.ops.linear_attn import chunk_linear_attn, fused_recurrent_linear_attn
    except ImportError:
        return None
    return chunk_linear_attn, fused_recurrent_linear_attn


def softmax_by(backend, causal, q, k, v):
    """torch's fused attention with one backend, [B, T, H, K]."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)


def softmax_backends(q, k, v, causal, gradients=True):
    """name -> torch's fused attention, by each backend that takes tensors like these."""
    made = {name: functools.partial(softmax_by, backend, causal) for name, backend in SOFTMAX_BACKENDS.items()}
    return {name: attention for name, attention in made.items() if takes(attention, q, k, v, gradients)}


def chosen_backend(q, k, v):
    """The name of the backend that torch itself chooses, causal."""
    chosen = torch._fused_sdp_choice(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return {backend.value: name for name, backend in SOFTMAX_BACKENDS.items()}.get(chosen, f"sdpa backend {chosen}")


def takes(attention, q, k, v, gradients=True):
    """Whether a backend takes tensors like these; tried on a few tokens."""
    if attention.args[0] == SDPBackend.MATH and q.shape[1] > MATH_TOKENS:
        return False
    few = [x.detach()[:1, :64].clone().requires_grad_(gradients) for x in (q, k, v)]
    try:
        o = attention(*few)
        if gradients:
            torch.autograd.grad(o.sum(), few)
    except RuntimeError:
        return False
    return True


def copy_of(moved, device):
    """A function that moves so many bytes: reads half of them and writes the others."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    return functools.partial(torch.empty_like(source).copy_, source)


def floor_bytes(rows, widths, dtype):
    """The bytes that attention must move at least, for `rows` tokens of all heads and widths of keys and values: forward, q,
    k, v, o; forward and backward, also q, k, v and three gradients, and that of o."""
    average = rows * sum(widths) * getattr(torch, dtype).itemsize // 2
    return 4 * average, (4 + 7) * average
