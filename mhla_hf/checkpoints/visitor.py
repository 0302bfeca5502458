"""Run in a process of its own: a visitor who has transformers or diffusers and a saved model, and no mhla_hf.

It is never imported. `clean_process.visit` hands its text and, as JSON, its arguments to `python -c`; the first lines make
sure that importing mhla_hf or triton fails, even where they are installed. Prints one line of JSON.
"""

import sys

ABSENT = ("mhla_hf", "triton")
sys.modules.update(dict.fromkeys(ABSENT))

import json  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

AUTOS = {"language": "AutoModelForCausalLM", "image": "AutoModelForImageClassification"}
AUTOS |= {"sequences": "AutoModelForSequenceClassification", "tokens": "AutoModelForTokenClassification"}
AUTOS |= {"answers": "AutoModelForQuestionAnswering", "choices": "AutoModelForMultipleChoice"}
AUTOS |= {"masked": "AutoModelForMaskedLM"}


def load(folder):
    """A model of transformers, and what was wrong with its weights."""
    options = {"trust_remote_code": True, "output_loading_info": True, "dtype": asked["dtype"]}
    model, loading = getattr(transformers, AUTOS.get(asked["kind"], "AutoModel")).from_pretrained(folder, **options)
    return model.eval(), {wrong: sorted(loading[f"{wrong}_keys"]) for wrong in ("missing", "unexpected")}


@torch.no_grad()
def language(folder):
    model, seen = load(folder)
    if asked["prompt"] is not None or any(Path(folder).glob("tokenizer*.json")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    given = load_file(asked["given"]) if asked["given"] else {"ids": torch.arange(8)[None] % model.config.vocab_size}
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


def diffusion(folder):
    """A model of diffusers or a pipeline, and what is wrong with its MHLA weights, by the names in the files."""
    import diffusers

    auto = diffusers.AutoModel if asked["kind"] == "model" else diffusers.DiffusionPipeline
    options = {} if asked["kind"] == "model" else {"dtype": asked["dtype"]}
    found = whole = auto.from_pretrained(folder, trust_remote_code=True, **options)
    seen = {"missing": [], "unexpected": []}
    for source in sorted(Path(folder).glob("modeling_mhla*.py" if asked["kind"] == "model" else "*/modeling_mhla*.py")):
        found = whole if asked["kind"] == "model" else getattr(whole, source.parent.name)
        stored, expected = set(), set(found.state_dict())
        for file in source.parent.glob("*.safetensors"):
            with safe_open(file, framework="pt") as weights:
                stored.update(weights.keys())
        seen["missing"] += sorted(expected - stored)
        seen["unexpected"] += sorted(stored - expected)
    return found, seen


asked = json.loads(sys.argv[1])
if asked["dtype"] != "auto":
    asked["dtype"] = getattr(torch, asked["dtype"])
torch.set_num_threads(asked["threads"])
kinds = {"language": language, "model": diffusion, "pipeline": diffusion}
loaded, report = kinds.get(asked["kind"], load)(asked["folder"])
report["class"] = f"{sys.modules[type(loaded).__module__].__name__}.{type(loaded).__name__}"
report["imported"] = [name for name in ABSENT if sys.modules[name] is not None]
print(json.dumps(report))
