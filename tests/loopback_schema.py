"""What the Hub refuses in a model card's front matter, as far as its documentation and its own libraries say it.

Sources: the Hub's documentation ("Model Cards", the specification modelcard.md), the list of tasks in huggingface.js
(packages/tasks), the messages of the server. Unusual: strict where the server only warns (a task or a language that it does
not know), because our own cards have no reason to name one.
"""

import re

import yaml

LICENSES = frozenset(["apache-2.0", "mit", "afl-3.0", "cc-by-nc-4.0", "gemma", "llama3.2", "other"])

_TASKS = """
    any-to-any audio-classification audio-text-to-text audio-to-audio automatic-speech-recognition depth-estimation
    document-question-answering feature-extraction fill-mask graph-ml image-classification image-feature-extraction
    image-segmentation image-text-to-text image-to-3d image-to-image image-to-text image-to-video keypoint-detection
    mask-generation object-detection other question-answering reinforcement-learning robotics sentence-similarity
    summarization table-question-answering tabular-classification tabular-regression text-classification text-generation
    text-ranking text-to-3d text-to-audio text-to-image text-to-speech text-to-video text2text-generation
    time-series-forecasting token-classification translation unconditional-image-generation video-classification
    video-text-to-text visual-document-retrieval visual-question-answering voice-activity-detection
    zero-shot-classification zero-shot-image-classification zero-shot-object-detection
"""
TASKS = frozenset(_TASKS.split())
FRONT = re.compile(r"---[ \t]*\n(.*?)\n---[ \t]*(?:\n|$)", re.DOTALL)
PATTERNS = {  # key -> what its text, or every text in its list, must look like
    "library_name": r"[a-z0-9][a-z0-9_.-]*",
    "base_model": r"\w[\w.-]*/\w[\w.-]*",
    "base_model_relation": r"finetune|quantized|merge|adapter",
    "datasets": r"(?:[\w-]+/)?[\w.-]+",
    "language": r"[a-z]{2,3}|multilingual|code",
    "license_name": r"[a-zA-Z0-9][a-zA-Z0-9 ._-]*",
    "license_link": r"LICENSE|https?://\S+",
    "tags": r".+",
}
LISTS = ("tags",)
PLACES = {"task": {"type": r"[\w-]+"}, "dataset": {"name": r".+", "type": r"(?:[\w-]+/)?[\w.-]+"}}


def refusals(text: str, licenses=LICENSES) -> list[str]:
    """What the server would say against a card; empty for one that it takes. licenses: the identifiers that it knows."""
    front = FRONT.match(text)
    try:
        data = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError as error:
        return [f"front matter: {' '.join(str(error).split())}"]
    if not isinstance(data, dict):
        return ["front matter is missing or no object"]
    found = [f'"{key}" is not allowed to be empty' for key, value in data.items() if value in (None, "", [])]
    if data.get("license") not in {None, *licenses}:
        found.append(f'"license" must be one of {sorted(licenses)}')
    if data.get("license") == "other" and not data.get("license_name"):
        found.append('"license_name" is required')
    if data.get("pipeline_tag", "other") not in TASKS:
        found.append(f'"pipeline_tag" must be one of {sorted(TASKS)}')
    for key, pattern in PATTERNS.items():
        value = data.get(key)
        if key in LISTS and not isinstance(data.get(key, []), list):
            found.append(f'"{key}" must be an array')
        for entry in value if isinstance(value, list) else [value] * (value is not None):
            if not isinstance(entry, str) or not re.fullmatch(pattern, entry):
                found.append(f'"{key}": {entry!r} fails to match the required pattern {pattern}')
    return found + _refused_index(data.get("model-index", []))


def _refused_index(index) -> list[str]:
    """The same for the scores: a list of models, each with results of a task, a data set and metrics with values."""
    if not isinstance(index, list):
        return ['"model-index" must be an array']
    found = []
    for number, model in enumerate(index):
        here = f"model-index[{number}]"
        if not isinstance(model, dict) or not isinstance(model.get("name"), str) or not model["name"]:
            found.append(f'"{here}.name" is required')
        results = model.get("results") if isinstance(model, dict) else None
        if not isinstance(results, list) or not results:
            found.append(f'"{here}.results" must be an array with results')
            continue
        for at, result in enumerate(results):
            found += _refused_result(f"{here}.results[{at}]", result if isinstance(result, dict) else {})
    return found


def _refused_result(here, result) -> list[str]:
    found = []
    for place, keys in PLACES.items():
        for key, pattern in keys.items():
            value = (result.get(place) or {}).get(key)
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                found.append(f'"{here}.{place}.{key}": {value!r} fails to match the required pattern {pattern}')
    metrics = result.get("metrics")
    if not isinstance(metrics, list) or not metrics:
        return [*found, f'"{here}.metrics" must be an array with metrics']
    for metric in metrics:
        value = metric.get("value")
        if (
            not isinstance(metric.get("type"), str)
            or isinstance(value, bool)
            or not isinstance(value, int | float | str)
        ):
            found.append(f'"{here}.metrics": {metric!r:.80} needs a type and a value')
    return found
