"""The task of causal language models: text cut into full sequences, and the losses on it."""

import logging
from pathlib import Path

import torch
import torch.nn.functional as F

from ..data import max_positions, open_text
from .output_head import find_head, run_body, sum_in_chunks
from .tasks import Objective, Task
from .teach import RECORD, TaughtText, likeliest_tokens

logger = logging.getLogger("mhla_hf")
NO_LABEL = -100
TINY = 1e-8  # what is left to all other tokens at least


class DistillStep(Objective):
    """A causal language model with the loss "transfer", "logits", "stored" or "lm"."""

    found = None  # the output heads, see `heads`

    def forward(self, ids, labels, *rest):
        """Of ids and labels, int64 `[B, L]`; with "stored" the teacher's likeliest tokens and their log-probabilities
        `[B, L, k]`; then 1 / number of predicted tokens, and 1 / number of sequences, in the whole batch.

        Labels are not shifted; -100 marks tokens without a loss.
        """
        *known, token_share, row_share = rest
        if self.stage.loss == "transfer":  # without the mask: sequences are full, its form is the teacher's attention's
            loss = row_share * self.transfer(
                lambda: self.teacher.base_model(input_ids=ids, use_cache=False),
                lambda attention, *args, **kwargs: attention(*args, **{**kwargs, "attention_mask": None}),
            )
            return loss, {"loss": loss.detach()}
        student, teacher = self.heads(ids)
        known, teach = [x.flatten(0, 1) for x in known], None
        if self.stage.loss == "logits":
            with torch.no_grad():
                known = [_run(self.teacher, teacher, ids)[1].flatten(0, 1)]
            top_k, logits_of = self.stage.top_k, teacher or (lambda logits: logits)
            teach = lambda x: likeliest_tokens(logits_of(x), top_k) if top_k else [logits_of(x)]  # noqa: E731
        output, hidden = _run(self.student, student, ids)
        targets = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), NO_LABEL)], dim=1).flatten()
        weight = self.stage.ce_weight if known else 1.0
        options = {"temperature": self.stage.temperature, "ce_weight": weight, "head": student, "teach": teach}
        loss, kl, ce = next_token(hidden.flatten(0, 1), targets, known, **options) * token_share
        logs = {"ce": ce.detach()} | ({"kl": kl.detach()} if known else {})
        if getattr(output, "aux_loss", None) is not None:
            loss = loss + self.student.config.router_aux_loss_coef * output.aux_loss * (len(ids) * row_share)
        return loss, {"loss": loss.detach(), **logs}

    def heads(self, ids):
        """The output heads of student and teacher, if both can be taken apart, else None for both; the log says which."""
        if self.found is None:
            models = [self.student, self.teacher] if self.stage.loss == "logits" else [self.student]
            found = [find_head(model, ids) for model in models]
            named = [(type(model).__name__, head) for model, head in zip(models, found, strict=True)]
            reasons = [f"{name}: {head}" for name, head in named if isinstance(head, str)]
            way = f"from the logits of whole batches. {'; '.join(reasons)}" if reasons else "in chunks of tokens"
            logger.info("stage %r: computes its loss %s", self.stage.name, way)
            self.found = (None, None) if reasons else (found[0], found[-1])
        return self.found


def _run(model, head, ids):
    """The model's output and its hidden states, or without a `head` its logits."""
    if head is not None:
        return run_body(model, head, ids)
    output = model(input_ids=ids, use_cache=False)
    return output, output.logits


