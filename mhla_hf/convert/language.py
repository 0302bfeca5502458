"""convert() with text: MHLA heads learn from the softmax original, and some KV heads of a language model keep softmax.

What an encoder reads, and how it is judged, is in `encoder.py`.
"""

import logging
import time
from pathlib import Path

import torch
from tqdm import tqdm

from ..checkpoints.file_io import atomic_file
from ..checkpoints.fingerprint import fingerprint_model, hash_json
from ..data import TokenRing, open_text
from ..models.attention import ATTENTION_NAME, keep_softmax_heads
from ..models.families import ENCODERS, LANGUAGE
from ..models.transformers_api import forward_cached, set_attention_function
from ..nn.settings import MHLASettings, is_whole
from .encoder import EmbeddingScores, read_encoder_rows
from .fit import GateFit, OutputFit, Rows, compared_positions, largest_gates, read_twice
from .sizes import LayerSizes, sizes_of_conversion
from .teacher import is_encoder, log_probabilities, mean_kl, mhla_layers, softmax_instead
from .transformers_models import checked_settings, convert_in_place, convertible_family

logger = logging.getLogger("mhla_hf")
ROW_TOKENS, FIT_ROWS, GATE_ROWS, HELD_OUT_ROWS = 1024, 28, 3, 2
LONG_TOKENS, LONG_ROWS = 4096, 5  # of FIT_ROWS: recall far back needs them, but they take time
GATE_STEPS = 20
MEASURED_POSITIONS = 256  # of a held-out row, at most
SAVE_EVERY = 30.0  # seconds
REPORT_LENGTHS = (4096, 32768)  # tokens for which the report gives the size of the cache
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
WRITING_BATCH = 16  # rows that the model writes at once


def convert_with_text(
    model, settings, layers, overrides: dict, tokenizer, text, *, keep, context, effort: float, seed: int, checkpoint,
    progress: bool,
):  # fmt: skip
    """The work of `convert` for a language model or an encoder with text; arguments as there."""
    family = convertible_family(model)
    if family not in (*LANGUAGE, *ENCODERS):
        what = "expected a causal language model or an encoder of text with it"
        raise ValueError(f"text: came with {type(model).__name__}, {what}.")
    encoder = family in ENCODERS
    if not encoder and not hasattr(model, "lm_head") and model.get_output_embeddings() is None:
        raise ValueError(
            f"text: came with {type(model).__name__}, which predicts no tokens, expected a ...ForCausalLM."
        )
    layers = "all" if layers is None and settings is None else layers
    if settings is None:  # unbounded features, which start from what the text shows
        overrides = {"feature_map": "exp", **overrides}
    chosen = checked_settings(model, family, settings, layers, overrides)
    if chosen.local is None or chosen.softmax_heads:
        got = "local=None" if chosen.local is None else "softmax_heads"
        raise ValueError(f'text: came with {got}, expected local="softmax" and no softmax_heads, which it chooses.')
    if not isinstance(effort, int | float) or not 0 < effort < float("inf"):
        raise ValueError(f"effort: got {effort!r}, expected a number above 0.")
    if encoder and (keep or context):
        name, value = ("keep", keep) if keep else ("context", context)
        raise ValueError(f"{name}: got {value!r} with {type(model).__name__}, an encoder, expected none.")
    sizes, count, began, training = None, 0, time.monotonic(), model.training
    if not encoder:
        sizes = sizes_of_conversion(model, chosen)
        context = model.config.max_position_embeddings if context is None else context
        count = count_kept_heads(sizes, 1 / 6 if keep is None else keep, context)
    model.eval()
    try:
        rows = (read_encoder_rows if encoder else read_rows)(model, tokenizer, text, seed, progress, effort)
        least = (chosen.window + 1) * chosen.block_size
        if not rows.held_out or rows.fit[0].shape[1] <= least:
            what = f"expected at least 6 rows of more than {least} tokens, the window and one block"
            got = f"{len(rows.fit)} rows of {rows.fit[0].shape[1]} tokens"
            raise ValueError(f"text: got {got}, {what}.")
        convert_in_place(model, settings, layers, overrides)
        gate_steps = max(1, round(GATE_STEPS * effort))
        report = learn_from_rows(model, rows, count, gate_steps, seed, checkpoint, progress)
        if sizes is not None:
            report["cache_bytes"] = cache_bytes(sizes, report["softmax_heads"])
        model.config.mhla_measured = report | {"seconds": round(time.monotonic() - began)}
    finally:
        model.train(training)
    logger.info("convert: %s, softmax stays in %s KV heads", report["kept" if count else "fitted"], count)
    return model


