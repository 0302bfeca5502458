"""A saved model in the hands of someone who never installed mhla_hf: another process, offline, without triton."""

import itertools
import json
import os
import subprocess

import pytest
import torch
from elsewhere import run_elsewhere
from small_models import MODELS, tokens
from small_scores import small_tokenizer
from transformers import ByT5Tokenizer

VISITOR = """
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
torch.set_num_threads(1)
ids = torch.tensor(json.load(open("ids.json")))
report, out, seen = {}, {}, None
for folder in ("saved", "again"):
    model, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    report[folder] = [sorted(info["missing_keys"]), sorted(info["unexpected_keys"])]
    out[folder + ".logits"] = model(ids).logits.detach()
    out[folder + ".text"] = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    if folder == "saved":
        report["class"] = type(model).__module__
        report["one identity"] = type(AutoConfig.from_pretrained(folder, trust_remote_code=True)) is type(model.config)
        model.save_pretrained("again")
report["loaded"] = [m for m in ("mhla_hf", "triton", "diffusers") if m in sys.modules]
save_file({k: v.contiguous() for k, v in out.items()}, "out.safetensors")
json.dump(report, open("report.json", "w"))
"""


def visit(folder):
    """Run the visitor in `folder`, away from this repository."""
    run = run_elsewhere(VISITOR, folder)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize(
    "name", ["scratch", "llama-all", "llama-hybrid", "qwen3-hybrid", "mixtral-hybrid", "llama-gate-norm"]
)
def test_bit_equal_elsewhere(name, tmp_path):
    from safetensors.torch import load_file

    model = MODELS[name]()
    ids = tokens(2, 45)
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "ids.json").write_text(json.dumps(ids.tolist()))
    report = visit(tmp_path)
    out = load_file(tmp_path / "out.safetensors")
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    for folder in ("saved", "again"):
        assert report[folder] == [[], []]
        assert torch.equal(out[f"{folder}.logits"], model(ids).logits)
        assert torch.equal(out[f"{folder}.text"], text)
    assert report["class"].startswith("transformers_modules.") and report["one identity"]
    assert report["loaded"] == []
    for file in ("model.safetensors", "modeling_mhla.py", "config.json"):
        assert (tmp_path / "saved" / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file


def test_refused_without_trust(tmp_path):
    MODELS["llama-all"]().save_pretrained(tmp_path / "saved")
    code = VISITOR.split("ids =")[0] + 'AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=False)'
    run = run_elsewhere(code, tmp_path)
    assert run.returncode == 1 and "trust_remote_code=True" in run.stderr


READER = """
from transformers import AutoTokenizer
json.dump({f: AutoTokenizer.from_pretrained(f, **%r)("a b c")["input_ids"] for f in %r}, open("read.json", "w"))
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_tokenizer_is_read_without_code_and_without_a_question(tmp_path, terminal):
    """Saved before or after its model. At a terminal transformers asks for the configuration's sake unless told False."""
    told, models = {}, {"scratch": MODELS["scratch"](), "converted": MODELS["llama-all"]()}
    tokenizers = {"fast": small_tokenizer(), "slow": ByT5Tokenizer()}
    for (first, model), (second, tokenizer) in itertools.product(models.items(), tokenizers.items()):
        for order in ((model, tokenizer), (tokenizer, model)):
            folder = f"{first}-{second}-{len(told)}"
            for part in order:
                part.save_pretrained(tmp_path / folder)
            told[folder] = tokenizer("a b c")["input_ids"]
    keyboard, stdin = os.openpty()
    options = {"trust_remote_code": False} if terminal else {}
    run = run_elsewhere(
        READER % (options, list(told)), tmp_path, stdin=stdin if terminal else subprocess.DEVNULL, timeout=60
    )
    os.close(keyboard), os.close(stdin)
    assert run.returncode == 0 and not (terminal and "[y/N]" in run.stdout), run.stdout + run.stderr
    assert json.loads((tmp_path / "read.json").read_text()) == told
    assert not (tmp_path / "hf/modules/transformers_modules").exists()
