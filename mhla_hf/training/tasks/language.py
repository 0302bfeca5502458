"""The task of causal language models: text cut into sequences of full length, and next-token losses."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...data import Reader, max_positions, open_text
from ...facts import FactRows
from ..output_head import OutputHead, SumInChunks, find_head, run_without_head
from ..recipe import Stage
from .base import LossAndLogs, Objective, Task, TensorsAndWeights

logger = logging.getLogger("mhla_hf")
IGNORED_LABEL = -100
MIN_REST = 1e-8  # lower bound of the probability of all tokens outside of the top k, whose logarithm is taken

Heads = tuple[OutputHead | None, OutputHead | None]


class LanguageObjective(Objective):
    heads: Heads | None = None  # output heads of student and teacher, after the first call of `_find_heads`

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, token_weight: float, sequence_weight: float,
    ) -> LossAndLogs:  # fmt: skip
        """Return the loss of a micro-batch of ids [B, L], and the values to log.

        `labels` and `weights` [B, L] are not shifted. The scalars multiply the loss of each token and each sequence.
        """
        if self.stage.loss == "transfer":

            def call_attention(attention: Any, *args: Any, **kwargs: Any) -> Any:
                return attention(*args, **{**kwargs, "attention_mask": None})  # there is no padding

            run_teacher = lambda: self.teacher.base_model(input_ids=ids, use_cache=False)  # noqa: E731
            loss = sequence_weight * self.attention_transfer_loss(run_teacher, call_attention)
            return loss, {"loss": loss.detach()}
        heads = self._find_heads(ids)
        teacher_hidden = None
        if self.stage.loss == "logits":
            with torch.no_grad():
                teacher_hidden = run_without_head(self.teacher, heads[1], ids)[1].flatten(0, 1)
        output, hidden = run_without_head(self.student, heads[0], ids)
        labels, weights = (x.where(labels != IGNORED_LABEL, 0) for x in (labels, weights))
        targets, weights = (F.pad(x[:, 1:], (0, 1)).flatten() for x in (labels, weights))
        sums = next_token_loss(
            hidden.flatten(0, 1), targets, weights, teacher_hidden, heads=heads, temperature=self.stage.temperature,
            top_k=self.stage.top_k, ce_weight=1.0 if teacher_hidden is None else self.stage.ce_weight,
        )  # fmt: skip
        loss, kl, ce = sums * token_weight
        logs = {"ce": ce.detach()}
        if teacher_hidden is not None:
            logs["kl"] = kl.detach()
        if getattr(output, "aux_loss", None) is not None:  # load-balancing loss of experts, a mean over the micro-batch
            loss = loss + self.student.config.router_aux_loss_coef * output.aux_loss * (len(ids) * sequence_weight)
        return loss, {"loss": loss.detach(), **logs}

    def _find_heads(self, ids: torch.Tensor) -> Heads:
        """Return the output heads of student and teacher, or (None, None) if one of them cannot be separated."""
        if self.heads is None:
            models = [self.student, self.teacher] if self.stage.loss == "logits" else [self.student]
            found: list[Any] = [find_head(model, ids) for model in models]
            reasons = [reason for reason in found if isinstance(reason, str)]
            method = f"from the logits of whole batches. {'; '.join(reasons)}" if reasons else "in chunks of tokens"
            logger.info("stage %r: computes its loss %s", self.stage.name, method)
            self.heads = (None, None) if reasons else (found[0], found[-1])
        return self.heads


def next_token_loss(
    student: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, teacher: torch.Tensor | None = None, *,
    heads: Heads = (None, None), temperature: float = 1.0, top_k: int = 0, ce_weight: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Return sums over N tokens, fp32 [3]: KL + ce_weight * CE (the only sum with a gradient), KL, and CE.

    With the temperature T, KL is T^2 * KL(teacher / T || student / T). Each token counts by its weight, fp32 [N]. `student`
    and `teacher` are the inputs of their `heads` [N, width] or, without heads, the logits.
    """
    student_head, teacher_head = heads

    def chunk_loss(
        logits: torch.Tensor, chunk_targets: torch.Tensor, chunk_weights: torch.Tensor, *chunk_teacher: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            teacher_logits = [x if teacher_head is None else teacher_head(x) for x in chunk_teacher]
        of_tokens = _kl_and_cross_entropy(logits, chunk_targets, teacher_logits, temperature, top_k)
        kl, ce = ((x * chunk_weights).sum() for x in of_tokens)
        return torch.stack([kl + ce_weight * ce, kl, ce])

    weight, bias = (None, None) if student_head is None else (student_head.layer.weight, student_head.layer.bias)
    tensors = (targets, weights) if teacher is None else (targets, weights, teacher)
    return SumInChunks.apply(student, weight, bias, student_head, chunk_loss, tensors)


def _kl_and_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, teacher: Sequence[torch.Tensor], temperature: float, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return KL and CE, [N] each. With `top_k`, KL is over the teacher's `top_k` likeliest tokens and all others as one."""
    log_q = logits.float().log_softmax(-1)
    ce = F.nll_loss(log_q, targets, reduction="none")
    if not teacher:
        return torch.zeros_like(ce), ce
    log_p = (teacher[0].float() / temperature).log_softmax(-1)
    if top_k:
        log_p, tokens = log_p.topk(min(top_k, log_p.shape[-1]))
        log_q = log_q.gather(-1, tokens)
        p, q = log_p.exp(), log_q.exp()
        rest_p, rest_q = ((1 - x.sum(-1)).clamp_min(MIN_REST) for x in (p, q))
        return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1) + rest_p * (rest_p.log() - rest_q.log()), ce
    if temperature != 1:
        log_q = (logits.float() / temperature).log_softmax(-1)
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1), ce


