"""`plan`: estimate the effects of converting a causal language model from its configuration alone.

The model is built and converted on the meta device, so no weights are loaded or initialized. Only the attention of one
layer is allocated on a real device, to time it.
"""

import copy
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .checkpoints.load import choose_device, load_config
from .checkpoints.provenance import describe_run
from .conversion import convert
from .conversion.model_family import softmax_config
from .conversion.sizes import cache_of_layers, cache_of_mhla, compare_caches
from .conversion.transformers_models import family_to_convert, reason_to_keep_softmax
from .evaluation.speed import clock
from .models.families import ENCODERS, VISION
from .models.language.cache import MHLACacheLayer
from .models.language.causal_attention import find_causal_attentions
from .nn.settings import is_whole
from .plots import render_rows

TIMED_LENGTHS = tuple(256 << n for n in range(10))
ROUNDS = 3  # measurements per length
MIN_TURN_SECONDS = 0.02  # in which a call is repeated and timed
SECONDS_PER_LENGTH = 1.0  # after which no further round of a length begins
SECONDS_PER_PHASE = 10.0  # for all lengths, for prefill and for decoding each
EXTRAPOLATION = 4  # crossovers are extrapolated to this multiple of the longest measured length
MIN_CACHE_REDUCTION = 2  # factor by which the cache has to shrink to recommend a conversion
MAX_ATTENTION_SHARE = 0.5  # of a prompt's operations, above which sparse attention is recommended if MHLA does not help
MIB = 2**20

Work = Callable[[], Any]  # a call to be timed


def plan(
    model: str | Path | PreTrainedConfig, *, context: int, layers: str | Sequence[int] | None = None,
    device: torch.device | str | None = None, timing: bool = True, revision: str | None = None, progress: bool = True,
    command: str | None = None, **settings: object,
) -> dict[str, Any]:  # fmt: skip
    """Estimate the effects of a conversion on layers, parameters, cache and speed.

    Args:
        model: Folder or Hub id, or a transformers configuration. Only config.json is read.
        context: Length of the sequences for which the model is used, in tokens.
        layers, settings: See `convert`; only `mixing_form="decay"` (the default) is supported.
        device: Device on which to time the attention of one layer (default: CUDA if there is a GPU, else the CPU). If it
            is not available on this machine, the speed is reported as unknown.
        timing: Whether to time the attention.
        revision: Branch, tag or commit on the Hub.
        progress: Whether to show a progress bar.
        command: The shell command that repeats the estimate, for the record.

    Returns:
        A JSON-serializable dict, which `render_plan` renders as text. Among its keys are "mhla_layers", "kept_layers" (by
        reason), "parameters", "cache" (bytes per sequence), "timing" (None if not requested), and "advice".

    Raises:
        NotConvertible: Nothing in this model type can be converted; the message gives the reason.
        ValueError, TypeError: An argument is not valid.
    """
    if not is_whole(context, 1):
        raise ValueError(f"context: got {context!r}, expected the tokens of a sequence, a whole number of at least 1.")
    config = copy.deepcopy(model) if isinstance(model, PreTrainedConfig) else load_config(model, revision=revision)
    student = model_without_weights(config)
    attentions = find_causal_attentions(student)
    softmax_caches = cache_of_layers(student)
    parameters = student.num_parameters()
    active = count_active_parameters(student)
    reasons = {index: reason_to_keep_softmax(attention, config) for index, attention in attentions.items()}
    num_convertible = sum(reason is None for reason in reasons.values())
    options: dict[str, Any] = settings
    converted_layers = convert(student, layers=layers, **options).config.mhla["layers"]
    core: Any = attentions[converted_layers[0]].mhla
    if not hasattr(core, "form"):
        raise ValueError(f'mixing_form: got {core.settings.mixing_form!r}, whose state grows, expected "decay".')
    kept_layers: dict[str, list[int]] = {}
    for index in sorted(set(range(config.num_hidden_layers)) - set(converted_layers)):
        reason = reasons.get(index, "it has no softmax attention") or "by the choice of layers"
        kept_layers.setdefault(reason, []).append(index)
    # Operations per token of q k^T and of the product with v: two for each pair, but half of the pairs are masked.
    products = num_convertible * core.num_heads * (core.q_map.head_dim + core.value_dim) * context
    record = {
        "model": None if isinstance(model, PreTrainedConfig) else str(model),
        "model_type": config.model_type,
        "context": context,
        "positions": getattr(config, "max_position_embeddings", None),
        "dtype": str(student.dtype).removeprefix("torch."),
        "mhla_layers": converted_layers,
        "kept_layers": kept_layers,
        "parameters": {"base": parameters, "added": student.num_parameters() - parameters},
        "attention": products / (products + 2 * active),
        "cache": compare_caches(softmax_caches, cache_of_mhla(student), context),
        "timing": time_layer(core, student.dtype, device, progress, command) if timing else None,
    }
    return {**record, "advice": advise(record)}


