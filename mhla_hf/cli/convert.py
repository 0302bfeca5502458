"""The commands `mhla-hf convert` and `merge`."""

import glob
import shlex
from typing import Any

from ..checkpoints.file_io import renamed_errors
from ..checkpoints.save import check_new_folder, count_bytes, holds_saved_model, read_sentence_files_or_warn
from . import values

CONVERT = """\
example:
  mhla-hf convert HuggingFaceTB/SmolLM2-135M out/smollm-mhla --text none --layers 2/3 --set window=2
  mhla-hf convert HuggingFaceTB/SmolLM2-135M out/smollm-mhla --text notes.txt --keep 1/6
  mhla-hf convert sentence-transformers/all-MiniLM-L6-v2 out/minilm-mhla --text notes.txt
  mhla-hf convert Wan-AI/Wan2.1-T2V-1.3B-Diffusers out/wan-mhla --set gate=true
  mhla-hf convert Wan-AI/Wan2.1-T2V-1.3B-Diffusers out/wan-near --samples prompts.txt --device cuda
  mhla-hf convert facebook/DiT-XL-2-256 out/dit-mhla --samples 1,207,281,985
  mhla-hf convert facebook/deit-small-patch16-224 out/deit-mhla --samples photos
Without text or samples, distillation recovers the quality: mhla-hf distill. After samples, it brings models closer still.
"""
MERGE = """\
example:
  mhla-hf merge me/smollm2-mhla-adapter out/smollm2-mhla --dtype bfloat16      for vLLM, which serves models without adapters
  mhla-hf merge adapter out/smollm2-mhla --model ./SmolLM2-135M-Instruct
"""
MAX_IMAGES = 256  # that a classifier learns from
# Kinds other than causal language models and pipelines -> (function that loads one, recipe that distills it).
OTHER_KINDS = {"images": ("load_classifier", None), "encoders": ("load_encoder", "encoder")}


