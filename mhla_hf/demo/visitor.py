"""Run by the demo in a process of its own: a visitor who has transformers and a saved model, and no mhla_hf.

Unusual: it is never imported. The demo hands its text to `python -c`, so nothing of this package is on the path, and the
first lines make sure that importing mhla_hf or triton fails even where they are installed.

Arguments: the model's folder, a safetensors file with `ids` and the `logits` they must give, a prompt, how many tokens to
generate, torch's number of threads. Prints one line of JSON.
"""

import importlib.util
import json
import sys

ABSENT = ("mhla_hf", "triton")
installed = importlib.util.find_spec


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def find_what_is_there(name, package=None):
    return None if name.partition(".")[0] in ABSENT else installed(name, package)


sys.meta_path.insert(0, Absent())
importlib.util.find_spec = find_what_is_there

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

folder, file, prompt, new_tokens, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
given = load_file(file)
model, loading = AutoModelForCausalLM.from_pretrained(
    folder, trust_remote_code=True, dtype=torch.float32, output_loading_info=True
)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
with torch.no_grad():
    logits = model(given["ids"]).logits
encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
encoded = {name: encoded[name] for name in ("input_ids", "attention_mask")}
generated = model.generate(
    **encoded, max_new_tokens=int(new_tokens), do_sample=False, pad_token_id=tokenizer.eos_token_id
)
print(
    json.dumps(
        {
            "class": f"{type(model).__module__}.{type(model).__name__}",
            "logits_equal": bool(torch.equal(logits, given["logits"])),
            "largest_difference": float((logits - given["logits"]).abs().max()),
            "missing": sorted(loading["missing_keys"]),
            "unexpected": sorted(loading["unexpected_keys"]),
            "imported": [name for name in ABSENT if name in sys.modules],
            "continuation": tokenizer.decode(generated[0][encoded["input_ids"].shape[1] :], skip_special_tokens=True),
        }
    )
)