def compare_saved_caches(config: Any, tokens: int) -> dict[str, int] | None:
    """Return the cache sizes of a converted decoder and of its softmax original.

    Args:
        config: Configuration of the converted model.
        tokens: Length of the sequence; at most the model's positions are counted.

    Returns:
        A dict with "tokens", and "softmax" and "mhla" in bytes per sequence. None for a model from scratch and for a model
        whose state grows with the length (`mixing_form` other than "decay").
    """
    if not hasattr(config, "base_model_type") or config.mhla["mixing_form"] != "decay":
        return None
    with torch.device("meta"):
        original = AutoModelForCausalLM.from_config(softmax_config(config)).eval()
        student = AutoModelForCausalLM.from_config(config).eval()
    tokens = min(tokens, config.max_position_embeddings)
    rows = compare_caches(cache_of_layers(original), cache_of_mhla(student), tokens)["rows"]
    return next(row for row in rows if row["tokens"] == tokens)


def model_without_weights(config: Any) -> Any:
    """Return the causal language model of a configuration, in eval mode on the meta device.

    Raises:
        NotConvertible, ValueError: The model is not a softmax language model that can be converted.
    """
    start = f"model: got {config.model_type!r}"
    if getattr(config, "mhla", None) is not None:
        raise ValueError(f"{start}, an MHLA model already, expected a softmax one.")
    if (family := family_to_convert(config.model_type)) in (*ENCODERS, *VISION):
        kind = "a vision tower" if family in VISION else "an encoder of text"
        raise ValueError(f"{start}, {kind}, expected a causal language model.")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).eval()


def count_active_parameters(model: Any) -> int:
    """Return the number of parameters that each token uses.

    In a mixture of experts, only the experts that a token is routed to are counted.

    Args:
        model: A transformers model, which may be on the meta device.
    """
    config = model.config
    experts_per_token = getattr(config, "num_experts_per_tok", None)
    count_fields = ("num_local_experts", "num_experts", "n_routed_experts")
    expert_counts = {getattr(config, field, None) for field in count_fields if experts_per_token}
    active = 0
    for parameter in model.parameters():
        if parameter.ndim == 3 and parameter.shape[0] in expert_counts:  # the stacked matrices of all experts
            active += parameter.numel() * experts_per_token // len(parameter)
        else:
            active += parameter.numel()
    return active


def time_layer(
    core: Any, dtype: torch.dtype, device: torch.device | str | None, progress: bool, command: str | None
) -> dict[str, Any]:
    """Time softmax attention and the MHLA core of one layer, for prefill and for decoding one token.

    Args:
        core: The MHLA core, on the meta device.
        dtype: Dtype of the inputs.
        device, progress, command: See `plan`.

    Returns:
        A dict with the results of `describe_run` and with "prefill" and "decoding". Each of these two is a dict with "rows"
        (see `time_lengths`) and the results of `find_crossover`. If the device is not available, a dict with only
        "unknown", the reason.
    """
    try:
        device = choose_device(device)
    except ValueError:
        return {"unknown": f"the speed on {device!r} is not known: it is not here"}
    core = initialize_core(core, device)
    timed = {}
    with torch.inference_mode():
        for phase, make_work in WORKS.items():
            rows = time_lengths(partial(make_work, core, dtype, device), device, progress)
            timed[phase] = {"rows": rows, **find_crossover(rows)}
    return {**describe_run(command, device), **timed}


