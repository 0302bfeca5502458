"""The checks of an audit: each looks at one thing of a saved language model, and gives a number or a word.

What a check raises is what it found. `CHECKS` lists them in the order of the page, each with what it measures.
"""

import copy
import dataclasses
import functools
import itertools
import math
from pathlib import Path

import torch
from huggingface_hub import ModelCard
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from ..analysis.behavior import (
    PASSAGE,
    batch_difference,
    cached_logits,
    causality_difference,
    continue_greedily,
    difference,
    layer_bytes,
    packed_difference,
    recall_gain,
    takes,
    told_logs,
    whole_logits,
    worst,
)
from ..analysis.measures import record_model
from ..checkpoints.bundle import FILE_NAME, build_bundle, check_bundle
from ..checkpoints.clean_process import check_visit
from ..checkpoints.load import load_language_model
from ..checkpoints.save import CARD_FILE
from ..convert.families import softmax_config
from ..convert.teacher import mean_kl
from ..evaluation.records import Results
from .card import compare_card, folder_card
from .facts import PERSON_FILE, read_records
from .folder_checks import check_weights

MOST = 8192  # tokens of a long text at most
EXACT, HALF = 1e-4, 2e-2  # tolerances of a difference of logits: float32; bfloat16 and float16 (see `tolerance`)
FALL = 0.5  # nats per recalled token that a model may be below its teacher
RECALL_TOKENS = 4096  # of one distance, in as many texts as that makes, at most 8
ROWS, PROMPTS, WRITTEN = 4, 16, 32  # texts beside a teacher; prompts, and the tokens that follow each


class NotApplicable(Exception):
    """A check has nothing to look at in this model; the text says why."""


@dataclasses.dataclass
class Audited:
    """What is looked at. ids: the text's tokens `[N]`; tokens: the most of them that the user wants at once; teacher: a
    model or None; loaded: the folder's model, once the check "loads" has it; progress: whether bars are shown."""

    folder: Path
    config: object
    tokenizer: object
    ids: torch.Tensor
    tokens: int
    device: torch.device
    trust_remote_code: bool
    teacher: object = None
    loaded: object = None
    progress: bool = False

    @property
    def model(self):
        """The loaded model."""
        if self.loaded is None:
            raise NotApplicable("the model does not load")
        return self.loaded

    @property
    def mhla(self) -> dict:
        """The settings of its MHLA layers."""
        if not isinstance(settings := getattr(self.config, "mhla", None), dict):
            raise NotApplicable("the model has no MHLA")
        return settings

    @property
    def source(self) -> str:
        """The code that an MHLA model brings along."""
        if self.mhla and not (file := self.folder / FILE_NAME).is_file():
            raise ValueError(f"there is no {FILE_NAME}: who has no mhla_hf cannot load the model")
        return file.read_text(encoding="utf-8")

    @functools.cached_property
    def exact(self):
        """The model in float32."""
        return self.model if self.model.dtype == torch.float32 else copy.deepcopy(self.model).float()

    @functools.cached_property
    def rounding(self) -> float:
        """What the dtype alone changes in the logits, against the same weights in float32; 0 in float32."""
        ids = self.text(self.short)[None]
        return difference(whole_logits(self.model, ids), whole_logits(self.exact, ids))

    @property
    def tolerance(self) -> float:
        """Of a difference of logits. In half precision each of two ways may be as far from float32 as the dtype alone is."""
        return EXACT if self.model.dtype == torch.float32 else max(HALF, 2 * self.rounding)

    @property
    def trained(self) -> int:
        """Tokens that the model was made for."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None) or MOST

    @property
    def long(self) -> int:
        """Tokens of a long text: four times the trained length, or, without RoPE, whose positions go on, as many."""
        rotary = getattr(self.config.get_text_config(), "rope_parameters", None)
        return min(self.tokens, self.trained * (4 if rotary else 1))

    @property
    def short(self) -> int:
        """Tokens of a text that reaches beyond a window."""
        return min(self.long, max(192, 4 * (getattr(self.config, "mhla", None) or {}).get("block_size", 0)))

    def text(self, length: int, number: int = 0) -> torch.Tensor:
        """`length` tokens `[length]` of the text, which begins again at its end; another `number` begins elsewhere."""
        return self.ids[(number * 9973 + torch.arange(length)) % len(self.ids)]

    def watch(self, steps):
        """The steps of a check, with a bar below that of the checks when they take more than a few seconds."""
        return tqdm(steps, desc="  this check", unit="step", leave=False, delay=3, disable=not self.progress)

    @functools.cached_property
    def beside_teacher(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each of a few texts the KL to the teacher in nats per token, and the share of next tokens that are alike."""
        if self.teacher is None:
            raise NotApplicable("no teacher was given")
        found = []
        for number in self.watch(range(ROWS)):
            row = self.text(self.short, number)[None]
            wanted, got = (whole_logits(model, row).log_softmax(-1) for model in (self.teacher, self.model))
            found.append((float(mean_kl(wanted, got)), float((wanted.argmax(-1) == got.argmax(-1)).float().mean())))
        return torch.tensor(found).unbind(1)


