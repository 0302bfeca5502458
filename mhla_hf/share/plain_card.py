"""The card of a model of which nothing was measured yet: it says what the model is, how to load it, and no number.

Unusual: it says of itself that it is not the card one should write; `card.write_card` writes that from an evaluated folder.
"""

import re

from huggingface_hub import ModelCardData

from .facts import find_licence

TASKS = {"language": "text-generation", "image": "image-classification", "tower": "image-feature-extraction"}
PIPELINES = (
    (r"Video|Wan", "text-to-video"),
    (r"Sana|PixArt", "text-to-image"),
    (r"DiT", "unconditional-image-generation"),
)
LOADING = {
    "language": (
        "from transformers import AutoModelForCausalLM",
        'model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)',
    ),
    "image": (
        "from transformers import AutoModelForImageClassification",
        'model = AutoModelForImageClassification.from_pretrained("{name}", trust_remote_code=True)',
    ),
    "tower": (
        "from transformers import AutoModel",
        'model = AutoModel.from_pretrained("{name}", trust_remote_code=True)',
    ),
    "model": (
        "from diffusers import AutoModel",
        'model = AutoModel.from_pretrained("{name}", trust_remote_code=True)',
    ),
    "pipeline": (
        "from diffusers import DiffusionPipeline",
        'pipe = DiffusionPipeline.from_pretrained("{name}", trust_remote_code=True)',
    ),
}

STOCK_CLASS = (
    "Load it as above: a transformer class of diffusers itself would find its weights here, warn of the others only, and "
    "compute softmax attention with weights that were trained for MHLA."
)


def hub_task(kind: str, class_name: str) -> str | None:
    """The Hub's name for what a model does, by its kind and class; None for a diffusion model that is not known."""
    return TASKS.get(kind) or next((task for pattern, task in PIPELINES if re.search(pattern, class_name)), None)


def plain_card(
    repo_id: str, kind: str, class_name: str, *, license, license_name=None, license_link=None, base_model=None
) -> str:
    """README.md for a model without scores.

    Args:
        repo_id: the Hub id it will have. kind: as `folder_checks.find_kind` says. class_name: of the model or pipeline.
        license, license_name, license_link: as the Hub writes them; must be what the card of `base_model` states, when
            that can be read.
        base_model: Hub id of the softmax original, or None.
    """
    given = {"license": license, "license_name": license_name, "license_link": license_link}
    licence = find_licence(base_model, None, given)
    tag = hub_task(kind, class_name)
    data = ModelCardData(
        base_model=base_model,
        base_model_relation=None if base_model is None else "finetune",
        library_name="transformers" if kind in TASKS else "diffusers",
        pipeline_tag=tag,
        tags=["mhla", "linear-attention", "custom_code"],
        **licence,
    )
    imports, call = LOADING[kind]
    origin = "" if base_model is None else f" Made from [{base_model}](https://huggingface.co/{base_model})."
    return (
        f"---\n{data.to_yaml()}\n---\n\n# {repo_id.split('/')[-1]}\n\n"
        f"`{class_name}` with [MHLA, multi-head linear attention](https://arxiv.org/abs/2601.07832).{origin}\n\n"
        f"```python\n{imports}\n\n{call.format(name=repo_id)}\n```\n\n"
        "mhla_hf need not be installed; the code is in `modeling_mhla*.py` beside the weights."
        f"{'' if kind in TASKS else ' ' + STOCK_CLASS}\n\n"
        "**Nothing was measured yet:** how good this model is, what a conversion lost, and how fast it is are not known.\n"
    )