def initialize_core(core: Any, device: torch.device | str) -> Any:
    """Return a copy of an MHLA core on `device`, in eval mode and with the weights that a new core starts with."""
    core = copy.deepcopy(core).to_empty(device=device)
    for module in core.modules():
        for name, value in module.initial_values().items() if hasattr(module, "initial_values") else ():
            module.get_parameter(name).data.copy_(value)
    return core.eval()


def time_lengths(
    make_works: Callable[[int], dict[str, Work]], device: torch.device, progress: bool
) -> list[dict[str, Any]]:
    """Time softmax and MHLA at increasing lengths, until MHLA is clearly faster or the next length would take too long.

    Args:
        make_works: Function that takes a length in tokens and returns the functions to time, "softmax" and "mhla".
        device: Device on which the functions run.
        progress: Whether to show a progress bar.

    Returns:
        A list of dicts with "tokens", "softmax_ms" and "mhla_ms", one per length. Both functions are timed in turns, for at
        most `ROUNDS` rounds; each time is the shortest of the function in any round.
    """
    rows = []
    spent = 0.0
    expected = 0.0
    for tokens in tqdm(TIMED_LENGTHS, desc="timing", disable=not progress):
        if spent + expected > SECONDS_PER_PHASE:
            break
        works = make_works(tokens)
        spent_before = spent
        best: dict[str, float] = {}
        for _ in range(ROUNDS):
            times = {name: time_call(work, device) for name, work in works.items()}
            best = {name: min(best.get(name, math.inf), seconds) for name, seconds in times.items()}
            spent += sum(times.values())
            if spent - spent_before > SECONDS_PER_LENGTH:
                break
        rows.append({"tokens": tokens, **{f"{name}_ms": 1e3 * seconds for name, seconds in best.items()}})
        # At twice the length, softmax takes four times as long and MHLA twice.
        expected = math.inf if best["softmax"] > 1.5 * best["mhla"] else 4 * best["softmax"] + 2 * best["mhla"]
    return rows


def time_call(function: Work, device: torch.device) -> float:
    """Return the seconds per call, averaged over repeated calls for at least `MIN_TURN_SECONDS`."""
    calls = 0
    start = clock(device)
    while calls == 0 or time.perf_counter() - start < MIN_TURN_SECONDS:
        function()
        calls += 1
    return (clock(device) - start) / calls


def make_random_inputs(core: Any, tokens: int, dtype: torch.dtype, device: torch.device | str) -> list[torch.Tensor]:
    """Return random q [1, H, T, K], k [1, G, T, K] and v [1, G, T, V] for a core with H query heads and G KV heads.

    T is `tokens`; K and V are the widths of a key and of a value.
    """
    sizes = (
        (core.num_heads, core.q_map.head_dim),
        (core.num_kv_heads, core.k_map.head_dim),
        (core.num_kv_heads, core.value_dim),
    )
    return [torch.randn(1, heads, tokens, width, dtype=dtype, device=device) for heads, width in sizes]


