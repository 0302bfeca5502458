"""The losses of language models; the value and the gradient of KL and cross-entropy come from one pass over chunks of tokens
that stay in cache."""

import torch
from torch.autograd.function import once_differentiable

from .tasks import Objective

NO_LABEL = -100
CHUNK = {"cpu": 1 << 18}
GPU_CHUNK = 1 << 25
TINY = 1e-8  # what is left to all other tokens at least


class DistillStep(Objective):
    """A causal language model with the loss "transfer", "logits", "stored" or "lm"."""

    def forward(self, ids, labels, *rest):
        """One part of a batch.

        Args:
            ids, labels: int64 `[B, L]`; labels are not shifted, -100 marks tokens without a loss.
            With "stored" then `[B, L, k]`: the teacher's likeliest tokens, and their log-probabilities.
            token_share: 1 / number of predicted tokens in the whole batch, times the number of processes.
            row_share: 1 / number of sequences in the whole batch, times the number of processes.
        """
        *likeliest, token_share, row_share = rest
        if self.stage.loss == "transfer":
            loss = self._transfer(ids) * row_share
            return loss, {"loss": loss.detach()}
        teacher_logits = None
        if self.stage.loss == "logits":
            with torch.no_grad():
                teacher_logits = self.teacher(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        output = self.student(input_ids=ids, use_cache=False)
        targets = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), NO_LABEL)], dim=1).flatten()
        logits = output.logits.flatten(0, 1)
        if teacher_logits is not None and self.stage.top_k:
            likeliest = likeliest_tokens(teacher_logits, self.stage.top_k)
        if likeliest:
            kl, ce = next_token_of_likeliest(logits, *(x.flatten(0, -2) for x in likeliest), targets)
            loss, kl, ce = kl + self.stage.ce_weight * ce, kl.detach(), ce.detach()
        else:
            weights = (0.0, 1.0) if teacher_logits is None else (1.0, self.stage.ce_weight)
            loss, kl, ce = NextToken.apply(logits, teacher_logits, targets, *weights, self.stage.temperature)
        loss = loss * token_share
        if getattr(output, "aux_loss", None) is not None:
            loss = loss + self.student.config.router_aux_loss_coef * output.aux_loss * (len(ids) * row_share)
        logs = {"loss": loss.detach(), "ce": ce * token_share}
        if teacher_logits is not None or likeliest:
            logs["kl"] = kl * token_share
        return loss, logs

    def _transfer(self, ids):
        """The teacher's mask is left out: the sequences are full, and its form belongs to the teacher's attention."""
        return self.transfer(
            lambda: self.teacher.base_model(input_ids=ids, use_cache=False),
            lambda attention, *args, **kwargs: attention(*args, **{**kwargs, "attention_mask": None}),
            torch.square,
        )


def likeliest_tokens(logits, count):
    """The `count` likeliest tokens `[.., k]` of logits `[.., vocabulary]`, and their log-probabilities, fp32."""
    best = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]))
    return best.indices, best.values


def next_token_of_likeliest(student, tokens, log_p, targets):
    """Sums of KL and cross-entropy over tokens with a target; all tokens but the teacher's likeliest count as one.

    student: logits `[N, vocabulary]`. tokens, log_p: `[N, k]`. targets: `[N]`.
    """
    live, place = (targets != NO_LABEL).float(), targets.clamp_min(0)
    log_q = student.float().log_softmax(-1)
    ce = -(log_q.gather(-1, place[:, None])[:, 0] * live).sum()
    p, log_q = log_p.float().exp(), log_q.gather(-1, tokens.long())
    rest_p, rest_q = ((1 - x.sum(-1)).clamp_min(TINY) for x in (p, log_q.exp()))
    kl = torch.where(p > 0, p * (log_p.float() - log_q), 0.0).sum(-1) + rest_p * (rest_p.log() - rest_q.log())
    return (kl * live).sum(), ce


class NextToken(torch.autograd.Function):
    """kl_weight * T^2 * KL(teacher / T, student / T) + ce_weight * cross-entropy, summed over tokens with a target.

    Worked off in chunks, the gradient with the value: beside the logits nothing of size [tokens, vocabulary] exists but the
    gradient itself. Returns the loss, and the plain sums of KL and cross-entropy.
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
