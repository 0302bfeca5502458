"""The model card: what was kept and lost against the softmax original, how it was made, how fast it is, how to load it.

Unusual: no number is typed by hand. `render_card` shows what `CardFacts` holds and nothing else, `write_card` keeps the
facts that have no other file in card.json, and `check_card` renders again and names the first number that differs.
"""

import dataclasses
import math
import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..checkpoints.files import write_text
from . import card_sections as sections
from .facts import (
    PERSON_FILE,
    TEACHER,
    CardFacts,
    find_licence,
    person_json,
    read_facts,
    read_person,
    read_records,
)
from .plain_card import TASKS, hub_task

CARD_FILE = "README.md"
NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
# a percentage, or a number with a decimal point that is no part of a name such as Llama-3.2
CLAIM = re.compile(
    r"(?<![\w.,/])(?<!\w-)(?:\d+(?:[.,]\d+)*\s?(?:%|per ?cent)|\d+\.\d+(?:\.\d+)*(?![\w.]*\w))", re.IGNORECASE
)
CITATION = """\
@article{zhang2026mhla,
  title  = {MHLA: Restoring Expressivity of Linear Attention via Token-Level Multi-Head},
  author = {Kewei Zhang and Ye Huang and Yufan Deng and Jincheng Yu and Junsong Chen and Huan Ling and Enze Xie and
            Daquan Zhou},
  journal = {arXiv preprint arXiv:2601.07832},
  year   = {2026}
}"""


def write_card(
    folder,
    *,
    name,
    base_model=None,
    compared=None,
    license=None,
    license_name=None,
    license_link=None,
    datasets=(),
    language=(),
    about="",
    limits=(),
) -> Path:
    """Write README.md and card.json into a saved and evaluated MHLA model's folder.

    Args:
        folder: holds config.json and results.json; train.json and speed.json are used when there, the latter's numbers also
            from results.json when the teacher and this model were timed together (`--recipe speed`).
        name: Hub id the model will have ("user/model"), or a plain name.
        base_model: Hub id of the softmax original; None when it is not published or the model was trained from scratch.
        compared: label -> folder of another model with a results.json, in the order of the columns. The label "teacher"
            is the softmax original; "hybrid" and "plain linear" are the usual others.
        license, license_name, license_link: taken from the base's card (README.md in the teacher's folder, else the
            Hub's); given here only when that states none. Never guessed.
        datasets, language: Hub ids of training sets, ISO language codes.
        about: a sentence or more below the title. limits: sentences to add to the limits. Neither may name a percentage or
            a decimal number that the card does not show elsewhere.

    Returns:
        Path of README.md.

    Raises:
        ValueError: one sentence that names what is missing or wrong; nothing has been written then.
    """
    folder, compared = Path(folder), dict(compared or {})
    given = {"license": license, "license_name": license_name, "license_link": license_link}
    person = {
        "name": name,
        "base_model": base_model,
        "compared": {label: read_records(place, f"compared[{label!r}]") for label, place in compared.items()},
        "datasets": list(datasets),
        "language": list(language),
        "about": about,
        "limits": list(limits),
        **given,
    }
    facts = read_facts(folder, person)
    licence = find_licence(base_model, compared.get(TEACHER), given)
    facts = dataclasses.replace(facts, **licence)
    text = render_card(facts)
    check_front(text, facts)
    person.update(licence)
    write_text(folder / PERSON_FILE, person_json(person))
    return write_text(folder / CARD_FILE, text)


def check_card(folder, weights: bool = True) -> None:
    """Prove that README.md says what the folder's files say.

    weights: False for a folder that holds the card and its records but no model, such as those in `model_cards`.

    Raises:
        ValueError: a missing or damaged file, front matter that is no model card data, or the first line that differs,
            with the wrong number named.
    """
    folder = Path(folder)
    person = read_person(folder)
    facts = read_facts(folder, person, weights)
    wanted = render_card(facts)
    path = folder / CARD_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: write the card with write_card first")
    text = path.read_text(encoding="utf-8")
    compare_cards(path, text, wanted)
    check_front(text, facts)


