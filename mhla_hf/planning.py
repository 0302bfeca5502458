"""plan(): what a conversion of a causal language model would be, from its configuration alone.

The model is made on the meta device and converted there, so that no weight is loaded or drawn. What is real is the attention
of one layer, while this machine times it.
"""

import copy
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .bench import seconds_of
from .checkpoints.load import choose_device, load_config, one_sentence
from .checkpoints.machine import describe_run
from .convert import convert
from .convert.families import softmax_config
from .convert.sizes import sizes_of_layers
from .convert.teacher import mhla_layers
from .convert.transformers_models import family_to_convert, what_is_lost
from .evaluation.records import render_rows
from .models.attention import softmax_attentions
from .models.cache import MHLACacheLayer
from .models.configuration import MHLAConfig
from .models.families import ENCODERS, VISION
from .models.language import MHLAForCausalLM
from .models.transformers_api import forward_cached
from .nn.settings import is_whole
from .training.costs import active_parameters, estimate_costs
from .training.recipe import read_recipe, recipe_names

LENGTHS = (2048, 8192, 32768, 131072)  # at which the cache is told
TIMED = tuple(256 << n for n in range(10))
ROUNDS = 3  # of timing a length
LONG = 1.0  # seconds for a length, after which no further round begins
SECONDS = 10.0  # for all lengths of prefill, and for all of decoding
REACH = 4  # times the longest length measured: beyond it no crossover is told
MIB, GIB = 2**20, 2**30
KINDS = ("softmax_ms", "mhla_ms")
WORTH = 2  # times that the cache has to shrink by
MOST = 0.5  # of a prompt's operations: attention that takes more of them should be sparse where MHLA is no help


def plan(
    model: str | Path | PreTrainedConfig, *, context: int, layers: str | Sequence[int] | None = None,
    recipe: str | Path = "language_llama_lite", device: torch.device | str | None = None, timing: bool = True,
    tflops: float | None = None, revision: str | None = None, progress: bool = True, command: str | None = None,
    **settings: object,
) -> dict[str, Any]:  # fmt: skip
    """What a conversion would change: layers, parameters, cache, time, and what its distillation takes.

    Args:
        model: folder or Hub id (of which config.json is read, nothing else), or a configuration of transformers.
        context: tokens of the sequences that the model is for, at least 1.
        layers, settings: as `convert` takes them; `mixing_form="decay"` only, which is the default.
        recipe: name or YAML file of the distillation.
        device: to time one layer's attention on, as torch names it; None: CUDA when there is one, else CPU. Of a device that
            is not here nothing is known. timing: False times nothing.
        tflops: what the training machine does in a second, in 1e12 operations; None: no hours are told.
        revision: on the Hub. progress: show a bar on stderr. command: the shell line that repeats it.

    Returns:
        Plain values for JSON, which `render_plan` makes readable. Bytes are those of one sequence.

    Raises:
        NotConvertible: of this model type nothing converts, with the reason. ValueError, TypeError: one sentence.
    """
    if not is_whole(context, 1):
        raise ValueError(f"context is {context!r}; expected the tokens of a sequence, a whole number of at least 1")
    check_speed(tflops)
    recipe = read_recipe(recipe)
    if recipe.task != "language":
        raise ValueError(f"recipe: it is for {recipe.task}; expected one for language")
    config = copy.deepcopy(model) if isinstance(model, PreTrainedConfig) else load_config(model, revision=revision)
    student = model_without_weights(config)
    attentions, held = softmax_attentions(student), cache_of_layers(student)
    parameters, active = student.num_parameters(), active_parameters(student)
    reasons = {index: what_is_lost(attention, config) for index, attention in attentions.items()}
    able = [index for index, reason in reasons.items() if reason is None]
    chosen = convert(student, layers=layers, **settings).config.mhla["layers"]
    core = attentions[chosen[0]].mhla
    if not hasattr(core, "form"):
        raise ValueError(f'mixing_form: got {core.settings.mixing_form!r}, whose state grows; expected "decay"')
    states, kept = cache_of_mhla(student), {}
    for index in sorted(set(range(config.num_hidden_layers)) - set(chosen)):
        reason = reasons.get(index, "it has no softmax attention") or "by the choice of layers"
        kept.setdefault(reason, []).append(index)
    products = (
        len(able) * core.num_heads * (core.q_map.head_dim + core.value_dim) * context
    )  # half of the pairs, times two
    record = {
        "model": None if isinstance(model, PreTrainedConfig) else str(model),
        "model_type": config.model_type,
        "context": context,
        "positions": getattr(config, "max_position_embeddings", None),
        "dtype": str(student.dtype).removeprefix("torch."),
        "mhla_layers": chosen,
        "kept_layers": kept,
        "parameters": {"base": parameters, "added": student.num_parameters() - parameters},
        "attention": products / (products + 2 * active),
        "cache": compare_caches(held, states, context),
        "timing": time_layer(core, student.dtype, device, progress, command) if timing else None,
        "distillation": estimate_costs(student, recipe, parameters, active, tflops),
    }
    return record | {"advice": advise(record)}