def mean_and_error(values: torch.Tensor) -> dict:
    """The mean of `[N]` and its standard error, as a check gives them."""
    return {"value": float(values.mean()), "stderr": float(values.std() / len(values) ** 0.5)}


def see_weights(subject):
    return {"value": f"finite, {check_weights(subject.folder)}"}


def source_maker(subject):
    """None where the source is what this mhla_hf makes; where it is whole, but another's, that one's version."""
    made = check_bundle(subject.source)
    return None if build_bundle(made["entry"]) == subject.source else made["version"]


def see_source(subject):
    other = source_maker(subject)
    return {"value": "what this mhla_hf makes" if other is None else f"whole, of another mhla_hf ({other})"}


def see_loading_elsewhere(subject):
    if source_maker(subject) is not None and not subject.trust_remote_code:
        raise NotApplicable("its source is not what this mhla_hf makes, and is not run without --trust-remote-code")
    return {"value": check_visit(subject.folder, "language").rpartition(".")[2]}


def see_loading(subject):
    how = {"device": subject.device, "trust_remote_code": subject.trust_remote_code}
    loaded = load_language_model(subject.folder, **how)[0]
    if (largest := int(subject.ids.max())) >= (known := loaded.get_input_embeddings().weight.shape[0]):
        raise ValueError(f"the tokenizer gives token {largest}, and the model knows 0 to {known - 1}")
    subject.loaded = loaded
    return {"value": type(loaded).__name__}


def see_cache(subject):
    ids, tail = subject.text(subject.short)[None], subject.short // 4
    whole = whole_logits(subject.model, ids)
    ways = {"chunks": [1, tail - 1, tail + 1, subject.short - 2 * tail - 1]}
    ways["token by token"] = [subject.short - 2 * tail, *[1] * (2 * tail)]
    found = {}
    for way, sizes in ways.items():
        found[way] = difference(cached_logits(subject.model, ids, sizes, watch=subject.watch), whole)
    return {"value": worst(found.values()), "tolerance": subject.tolerance, "details": found}


def see_causality(subject):
    lengths = (subject.short, subject.short - 5)  # the last one of a block, and one in the middle
    found = [causality_difference(subject.model, subject.text(length)[None]) for length in lengths]
    return {"value": worst(found), "tolerance": subject.tolerance}


def see_batches(subject):
    rows = [subject.text(subject.short, number) for number in range(3)]
    return {"value": batch_difference(subject.model, rows), "tolerance": subject.tolerance}


