"""Small saved models with everything that a push asks for: source, weights, tokenizer, scores, card."""

from small_scores import make_result, small_tokenizer

from mhla_hf.checkpoints.fingerprint import fingerprint_folder
from mhla_hf.evaluation.records import Results
from mhla_hf.share.card import write_card

CARD = """\
---
license: apache-2.0
library_name: transformers
---

# A model
"""


def save_model(folder, model, tokenizer=True):
    """The model and its tokenizer, saved; no card."""
    model.save_pretrained(folder)
    if tokenizer:
        small_tokenizer().save_pretrained(folder)
    return folder


def score(folder, tasks=("heldout_recall", "heldout_generation")):
    """results.json as if these tasks had been evaluated with what is in the folder."""
    fingerprint = fingerprint_folder(folder)
    records = [make_result(task=task, fingerprint=fingerprint, model="mhla") for task in tasks]
    Results(records).write(folder)
    return folder


def save_carded(folder, model, name="tester/mhla", tasks=("heldout_recall", "heldout_generation")):
    """The same with scores and the card that `write_card` makes of them."""
    score(save_model(folder, model), tasks)
    write_card(folder, name=name, license="apache-2.0")
    return folder