def render_card(facts: CardFacts) -> str:
    """README.md for `facts`: YAML front matter, then the sections in the order in which a reader asks.

    ValueError for a percentage or a decimal number in `about` or `limits` that nothing else on the card shows.
    """
    check_claims(facts)
    parts = [
        f"---\n{card_data(facts).to_yaml()}\n---",
        f"# {facts.name.split('/')[-1]}",
        sections.summary(facts),
        sections.in_short(facts),
        sections.recovery(facts),
        sections.speed(facts),
        sections.limits(facts),
        sections.settings(facts),
        sections.recipe(facts),
        sections.loading(facts),
        sections.measured(facts),
        sections.licence(facts),
        f"## Citation\n\n```bibtex\n{CITATION}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def check_claims(facts: CardFacts) -> None:
    """What a person wrote claims no number that was not measured: percentages and decimals stand elsewhere on the card."""
    claims = [claim for text in (facts.about, *facts.limits) for claim in CLAIM.findall(text)]
    if not claims:
        return
    shown = render_card(dataclasses.replace(facts, about="", limits=[]))
    known = {_plain(claim) for claim in CLAIM.findall(shown)} | {_plain(number) for number in NUMBER.findall(shown)}
    for claim in claims:
        if _plain(claim) not in known:
            raise ValueError(
                f"about and limits: {claim!r} is no number of this model's files: write it as the card does, or leave it out"
            )


def _plain(number: str) -> str:
    """A number without what may differ in writing: "12 percent" is "12%"."""
    return re.sub(r"per ?cent", "%", number.lower()).replace(" ", "").replace("\u00a0", "")


def card_data(facts: CardFacts) -> ModelCardData:
    """The front matter; scores on whole tasks become the model-index, without depths and what is not finite."""
    scores = [
        EvalResult(
            task_type=hub_task(facts.kind, facts.class_name) or "other",
            dataset_type=record.task,
            dataset_name=record.task,
            dataset_config=record.task,  # the Hub groups by type and configuration, not by name
            metric_type=record.metric,
            metric_value=record.value,
            metric_args={"shots": record.shots, "samples": record.samples, "stderr": record.stderr},
        )
        for record in facts.records
        if record.limit is None
        and record.value is not None
        and math.isfinite(record.value)
        and sections.is_score(record)
    ]
    return ModelCardData(
        base_model=facts.base_model,
        base_model_relation=None if facts.base_model is None else "finetune",
        library_name="transformers" if facts.kind in TASKS else "diffusers",
        pipeline_tag=hub_task(facts.kind, facts.class_name),
        license=facts.license,
        license_name=facts.license_name,
        license_link=facts.license_link,
        datasets=facts.datasets or None,
        language=facts.language or None,
        tags=["mhla", "linear-attention", "custom_code"],
        model_name=facts.name.split("/")[-1] if scores else None,
        eval_results=scores or None,
    )


def check_front(text: str, facts: CardFacts) -> None:
    """The front matter must come back from the Hub client's own reader as it was meant."""
    read = ModelCard(text).data.to_dict()
    meant = card_data(facts).to_dict()
    if read != meant:
        odd = sorted(key for key in {*read, *meant} if read.get(key) != meant.get(key))
        raise ValueError(f"the front matter's {odd[0]!r} reads as {read.get(odd[0])!r}, expected {meant.get(odd[0])!r}")


def compare_cards(path: Path, text: str, wanted: str) -> None:
    """ValueError that names the first difference between the card and what the files say."""
    got_lines, wanted_lines = text.split("\n"), wanted.split("\n")
    for number, (got, want) in enumerate(zip(got_lines, wanted_lines, strict=False), 1):
        if got == want:
            continue
        for here, there in zip(NUMBER.findall(got), NUMBER.findall(want), strict=False):
            if here != there:
                raise ValueError(f"{path}:{number}: shows {here} where the files say {there}: {got.strip()!r}")
        raise ValueError(f"{path}:{number}: is {got.strip()!r} where the files say {want.strip()!r}")
    if len(got_lines) != len(wanted_lines):
        raise ValueError(f"{path} has {len(got_lines)} lines where the files give {len(wanted_lines)}")
