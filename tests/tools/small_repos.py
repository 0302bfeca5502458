"""Small saved models with all that a push needs: source, weights, tokenizer, scores, and card."""

import hashlib

from safetensors.torch import load_file, save_file

import mhla_hf
from mhla_hf.checkpoints.bundle import check_bundle
from mhla_hf.checkpoints.fingerprint import fingerprint_folder
from mhla_hf.evaluation.records import Results
from mhla_hf.hub.card import write_card
from tools.small_scores import make_result, small_tokenizer

CARD = "---\nlicense: apache-2.0\nlibrary_name: transformers\n---\n\n# A model\n"


def small_scratch(**changes):
    """Return a from-scratch model with a vocabulary of 400 tokens."""
    sizes = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return mhla_hf.MHLAForCausalLM(mhla_hf.MHLAConfig.preset("tiny", num_attention_heads=2, **sizes, **changes))


def save_model(folder, model):
    """Save a model and its tokenizer without a card, and return the folder."""
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


def score(folder, tasks=("heldout_recall", "heldout_generation")):
    """Write results.json as if the model in `folder` had been evaluated on `tasks`, and return the folder."""
    fingerprint = fingerprint_folder(folder)
    records = [make_result(task=task, fingerprint=fingerprint, model="mhla") for task in tasks]
    Results(records).write(folder)
    return folder


def save_carded(folder, model):
    """Save a model with its tokenizer, scores, and the card that `write_card` makes of them."""
    write_card(score(save_model(folder, model)), name="tester/mhla", license="apache-2.0")


def forge(folder):
    """Add code to the source of a saved model, and replace its hash by one that fits."""
    source = folder / "modeling_mhla.py"
    text = source.read_text() + "print('mine')\n"
    original, lines = check_bundle(source.read_text())["sha256"], ("\nsha256: {}\n", '\nNAMESPACE = "{}"\n')
    for line in lines:
        text = text.replace(line.format(original), line.format("package"))
    forged = hashlib.sha256(text.encode()).hexdigest()[:12]
    for line in lines:
        text = text.replace(line.format("package"), line.format(forged), 1)
    assert check_bundle(text)["sha256"] == forged
    source.write_text(text)


def spoil(value, name="model.norm.weight"):
    """Return a function that damages the model in a folder."""

    def change_weights(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors[name].view(-1)[-1] = value
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return change_weights