def check_speed(tflops):
    """ValueError, one sentence, unless it is None or what a machine can do."""
    if tflops is not None and not (isinstance(tflops, (int, float)) and 0 < tflops < math.inf):
        raise ValueError(f"tflops is {tflops!r}; expected a number above 0")


def model_without_weights(config):
    """The causal language model of a configuration, on the meta device. NotConvertible, ValueError: one sentence."""
    if getattr(config, "mhla", None) is not None:
        raise ValueError(f"model: got {config.model_type!r}, an MHLA model already; expected a softmax one")
    if (family := family_to_convert(config.model_type)) in (*ENCODERS, *VISION):
        what = "a vision tower" if family in VISION else "an encoder of text"
        raise ValueError(f"model: got {config.model_type!r}, {what}; expected a causal language model")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).eval()


def cache_of_saved(config, tokens):
    """Bytes of one sequence's cache at so many tokens, {"softmax", "mhla"}, of a saved converted decoder and of what it was.

    config: the saved model's. None: it is from scratch, or its state grows with the length (`mixing_form="softmax"`).
    """
    if not hasattr(config, "base_model_type") or config.mhla["mixing_form"] != "decay":
        return None
    with torch.device("meta"):
        softmax, student = (AutoModelForCausalLM.from_config(one).eval() for one in (softmax_config(config), config))
    states = cache_of_mhla(student)
    rows = compare_caches(cache_of_layers(softmax), states, tokens)["rows"]
    return next({name: row[name] for name in ("softmax", "mhla")} for row in rows if row["tokens"] == tokens)


def list_recipes(model=None, tflops=None) -> list[dict]:
    """The recipes of this package: name, task, base, about, stages; memory, flops and hours as `plan` counts them.

    model: folder or Hub id of a softmax language model, for those that convert one; None: memory and work are told of those
    that start from scratch. tflops: as `plan` takes it. Of images and diffusion they are not known.
    """
    check_speed(tflops)
    config, listed = None if model is None else load_config(model), []
    for name in recipe_names():
        recipe, student = read_recipe(name), None
        settings = dict(recipe.settings)
        if recipe.task == "language" and "preset" in settings:
            with torch.device("meta"):
                student = MHLAForCausalLM(MHLAConfig.preset(settings.pop("preset"), **settings))
            sizes = student.num_parameters(), active_parameters(student)
        elif recipe.task == "language" and config is not None:
            student = model_without_weights(copy.deepcopy(config))
            sizes = student.num_parameters(), active_parameters(student)
            student = convert(student, **settings)
        work = {} if student is None else estimate_costs(student, recipe, *sizes, tflops)
        told = ("name", "loss", "steps", "batch_size", "seq_len")
        stages = [{key: getattr(stage, key) for key in told if hasattr(stage, key)} for stage in recipe.stages]
        known = {key: work.get(key) for key in ("memory", "flops", "hours")}
        listed.append(
            {"name": name, "task": recipe.task, "base": recipe.base, "stages": stages, **known, "about": recipe.about}
        )
    return listed


def render_recipes(listed):
    """The list as a table."""
    rows = []
    for recipe in listed:
        stages = recipe["stages"]
        steps = " + ".join(f"{stage['name']} {stage['steps']:,}" for stage in stages)
        tokens = sum(stage["steps"] * stage["batch_size"] * stage.get("seq_len", 0) for stage in stages)
        numbers = tokens / 1e6 or None, recipe["memory"] and recipe["memory"] / GIB, recipe["hours"]
        rows.append([recipe["name"], recipe["task"], recipe["base"] or "", steps, *map(in_digits, numbers)])
    heads = ["recipe", "task", "base", "stages and their steps", "tokens, M", "GiB", "hours"]
    return render_rows(heads, rows, left=4)


