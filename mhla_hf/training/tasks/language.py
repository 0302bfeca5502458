"""The task of causal language models: text cut into sequences of full length, and next-token losses."""

import logging
from collections.abc import Callable, Sequence
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
Tensors = Sequence[torch.Tensor]


class LanguageObjective(Objective):
    heads: Heads | None = None  # output heads of student and teacher, after the first call of `_find_heads`

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, token_weight: float, sequence_weight: float,
    ) -> LossAndLogs:  # fmt: skip
        """Return the loss of a micro-batch of ids [B, L], and the values to log.

        `labels` and their `weights` [B, L] are not shifted. `token_weight` multiplies the loss of a token of weight 1, and
        `sequence_weight` that of a sequence.
        """
        if self.stage.loss == "transfer":

            def call_attention(attention: Any, *args: Any, **kwargs: Any) -> Any:
                return attention(*args, **{**kwargs, "attention_mask": None})  # there is no padding

            run_teacher = lambda: self.teacher.base_model(input_ids=ids, use_cache=False)  # noqa: E731
            loss = sequence_weight * self.attention_transfer_loss(run_teacher, call_attention)
            return loss, {"loss": loss.detach()}
        student_head, teacher_head = self._find_heads(ids)
        teacher_values: Tensors = []
        to_targets: Callable[..., Tensors] | None = None
        if self.stage.loss == "logits":
            with torch.no_grad():
                teacher_values = [run_without_head(self.teacher, teacher_head, ids)[1].flatten(0, 1)]

            def to_targets(x: torch.Tensor) -> Tensors:
                logits = x if teacher_head is None else teacher_head(x)
                return most_likely_tokens(logits, self.stage.top_k) if self.stage.top_k else [logits]

        output, hidden = run_without_head(self.student, student_head, ids)
        labels, weights = (x.where(labels != IGNORED_LABEL, 0) for x in (labels, weights))
        targets, weights = (F.pad(x[:, 1:], (0, 1)).flatten() for x in (labels, weights))
        sums = next_token_loss(
            hidden.flatten(0, 1), targets, weights, teacher_values, temperature=self.stage.temperature,
            ce_weight=self.stage.ce_weight if teacher_values else 1.0, head=student_head, to_teacher_targets=to_targets,
        )  # fmt: skip
        loss, kl, ce = sums * token_weight
        logs = {"ce": ce.detach()}
        if teacher_values:
            logs["kl"] = kl.detach()
        if getattr(output, "aux_loss", None) is not None:  # load-balancing loss of experts, a mean over the micro-batch
            loss = loss + self.student.config.router_aux_loss_coef * output.aux_loss * (len(ids) * sequence_weight)
        return loss, {"loss": loss.detach(), **logs}

    def _find_heads(self, ids: torch.Tensor) -> Heads:
        """Return the output heads of student and teacher, or (None, None) if one of them cannot be separated."""
        if self.heads is None:
            models = [self.student, self.teacher] if self.stage.loss == "logits" else [self.student]
            results = [(type(model).__name__, find_head(model, ids)) for model in models]
            heads = [head for _, head in results if isinstance(head, OutputHead)]
            reasons = [f"{name}: {reason}" for name, reason in results if isinstance(reason, str)]
            method = f"from the logits of whole batches. {'; '.join(reasons)}" if reasons else "in chunks of tokens"
            logger.info("stage %r: computes its loss %s", self.stage.name, method)
            self.heads = (None, None) if reasons else (heads[0], heads[-1])
        return self.heads


def most_likely_tokens(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` most likely tokens, int64 [..., count], and their log-probabilities, fp32 [..., count]."""
    top = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]))
    return top.indices, top.values


def next_token_loss(
    student: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, teacher: Tensors = (), *,
    temperature: float = 1.0, ce_weight: float = 0.0, head: OutputHead | None = None,
    to_teacher_targets: Callable[..., Tensors] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return sums over N tokens, fp32 [3]: KL + ce_weight * CE (the only one with a gradient), KL, and CE.

    With the temperature T, KL is T^2 * KL(teacher / T || student / T). Each token counts by its weight, fp32 [N]. `student`
    are the inputs of `head` [N, width] or, without a head, the logits. `teacher`, or what `to_teacher_targets` makes of it,
    are logits, or the k most likely tokens [N, k] and their log-probabilities, where all others count as one token.
    """

    def chunk_loss(
        logits: torch.Tensor, chunk_targets: torch.Tensor, chunk_weights: torch.Tensor, *chunk_teacher: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            teacher_targets = to_teacher_targets(*chunk_teacher) if to_teacher_targets else chunk_teacher
        of_tokens = _kl_and_cross_entropy(logits, chunk_targets, teacher_targets, temperature)
        kl, ce = ((x * chunk_weights).sum() for x in of_tokens)
        return torch.stack([kl + ce_weight * ce, kl, ce])

    weight, bias = (None, None) if head is None else (head.layer.weight, head.layer.bias)
    tensors = (targets, weights, *teacher)
    return SumInChunks.apply(student, weight, bias, head, chunk_loss, tensors, torch.is_grad_enabled())


def _kl_and_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, teacher: Tensors, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_q = logits.float().log_softmax(-1)
    ce = F.nll_loss(log_q, targets, reduction="none")
    if len(teacher) == 1:
        if temperature != 1:
            log_q = (logits.float() / temperature).log_softmax(-1)
        log_p = (teacher[0].float() / temperature).log_softmax(-1)
        kl = temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)
    elif teacher:
        tokens, log_p = teacher[0].long(), teacher[1].float()
        log_q = log_q.gather(-1, tokens)
        p, q = log_p.exp(), log_q.exp()
        rest_p, rest_q = ((1 - x.sum(-1)).clamp_min(MIN_REST) for x in (p, q))
        kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1) + rest_p * (rest_p.log() - rest_q.log())
    else:
        kl = torch.zeros_like(log_q[:, 0])
    return kl, ce


class LanguageTask(Task[Stage]):
    """The task of a causal language model. `tokenizer` is saved with it; `text_field` is the column of a dataset."""

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
        head = getattr(self.student, "get_output_embeddings", lambda: self)()
        if head is None:
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
