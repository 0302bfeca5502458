"""The command `mhla-hf compare`."""

import importlib.metadata
from pathlib import Path
from typing import Any

from .. import __version__
from . import values

COMPARE = """\
example:
  mhla-hf compare HuggingFaceTB/SmolLM2-135M-Instruct out/smollm2-mhla
  mhla-hf compare HuggingFaceTB/SmolLM2-135M-Instruct me/smollm2-mhla --space space      a folder for a Hugging Face Space
  mhla-hf compare Wan-AI/Wan2.1-T2V-1.3B-Diffusers out/wan-mhla --set num_frames=33 --trust-remote-code
"""
SPACE = {
    "README.md": """\
---
title: MHLA beside softmax
sdk: gradio
sdk_version: {gradio}
app_file: app.py
models: [{models}]
---

{original} and {converted}, its conversion by mhla_hf, answer the same prompt.
""",
    "requirements.txt": "mhla_hf[compare,diffusers,peft]=={version}\n",
    "app.py": """\
from mhla_hf.compare import build_page

build_page({arguments}).launch()
""",
}


def compare_options(add: values.AddArgument) -> None:
    add("original", metavar="ORIGINAL", help="folder or Hub id of a softmax language model or pipeline")
    add("converted", metavar="CONVERTED", help="folder or Hub id of its conversion, or the folder of an adapter")
    add(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help="an argument of the pipelines"
    )
    add("--dtype", **values.DTYPE)
    add("--device", help="as torch names it (default: cuda if there is one, else cpu)")
    add("--trust-remote-code", action="store_true", help="run source from the folders, which converted pipelines hold")
    add("--port", type=values.parse_count, help="port of the page (default: the first free one from 7860 on)")
    add("--space", metavar="FOLDER", help="write a Hugging Face Space that shows this page, instead of opening it")


def run_compare(
    original: str, converted: str, settings: list[str], port: int | None, space: str | None, progress: bool,
    command: str, **options: Any,
) -> None:  # fmt: skip
    options["settings"] = values.parse_settings(settings)
    for model in (original, converted):
        if not (Path(model) / "adapter_config.json").is_file():
            values.check_model(model)
    values.load_libraries()

    from ..compare import build_page

    if space is None:
        build_page(original, converted, **options).launch(server_port=port, inbrowser=progress)
        return
    folder = Path(space)
    if (folder / "app.py").exists():
        raise ValueError(f"space: got {space!r}, which has an app.py, expected a new folder.")
    words = {"original": original, "converted": converted, "version": __version__}
    words["gradio"] = importlib.metadata.version("gradio")
    words["arguments"] = ", ".join([repr(original), repr(converted), *(f"{x}={y!r}" for x, y in options.items() if y)])
    local = [name for name in (original, converted) if Path(name).exists()]
    words["models"] = ", ".join(name for name in (original, converted) if name not in local)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in SPACE.items():
        (folder / name).write_text(content.format_map(words), encoding="utf-8")
    print(f"{space}: try it with python {space}/app.py; upload it with hf upload NAME {space} . --repo-type space")
    if local:
        print(
            f"{space}/app.py reads {' and '.join(local)} on this machine: name models on the Hub before you upload it"
        )
