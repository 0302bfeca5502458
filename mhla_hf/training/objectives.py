"""The losses of language models; the value and the gradient of KL and cross-entropy come from one pass over chunks of tokens
that stay in cache."""

import torch
from torch.autograd.function import once_differentiable

from .tasks import Objective

NO_LABEL = -100
CHUNK = {"cpu": 1 << 18}
GPU_CHUNK = 1 << 25


class DistillStep(Objective):
    """A causal language model with the loss "transfer", "logits" or "lm"."""

    def forward(self, ids, labels, token_share, row_share):
        """One part of a batch.

        Args:
            ids, labels: int64 `[B, L]`; labels are not shifted, -100 marks tokens without a loss.
            token_share: 1 / number of predicted tokens in the whole batch, times the number of processes.
            row_share: 1 / number of sequences in the whole batch, times the number of processes.
        """
        if self.stage.loss == "transfer":
            loss = self._transfer(ids) * row_share
            return loss, {"loss": loss.detach()}
        teacher_logits = None
        if self.stage.loss == "logits":
            with torch.no_grad():
                teacher_logits = self.teacher(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        output = self.student(input_ids=ids, use_cache=False)
        targets = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), NO_LABEL)], dim=1).flatten()
        weights = (0.0, 1.0) if teacher_logits is None else (1.0, self.stage.ce_weight)
        loss, kl, ce = NextToken.apply(
            output.logits.flatten(0, 1), teacher_logits, targets, *weights, self.stage.temperature
        )
        loss = loss * token_share
        if getattr(output, "aux_loss", None) is not None:
            loss = loss + self.student.config.router_aux_loss_coef * output.aux_loss * (len(ids) * row_share)
        logs = {"loss": loss.detach(), "ce": ce * token_share}
        if teacher_logits is not None:
            logs["kl"] = kl * token_share
        return loss, logs

    def _transfer(self, ids):
        """The teacher's mask is left out: the sequences are full, and its form belongs to the teacher's attention."""
        return self.transfer(
            lambda: self.teacher.base_model(input_ids=ids, use_cache=False),
            lambda attention, *args, **kwargs: attention(*args, **{**kwargs, "attention_mask": None}),
            torch.square,
        )


class NextToken(torch.autograd.Function):
    """kl_weight * T^2 * KL(teacher / T, student / T) + ce_weight * cross-entropy, summed over tokens with a target.

    Worked off in chunks that stay in cache, the gradient with the value: beside the logits nothing of size
    [tokens, vocabulary] exists but the gradient itself. Returns the loss, and the plain sums of KL and cross-entropy.
    """

    @staticmethod
    def forward(ctx, student, teacher, targets, kl_weight, ce_weight, temperature):
        sums = torch.zeros(2, dtype=torch.float32, device=student.device)
        gradient = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        rows = max(1, CHUNK.get(student.device.type, GPU_CHUNK) // student.shape[-1])
        for start in range(0, len(student), rows):
            part = slice(start, start + rows)
            target = targets[part, None]
            live = (target != NO_LABEL).float()
            place = target.clamp_min(0)
            logits = student[part].float()
            log_q = logits.log_softmax(-1)
            sums[1] -= (log_q.gather(-1, place) * live).sum()
            slope = None
            if teacher is not None:
                log_p = (teacher[part].float() / temperature).log_softmax(-1)
                log_s = log_q if temperature == 1 else (logits / temperature).log_softmax(-1)
                p = log_p.exp()
                sums[0] += ((log_p.sub_(log_s) * p).sum(-1, keepdim=True) * live).sum()
                if gradient is not None:
                    slope = (log_s.exp() - p).mul_(kl_weight * temperature)
            if gradient is None:
                continue
            if ce_weight:
                q = log_q.exp().scatter_add_(-1, place, torch.full_like(live, -1.0))
                slope = q.mul_(ce_weight) if slope is None else slope.add_(q, alpha=ce_weight)
            gradient[part] = slope.mul_(live)
        ctx.gradient = gradient
        kl, ce = sums[0] * temperature**2, sums[1]
        loss = kl_weight * kl + ce_weight * ce
        ctx.mark_non_differentiable(kl, ce)
        return loss, kl, ce

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _kl, _ce):
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(grad), None, None, None, None, None