def cache_of_layers(model):
    """Of each layer's cache (bytes of a token, the most tokens that are kept, bytes beside these), one sequence.

    Counted in the cache that the model itself fills with one token, without weights.
    """
    model.set_experts_implementation("batched_mm")  # others read how many tokens an expert got
    ids = torch.zeros(1, 1, dtype=torch.long, device="meta")
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta")  # in a mask of four axes nobody looks for padding
    about = f"model: the cache of model type {model.config.model_type!r} cannot be counted without weights"
    with one_sentence(about), torch.device("meta"), torch.no_grad():
        _, cache = forward_cached(model.base_model, ids, attention_mask=seen)
    layers = []
    for layer in cache.layers:
        tensors = [x for x in (getattr(layer, "keys", None), getattr(layer, "values", None)) if x is not None]
        states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
        window = getattr(layer, "sliding_window", None)
        most = math.inf if window is None else window - 1  # the newest token is not kept
        layers.append((sum(x.nbytes for x in tensors), most, sum(x.nbytes for x in states if x is not None)))
    return layers


def cache_of_mhla(student):
    """That of the MHLA layers of a model, by index: of a token in heads that keep softmax, and the state of the others."""
    cache = {}
    for index, size in sizes_of_layers(student).items():
        heads = mhla_layers(student)[index].mhla.heads
        share = 0 if heads is None else heads.counts[True] / size.heads
        cache[index] = round(share * size.token), math.inf, round((1 - share) * size.state)
    return cache


def compare_caches(held, states, context):
    """Rows by length, and the length from which the conversion's cache is the smaller one.

    held: as of `cache_of_layers`. states: the same of each layer that becomes MHLA, by its index.
    """

    def total(layers, tokens):
        return sum(token * min(tokens, most) + beside for token, most, beside in layers)

    converted = [states.get(index, layer) for index, layer in enumerate(held)]
    lengths = sorted({*LENGTHS, context})
    rows = [{"tokens": n, "softmax": total(held, n), "mhla": total(converted, n)} for n in lengths]
    each = sum(held[index][0] - states[index][0] for index in states)
    smaller_from = sum(state for _, _, state in states.values()) // each + 1
    return {"rows": rows, "smaller_from": smaller_from}


def time_layer(core, dtype, device, progress, command):
    """How long softmax and `core` (on the meta device) take for a prompt and for the next token after it, and crossovers."""
    try:
        device = choose_device(device)
    except ValueError:
        return {"unknown": f"the speed on {device!r} is not known: it is not here"}
    core, timed = started_core(core, device), {}
    with torch.inference_mode():
        for what, make in WORKS.items():
            rows = time_lengths(lambda tokens, make=make: make(core, tokens, dtype, device), device, progress)
            timed[what] = {"rows": rows, **crossover(rows)}
    return {**describe_run(command, device), **timed}


def started_core(core, device):
    """A copy of a core, with the weights that it starts from, in eval mode."""
    core = copy.deepcopy(core).to_empty(device=device)
    for module in core.modules():
        for name, value in module.initial_values().items() if hasattr(module, "initial_values") else ():
            module.get_parameter(name).data.copy_(value)
    return core.eval()


def time_lengths(make, device, progress):
    """Rows of milliseconds by length, until MHLA is clearly ahead or the next one would exceed SECONDS.

    make: from a length to {"softmax", "mhla": what is timed}; the two take turns, and the fastest turn of each counts.
    """
    rows, spent, expected = [], 0.0, 0.0
    for tokens in tqdm(TIMED, desc="timing", disable=not progress):
        if spent + expected > SECONDS:
            break
        best, works, begun = {}, make(tokens), spent
        for _ in range(ROUNDS):
            took = {name: seconds_of(work, device) for name, work in works.items()}
            best = {name: min(best.get(name, math.inf), seconds) for name, seconds in took.items()}
            spent += sum(took.values())
            if spent - begun > LONG:
                break
        rows.append({"tokens": tokens, **{f"{name}_ms": 1e3 * seconds for name, seconds in best.items()}})
        expected = math.inf if best["softmax"] > 1.5 * best["mhla"] else 4 * best["softmax"] + 2 * best["mhla"]
    return rows