class LanguageTask(Task[Stage]):
    """The task of a causal language model. `tokenizer` is saved with it; `text_field` is the text column of a dataset."""

    name = "language"
    objective_type = LanguageObjective
    unit = "tokens"
    cpu_recipe = "language_cpu"
    expected_model = "a causal language model of transformers"
    equal_sizes = (("logits", "vocab_size"), ("transfer", "hidden_size"))

    def __init__(self, student: Any, teacher: Any, tokenizer: Any = None, text_field: str = "text") -> None:
        super().__init__(student, teacher, tokenizer)
        self.text_field = text_field

    def check(self, stages: Sequence[Stage]) -> None:
        if getattr(self.student, "get_output_embeddings", lambda: self)() is None:
            raise TypeError(f"student: got {type(self.student).__name__}, expected {self.expected_model}.")
        super().check(stages)

    def open(self, data: Any, stages: Sequence[Stage]) -> Any:
        vocab_size = self.student.get_input_embeddings().weight.shape[0]
        source = open_text(data, self.preprocessor, text_field=self.text_field, vocab_size=vocab_size)
        longest = max(stage.seq_len for stage in stages)
        limit = max_positions(self.student.config)
        if longest > limit:
            raise ValueError(f"seq_len: got {longest}, expected at most the {limit} positions of the student.")
        source.reader(longest, 0, 0).take(1)  # fails now if the text is too short
        return source

    def reader(self, source: Any, stage: Stage, number: int, seed: int, state: dict[str, Any] | None) -> Reader:
        self.fact_rows = FactRows(self.preprocessor, stage.facts)
        if stage.facts and not self.fact_rows.can_ask:
            reason = "too few words are one token of the tokenizer" if self.preprocessor else "there is no tokenizer"
            logger.warning("stage %r: trains on text alone, without facts, because %s", stage.name, reason)
        return source.reader(stage.seq_len, seed, number, state)

    def take(self, reader: Any, stage: Stage, rows: slice) -> TensorsAndWeights:
        tensors = self.fact_rows(*reader.take(stage.batch_size))
        _, labels, weights = (x[:, 1:] for x in tensors)
        predicted = float(weights[labels != IGNORED_LABEL].sum())
        return tuple(x[rows] for x in tensors), (1 / max(1, predicted), 1 / stage.batch_size)
