"""analyze(): any models side by side on the same inputs, as JSON, a table and pictures.

What a model gets to see follows from what it is (`inputs.py`: text for a language model, images for a classifier); for every
other kind the caller gives the inputs. `attention.py` has the matrices, `measures.py` what is measured of them.
"""

import re
from pathlib import Path

from ..checkpoints.files import write_json
from ..checkpoints.load import check_model_name, choose_device, is_pipeline, kind_of_class
from ..checkpoints.machine import describe_run
from ..evaluation.subjects import check_writable
from .figures import plot_layers, plot_maps, plot_mixing
from .inputs import image_batch, load_any, prompt_batch, text_batch
from .measures import attention_maps, describe_mixing, measure_calls, record_model

FORMAT_VERSION = 1
RECORD = "analysis.json"


def analyze(
    models,
    inputs=None,
    *,
    data=None,
    out=None,
    samples=8,
    length=256,
    tolerance=None,
    device=None,
    trust_remote_code=False,
    progress=True,
    command=None,
):
    """Rank and entropy of the attention of each model, layer by layer (figure 3b), with maps (3a) and mixing (4b).

    Args:
        models: a folder, a Hub id, a model or a pipeline of diffusers; a list of them; or a dict label -> one of them.
        inputs: keyword arguments of the models' forward, or of the pipelines' call; needed for what is neither a causal
            language model, an image classifier nor a pipeline (a diffusers transformer: latents, timestep, conditions).
        data: what to look at instead of the default. Text (file, folder or dataset id; default the Python language
            reference) for language models; images (folder, dataset id; default scikit-learn's digits) for classifiers;
            the prompt of a pipeline.
        out: folder for analysis.json, mixing.json, layers.png, maps.png, mixing.png; None writes nothing.
        samples: sequences or images. length: tokens in a sequence.
        tolerance: of the rank, as in `measure_calls`. device: where the models run; None: CUDA when there is one.

    Returns:
        What analysis.json holds: "models" -> label -> what `measure_calls` gives; "inputs", versions, hardware, command.

    Raises:
        ValueError, TypeError, ImportError: one sentence.
    """
    for name, value in (("samples", samples), ("length", length)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: got {value!r}, expected a whole number of at least 1")
    if tolerance is not None and not 0 <= tolerance < 1:
        raise ValueError(f"tolerance: got {tolerance!r}, expected a number from 0 to below 1")
    device = choose_device(device)
    named = _labels(models)
    for model in named.values():
        if isinstance(model, (str, Path)):
            check_model_name(model, pipeline=is_pipeline(model))
    if out is not None:
        out = Path(out).expanduser()
        if out.exists() and not out.is_dir():
            raise ValueError(f"out: {str(out)!r} is a file, expected a folder to make")
        check_writable(out / RECORD)
    record = {"format_version": FORMAT_VERSION, "models": {}, "inputs": {}}
    maps, mixing = {}, {}
    for label, given in named.items():
        model, run, batch, what = _prepare(given, inputs, data, samples, length, device, trust_remote_code)
        calls = record_model(model, [batch], run)
        record["models"][label] = measure_calls(calls, tolerance=tolerance, progress=progress)
        record["inputs"][label] = what
        maps[label], mixing[label] = attention_maps(calls), describe_mixing(model)
    record |= describe_run(command, device)
    if out is not None:
        _write(out, record, maps, mixing)
    return record


def _labels(models):
    if isinstance(models, dict):
        named = dict(models)
    else:
        several = list(models) if isinstance(models, (list, tuple)) else [models]
        for parts in (1, 2):
            names = [
                "/".join(Path(m).parts[-parts:]) if isinstance(m, (str, Path)) else type(m).__name__ for m in several
            ]
            if len(set(names)) == len(names):
                break
        else:
            names = [f"{number} {name}" for number, name in enumerate(names, 1)]
        named = dict(zip(names, several, strict=True))
    if not named:
        raise ValueError("models: none was given, expected at least one")
    return named


def _prepare(given, inputs, data, samples, length, device, trust_remote_code):
    """The model, what calls it (None: nothing but itself), the keyword arguments, and in words what they are."""
    loaded = not isinstance(given, (str, Path))
    model, tools = (given, None) if loaded else load_any(given, trust_remote_code)
    run = None
    if hasattr(model, "components"):
        run, model = model, getattr(model, "transformer", None)
        if model is None:
            raise ValueError(f"models: {type(run).__name__} has no transformer, expected a pipeline with one")
        run.to(device)
    model = model.to(device)
    kind = kind_of_class(type(model).__name__)
    if inputs is not None:
        return model, run, dict(inputs), "given by the caller"
    if run is not None:
        batch, what = prompt_batch(run, data, samples)
    elif kind == "language":
        ids, what = text_batch(model, tools, data, samples, length)
        batch = {"input_ids": ids.to(device), "use_cache": False}
    elif kind == "images":
        pixels, what = image_batch(model, tools, data, samples)
        batch = {"pixel_values": pixels.to(device)}
    else:
        raise ValueError(
            f"inputs: None was given for {type(model).__name__}, expected the keyword arguments of its forward "
            "(known without them: causal language models, image classifiers and pipelines)"
        )
    return model, run, batch, what


def _write(out, record, maps, mixing):
    out.mkdir(parents=True, exist_ok=True)
    looked_at = "; ".join(dict.fromkeys(record["inputs"].values()))
    plot_layers(out / "layers.png", {label: own["layers"] for label, own in record["models"].items()}, looked_at)
    plot_maps(out / "maps.png", maps)
    write_json(out / "mixing.json", mixing)
    for label, layers in mixing.items():
        name = re.sub(r"[^\w.-]+", "-", label).strip("-") or "model"
        several = sum(bool(layers) for layers in mixing.values()) > 1
        plot_mixing(out / (f"mixing-{name}.png" if several else "mixing.png"), layers)
    write_json(out / RECORD, record)


def render_analysis(record):
    """The table for a terminal: one line per layer and model."""
    rows = [["model", "layer", "kind", "rank", "of", "effective", "entropy", "of"]]
    layers = [(label, layer) for label, model in record["models"].items() for layer in model["layers"]]
    for label, layer in layers:
        numbers = [f"{layer['rank']:.1f}", f"{layer['bound']:,}", f"{layer['effective_rank']:.1f}"]
        numbers += [f"{layer[key]:.2f}" for key in ("entropy", "uniform_entropy")]
        rows.append([label, layer["layer"], layer["kind"], *numbers])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = [
        "  ".join([*map(str.ljust, row[:3], widths[:3]), *map(str.rjust, row[3:], widths[3:])]).rstrip() for row in rows
    ]
    tolerances = dict.fromkeys(f"{layer['tolerance']:.1e}" for _, layer in layers)
    lines += ["", f"rank at {', '.join(tolerances)} of the largest singular value; entropy in nats"]
    if any(layer["part"] != "whole" for _, layer in layers):
        lines.append("causal layers: the rank is that of the second half of the text on the first")
    return "\n".join(lines)
