"""MHLA in Triton: which kernels run, in which order, for the forward and the backward pass.

Forward: block summaries from keys and values, mixing, outputs. Backward: both are computed again, so that only inputs,
output and 1 / denominator are kept, then gradients of the mixed summaries, their mixture, and the tokens' gradients. Short
sequences without causality take the quadratic form instead. A denominator from other features than the numerator's
(q_den, or the official one) is a pass of its own, over values of ones.
"""

import torch

from .reference import head_norm
from .triton_attend import attend, attend_normed, holds_rows
from .triton_blocks import mix, mix_grads
from .triton_common import cut_of, dot_kind, in_rows, tiles
from .triton_quadratic import quadratic, use_quadratic
from .triton_summaries import prepare, summaries


class Work:
    """One call: what forward and backward share. Tensors as in `mhla`; cut and key_cut from `cut_of`; mixing fp32.

    eps: a number if the kernels are to take relu(q) + eps and relu(k) + eps, without causality; then gradients are those of
    q and k themselves.
    """

    def __init__(self, mixing, cut, key_cut, causal, mask, scale, eps=None):
        self.mixing, self.cut, self.key_cut = mixing, cut, key_cut
        self.causal, self.mask, self.scale = causal, mask, scale
        self.per_head = mixing.dim() == 3
        self.eps = eps
        self.own = mixing if causal else None
        self.triangle = int(causal)

    def without_masked(self, k, v, dot):
        """k and v, and the mask that the kernels have still to see to.

        Causal ones of fp32 products, or of heads wider than 128, have no registers left for a mask: there masked keys and
        values are zeros instead. Values that are the same for all tokens, as `counting` has them, may stay.
        """
        if self.mask is None or not self.causal or (dot != "fp32" and max(k.shape[3], v.shape[3]) <= 128):
            return k, v, self.mask
        real = self.mask[:, :, None, None]
        return torch.where(real, k, 0), v if v.stride(1) == 0 else torch.where(real, v, 0), None

    def mixed(self, k, v, heads, dot, with_z, mask):
        """Mixed summaries P and z, [B, H or G, M, ...], and the summaries they are made of."""
        options = {"mask": mask, "with_z": with_z, "eps": self.eps, "split": not self.causal}
        s, z = summaries(k, v, self.key_cut, dot, heads=k.shape[2], **options)
        heads = heads if self.per_head else k.shape[2]
        p = mix(self.mixing, s, heads, triangle=self.triangle)
        p_z = mix(self.mixing, z, heads, triangle=self.triangle) if with_z else None
        return p, p_z, s, z

    def forward(self, q, k, v, out, inv=None, shared=False, dot=None):
        """Write the sum of weight times v to out [B, T, H, V]; times inv [B, T, H], which `shared` computes from q and k."""
        dot = dot or dot_kind(q, k, v)
        if self.short(k, v):
            cuts = self.cut, self.key_cut
            options = {"inv": inv, "shared": shared, "mask": self.mask, "scale": self.scale, "eps": self.eps}
            quadratic(q, k, v, out, self.mixing, *cuts, dot, **options)
            return
        k, v, mask = self.without_masked(k, v, dot)
        p, p_z, _, _ = self.mixed(k, v, q.shape[2], dot, shared, mask)
        options = {"state_z": p_z, "mixing": self.own, "inv": inv, "mask": mask, "scale": self.scale}
        attend(q, k, v, p, out, self.cut, dot, eps=self.eps, **options)

    def short(self, k, v):
        """Whether the quadratic form is taken; not between a grid and a sequence, for which it is not compiled ahead."""
        alike = (self.cut.index is None) == (self.key_cut.index is None)
        return alike and use_quadratic(k.shape[1], self.key_cut.blocks, (k.shape[3], v.shape[3]), self.causal)

    def backward(self, q, k, v, g, grads, r=None, dot=None):
        """Write the gradients of q, k, v to `grads`, given that of the sum, g, and of the weights, r; returns mixing's."""
        dot = dot or dot_kind(q, k, v)
        dot = "tf32" if dot == "fp16" else dot
        if self.short(k, v):
            return self.backward_short(q, k, v, g, grads, r, dot)
        k, v, mask = self.without_masked(k, v, dot)
        p, p_z, s, z = self.mixed(k, v, q.shape[2], dot, r is not None, mask)
        options = {"mixing": self.own, "scale": self.scale, "mask": mask}
        e = q if self.causal else None
        raw = (None, None) if self.eps is None else (q, k)
        own = attend(g, v, k, p, grads[0], self.cut, dot, transposed=True, state_z=p_z, r=r, e=e, raw=raw[0], **options)
        z_options = {"r": r, "with_z": r is not None, "eps": self.eps, "split": not self.causal}
        dp, dp_z = summaries(q, g, self.cut, dot, heads=p.shape[1], **z_options)
        dm = self.mixing_grad(dp, s, dp_z, z, own)
        ds = mix(self.mixing, dp, k.shape[2], triangle=self.triangle, transposed=True)
        ds_z = mix(self.mixing, dp_z, k.shape[2], triangle=self.triangle, transposed=True) if r is not None else None
        options["reverse"] = True
        attend(v, g, q, ds, grads[1], self.key_cut, dot, transposed=True, state_z=ds_z, r=r, raw=raw[1], **options)
        if grads[2] is not None:
            attend(k, q, g, ds, grads[2], self.key_cut, dot, eps=self.eps, **options)
        if mask is not self.mask:
            for grad in grads[1:]:
                if grad is not None:
                    grad.masked_fill_(~self.mask[:, :, None, None], 0)
        return dm

    def backward_short(self, q, k, v, g, grads, r, dot):
        """`backward` by the quadratic form; only the mixing's gradient needs summaries."""
        rows, columns = (self.mixing, self.cut, self.key_cut, dot), (self.mixing, self.key_cut, self.cut, dot)
        options = {"scale": self.scale, "mask": self.mask, "eps": self.eps}
        raw = (None, None) if self.eps is None else (q, k)
        quadratic(g, v, k, grads[0], *rows, r=r, raw=raw[0], **options)
        quadratic(v, g, q, grads[1], *columns, r=r, raw=raw[1], reverse=True, **options)
        if grads[2] is not None:
            quadratic(k, q, g, grads[2], *columns, reverse=True, **options)
        z = {"with_z": r is not None, "eps": self.eps}
        s, z_s = summaries(k, v, self.key_cut, dot, heads=k.shape[2], mask=self.mask, **z)
        heads = q.shape[2] if self.per_head else k.shape[2]
        dp, z_p = summaries(q, g, self.cut, dot, heads=heads, r=r, **z)
        return self.mixing_grad(dp, s, z_p, z_s, None)

    def mixing_grad(self, dp, s, dp_z, z, own):
        """Gradient of the mixing from those of P and z, and for its diagonal from `own` [B, H, M]."""
        dm = mix_grads(dp, s, self.mixing.shape, triangle=self.triangle)
        if z is not None:
            dm = dm + mix_grads(dp_z, z, self.mixing.shape, triangle=self.triangle)
        dm = dm * self.scale
        if own is None:
            return dm
        return dm + torch.diag_embed(own.sum(0) if self.per_head else own.sum((0, 1)))


