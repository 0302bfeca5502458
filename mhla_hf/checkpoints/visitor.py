"""Run in a process of its own: a visitor who has transformers or diffusers and a saved model, and no mhla_hf.

It is never imported. `clean_process.visit` hands its text to `python -c`, so nothing of this package is on the path, and the
first lines make sure that importing mhla_hf or triton fails, and that nobody finds them, even where they are installed.

Argument: JSON with `folder`, `kind` (one of clean_process.KINDS), `given` (None, or a safetensors file with `ids`
and the `logits` they must give), `prompt` and `new_tokens` (language models only; None: no text), `dtype` (as torch names
it, or "auto") and `threads`. Prints one line of JSON.
"""

import sys

ABSENT = ("mhla_hf", "triton")
sys.modules.update(dict.fromkeys(ABSENT))

import json  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402


def load(auto, folder):
    """A model of transformers, and what was wrong with its weights."""
    options = {"trust_remote_code": True, "output_loading_info": True, "dtype": asked["dtype"]}
    model, loading = auto.from_pretrained(folder, **options)
    wrong = {"missing": sorted(loading["missing_keys"]), "unexpected": sorted(loading["unexpected_keys"])}
    return model.eval(), wrong


def language(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, seen = load(AutoModelForCausalLM, folder)
    if asked["prompt"] is not None or any(Path(folder).glob("tokenizer*.json")):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    given = load_file(asked["given"]) if asked["given"] else {"ids": torch.arange(8)[None] % model.config.vocab_size}
    with torch.no_grad():
        logits = model(given["ids"]).logits
    seen["finite"] = bool(logits.isfinite().all())
    if "logits" in given:
        seen["logits_equal"] = bool(torch.equal(logits, given["logits"]))
        seen["largest_difference"] = float((logits - given["logits"]).abs().max())
    if asked["prompt"] is not None:
        encoded = tokenizer(asked["prompt"], return_tensors="pt", add_special_tokens=False)
        encoded = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        options = {"max_new_tokens": asked["new_tokens"], "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
        written = model.generate(**encoded, **options)
        seen["continuation"] = tokenizer.decode(written[0][encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return model, seen


def image(folder):
    from transformers import AutoModelForImageClassification

    return load(AutoModelForImageClassification, folder)


def tower(folder):
    from transformers import AutoModel

    return load(AutoModel, folder)


def compare(found, folder):
    """What is wrong with the weights of a model of diffusers, by the names in its files."""
    stored = set()
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            stored.update(weights.keys())
    expected = set(found.state_dict())
    return {"missing": sorted(expected - stored), "unexpected": sorted(stored - expected)}


def model(folder):
    from diffusers import AutoModel

    found = AutoModel.from_pretrained(folder, trust_remote_code=True)
    return found, compare(found, folder)


def pipeline(folder):
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True, dtype=asked["dtype"])
    seen, found = {"missing": [], "unexpected": []}, pipe
    for source in sorted(Path(folder).glob("*/modeling_mhla*.py")):
        found = getattr(pipe, source.parent.name)
        for wrong, names in compare(found, source.parent).items():
            seen[wrong] += names
    return found, seen


asked = json.loads(sys.argv[1])
if asked["dtype"] != "auto":
    asked["dtype"] = getattr(torch, asked["dtype"])
torch.set_num_threads(asked["threads"])
kinds = {"language": language, "image": image, "tower": tower, "model": model, "pipeline": pipeline}
loaded, report = kinds[asked["kind"]](asked["folder"])
report["class"] = f"{sys.modules[type(loaded).__module__].__name__}.{type(loaded).__name__}"
report["imported"] = [name for name in ABSENT if sys.modules[name] is not None]
print(json.dumps(report))
