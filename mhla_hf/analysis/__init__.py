"""analyze(): any models side by side on the same inputs, as JSON, a table and pictures."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.files import write_json
from ..checkpoints.load import check_model_name, choose_device
from ..checkpoints.machine import describe_run
from ..evaluation.records import render_rows
from ..evaluation.subjects import check_writable, named_models
from .figures import plot_layers, plot_maps, plot_mixing
from .inputs import load_any, make_batch
from .measures import attention_maps, describe_mixing, measure_calls, record_model

RECORD = "analysis.json"


def analyze(
    models: object, inputs: Mapping[str, object] | None = None, *, data: object = None, out: str | Path | None = None,
    samples: int = 8, length: int = 256, device: torch.device | str | None = None, trust_remote_code: bool = False,
    progress: bool = True, command: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Rank and entropy of the attention of each model, layer by layer (figure 3b), with maps (3a) and mixing (4b).

    Args:
        models: a folder, a Hub id, a model or a pipeline of diffusers; a list of them; or a dict label -> one of them.
        inputs: keyword arguments of the models' forward, or of the pipelines' call; needed for whatever is not the folder or
            Hub id of a causal language model or an image classifier.
        data: text (file, folder or dataset id; default the Python language reference) for language models; images (folder,
            dataset id; default scikit-learn's digits) for classifiers.
        out: folder for analysis.json, mixing.json, layers.png, maps.png, mixing-LABEL.png; None writes nothing.
        samples: sequences or images. length: tokens in a sequence.
        device: where the models run; None: CUDA when there is one.

    Returns:
        What analysis.json holds: "models" -> label -> what `measure_calls` gives; "inputs", versions, hardware, command.
    """
    for name, value in (("samples", samples), ("length", length)):
        if value < 1:
            raise ValueError(f"{name}: got {value!r}, expected a whole number of at least 1")
    device, named = choose_device(device), named_models(models)
    for model in named.values():
        if isinstance(model, (str, Path)):
            check_model_name(model)
    if out is not None:
        out = Path(out).expanduser()
        check_writable(out / RECORD)
    record, maps, mixing = {"models": {}, "inputs": {}}, {}, {}
    for label, model in named.items():
        batch, what, run = inputs, "given by the caller", None
        if isinstance(model, (str, Path)):
            model, tools = load_any(model, device, trust_remote_code)
            if inputs is None:
                batch, what = make_batch(model, tools, data, samples, length)
        elif inputs is None:
            raise ValueError(f"inputs: got none for a {type(model).__name__}, expected the arguments of its call")
        elif hasattr(model, "components"):
            run, model = model.to(device), model.transformer
        calls = record_model(model.to(device), batch, run)
        record["models"][label] = measure_calls(calls, progress=progress)
        record["inputs"][label] = what
        maps[label], mixing[label] = attention_maps(calls), describe_mixing(model)
    record |= describe_run(command, device)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        layers = {label: own["layers"] for label, own in record["models"].items()}
        plot_layers(out / "layers.png", layers, "; ".join(dict.fromkeys(record["inputs"].values())))
        plot_maps(out / "maps.png", maps)
        write_json(out / "mixing.json", mixing)
        for label, own in mixing.items():
            plot_mixing(out / f"mixing-{re.sub(r'[^-.0-9A-Za-z]+', '-', label)}.png", own)
        write_json(out / RECORD, record)
    return record


def render_analysis(record):
    """The table for a terminal: one line per layer and model."""
    header = ["model", "layer", "kind", "rank", "of", "effective", "entropy", "of", "far"]
    layers, rows = [(label, layer) for label, model in record["models"].items() for layer in model["layers"]], []
    for label, layer in layers:
        numbers = [f"{layer['rank']:.1f}", f"{layer['bound']:,}", f"{layer['effective_rank']:.1f}"]
        numbers += [f"{layer['entropy']:.2f}", f"{layer['uniform_entropy']:.2f}"]
        far = f"{layer['far_share']:.3f}" if "far_share" in layer else ""
        rows.append([label, layer["layer"], layer["kind"], *numbers, far])
    lines = [render_rows(header, rows, left=3)]
    tolerances = dict.fromkeys(f"{layer['tolerance']:.1e}" for _, layer in layers)
    lines += ["", f"rank at {', '.join(tolerances)} of the largest singular value; entropy in nats"]
    lines.append("far: the share of all weights that lies outside the local softmax")
    lines.append("causal layers: the rank is that of the second half of the text on the first")
    return "\n".join(lines)
