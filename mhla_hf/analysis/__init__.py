"""`analyze`: compare the attention of models on the same inputs, as JSON, a table and figures."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.file_io import resolve_model_name, write_json
from ..checkpoints.load import choose_device
from ..checkpoints.provenance import describe_run
from ..evaluation.records import render_rows
from ..evaluation.subjects import check_writable, name_models
from .figures import plot_layers, plot_maps, plot_mixing
from .inputs import load_any, make_batch
from .measures import compute_attention_maps, describe_mixing, measure_calls, record_model

RECORD = "analysis.json"


def analyze(
    models: object, inputs: Mapping[str, object] | None = None, *, data: object = None, out: str | Path | None = None,
    samples: int = 8, length: int = 256, device: torch.device | str | None = None, trust_remote_code: bool = False,
    progress: bool = True, command: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure rank and entropy of each model's attention by layer and, with `out`, plot maps and mixing weights.

    Args:
        models: A folder, a Hub id, a model or a diffusers pipeline; a list of them; or a dict from label to one of them.
        inputs: Keyword arguments of the models' forward, or of the pipelines' call. Required unless `models` are folders
            or Hub ids of causal language models or image classifiers.
        data: For language models a text (file, folder or dataset id; default: the Python language reference), for
            classifiers images (folder or dataset id; default: scikit-learn's digits).
        out: Folder for analysis.json, mixing.json, layers.png, maps.png and mixing-LABEL.png (default: nothing is written).
        samples: Number of sequences or images.
        length: Tokens in a sequence.
        device: Device on which the models run (default: CUDA if there is a GPU, else the CPU). Models and pipelines that are
            passed as objects are moved to it and stay there.
        trust_remote_code: Whether to run source code from the models' folders.
        progress: Whether to show progress bars.
        command: The shell command that repeats the analysis, for the record.

    Returns:
        The content of analysis.json: a dict with "models" (label -> the result of `measure_calls`), "inputs" (label -> a
        description of the inputs), and the results of `describe_run`.

    Raises:
        ValueError: An argument is not valid, or a model has no attention that can be recorded.
    """
    for name, value in (("samples", samples), ("length", length)):
        if value < 1:
            raise ValueError(f"{name}: got {value!r}, expected a whole number of at least 1.")
    device = choose_device(device)
    models_by_label = name_models(models)
    for model in models_by_label.values():
        if isinstance(model, (str, Path)):
            resolve_model_name(model)
    if out is not None:
        out = Path(out).expanduser()
        check_writable(out / RECORD, "out")
    measured, descriptions, maps, mixing = {}, {}, {}, {}
    for label, model in models_by_label.items():
        batch: Any = inputs
        description = "given by the caller"
        run = None
        if isinstance(model, (str, Path)):
            model, processor = load_any(model, device, trust_remote_code)
            if inputs is None:
                batch, description = make_batch(model, processor, data, samples, length)
        elif inputs is None:
            raise ValueError(f"inputs: got none for a {type(model).__name__}, expected the arguments of its call.")
        elif hasattr(model, "components"):
            run = model.to(device)
            model = model.transformer
        calls = record_model(model.to(device), batch, run)
        measured[label] = measure_calls(calls, progress=progress)
        descriptions[label] = description
        maps[label] = compute_attention_maps(calls)
        mixing[label] = describe_mixing(model)
    record = {"models": measured, "inputs": descriptions, **describe_run(command, device)}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        layers = {label: model_record["layers"] for label, model_record in measured.items()}
        plot_layers(out / "layers.png", layers, "; ".join(dict.fromkeys(descriptions.values())))
        plot_maps(out / "maps.png", maps)
        write_json(out / "mixing.json", mixing)
        for label, model_mixing in mixing.items():
            plot_mixing(out / f"mixing-{re.sub(r'[^-.0-9A-Za-z]+', '-', label)}.png", model_mixing)
        write_json(out / RECORD, record)
    return record


def render_analysis(record: Mapping[str, Any]) -> str:
    """Render the result of `analyze` as a table for a terminal, with one line per layer and model."""
    header = ["model", "layer", "kind", "rank", "of", "effective", "entropy", "of", "far"]
    layers = [(label, layer) for label, model in record["models"].items() for layer in model["layers"]]
    rows = []
    for label, layer in layers:
        numbers = [f"{layer['rank']:.1f}", f"{layer['bound']:,}", f"{layer['effective_rank']:.1f}"]
        numbers += [f"{layer['entropy']:.2f}", f"{layer['uniform_entropy']:.2f}"]
        far = f"{layer['far_share']:.3f}" if "far_share" in layer else ""
        rows.append([label, layer["layer"], layer["kind"], *numbers, far])
    tolerances = dict.fromkeys(f"{layer['tolerance']:.1e}" for _, layer in layers)
    return "\n".join([
        render_rows(header, rows, left=3),
        "",
        f"rank: singular values above {', '.join(tolerances)} of the largest one; entropy in nats",
        "far: the share of the weights outside the softmax window",
        "causal layers: the rank of the second half of the text on the first half",
    ])  # fmt: skip