class Call(Work):
    """One call with its denominator. normalize: "no", "shared" (from q and k), "separate" (q_den, k_den) or "official"."""

    def __init__(self, like, mixing, key_mask, starts, edges, cut, key_cut, causal, normalize, scale, eps):
        self.normalize, self.padded = normalize, starts is not None
        key_mask, starts = (x if x is None else x.contiguous() for x in (key_mask, starts))
        rows = cut_of(cut, like.device, starts, edges)
        columns = rows if key_cut == cut else cut_of(key_cut, like.device)
        super().__init__(
            in_rows(mixing.float()), rows, columns, causal, key_mask, scale if normalize == "no" else 1.0, eps
        )

    def room(self, x, *shape, dtype=None):
        """Memory for a result; zeros where tokens before `starts` are written by no block."""
        make = torch.zeros if self.padded else torch.empty
        return make(shape or x.shape, dtype=dtype or x.dtype, device=x.device)

    def column(self, like):
        """`room` for a number of each token and head of like [B, T, H, ..], fp32 [B, T, H, 1]: with strides that 16 divides,
        whatever T and H are, for the kernels are compiled for that."""
        batch, tokens, heads = like.shape[:3]
        room = self.room(like, batch, heads, 16 * tiles(tokens, 16), dtype=torch.float32)
        return room[..., :tokens].transpose(1, 2)[..., None]

    def counting(self, q, k):
        """Weights alone: a `Work` and values of ones, whose output is the denominator (of the official kind, unmixed)."""
        mixing = self.mixing
        if self.normalize == "official":
            mixing = torch.eye(self.cut.blocks, dtype=torch.float32, device=q.device)
        work = Work(mixing, self.cut, self.key_cut, self.causal, self.mask, 1.0, self.eps)
        return work, torch.ones((), dtype=torch.float32, device=q.device).expand(*k.shape[:3], 1)  # strides of 0

    def across_slots(self, x, mixing):
        """sum_j m_ij x_j over blocks for each slot of a block, [B, T, H] to [B, T, H]: the official denominator's mixing."""
        order = self.cut.order
        x = x if order is None else x.index_select(1, order)
        x = x.unflatten(1, (self.cut.blocks, -1)).permute(0, 3, 1, 2)
        x = torch.matmul(mixing, x).permute(0, 2, 3, 1).flatten(1, 2).contiguous()
        return x if order is None else torch.empty_like(x).index_copy(1, order.long(), x)

    def run(self, q, k, v, q_den, k_den, unrounded):
        """o [B, T, H, V] and 1 / denominator, fp32 [B, T, H] (empty if not normalised)."""
        o = self.room(v, *q.shape[:3], v.shape[3], dtype=torch.float32 if unrounded else None)
        dot = "tf32" if unrounded and dot_kind(q, k, v) == "fp16" else None  # a block's sums may overflow fp16, too
        if self.normalize == "no":
            self.forward(q, k, v, o, dot=dot)
            return o, torch.empty(0, dtype=torch.float32, device=q.device)
        if self.normalize == "shared":
            inv = self.room(q, *q.shape[:3], dtype=torch.float32)
        else:
            features, den = (q, k) if q_den is None else (q_den, k_den), self.column(q)
            work, ones = self.counting(*features)
            work.forward(*features, ones, den, dot="fp32")
            den = den[..., 0].contiguous()
            den = self.across_slots(den, self.mixing) if self.normalize == "official" else den
            dead = den.abs() < torch.finfo(torch.float32).tiny
            inv = torch.where(dead, 0, 1 / torch.where(dead, 1, den))
        self.forward(q, k, v, o, inv, self.normalize == "shared", dot)
        return o, inv

    def run_normed(self, q, k, v, weight, norm_eps):
        """o [B, T, H, V], not normalised and not causal, after an RMSNorm over V."""
        dot = dot_kind(q, k, v)
        if self.short(k, v) or not holds_rows(q.shape[3], v.shape[3], dot):
            return head_norm(self.run(q, k, v, None, None, True)[0], weight, norm_eps).to(v.dtype)
        o = self.room(v, *q.shape[:3], v.shape[3])
        p, _, _, _ = self.mixed(k, v, q.shape[2], dot, False, self.mask)
        attend_normed(q, p, o, self.cut, dot, weight, norm_eps, scale=self.scale, eps=self.eps)
        return o

    def run_back(self, grad, q, k, v, q_den, k_den, o, inv):
        """Gradients of q, k, v, mixing, q_den and k_den (the last two None where they were not given)."""
        grads, half = [self.room(x) for x in (q, k, v)], dot_kind(q, k, v) == "bf16"
        if self.normalize == "no":
            grad = grad.to(torch.bfloat16) if half else grad  # as `prepare` does
            return *grads, self.backward(q, k, v, grad, grads), None, None
        grad, r = prepare(grad, o, inv, torch.bfloat16 if half else torch.float32)
        if self.normalize == "shared":
            return *grads, self.backward(q, k, v, grad, grads, r), None, None
        dm = self.backward(q, k, v, grad, grads)
        features = (q, k) if q_den is None else (q_den, k_den)
        work, ones = self.counting(*features)
        den_grads = [self.room(x) for x in features]
        if self.normalize == "official":
            own = self.column(r)
            work.forward(*features, ones, own, dot="fp32")
            cut, order = self.cut, self.cut.order
            slots = [x if order is None else x.index_select(1, order) for x in (r, own[..., 0])]
            slots = [x.unflatten(1, (cut.blocks, -1)).permute(0, 3, 1, 2) for x in slots]
            per_head = torch.matmul(slots[0], slots[1].mT).sum(0)
            dm = dm + (per_head if self.per_head else per_head.sum(0))
            r = self.across_slots(r, self.mixing.mT)
            work.backward(*features, ones, self.column(r).copy_(r[..., None]), [*den_grads, None], dot="fp32")
        else:
            dm = dm + work.backward(*features, ones, self.column(r).copy_(r[..., None]), [*den_grads, None], dot="fp32")
        if q_den is None:
            return grads[0] + den_grads[0], grads[1] + den_grads[1], grads[2], dm, None, None
        return *grads, dm, *den_grads
