"""The commands `mhla-hf info`, `card` and `push`."""

import json
import os
from typing import Any

from . import values

INFO = """\
example:
  mhla-hf info out/mhla                  class, base, layers, form, state, scores
  mhla-hf info out/mhla --context 32768 --json
  mhla-hf info meta-llama/Llama-3.2-1B --context 32768      before a conversion: its layers and cache; reads config.json
"""
CARD = """\
example:
  mhla-hf card out/mhla --name me/mhla --compare teacher=out/teacher --compare "plain linear=out/linear"
  mhla-hf card out/mhla --check                 check that its files still render to the same card
  mhla-hf card out/mhla --shelve model_cards/demo              add its facts and card to this repository
  mhla-hf card model_cards                      render every card again; --check: name those that differ
"""
PUSH = """\
example:
  mhla-hf push out/mhla user/llama-mhla --private --tag v1
  mhla-hf push out/mhla user/llama-mhla --draft   without scores for recall and generation
  mhla-hf push out/mhla user/llama-mhla --dry-run   check everything, list all files, and send nothing
Log in first: hf auth login. If it is interrupted, the same command resumes: files that arrived are not sent again.
"""


def info_options(add: values.AddArgument) -> None:
    models = "a saved MHLA model or pipeline, or folder or Hub id of a softmax language model"
    add("model", metavar="MODEL", help=models)
    add("--context", type=values.parse_count, default=1024, help="tokens at which the cache is counted (default: 1024)")
    add("--revision", help="branch, tag or commit on the Hub")
    add("--json", **values.JSON)


def run_info(model: str, context: int, revision: str | None, as_json: bool, **_: Any) -> None:
    values.check_model(model, revision, weights=False)
    values.load_libraries()

    from ..info import describe_model, render_info

    record = describe_model(model, context, revision)
    print(json.dumps(record, indent=2) if as_json else render_info(record))


def card_options(add: values.AddArgument) -> None:
    add("folder", metavar="DIR", help="an evaluated model's folder, or a folder of cards such as model_cards")
    add("--check", action="store_true", help="write nothing; check that rendering gives the same card")
    add("--name", dest="hub_id", metavar="NAME", help="Hub id the model will have")
    add("--compare", action="append", default=[], metavar="LABEL=DIR", help="such as teacher=out/teacher")
    add("--base-model", metavar="ID", help="Hub id of the softmax original")
    add("--license", help="license of the weights, if the original's card states none")
    add("--about", default="", help="a sentence below the title")
    add("--limit", action="append", default=[], metavar="SENTENCE", dest="limits", help="a known failure")
    add("--shelve", metavar="CARDS/NAME", help="add its facts and card to a folder of cards")
    add("--over-seeds", metavar="JSON", help="with --shelve: results over several seeds, stored with the facts")


def run_card(
    folder: str, check: bool, hub_id: str | None, compare: list[str], shelve: str | None, over_seeds: str | None,
    progress: bool, command: str, **options: Any,
) -> None:  # fmt: skip
    values.check_folder(folder, "an evaluated model, or of cards")
    values.load_libraries()

    from ..hub import card

    if os.path.isdir(os.path.join(folder, card.RESULTS)):
        for path in card.render_shelf(folder, check):
            print(f"{path}: {'matches its files' if check else 'rendered'}")
    elif check:
        card.check_card(folder)
        print(f"{folder}: its card matches its files")
    elif shelve:
        print(card.shelve(folder, *os.path.split(shelve), over_seeds))
    elif hub_id is None:
        raise ValueError("hub_id: got None, expected the Hub id that the model will have, such as me/model.")
    else:
        compared: dict[str, Any] = dict(pair.partition("=")[::2] for pair in compare)
        if incomplete := [label for label, path in compared.items() if not (label and path)]:
            raise ValueError(f"compare: got {incomplete[0]!r}, expected LABEL=DIR, such as teacher=out/teacher.")
        print(card.write_card(folder, name=hub_id, compared=compared, **options))


def push_options(add: values.AddArgument) -> None:
    add("what", metavar="DIR", help="folder of a saved MHLA model or pipeline")
    add("repo_id", metavar="USER/NAME", help="Hub id; created if it does not exist")
    add("--private", action="store_true", default=None, help="create a private repository")
    add("--create-pr", action="store_true", help="open a pull request instead of committing")
    add("--tag", action="append", default=[], dest="tags", help="tag for the commit; may be repeated")
    add("--revision", help="branch to commit to (default: main)")
    add("--message", help="first line of the commit")
    add(
        "--draft", action="store_true", help="allow a converted language model without scores for recall and generation"
    )
    add("--delete-stale", action="store_true", help="delete files of an older model that the new one lacks")
    dry_run = "check everything, list the files to send and to delete, and send nothing"
    add("--dry-run", action="store_true", help=dry_run)
    add("--license", help="for the card of a model that has none, such as apache-2.0")
    add("--base-model", help="Hub id of the softmax original, for such a card")


def run_push(what: str, command: str, **options: Any) -> None:
    values.check_folder(what, "a saved MHLA model or pipeline")
    values.load_libraries()

    from ..hub.push import push

    pushed = push(what, **options)
    if options["dry_run"]:
        lines = [f"{size:>15,}  {name}" for name, size in pushed.files.items()]
        lines += [f"{'delete':>15}  {name}" for name in pushed.deleted]
        hint = "; to delete files, the push needs --delete-stale" if pushed.deleted else ""
        print("\n".join(lines), f"{sum(pushed.files.values()):>15,}  bytes; nothing was sent{hint}", sep="\n")
        return
    print(f"{pushed.url}\n{'revision' if pushed.new else 'nothing changed; revision'} {pushed.revision}")
