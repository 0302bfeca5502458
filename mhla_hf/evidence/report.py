"""analyze(): any models side by side on the same inputs, as JSON, a table and pictures.

Unusual: what a model gets to see follows from what it is (text for a language model, images for a classifier); for every
other kind the caller gives the inputs themselves. What is measured and how stands in `analysis.py`.
"""

import re
from pathlib import Path

from ..checkpoints.files import write_json
from ..checkpoints.load import check_model_name, choose_device
from ..checkpoints.machine import describe_hardware, describe_versions, now, source_commit
from ..evaluation.subjects import check_writable
from ..plots import plot_mixing
from .analysis import attention_maps, describe_mixing, measure_calls, record_model
from .figures import plot_grid_mixing, plot_layers, plot_maps
from .inputs import image_batch, is_pipeline_folder, kind_of, load_any, pipeline_call, text_batch

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
        tolerance: of the rank, as in `measure_model`. device: where the models run; None: CUDA when there is one.

    Returns:
        What analysis.json holds: "models" -> label -> what `measure_model` gives; "inputs", versions, hardware, command.

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
            check_model_name(model, pipeline=is_pipeline_folder(model))
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
        maps[label] = attention_maps(calls)
        mixing[label] = describe_mixing(model)
    record |= {
        "hardware": describe_hardware(device),
        "versions": describe_versions(),
        "commit": source_commit(),
        "command": command,
        "date": now(),
    }
    if out is not None:
        _write(out, record, maps, mixing)
    return record


def _labels(models):
    if isinstance(models, dict):
        named = dict(models)
    else:
        several = list(models) if isinstance(models, (list, tuple)) else [models]
        names = [Path(m).name if isinstance(m, (str, Path)) else type(m).__name__ for m in several]
        if len(set(names)) < len(names):
            names = ["/".join(Path(m).parts[-2:]) if isinstance(m, (str, Path)) else type(m).__name__ for m in several]
        if len(set(names)) < len(names):
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
    kind = kind_of(type(model).__name__)
    if inputs is not None:
        return model, run, dict(inputs), "given by the caller"
    if run is not None:
        batch, what = pipeline_call(run, data, samples)
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
        own = {number: layer for number, layer in enumerate(layers.values()) if len(layer["learned"]) > 1}
        if own:
            several = sum(bool(layers) for layers in mixing.values()) > 1
            plot_any_mixing(out / (f"mixing-{safe_name(label)}.png" if several else "mixing.png"), own)
    write_json(out / RECORD, record)


def plot_any_mixing(path, layers):
    """One picture of what `describe_mixing` gives for some layers: over the grid of blocks where they have one."""
    matrices = {number: (layer["start"], layer["learned"]) for number, layer in layers.items()}
    layouts = {number: layer["layout"] for number, layer in layers.items()}
    if all(layout is not None and len(layout) == 2 for layout in layouts.values()):
        plot_grid_mixing(path, matrices, layouts)
    else:
        plot_mixing(path, matrices, causal=all(layout is None for layout in layouts.values()))


def safe_name(label):
    """`label` as part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", label).strip("-") or "model"


def render_analysis(record):
    """The table for a terminal: one line per layer and model."""
    rows = [["model", "layer", "kind", "rank", "of", "effective", "entropy", "of"]]
    for label, model in record["models"].items():
        for layer in model["layers"]:
            rows.append(
                [
                    label,
                    layer["layer"],
                    layer["kind"],
                    f"{layer['rank']:.1f}",
                    f"{layer['bound']:,}",
                    f"{layer['effective_rank']:.1f}",
                    f"{layer['entropy']:.2f}",
                    f"{layer['uniform_entropy']:.2f}",
                ]
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = [
        "  ".join([*map(str.ljust, row[:3], widths[:3]), *map(str.rjust, row[3:], widths[3:])]).rstrip() for row in rows
    ]
    tolerances = {
        label: dict.fromkeys(f"{layer['tolerance']:.1e}" for layer in model["layers"])
        for label, model in record["models"].items()
    }
    several = {tuple(own) for own in tolerances.values()}
    told = [" and ".join(own) + (f" ({label})" if len(several) > 1 else "") for label, own in tolerances.items()]
    lines += ["", f"rank at {', '.join(dict.fromkeys(told))} of the largest singular value; entropy in nats"]
    if any(layer["part"] != "whole" for model in record["models"].values() for layer in model["layers"]):
        lines.append("causal layers: the rank is that of the second half of the text on the first")
    return "\n".join(lines)