def make_softmax_attention(core: Any) -> Callable[..., Any]:
    """Return a function of q, k and v that calls transformers' softmax attention for the numbers of heads of `core`."""
    module = SimpleNamespace(num_key_value_groups=core.num_heads // core.num_kv_heads)
    return lambda q, k, v: sdpa_attention_forward(module, q, k, v, None)


def make_prefill_work(core: Any, dtype: torch.dtype, device: torch.device | str, tokens: int) -> dict[str, Work]:
    """Return a dict of functions, "softmax" and "mhla", that attend over `tokens` tokens and fill a new cache."""
    q, k, v = make_random_inputs(core, tokens, dtype, device)
    softmax = make_softmax_attention(core)
    transposed = [x.transpose(1, 2) for x in (q, k, v)]
    return {
        "softmax": lambda: softmax(q, *DynamicLayer().update(k, v)),
        "mhla": lambda: core(*transposed, cache=MHLACacheLayer()),
    }


def make_decoding_work(core: Any, dtype: torch.dtype, device: torch.device | str, tokens: int) -> dict[str, Work]:
    """Return a dict of functions, "softmax" and "mhla", that decode one token after a prompt of `tokens` tokens."""
    q, k, v = make_random_inputs(core, 1, dtype, device)
    softmax = make_softmax_attention(core)
    transposed = [x.transpose(1, 2) for x in (q, k, v)]
    _, past_k, past_v = make_random_inputs(core, tokens, dtype, device)
    layer = DynamicLayer()
    layer.update(past_k, past_v)
    cache = MHLACacheLayer()
    core(*transposed, cache=cache)  # one token is enough: neither the state nor the time of a step grows

    def step() -> Any:
        layer.keys, layer.values = past_k, past_v  # `update` appends to them
        return softmax(q, *layer.update(k, v))

    return {"softmax": step, "mhla": lambda: core(*transposed, cache=cache)}


WORKS = {"prefill": make_prefill_work, "decoding": make_decoding_work}


def find_crossover(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Find the length from which MHLA is faster.

    The ratio of the times is interpolated linearly between two lengths. It is extrapolated up to `EXTRAPOLATION` times the
    longest length, because the time per token grows linearly with the length for softmax and is constant for MHLA.

    Args:
        rows: The rows that `time_lengths` returned.

    Returns:
        A dict with "faster_from" (tokens from which MHLA stays faster, or None) and "known_to" (tokens up to which this is
        known).
    """
    points = [(row["tokens"], row["softmax_ms"] / row["mhla_ms"] - 1) for row in rows]
    longest = rows[-1]["tokens"]
    slower = [index for index, (_, advantage) in enumerate(points) if advantage < 0]
    if not slower:
        return {"faster_from": rows[0]["tokens"], "known_to": longest}
    last = len(points) - 1
    index = max(min(slower[-1], last - 1), 0)
    tokens, advantage = points[index]
    next_tokens, next_advantage = points[min(index + 1, last)]
    if next_advantage <= advantage:
        return {"faster_from": None, "known_to": longest}
    crossing = tokens - advantage * (next_tokens - tokens) / (next_advantage - advantage)
    limit = EXTRAPOLATION * longest
    return {"faster_from": round(crossing) if crossing <= limit else None, "known_to": limit}


def advise(record: Mapping[str, Any]) -> str:
    """Return one or two sentences that advise whether to convert.

    Args:
        record: The result of `plan` without "advice".
    """
    context = record["context"]
    positions = record["positions"]
    timing = record["timing"] or {}
    if positions is not None and context > positions:
        return f"Plan for at most {positions:,} tokens: the model has no more positions, with softmax or with MHLA."
    row = next(row for row in record["cache"]["rows"] if row["tokens"] == context)
    reduction = row["softmax"] / row["mhla"]
    at_context = f"at {context:,} tokens"
    slower_up_to = {
        phase: timing[phase]["faster_from"] or timing[phase]["known_to"] for phase in WORKS if phase in timing
    }
    slower = [phase for phase, tokens in slower_up_to.items() if context < tokens]
    unknown = [phase for phase in WORKS if phase not in slower and not timing.get(phase, {}).get("faster_from")]
    against = None
    if reduction < MIN_CACHE_REDUCTION:
        shrinkage = f"shrink by a factor of {reduction:.2f}, and {MIN_CACHE_REDUCTION} is the least"
        against = f"{at_context} the cache would {shrinkage}"
    elif len(slower) == len(WORKS):
        against = f"{at_context} neither prefill nor decoding is faster with MHLA"
    if against and record["attention"] > MAX_ATTENTION_SHARE:
        share = f"{record['attention']:.0%} of a prompt's operations are attention's"
        return f"Use sparse attention: {share}, and {against}."
    if against:
        return f"Stay with softmax: {against}."
    caveats = f"; {slower[0]} is slower" if slower else ""
    caveats += f"; whether {' or '.join(unknown)} is faster there is not known" if unknown else ""
    saved = f"{len(record['mhla_layers'])} MHLA layers save {(row['softmax'] - row['mhla']) / MIB:,.1f} MiB of cache"
    command = "mhla-hf convert MODEL OUT --text FILE --keep 1/6"
    benefit = f"{at_context} {saved} ({reduction:.2f} times smaller){caveats}"
    return f"Convert: {benefit}. Let measurement choose the layers: {command}"


def render_plan(record: Mapping[str, Any]) -> str:
    """Render the result of `plan` as a page of text."""
    converted, kept, parameters = record["mhla_layers"], record["kept_layers"], record["parameters"]
    count = len(converted) + sum(map(len, kept.values()))
    cache = record["cache"]
    added = parameters["added"] / parameters["base"]
    attention = f"{record['attention']:.0%}"
    sizes = [(row["tokens"], row["softmax"] / MIB, row["mhla"] / MIB) for row in cache["rows"]]
    rows = [[f"{n:,}", f"{softmax:,.1f}", f"{mhla:,.1f}", f"{softmax / mhla:.2f}"] for n, softmax, mhla in sizes]
    return "\n".join([
        f"{record['model'] or record['model_type']}: {record['dtype']}, sequences of {record['context']:,} tokens",
        "",
        f"{len(converted)} of {count} layers become MHLA: {', '.join(map(str, converted))}",
        *(f"{len(layers)} stay as they are: {', '.join(map(str, layers))} ({why})" for why, layers in kept.items()),
        f"{parameters['added']:,} parameters are added to {parameters['base']:,} ({added:.2%})",
        f"{attention} of the softmax model's operations on such a prompt are attention's products",
        "",
        render_rows(["cache, tokens", "softmax, MiB", "converted, MiB", "times smaller"], rows, left=0),
        f"The converted model's cache is smaller from {cache['smaller_from']:,} tokens on.",
        "",
        *render_timing(record["timing"], record["dtype"]),
        record["advice"],
    ])  # fmt: skip


def format_three_digits(number: float | None) -> str:
    """Format a number below 100 with three significant digits and any other as an integer; return "" for None."""
    if number is None:
        return ""
    return f"{number:.3g}" if number < 100 else f"{number:,.0f}"


def render_timing(timing: Mapping[str, Any] | None, dtype: str) -> list[str]:
    """Render the result of `time_layer` as lines of text; return [] for None.

    Args:
        timing: The result of `time_layer`; None if timing was not requested.
        dtype: Name of the dtype of the inputs.
    """
    if timing is None:
        return []
    if "unknown" in timing:
        return [f"Time: {timing['unknown']}.", ""]

    def cells(row: Mapping[str, Any] | None) -> list[str]:
        return (
            [f"{row['tokens']:,}", *(format_three_digits(row[key]) for key in ("softmax_ms", "mhla_ms"))]
            if row
            else [""] * 3
        )

    pairs = itertools.zip_longest(*(timing[phase]["rows"] for phase in WORKS))
    header = ["prefill, tokens", "softmax, ms", "MHLA, ms", "next token after", "softmax, ms", "MHLA, ms"]
    machine = f"{timing['hardware']}, torch {timing['versions']['torch']}"
    lines = [render_rows(header, [[*cells(prefill), *cells(decoding)] for prefill, decoding in pairs], left=0)]
    lines.append(f"Attention of one layer, one sequence, {dtype}, not compiled; {machine}.")
    for phase in WORKS:
        tokens = timing[phase]["faster_from"]
        slower = f"slower up to {timing[phase]['known_to']:,} tokens; longer contexts were not measured"
        lines.append(f"With MHLA {phase} is {f'faster from {tokens:,} tokens on' if tokens else slower}.")
    return [*lines, ""]