def operands(core, tokens, dtype, device):
    """Random q `[1, H, T, K]`, k `[1, G, T, K]` and v `[1, G, T, V]` for a core."""
    sizes = (core.num_heads, core.q_map.head_dim), (core.num_kv_heads, core.k_map.head_dim)
    sizes = *sizes, (core.num_kv_heads, core.value_dim)
    return [torch.randn(1, heads, tokens, width, dtype=dtype, device=device) for heads, width in sizes]


def softmax_of(core):
    """Softmax attention of q, k and v, with the heads of `core`, as transformers' models call it."""
    grouped = SimpleNamespace(num_key_value_groups=core.num_heads // core.num_kv_heads)
    return lambda q, k, v: sdpa_attention_forward(grouped, q, k, v, None)


def prefill_work(core, tokens, dtype, device):
    """{"softmax", "mhla": a function that attends over a prompt and keeps it, as `generate` does by default}."""
    q, k, v = operands(core, tokens, dtype, device)
    softmax, turned = softmax_of(core), [x.transpose(1, 2) for x in (q, k, v)]
    return {
        "softmax": lambda: softmax(q, *DynamicLayer().update(k, v)),
        "mhla": lambda: core(*turned, cache=MHLACacheLayer()),
    }


def decoding_work(core, tokens, dtype, device):
    """The same for one token behind `tokens` others."""
    q, k, v = operands(core, 1, dtype, device)
    softmax, turned = softmax_of(core), [x.transpose(1, 2) for x in (q, k, v)]
    past, layer, cache = operands(core, tokens, dtype, device)[1:], DynamicLayer(), MHLACacheLayer()
    layer.update(*past)
    core(*turned, cache=cache)  # the state is as large, and a step as long, after one token as after many

    def step():
        layer.keys, layer.values = past  # or each call would make it longer
        return softmax(q, *layer.update(k, v))

    return {"softmax": step, "mhla": lambda: core(*turned, cache=cache)}


WORKS = {"prefill": prefill_work, "decoding": decoding_work}


def crossover(rows):
    """{"faster_from": tokens from which MHLA stays the faster one, or None, "known_to": tokens up to which that is known}.

    Between two lengths, and beyond the longest by at most REACH times, the ratio of the times is taken for a line: softmax's
    prefill per token and its next token grow with the length, MHLA's do not.
    """
    points = [(row["tokens"], row["softmax_ms"] / row["mhla_ms"] - 1) for row in rows]
    longest, slower = rows[-1]["tokens"], [place for place, (_, ahead) in enumerate(points) if ahead < 0]
    if not slower:
        return {"faster_from": rows[0]["tokens"], "known_to": longest}
    first = min(slower[-1], len(points) - 2)
    (tokens, ahead), (more, further) = points[max(first, 0)], points[first + 1]
    if further <= ahead:
        return {"faster_from": None, "known_to": longest}
    found, reach = tokens - ahead * (more - tokens) / (further - ahead), REACH * longest
    return {"faster_from": round(found) if found <= reach else None, "known_to": reach}


def advise(record):
    """One or two sentences."""
    context, positions, timing = record["context"], record["positions"], record["timing"] or {}
    if positions is not None and context > positions:
        return f"Plan for at most {positions:,} tokens: the model has no more positions, with softmax or with MHLA."
    row = next(row for row in record["cache"]["rows"] if row["tokens"] == context)
    times, after = row["softmax"] / row["mhla"], f"at {context:,} tokens"
    known = {what: timing[what]["faster_from"] or timing[what]["known_to"] for what in WORKS if what in timing}
    slower = [what for what, tokens in known.items() if context < tokens]
    unsure = [what for what in WORKS if what not in slower and not timing.get(what, {}).get("faster_from")]
    stay = None
    if times < WORTH:
        stay = f"{after} the cache would shrink by a factor of {times:.2f}, and {WORTH} is the least"
    elif len(slower) == len(WORKS):
        stay = f"{after} neither prefill nor decoding is faster with MHLA"
    if stay and record["attention"] > MOST:
        share = f"{record['attention']:.0%} of a prompt's operations are attention's"
        return f"Use sparse attention: {share}, and {stay}."
    if stay:
        return f"Stay with softmax: {stay}."
    but = f"; {slower[0]} is slower" if slower else ""
    but += f"; whether {' or '.join(unsure)} is faster there is not known" if unsure else ""
    won = f"{len(record['mhla_layers'])} MHLA layers save {(row['softmax'] - row['mhla']) / MIB:,.1f} MiB of cache"
    how = "mhla-hf convert MODEL OUT --text FILE --keep 1/6"
    return f"Convert: {after} {won} ({times:.2f} times smaller){but}. Let measurement choose the layers: {how}"


def render_plan(record):
    """The record as a page of text."""
    chosen, kept, parameters = record["mhla_layers"], record["kept_layers"], record["parameters"]
    count, cache = len(chosen) + sum(map(len, kept.values())), record["cache"]
    added, share = parameters["added"] / parameters["base"], f"{record['attention']:.0%}"
    sizes = [(row["tokens"], row["softmax"] / MIB, row["mhla"] / MIB) for row in cache["rows"]]
    rows = [[f"{n:,}", f"{old:,.1f}", f"{new:,.1f}", f"{old / new:.2f}"] for n, old, new in sizes]
    return "\n".join([
        f"{record['model'] or record['model_type']}: {record['dtype']}, sequences of {record['context']:,} tokens",
        "",
        f"{len(chosen)} of {count} layers become MHLA: {', '.join(map(str, chosen))}",
        *(f"{len(layers)} stay as they are: {', '.join(map(str, layers))} ({why})" for why, layers in kept.items()),
        f"{parameters['added']:,} parameters are added to {parameters['base']:,} ({added:.2%})",
        f"{share} of the softmax model's operations on such a prompt are attention's products",
        "",
        render_rows(["cache, tokens", "softmax, MiB", "converted, MiB", "times smaller"], rows, left=0),
        f"The converted model's cache is smaller from {cache['smaller_from']:,} tokens on.",
        "",
        *render_timing(record["timing"], record["dtype"]),
        *render_work(record["distillation"]),
        "",
        record["advice"],
    ])  # fmt: skip


def in_digits(number):
    """Three digits of a number below a hundred, all before the point of others; nothing of None."""
    if number is None:
        return ""
    return f"{number:.3g}" if number < 100 else f"{number:,.0f}"


def in_hours(hours):
    """A duration in the largest of hours, minutes and seconds of which it has one."""
    unit, size = ("hours", 1) if hours >= 1 else ("minutes", 60) if 60 * hours >= 1 else ("seconds", 3600)
    return f"{hours * size:,.1f} {unit}"


def render_timing(timing, dtype):
    """Lines on the time of one layer; none where nothing was timed."""
    if timing is None or "unknown" in timing:
        return [f"Time: {timing['unknown']}.", ""] if timing else []

    def cells(row):
        return [f"{row['tokens']:,}", *(in_digits(row[kind]) for kind in KINDS)] if row else [""] * 3

    pairs = itertools.zip_longest(*(timing[what]["rows"] for what in WORKS))
    heads = ["prefill, tokens", "softmax, ms", "MHLA, ms", "next token after", "softmax, ms", "MHLA, ms"]
    machine = f"{timing['hardware']}, torch {timing['versions']['torch']}"
    lines = [render_rows(heads, [[*cells(prefill), *cells(step)] for prefill, step in pairs], left=0)]
    lines.append(f"Attention of one layer, one sequence, {dtype}, not compiled; {machine}.")
    for what in WORKS:
        tokens, known = timing[what]["faster_from"], timing[what]["known_to"]
        beyond = f"slower up to {known:,} tokens; longer contexts were not measured"
        lines.append(f"With MHLA {what} is {f'faster from {tokens:,} tokens on' if tokens else beyond}.")
    return [*lines, ""]


def render_work(work):
    """Lines on the distillation."""
    rows = []
    for stage in work["stages"]:
        sizes = [sum(stage["memory"].values()), *stage["memory"].values()]
        counts = f"{stage['trained'] / 1e6:,.1f}", f"{stage['tokens'] / 1e6:,.1f}"
        rows.append([stage["name"], *counts, *(f"{size / GIB:,.2f}" for size in sizes)])
    heads = ["distillation", "trains, M", "tokens, M", "GiB", *work["stages"][0]["memory"]]
    time = "" if work["hours"] is None else f", {in_hours(work['hours'])} at {work['tflops']:g} TFLOP/s"
    said = f"In all {work['flops']:.2g} FLOPs{time}."
    return [render_rows(heads, rows, left=1), said]
