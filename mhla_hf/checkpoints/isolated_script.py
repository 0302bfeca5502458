"""Script that loads a saved model in a process where importing mhla_hf or Triton fails, even if they are installed.

It is never imported: `load_isolated` passes it to `python -c` with a request in JSON, and it prints its report as JSON.
"""

import sys

BLOCKED_MODULES = ("mhla_hf", "triton")
sys.modules.update(dict.fromkeys(BLOCKED_MODULES))  # type: ignore[arg-type]

import json  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402


@torch.no_grad()
def load_transformers_model(folder: str) -> tuple[Any, dict[str, Any]]:
    """Load a model and report its weights. For a language model, also load its tokenizer, if any, and check its logits."""
    auto_class = getattr(transformers, request["auto_class"])
    options = {"trust_remote_code": True, "output_loading_info": True, "dtype": request["dtype"]}
    model, loading_info = auto_class.from_pretrained(folder, **options)
    report: dict[str, Any] = {name: sorted(loading_info[f"{name}_keys"]) for name in ("missing", "unexpected")}
    if request["kind"] == "language":
        if any(Path(folder).glob("tokenizer*.json")):
            transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        ids = {"ids": torch.arange(8)[None] % model.config.vocab_size}
        inputs = load_file(request["inputs"]) if request["inputs"] else ids
        logits = model.eval()(inputs["ids"]).logits
        report["finite"] = bool(logits.isfinite().all())
        report["logits_equal"] = "logits" in inputs and bool(torch.equal(logits, inputs["logits"]))
    return model, report


def load_diffusers_model(folder: str) -> tuple[Any, dict[str, Any]]:
    """Load a diffusers model or pipeline; return its last MHLA model, and a report on the weights of all its MHLA models."""
    import diffusers

    is_model = request["kind"] == "model"
    auto_class = diffusers.AutoModel if is_model else diffusers.DiffusionPipeline
    options = {} if is_model else {"dtype": request["dtype"]}
    model_or_pipeline: Any = auto_class.from_pretrained(folder, trust_remote_code=True, **options)
    model = model_or_pipeline
    report: dict[str, Any] = {"missing": [], "unexpected": []}
    for source in sorted(Path(folder).glob("modeling_mhla*.py" if is_model else "*/modeling_mhla*.py")):
        model = model_or_pipeline if is_model else getattr(model_or_pipeline, source.parent.name)
        stored: set[str] = set()
        expected = set(model.state_dict())
        for file in source.parent.glob("*.safetensors"):
            with safe_open(file, framework="pt") as weights:
                stored.update(weights.keys())
        report["missing"] += sorted(expected - stored)
        report["unexpected"] += sorted(stored - expected)
    return model, report


request: dict[str, Any] = json.loads(sys.argv[1])
if request["dtype"] != "auto":
    request["dtype"] = getattr(torch, request["dtype"])
torch.set_num_threads(request["threads"])
load = load_diffusers_model if request["kind"] in ("model", "pipeline") else load_transformers_model
loaded, report = load(request["folder"])
report["class"] = f"{sys.modules[type(loaded).__module__].__name__}.{type(loaded).__name__}"
report["imported"] = [name for name in BLOCKED_MODULES if sys.modules[name] is not None]
print(json.dumps(report))