def see_padding(subject):
    rows = [subject.text(length, length) for length in (subject.short, subject.short // 2, 17)]
    return {"value": batch_difference(subject.model, rows), "tolerance": subject.tolerance}


def see_packing(subject):
    if not takes(subject.model, "position_ids"):
        raise NotApplicable("the model takes no position_ids")
    rows = [subject.text(length, length) for length in (subject.short // 2, subject.short // 2 - 7, 20)]
    stock = None if keeps_apart(subject, subject.model, rows) else stock_model(subject)
    if stock is not None and not keeps_apart(subject, stock, rows):
        raise NotApplicable(f"{type(stock).__name__} of transformers does not keep packed sequences apart either")
    return {"value": packed_difference(subject.model, rows), "tolerance": subject.tolerance}


def keeps_apart(subject, model, rows) -> bool:
    """Whether it reads packed rows as it reads each alone; some refuse to read them, for lack of a kernel."""
    try:
        return packed_difference(model, rows) <= subject.tolerance
    except Exception:  # of our own model `see_packing` says it
        return False


def stock_model(subject):
    """A model of transformers of the same type, without MHLA: itself, the teacher, or one with random weights; None of one
    from scratch, which was never anything else."""
    for model in (subject.model, subject.teacher):
        if type(model).__module__.startswith("transformers."):
            return model
    if not hasattr(subject.config, "base_model_type"):
        return None
    return AutoModelForCausalLM.from_config(softmax_config(subject.config)).eval().to(subject.device)


def see_far_part(subject):
    window, length = subject.mhla.get("window", 2) * subject.mhla["block_size"] + subject.mhla["sinks"], subject.short
    if length <= window:
        raise NotApplicable(f"a text of {length} tokens ends within the window of {window}")
    batch = {"input_ids": subject.text(length)[None].to(subject.device), "use_cache": False}
    calls = [call for layer in record_model(subject.model, batch).values() for call in layer if "form" in call.options]
    if not calls:
        raise NotApplicable("its MHLA has no window")
    heads = [[call.far_share(0, head) for head in range(call.q.shape[2])] for call in calls]
    shares = {str(layer): sum(own) / len(own) for layer, own in zip(subject.mhla["layers"], heads, strict=True)}
    if dead := [layer for layer, share in shares.items() if not 0 < share < math.inf]:
        raise ValueError(f"beyond the window layer {dead[0]} has {shares[dead[0]]} of its weights ({len(dead)} layers)")
    return {"value": min(shares.values()), "tolerance": "above 0", "details": shares}


def long_logits(subject, cached, whole):
    """Logits at some places of a long text, of a model that reads it in chunks, its end token by token, and of another."""
    ids, single = subject.text(length := subject.long)[None], min(32, subject.long // 2)
    full, rest = divmod(length - single, 512)
    sizes = [*[512] * full, *([rest] if rest else []), *[1] * single]
    places = torch.cat([torch.arange(0, length - single, max(1, length // 128)), torch.arange(length - single, length)])
    return cached_logits(cached, ids, sizes, places, watch=subject.watch), whole_logits(whole, ids, places)


def see_long_text(subject):
    value = difference(*long_logits(subject, subject.model, subject.model))
    return {"value": value, "tolerance": subject.tolerance, "details": {"tokens": subject.long}}


def see_drift(subject):
    half = copy.deepcopy(subject.model).bfloat16() if subject.model.dtype == torch.float32 else subject.model
    pieces = [logits.tensor_split(4, 1) for logits in long_logits(subject, half, subject.exact)]
    quarters = [float((got - wanted).norm() / wanted.norm()) for got, wanted in zip(*pieces, strict=True)]
    return {"value": quarters[-1] / quarters[0], "details": {"quarters": quarters}}


def see_state(subject):
    if subject.mhla["mixing_form"] != "decay":
        raise NotApplicable("a dense mixing keeps the summary of every block")
    half = subject.long // 2
    before, after = layer_bytes(subject.model, subject.text(2 * half)[None], half, subject.mhla["layers"])
    if before != after:
        raise ValueError(f"{before:,} bytes after {half} tokens have become {after:,} after {2 * half}")
    return {"value": f"{after:,} bytes"}


def see_recall(subject):
    most = min(subject.long, subject.trained) - PASSAGE
    distances = [*(d for d in (PASSAGE << power for power in range(20)) if d < most), most]
    models = {"model": subject.model, "teacher": subject.teacher}
    models = {name: model for name, model in models.items() if model is not None}
    gains = {name: {} for name in models}
    for d, name in subject.watch([*itertools.product(distances, models)]):
        rows = max(1, min(8, RECALL_TOKENS // d))
        gains[name][str(d)] = recall_gain(models[name], subject.ids, d, rows)
    if subject.teacher is None:
        return {"value": gains["model"][str(most)], "details": gains}
    fall = worst(gains["teacher"][d] - gain for d, gain in gains["model"].items())
    what = "what the model forgets of what its teacher recalls, nats per token"
    return {"value": fall, "tolerance": FALL, "measured": what, "details": gains}


def see_kl(subject):
    return mean_and_error(subject.beside_teacher[0])


def see_agreement(subject):
    return mean_and_error(subject.beside_teacher[1])


def see_writing(subject):
    if subject.teacher is None:
        raise NotApplicable("no teacher was given")
    length = subject.short - WRITTEN
    prompts = torch.stack([subject.text(length, number) for number in range(PROMPTS)])
    written = [continue_greedily(model, prompts, WRITTEN, subject.watch) for model in (subject.model, subject.teacher)]
    at = torch.arange(length, length + WRITTEN)
    own, wanted = (told_logs(subject.teacher, ids, at).mean(-1).cpu() for ids in written)
    ties = (written[0] == written[1]).all(-1)
    gap = mean_and_error(own - wanted)
    details = {"texts": PROMPTS, "same": int(ties.sum()), "gap": gap["value"], "gap_stderr": gap["stderr"]}
    return {**mean_and_error((ties | (own > wanted)).float()), "details": details}


def see_card(subject):
    if not (readme := subject.folder / CARD_FILE).is_file():
        raise NotApplicable("there is no card")
    if not (subject.folder / PERSON_FILE).is_file():
        raise NotApplicable("mhla_hf did not write the card, so what it claims cannot be checked")
    compare_card(readme, folder_card(subject.folder, weights=False))
    return {"value": "rendered again, the same"}


def see_scores(subject):
    known = [record for record in Results.read(subject.folder) if record.fingerprint.startswith("files:")]
    if not known:
        raise NotApplicable("there are no scores of a folder's weights")
    read_records(subject.folder)
    return {"value": f"{len(known)} of these weights"}


def see_claims(subject):
    readme, known = subject.folder / CARD_FILE, Results.read(subject.folder)
    claims = (ModelCard.load(readme).data.eval_results or []) if readme.is_file() else []
    if not claims or not known:
        raise NotApplicable("no results.json says where the numbers are from" if claims else "no number is claimed")
    scores = {(record.task, record.metric, record.value) for record in known}
    for claim in claims:
        if (claim.dataset_type, claim.metric_type, claim.metric_value) not in scores:
            what = f"{claim.metric_type} {claim.metric_value} on {claim.dataset_type}"
            raise ValueError(f"{CARD_FILE} claims {what}, which results.json does not hold")
    return {"value": f"{len(claims)} of results.json"}


CHECKS = {
    "weights": ("every file whole, every weight finite", see_weights),
    "source": ("the code in the folder", see_source),
    "loads elsewhere": ("the class in a process without mhla_hf", see_loading_elsewhere),
    "loads": ("the class here, no weight missing", see_loading),
    "cache": ("in chunks and token by token, not whole: logits differ by", see_cache),
    "causality": ("another last token: logits before it differ by", see_causality),
    "batches": ("a row with others, not alone: logits differ by", see_batches),
    "left padding": ("a padded row, not alone: logits differ by", see_padding),
    "packing": ("rows in one by position_ids, not alone: logits differ by", see_packing),
    "long text": ("with a cache, not whole: logits differ by", see_long_text),
    "drift": ("half precision against float32: last quarter of a long text, first is 1", see_drift),
    "state": ("cache of the MHLA layers, the same when the text doubles", see_state),
    "far part": ("least share of a layer's weights beyond the window", see_far_part),
    "recall": ("what a passage gains when it comes again, nats per token", see_recall),
    "KL": ("to the teacher, nats per token", see_kl),
    "agreement": ("share of next tokens that are the teacher's", see_agreement),
    "writing": ("share of texts that the teacher finds as likely as its own", see_writing),
    "card": ("README.md and the files beside it", see_card),
    "scores": ("results.json and the weights", see_scores),
    "claims": ("the numbers in the card's front matter", see_claims),
}
