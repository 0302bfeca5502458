"""Cards of diffusers pipelines and image classifiers: evaluated, written, proven, valid, loaded as they say."""

import json

import numpy
import pytest
import torch
from diffusers import DiffusionPipeline
from huggingface_hub import ModelCard
from small_scores import make_result
from tiny_pipelines import dit_pipeline, wan_pipeline

import mhla_hf
from mhla_hf.checkpoints.fingerprint import fingerprint_folder
from mhla_hf.evaluation.image_scores import Extractor
from mhla_hf.evaluation.records import Results
from mhla_hf.share import folder_checks
from mhla_hf.share.card import check_card, write_card


def colours(images):
    pooled = torch.nn.functional.adaptive_avg_pool2d(images.float() / 255, 2).flatten(1)
    return {"features": pooled, "logits": 9 * pooled, "spatial": pooled[:, :3]}


@pytest.fixture
def folders(tmp_path):
    """A converted DiT pipeline and its teacher, both evaluated with a small judge."""
    pipe = dit_pipeline()
    pipe.save_pretrained(tmp_path / "teacher")
    mhla_hf.convert(pipe)
    pipe.save_pretrained(tmp_path / "mhla")
    images = numpy.random.default_rng(0).integers(0, 255, (24, 16, 16, 3), dtype=numpy.uint8)
    numpy.savez(tmp_path / "reference.npz", arr_0=images)
    settings = {"reference": str(tmp_path / "reference.npz"), "samples": str(tmp_path / "samples"), "images": 24}
    settings |= {"extractor": Extractor("colour judge", colours, "1"), "sampling.num_inference_steps": 2}
    options = {"recipe": "table_9_class_to_image", "settings": settings, "progress": False}
    with pytest.raises(ValueError, match="mhla' holds the source of its MHLA model; give trust_remote_code to run it"):
        mhla_hf.evaluate(tmp_path / "mhla", **options)
    options["trust_remote_code"] = True
    compared = mhla_hf.evaluate([tmp_path / "teacher", tmp_path / "mhla"], **options)
    assert list(compared) == ["teacher", "mhla"] and all(len(records) == 5 for records in compared.values())
    return tmp_path


def test_the_card_of_an_image_pipeline(folders):
    mine = folders / "mhla"
    options = {"base_model": "facebook/DiT-XL-2-256", "license": "cc-by-nc-4.0"}
    text = write_card(mine, name="me/dit-mhla", compared={"teacher": folders / "teacher"}, **options).read_text()
    check_card(mine)
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag) == ("diffusers", "unconditional-image-generation")
    assert data.to_dict()["model-index"][0]["results"][0]["task"]["type"] == "unconditional-image-generation"
    assert "A class-to-image model whose attention was converted from softmax" in text and "2 of the 2 layers" in text
    assert "| imagenet_256 | Fréchet distance (colour judge) ↓ | 0 | 24 |" in text and " FID " not in text
    assert 'DiffusionPipeline.from_pretrained("me/dit-mhla", trust_remote_code=True)' in text.replace("'", '"')
    assert "far-back detail" not in text and "Generation was not measured" not in text
    record = json.loads((mine / "results.json").read_text())["results"][0]
    assert record["fingerprint"] == fingerprint_folder(mine)
    (mine / "README.md").write_text(text.replace("| 0 | 24 |", "| 0 | 50000 |", 1))
    with pytest.raises(ValueError, match=r"is not what the files say: .*\| 24 \|"):
        check_card(mine)
    with pytest.raises(ValueError, match="is a pipeline; expected a recipe for images or videos"):
        mhla_hf.evaluate(mine, ["wikitext"])


def test_what_push_sends_of_a_pipeline_proves_its_card(tmp_path, monkeypatch):
    """diffusers notes in every configuration where it was loaded from; that is not sent, and is no other model."""
    monkeypatch.setattr(folder_checks, "check_visit", lambda *given: None)
    pipe = dit_pipeline()
    mhla_hf.convert(pipe)
    pipe.save_pretrained(tmp_path / "first")
    mine, sent = tmp_path / "mhla", tmp_path / "sent"
    DiffusionPipeline.from_pretrained(tmp_path / "first", trust_remote_code=True).save_pretrained(mine)
    fingerprint = fingerprint_folder(mine)
    Results([make_result(fingerprint=fingerprint, task="imagenet_256")]).write(mine)
    write_card(mine, name="me/dit-mhla", license="apache-2.0")
    checked = folder_checks.check_folder(mine)
    assert {"transformer/config.json", "vae/config.json"} <= set(checked.rewritten)
    for path, file in checked.files.items():
        (sent / path).parent.mkdir(parents=True, exist_ok=True)
        (sent / path).write_bytes(checked.rewritten.get(path) or file.read_bytes())
    assert str(tmp_path) in (mine / "vae" / "config.json").read_text()
    assert str(tmp_path) not in (sent / "vae" / "config.json").read_text()
    assert fingerprint_folder(sent) == fingerprint
    check_card(sent)
    config = json.loads((sent / "vae" / "config.json").read_text())
    (sent / "vae" / "config.json").write_text(json.dumps(config | {"scaling_factor": 0.5}))
    with pytest.raises(ValueError, match="imagenet_256 was scored with other weights than it holds now"):
        check_card(sent)


def test_the_card_of_a_video_pipeline_with_a_kept_layer(tmp_path):
    pipe = wan_pipeline()
    mhla_hf.convert(pipe, layers="2/3")
    pipe.save_pretrained(tmp_path / "wan")
    mark = {"fingerprint": fingerprint_folder(tmp_path / "wan"), "task": "vbench"}
    Results([make_result(metric="total", value=0.8382, stderr=None, **mark)]).write(tmp_path / "wan")
    text = write_card(tmp_path / "wan", name="me/wan-mhla", license="apache-2.0").read_text()
    check_card(tmp_path / "wan")
    assert "A video model with" in text and "| softmax layers | 0 |" in text and "| vbench | total ↑ |" in text
    assert ModelCard(text).data.pipeline_tag == "text-to-video"


def test_a_folder_of_a_pipeline_without_mhla_has_no_card(tmp_path):
    dit_pipeline().save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match='has no "mhla" settings'):
        write_card(tmp_path / "plain", name="toy", license="mit")