def convert_options(add: values.AddArgument) -> None:
    kinds = "a language model, text encoder, image classifier, or pipeline"
    add("model", metavar="DIR_OR_ID", help=f"folder or Hub id of {kinds}")
    add("out", metavar="OUT", help="output folder")
    add("--text", help="text that a language model or an encoder learns from: file, folder or dataset; none: nothing is "
        "learned (default: self, what the model itself writes, for a language model, and none for an encoder; in Python, "
        "always none)")  # fmt: skip
    add("--samples", help="what a pipeline or classifier learns from: a .txt file with one prompt per line, class labels "
        "such as 1,207, or a folder or dataset of images (default: nothing is learned)")  # fmt: skip
    add("--keep", help="KV heads of a language model that keep softmax: a share, a number, a cache size such as 64MiB, or "
        "auto, the smallest cache that keeps enough (default: auto); with --samples, heads that keep softmax: a share or a "
        "number")  # fmt: skip
    add("--context", type=values.parse_count, help="tokens at which --keep counts bytes (default: all positions)")
    add("--tolerance", type=float, help="KL to the original that --keep auto accepts, in nats (default: 0.02)")
    add("--layers", help='"all", "2/3" or indices such as 1,2,4 (default: all; without learning, of text models: 2/3)')
    add("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help="a setting of MHLASettings")
    add(
        "--effort", type=float, default=1.0, help="multiplies the rows to learn from, or to score heads by (default: 1)"
    )
    add("--dtype", **values.DTYPE)
    add("--device", default="cpu", help="where the model learns, as torch names it (default: cpu)")
    add("--seed", type=values.parse_seed, default=0, help="random seed (default: 0)")
    add("--revision", help="branch, tag or commit on the Hub")
    add("--overwrite", action="store_true", help="replace the MHLA model in OUT")


def run_convert(
    model: str, out: str, text: str | None, samples: str | None, keep: str | None, context: int | None,
    tolerance: float | None, layers: str | None, settings: list[str], effort: float, dtype: str, device: str, seed: int,
    revision: str | None, overwrite: bool, progress: bool, **_: Any,
) -> None:  # fmt: skip
    options: dict[str, Any] = {"layers": values.parse_layers(layers), **values.parse_settings(settings)}
    learning: dict[str, Any] = {"effort": effort, "seed": seed, "progress": progress}
    learning |= {"keep": None if keep is None else values.parse_keep(keep), "context": context, "tolerance": tolerance}
    path = check_new_folder(out, overwrite)
    if text not in (None, "self", "none"):
        values.check_data(text)
    values.check_model(model, revision)
    values.load_libraries()

    import torch

    from ..checkpoints import load
    from ..checkpoints.save import save_model
    from ..conversion import convert
    from ..plots import render_report

    load_options: dict[str, Any] = {"dtype": dtype, "device": load.choose_device(device), "revision": revision}
    kind = "pipelines" if load.is_pipeline(model, revision) else load.find_model_kind(model, revision)
    if text not in (None, "none") and kind in ("pipelines", "images"):
        raise ValueError(f"text: got {text!r} with {model!r}, expected a causal language model or a text encoder.")
    if samples is not None and kind not in ("pipelines", "images"):
        raise ValueError(f"samples: got {samples!r} with {model!r}, expected a pipeline or an image classifier.")
    if kind == "pipelines":
        learning["samples"] = None if samples is None else read_pipeline_samples(samples)
        pipeline = load.load_pipeline(model, **load_options)
        check_new_folder(out, overwrite, count_bytes(pipeline))
        torch.manual_seed(seed)
        transformer = convert(pipeline, **learning, **options).transformer
        save_model(pipeline, out, overwrite=overwrite)
        words = ["mhla-hf", "distill", out, "--teacher", model, "--trust-remote-code", "--out", f"{out}-distilled"]
        next_step = f"{shlex.join(words)} --recipe RECIPE --data PROMPTS"
        print(f"{render_layers(out, transformer)}; next, distill it: {next_step}")
        return
    loader_name, recipe = OTHER_KINDS.get(kind or "", ("load_language_model", "language_llama_lite"))
    base, processor = getattr(load, loader_name)(model, **load_options)
    check_new_folder(out, overwrite, count_bytes(base))
    checkpoint = path.with_name(f"{path.name}.part")
    if samples is not None:
        learning["samples"] = read_image_samples(samples, processor, base.config, seed)
    elif text not in (None, "none") or (text is None and kind not in OTHER_KINDS):
        text = text or "self"
        learning |= {"text": text, "tokenizer": processor}
        if kind == "encoders":
            learning["checkpoint"] = checkpoint
    torch.manual_seed(seed)
    can_resume = lambda: checkpoint.exists() and (overwrite or not holds_saved_model(path))  # noqa: E731
    with values.resumable(lambda: checkpoint if can_resume() else None):
        convert(base, **learning, **options)
        files = read_sentence_files_or_warn(model, revision) if kind == "encoders" else {}
        save_model(base, out, processor, overwrite, files)
    for file in (checkpoint, *path.parent.glob(f"{glob.escape(checkpoint.name)}.tmp-*")):  # those of killed processes
        file.unlink(missing_ok=True)
    if "text" in learning:
        if not progress:  # with progress, `convert` has printed it
            print(render_report(base.config.mhla_measured))
        print(f"{out}: {base.config.mhla_measured['seconds']} s")
        return
    next_step = "distill it with conversion/image_classifier.py"
    if recipe:
        words = ["mhla-hf", "distill", out, "--teacher", model, "--out", f"{out}-distilled", "--recipe", recipe]
        next_step = f"distill it: {shlex.join(words)} --data TEXT"
    print(f"{render_layers(out, base)}; next, {next_step}")


def merge_options(add: values.AddArgument) -> None:
    add("adapter", metavar="DIR_OR_ID", help="folder or Hub id of an adapter that save_adapter wrote")
    add("out", metavar="OUT", help="output folder")
    add("--model", help="folder or Hub id of the softmax original (default: the base model in adapter_config.json)")
    add("--dtype", **values.DTYPE)
    add("--revision", help="branch, tag or commit of the adapter on the Hub")
    add("--overwrite", action="store_true", help="replace the MHLA model in OUT")


def run_merge(
    adapter: str, out: str, model: str | None, dtype: str, revision: str | None, overwrite: bool, **_: Any
) -> None:
    check_new_folder(out, overwrite)
    values.load_libraries()

    from ..checkpoints.load import load_language_model
    from ..checkpoints.save import save_model
    from ..training.adapters import import_peft, load_adapter

    peft = import_peft()
    base = model or peft.PeftConfig.from_pretrained(adapter, revision=revision).base_model_name_or_path
    if base is None:
        raise ValueError("model: got None, and no base model in adapter_config.json, expected the softmax original.")
    values.check_model(base)
    original, tokenizer = load_language_model(base, dtype=dtype)
    check_new_folder(out, overwrite, count_bytes(original))
    merged: Any = load_adapter(original, adapter, revision=revision)
    merged = merged.merge_and_unload()
    save_model(merged, out, tokenizer, overwrite)
    print(f"{out}: {type(merged).__name__}, layers {merged.config.mhla['layers']} are MHLA")


def read_pipeline_samples(samples: str) -> list[int] | list[str]:
    from ..training.datasets.latents import read_prompts

    items = [item.strip() for item in samples.split(",")]
    if all(item.isdecimal() for item in items):
        return [int(item) for item in items]
    with renamed_errors("data", "samples"):
        prompts = read_prompts(samples)
    if prompts is None:
        raise ValueError(f"samples: got {samples!r}, expected a .txt file of prompts, or class labels such as 1,207.")
    return prompts


def read_image_samples(samples: str, processor: Any, config: Any, seed: int) -> Any:
    """Return the pixels of up to `MAX_IMAGES` images, drawn at random: fp32 [N, C, H, W]."""
    import torch

    from ..training.datasets.images import open_images, preprocess

    with renamed_errors("data", "samples"):
        images = open_images(samples, labeled=False)
        rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:MAX_IMAGES].tolist()
        return preprocess(processor, [images.image(row, getattr(config, "num_channels", 3)) for row in rows])


def render_layers(out: str, model: Any) -> str:
    """Render which layers are MHLA, and the errors that a conversion with samples measured."""
    config = model.config
    total = f" of {config.num_hidden_layers}" if hasattr(config, "num_hidden_layers") else ""
    line = f"{out}: {type(model).__name__}, layers {config.mhla['layers']}{total} are MHLA"
    if measured := getattr(config, "mhla_measured", None):
        names = {"converted": "converted", "fitted": "fitted", "kept": "with softmax layers"}
        errors = [f"{name} {measured['output'][key]:.4g}" for key, name in names.items() if key in measured["output"]]
        line += f"; relative squared error of the output: {', '.join(errors)} ({measured['seconds']} s)"
    return line