def read_rows(model, tokenizer, text, seed: int, progress: bool, effort: float = 1.0) -> Rows:
    """The rows of a conversion, of `ROW_TOKENS` tokens; to learn outputs from, `LONG_ROWS` of them are of `LONG_TOKENS`.

    Rows are shorter where the model has fewer positions or the text fewer tokens.

    Args:
        model: a causal language model; with `text="self"` still the softmax one.
        tokenizer: its tokenizer; None if `text` is tokens, or "self".
        text: as `data.open_text` takes it, or "self".
        seed: of the choice of passages, and of what the model writes.
        progress: show a bar.
        effort: multiplies the number of rows that outputs are learned from.

    Raises:
        ValueError: the text is too short.
    """
    positions = getattr(model.config, "max_position_embeddings", LONG_TOKENS)
    length, long = min(ROW_TOKENS, positions), min(LONG_TOKENS, positions)
    long_rows = round(LONG_ROWS * effort) if long > length else 0
    total = HELD_OUT_ROWS + GATE_ROWS + max(1, round(FIT_ROWS * effort))
    count = long_rows + -(-(total - long_rows) // (long // length))
    if isinstance(text, str) and text == "self":
        # A long row is several short ones: to write it at once would take longer.
        written = write_rows(model, tokenizer, count * (long // length), length, seed, progress)
        rows, name = written.view(count, -1), "self"
    else:
        source = open_text(text, tokenizer, vocab_size=model.get_input_embeddings().weight.shape[0])
        if isinstance(source, TokenRing) and len(source.tokens) < count * long:
            long = length = max(min(length, len(source.tokens) // 6), 1)
            long_rows, count = 0, min(total, len(source.tokens) // length)
        rows, name = source.reader(long, seed, 0).take(count)[0], source.name
    short = list(rows[long_rows:, : long // length * length].reshape(-1, 1, length))[: total - long_rows]
    held_out = min(HELD_OUT_ROWS, len(short) // 6)
    gates = held_out + min(GATE_ROWS, len(short) // 5)
    fit, last = short[gates:], len(short) - gates - 2 * (long_rows - 1)
    for number, row in enumerate(rows[:long_rows, None]):  # two short rows between two long ones
        fit.insert(max(last, 0) + 3 * number, row)
    return Rows(fit, short[held_out:gates], short[:held_out], name)


@torch.no_grad()
def write_rows(model, tokenizer, count: int, length: int, seed: int, progress: bool) -> torch.Tensor:
    """Text that a softmax language model samples by itself, at temperature 1: int64 `[count, length]` on the CPU.

    It begins with the tokenizer's beginning-of-sequence token, or its end-of-sequence token, and goes on behind the latter.
    """
    config = model.config
    ids = (getattr(tokenizer, "bos_token_id", None), config.bos_token_id, config.eos_token_id, 0)
    begin = next(x for x in (x[0] if isinstance(x, list) else x for x in ids) if x is not None)
    generator, batches = torch.Generator().manual_seed(seed), []
    with tqdm(total=count * length, desc="write text", unit="token", disable=not progress) as bar:
        for first in range(0, count, WRITING_BATCH):
            rows, cache = torch.full((min(WRITING_BATCH, count - first), 1), begin), None
            while rows.shape[1] < length:
                output, cache = forward_cached(model, rows[:, -1:].to(model.device), cache)
                chances = output.logits[:, -1].float().softmax(-1).cpu()
                rows = torch.cat([rows, chances.multinomial(1, generator=generator)], 1)
                bar.update(len(rows))
            batches.append(rows)
    return torch.cat(batches)


def count_kept_heads(sizes: dict[int, LayerSizes], keep: float | int | str, context: int) -> int:
    """How many KV heads of the MHLA layers keep softmax.

    Args:
        sizes: of `sizes_of_layers`.
        keep: a share up to 1.0, a number of heads, a percentage such as "17%", or a size such as "64MiB", which the cache of
            these layers has at most for one sequence.
        context: tokens of that sequence.

    Raises:
        ValueError: it is none of these, or it is all heads, or no number of heads fits.
    """
    heads, tokens, states = (sum(column) for column in zip(*sizes.values(), strict=True))
    count = None
    if isinstance(keep, str) and (size := parse_size(keep)) is not None:
        each = (tokens * context - states) / heads
        if size < states or each <= 0:
            what = f"expected at least {states} bytes, the state of MHLA alone, and a context where softmax has more"
            raise ValueError(f"keep: got {keep!r} at {context} tokens, {what}.")
        count = min(heads - 1, int((size - states) / each))
    elif isinstance(keep, str) and keep.endswith("%") and is_number(keep[:-1]):
        count = round(float(keep[:-1]) / 100 * heads)
    elif isinstance(keep, float) and 0 <= keep <= 1:
        count = round(keep * heads)
    elif is_whole(keep, 0):
        count = keep
    if count is None or count >= heads:
        what = f"expected less than all {heads} KV heads, as a share, a number, a percentage, or a size such as '64MiB'"
        raise ValueError(f"keep: got {keep!r}, {what}.")
    return count


def parse_size(text: str) -> int | None:
    """Bytes of a size such as "64MiB"; None if it is none."""
    number, unit = text[:-3], text[-3:]
    return int(float(number) * UNITS[unit]) if unit in UNITS and is_number(number) else None


def is_number(text: str) -> bool:
    """Whether a text is a number above or equal to 0."""
    return text.replace(".", "", 1).isdecimal()


class Checkpoint:
    """A file in which a conversion notes how far it is, so that the same call goes on there.

    Args:
        file: its path; None keeps nothing.
        identity: a hash of what decides the conversion.

    Raises:
        ValueError: the file was begun by another conversion.
    """

    def __init__(self, file: str | Path | None, identity: str):
        self.file, self.saved = None if file is None else Path(file), time.monotonic()
        self.content = {"identity": identity}
        if self.file is not None and self.file.exists():
            content = torch.load(self.file, weights_only=True)
            if content.get("identity") != identity:
                raise ValueError(f"checkpoint: got {str(file)!r} of another conversion, expected a new file.")
            self.content = content

    def run(self, name: str, fit, inputs: list, bar: tqdm) -> None:
        """Call `fit.step(*inputs)` for each of `inputs` that is still to come; `name` of the fit in the file."""
        if name in self.content:
            fit.load_state_dict(self.content[name])
        bar.update(fit.done)
        while fit.done < len(inputs):
            loss = fit.step(*inputs[fit.done])
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update()
            if time.monotonic() - self.saved < SAVE_EVERY and fit.done < len(inputs):
                continue
            self.saved = time.monotonic()
            if bar.disable:
                logger.info("%s: %d of %d, loss %.4f", name, fit.done, len(inputs), loss)
            if self.file is not None:
                self.content[name] = fit.state_dict()
                with atomic_file(self.file) as aside:
                    torch.save(self.content, aside)


def learn_from_rows(model, rows: Rows, count: int, gate_steps: int, seed: int, checkpoint, progress: bool) -> dict:
    """Fit the MHLA heads of a model that was just converted, choose its softmax heads, and measure it; in place.

    Args:
        model: in eval mode.
        rows: of `read_rows` or `read_encoder_rows`.
        count: KV heads that keep softmax.
        gate_steps: steps in which gates choose them.
        checkpoint: file of `Checkpoint`, or None.
        progress: show bars.

    Returns:
        What `model.config.mhla_measured` holds: plain values.
    """
    settings = MHLASettings.from_dict(model.config.mhla)
    identity = [[ids.tolist() for ids in (*rows.fit, *rows.gates)], settings.to_dict(), fingerprint_model(model)]
    checkpoint = Checkpoint(checkpoint, hash_json(identity))
    teacher = (EmbeddingScores if is_encoder(model) else TeacherScores)(model, rows.held_out)
    report = {"text": rows.name, "tokens": sum(x.numel() for x in (*rows.fit, *rows.gates)), "seed": seed}
    report |= {"original": teacher.scores, "converted": teacher.compare(model)}
    fit = OutputFit(model, steps=len(rows.fit))
    with tqdm(total=len(rows.fit), desc="fit MHLA to softmax", unit="row", disable=not progress) as bar:
        checkpoint.run("outputs", fit, [(x,) for x in rows.fit], bar)
    fit.finish()
    report["fitted"] = teacher.compare(model)
    chosen = {}
    if count:
        gates = GateFit(model, rows.gates)
        with tqdm(total=gate_steps, desc="choose softmax heads", unit="step", disable=not progress) as bar:
            checkpoint.run("gates", gates, [()] * gate_steps, bar)
        report["gates"] = {str(layer): [round(x, 3) for x in values] for layer, values in gates.by_layer().items()}
        chosen = largest_gates(gates.by_layer(), count)
        give_softmax_back(model, chosen)
        report["kept"] = teacher.compare(model)
    return report | {"softmax_heads": {str(layer): heads for layer, heads in chosen.items()}}


class TeacherScores:
    """Scores of the softmax original of a model on some rows, and of the model against it.

    Args:
        model: a converted language model.
        rows: token ids `[1, T]` each.

    Attributes:
        scores: "perplexity", and "recall": the mean log-probability of a row that is read a second time.
    """

    def __init__(self, model, rows: list[torch.Tensor]):
        self.rows = rows
        self.positions = torch.arange(rows[0].shape[1] - 1)[:: -(-(rows[0].shape[1] - 1) // MEASURED_POSITIONS)]
        with torch.no_grad(), softmax_instead(model):
            self.expected = [log_probabilities(model, ids, self.positions).half() for ids in rows]
            self.scores = self.own_scores(model, self.expected)

    @torch.no_grad()
    def compare(self, model) -> dict[str, float]:
        """The same scores of the model as it is, and "kl" to the original's predictions, nats per token."""
        predicted = [log_probabilities(model, ids, self.positions) for ids in self.rows]
        pairs = zip(self.expected, predicted, strict=True)
        kl = sum(float(mean_kl(expected.float(), x)) for expected, x in pairs) / len(predicted)
        return {"kl": round(kl, 4), **self.own_scores(model, predicted)}

    def own_scores(self, model, predicted: list[torch.Tensor]) -> dict[str, float]:
        """Perplexity from log-probabilities `[1, N, vocabulary]` at `positions` of each row, and recall."""
        losses, recalls = [], []
        for ids, x in zip(self.rows, predicted, strict=True):
            losses.append(-x.float().gather(-1, ids[:, self.positions + 1, None].to(x.device)))
            row = read_twice(model, ids)
            positions = compared_positions(row.shape[1], True)
            copy = log_probabilities(model, row, positions - 1)
            recalls.append(copy.gather(-1, row[:, positions, None].to(copy.device)).mean())
        perplexity = torch.cat(losses, 1).mean().exp()
        return {"perplexity": round(float(perplexity), 3), "recall": round(float(sum(recalls)) / len(recalls), 4)}


def give_softmax_back(model, chosen: dict[int, list[int]]) -> None:
    """Let KV heads of MHLA layers keep softmax, in place; a layer all of whose heads are chosen is the base's again.

    chosen: {layer: [KV head, ...]}; not all heads of the model.
    """
    layers, settings, config = mhla_layers(model), MHLASettings.from_dict(model.config.mhla), model.config
    whole = [index for index, heads in chosen.items() if len(heads) == layers[index].mhla.num_kv_heads]
    if len(whole) == len(layers):
        raise ValueError(f"keep: got all {sum(map(len, chosen.values()))} KV heads, expected fewer.")
    if config._attn_implementation == ATTENTION_NAME:
        set_attention_function(config, "sdpa")  # the default of transformers
    for index, heads in chosen.items():
        attention = layers[index]
        if index in whole:
            attention.__class__ = type(attention).__bases__[1]
            attention.config = config
            del attention.mhla
        else:
            keep_softmax_heads(attention, config, heads)
    settings.layers = [index for index in settings.layers if index not in whole]
    settings.softmax_heads = {str(index): heads for index, heads in chosen.items() if index not in whole} or None
    config.mhla = settings.to_dict()


def cache_bytes(sizes: dict[int, LayerSizes], chosen: dict[str, list[int]]) -> dict[str, dict[str, int]]:
    """Bytes of one sequence's cache in the MHLA layers of a model, at `REPORT_LENGTHS` tokens.

    Args:
        sizes: of `sizes_of_layers`.
        chosen: {layer: [KV head that keeps softmax, ...]}.

    Returns:
        For each length "softmax", with softmax in all heads, and "converted", the state and window of MHLA heads included.
    """
    lengths = {str(length): {"softmax": 0, "converted": 0} for length in REPORT_LENGTHS}
    for index, (heads, token, state) in sizes.items():
        share = len(chosen.get(str(index), ())) / heads
        for length, size in lengths.items():
            size["softmax"] += token * int(length)
            size["converted"] += round(share * token * int(length) + (1 - share) * state)
    return lengths