def next_token(student, targets, known=(), *, temperature=1.0, ce_weight=0.0, head=None, teach=None):
    """[T^2 * KL(teacher / T, student / T) + ce_weight * cross-entropy, KL, cross-entropy], summed over the tokens with a
    target, fp32. Only the first has a gradient.

    Worked off in chunks: nothing of the size of all logits is made, but the logits themselves where there is no `head`.

    Args:
        student: logits `[N, vocabulary]`, or with `head`, an `OutputHead`, the hidden states `[N, width]` that it reads.
        targets: int64 `[N]`, -100 for none.
        known: of the teacher, its logits `[N, vocabulary]`; or its likeliest tokens and their log-probabilities `[N, k]`,
            against which all other tokens count as one; or nothing, and the KL is 0.
        teach: makes those of the rows of a chunk of `known`, if `known` is something else, such as hidden states.
    """

    def loss(logits, targets, *known):
        with torch.no_grad():
            known = teach(*known) if teach else known
        kl, ce = _next_token_of_chunk(temperature, logits, targets, *known)
        return torch.stack([kl + ce_weight * ce, kl, ce])

    return sum_in_chunks(student, head, loss, (targets, *known))


def _next_token_of_chunk(temperature, student, targets, *known):
    log_q = student.float().log_softmax(-1)
    ce = F.nll_loss(log_q, targets, reduction="sum", ignore_index=NO_LABEL)
    if len(known) == 1:
        if temperature != 1:
            log_q = (student.float() / temperature).log_softmax(-1)
        log_p = (known[0].float() / temperature).log_softmax(-1)
        kl = temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)
    elif known:
        log_p, log_q = known[1].float(), log_q.gather(-1, known[0].long())
        p, q = log_p.exp(), log_q.exp()
        rest_p, rest_q = ((1 - x.sum(-1)).clamp_min(TINY) for x in (p, q))
        kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1) + rest_p * (rest_p.log() - rest_q.log())
    else:
        kl = torch.zeros_like(log_q[:, 0])
    return (kl * (targets != NO_LABEL)).sum(), ce


class LanguageTask(Task):
    """A causal language model of transformers.

    tokenizer: of transformers; saved with the model. text_field: the column of a dataset that holds the text.
    """

    name = "language"
    step = DistillStep
    unit = "tokens"
    wanted = "a causal language model of transformers"
    equal = (("logits", "vocab_size"), ("transfer", "hidden_size"))

    def __init__(self, student, teacher, tokenizer=None, text_field="text"):
        super().__init__(student, teacher)
        self.tool, self.text_field = tokenizer, text_field

    def check(self, stages):
        """Also: the student has a head of next tokens, which bodies and classifiers have not."""
        head = getattr(self.student, "get_output_embeddings", lambda: self)()
        if head is None:
            raise TypeError(f"student: got {type(self.student).__name__}; expected {self.wanted}")
        super().check(stages)

    def open(self, data, stages):
        """Text, see `open_text`; or what `teach` wrote, for the loss "stored"."""
        stored = [stage.loss == "stored" for stage in stages]
        taught = isinstance(data, (str, Path)) and (Path(data) / RECORD).is_file()
        if any(stored) and not (all(stored) and taught):
            got = repr(str(data)) if isinstance(data, (str, Path)) else type(data).__name__
            raise ValueError(f"data: got {got}; expected a folder that `mhla-hf teach` wrote, for all stages")
        vocab = self.student.get_input_embeddings().weight.shape[0]
        if taught:
            source = TaughtText(data, vocab)
        else:
            source = open_text(data, self.tool, text_field=self.text_field, vocab_size=vocab)
        longest, limit = max(stage.seq_len for stage in stages), max_positions(self.student.config)
        if longest > limit:
            raise ValueError(f"seq_len is {longest}; expected at most the {limit} positions of the student")
        source.reader(longest, 0, 0).take(1)  # a text too short is known now
        return source

    def reader(self, source, stage, number, seed, state):
        return source.reader(stage.seq_len, seed, number, state)

    def take(self, reader, stage, rows):
        ids, labels, *likeliest = reader.take(stage.batch_size)
        predicted = int((labels.numpy()[:, 1:] != NO_LABEL).sum())
        likeliest = likeliest if stage.loss == "stored" else ()
        return tuple(x[rows] for x in (ids, labels, *likeliest)), (1 / max(1, predicted), 1 / stage.batch_size)

    def count(self, stage):
        return stage.batch_size * stage.seq_len
