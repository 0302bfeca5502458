"""Image pipelines and classifiers: sampled as planned, resumed, scored once, never under a name that is not theirs."""

import functools
from pathlib import Path

import datasets
import numpy
import pytest
import torch
import transformers
from PIL import Image
from tools.launched import launch
from tools.small_models import refused
from tools.small_scores import color_judge, colors
from tools.small_towers import save_photos, small_clip
from tools.tiny_pipelines import dit_pipeline
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

import mhla_hf
from mhla_hf.evaluation import images as judging
from mhla_hf.evaluation.image_scores import Extractor, Moments, frechet_distance, precision_recall
from mhla_hf.evaluation.records import Results

STEPS = {"sampling.num_inference_steps": 2}


@pytest.fixture(scope="module")
def pipeline():
    return dit_pipeline()


@pytest.fixture
def reference(tmp_path):
    random = numpy.random.default_rng(0)
    images = random.integers(0, 255, (24, 16, 16, 3), dtype=numpy.uint8)
    numpy.savez(tmp_path / "reference.npz", arr_0=images, mu=numpy.zeros(2048), sigma=numpy.eye(2048))
    return images, str(tmp_path / "reference.npz")


def judge(pipeline, tmp_path, reference, models=None, **changes):
    extractor = {"extractor": color_judge(), "images": 22, **STEPS}
    settings = {"reference": reference[1], "samples": tmp_path / "samples", **extractor}
    settings |= changes.pop("settings", {})
    options = {"recipe": "table_9_class_to_image", "batch_size": 4, "progress": False, "settings": settings, **changes}
    return mhla_hf.evaluate(models or {"dit": pipeline}, **options)


def test_a_stop_is_resumed_and_gives_the_same_images_and_the_scores_of_the_files(
    pipeline, tmp_path, reference, monkeypatch
):
    calls, true, stop = [], type(pipeline).__call__, [2]

    @functools.wraps(true)
    def counted(self, *args, **kwargs):
        if len(calls) in stop:
            raise KeyboardInterrupt
        calls.append(kwargs["class_labels"])
        return true(self, *args, **kwargs)

    monkeypatch.setattr(type(pipeline), "__call__", counted)
    out = {"output": tmp_path / "out.json", "seed": 3}
    with pytest.raises(KeyboardInterrupt):
        judge(pipeline, tmp_path, reference, **out)
    folder = tmp_path / "samples" / "dit" / "imagenet_256-22"
    assert len(list(folder.glob("*.png"))) == 8 and not list(folder.rglob("*.tmp-*"))
    stop.clear()
    found = judge(pipeline, tmp_path, reference, **out)["dit"]
    again = {file.name: file.read_bytes() for file in folder.glob("*.png")}
    drawn = torch.randint(1000, (22,), generator=torch.Generator().manual_seed(3)).tolist()
    assert [label for batch in calls for label in batch] == drawn and len(set(again.values())) == 22
    judge(pipeline, tmp_path, reference, **out)
    assert len(calls) == 6, "what is known is not run again"
    judge(pipeline, tmp_path / "whole", reference, tasks=["precision"], seed=3)
    assert again == {file.name: file.read_bytes() for file in (tmp_path / "whole").rglob("*.png")}

    names = {"Fréchet distance", "spatial Fréchet distance", "classifier score", "precision", "recall"}
    kept = Results.read(tmp_path / "out.json")
    assert {r.metric for r in found} == {r.metric for r in kept} == {f"{name} (color judge)" for name in names}
    images = torch.stack([torch.from_numpy(numpy.array(Image.open(f))) for f in sorted(folder.glob("*.png"))])
    mine, theirs = (colors(x.permute(0, 3, 1, 2))["features"] for x in (images, torch.from_numpy(reference[0])))
    distance = found.find("imagenet_256", "Fréchet distance (color judge)")
    assert distance.value == pytest.approx(frechet_distance(Moments.of(mine), Moments.of(theirs)), rel=1e-6)
    precision = found.find("imagenet_256", "precision (color judge)").value
    assert precision == pytest.approx(precision_recall(mine, theirs)[0])
    assert (distance.samples, distance.seed, distance.shots, distance.higher_is_better) == (22, 3, 0, False)
    assert "--recipe table_9_class_to_image --set reference=" in distance.command and "color judge" in distance.command
    for changes, says in (({"settings": {"sampling.num_inference_steps": 3}, "seed": 3}, "sampling"), ({}, "plan")):
        with pytest.raises(ValueError, match=f"was started with another {says}"):
            judge(pipeline, tmp_path, reference, **changes)


def test_a_score_is_known_for_its_number_of_images_its_extractor_and_its_reference(pipeline, tmp_path, reference):
    def distance(place=reference, **settings):
        how = {"tasks": ["FID"], "output": tmp_path / "dit.json", "settings": {"images": 6, **settings}}
        return judge(pipeline, tmp_path, place, **how)["dit"][0].value

    few, many = distance(), distance(images=12)
    assert many != few and len(list((tmp_path / "samples").rglob("*.png"))) == 18
    kept = {record.samples: record.value for record in Results.read(tmp_path / "dit.json")}
    assert kept == {6: few, 12: many}, "fewer images are no new measurement of more, nor more of fewer"
    other = Extractor("color judge", lambda images: 3 * colors(images)["features"], "3")
    assert distance() == few and distance(extractor=other) == pytest.approx(9 * few, rel=1e-4)

    def scored(shade):
        (tmp_path / "references").mkdir(exist_ok=True)
        for number in range(6):
            color = (shade + number, shade, shade)
            Image.new("RGB", (16, 16), color).save(tmp_path / "references" / f"{number}.png", compress_level=0)
        return distance((None, str(tmp_path / "references")))

    assert scored(50) != scored(180) == scored(180)


@pytest.mark.slow
def test_two_processes_make_the_same_images_and_scores_as_one(pipeline, tmp_path, reference):
    pipeline.save_pretrained(tmp_path / "dit")
    options = "--quiet --recipe table_9_class_to_image --batch-size 4 --set extractor=tools.small_scores:color_judge"
    options += f" --set images=22 --set sampling.num_inference_steps=2 --set reference={reference[1]}"
    found = {}
    for setup, count in ((None, 1), ("ddp", 2)):
        line = f"evaluate dit {options} --out {count}.json --set samples=samples-{count}"
        code, text = launch(tmp_path, setup, count, *line.split())
        assert code == 0 and text.count("color judge") == 5, text
        images = sorted((tmp_path / f"samples-{count}").rglob("*.png"))
        records = Results.read(tmp_path / f"{count}.json")
        found[count] = [file.read_bytes() for file in images], {record.metric: record.value for record in records}
    assert found[1] == found[2] and len(found[1][0]) == 22


class Painter:
    """A text pipeline of a few lines: the color of the picture is in the prompt."""

    dtype = torch.float32
    components = {}

    def set_progress_bar_config(self, **options):
        pass

    def __call__(self, prompt, generator, output_type, **options):
        shade = [int(torch.randint(200, (1,), generator=one)) for one in generator]
        images = [Image.new("RGB", (8, 8), (len(text), s, s)) for text, s in zip(prompt, shade, strict=True)]
        return type("Output", (), {"images": images})()


def save_clip(folder):
    """A CLIP model with its processor: letters as tokens, one layer each, random weights."""
    letters, ends = "abcdefghijklmnopqrstuvwxyz", ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: n for n, token in enumerate([*letters, *(f"{one}</w>" for one in letters), *ends])}
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=16)
    start, end = (vocabulary[one] for one in ends)
    model = small_clip(vocab_size=len(vocabulary), bos_token_id=start, eos_token_id=end, pad_token_id=end)
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = transformers.CLIPProcessor(images, tokenizer)
    for part in (model, processor):
        part.save_pretrained(folder)
    return model, processor


def test_the_clip_score_of_a_text_pipeline(tmp_path):
    (model, processor), prompts = save_clip(tmp_path / "clip"), tmp_path / "prompts.txt"
    prompts.write_text("a cat\na very long prompt that is cut after the window of the model\n")
    settings = {
        "clip": str(tmp_path / "clip"),
        "prompts": str(prompts),
        "images": 6,
        "samples": str(tmp_path / "samples"),
    }
    options = {"recipe": "table_4_text_to_image", "tasks": ["CLIP score"], "settings": settings, "progress": False}
    compared = mhla_hf.evaluate({"sana": Painter()}, batch_size=4, **options)
    (record,) = compared["sana"]
    values = []
    for number, file in enumerate(sorted((tmp_path / "samples").rglob("*.png"))):
        prompt = prompts.read_text().splitlines()[number % 2]
        given = processor(text=[prompt], images=[Image.open(file)], return_tensors="pt", truncation=True)
        with torch.no_grad():
            values.append(max(0.0, 100 * model(**given).logits_per_image.item() / model.logit_scale.exp().item()))
    assert record.metric == "CLIP score" and record.samples == 6
    assert record.value == pytest.approx(sum(values) / 6, rel=1e-4)
    assert record.stderr == pytest.approx(numpy.std(values, ddof=1) / 6**0.5, rel=1e-3)
    assert compared.paper_table("markdown").splitlines()[2].startswith("| sana |  | ")


FEATURES = Extractor("only features", lambda images: images.float().mean((2, 3)), "1")


BAD = [
    ({"settings": {"reference": "nowhere.npz"}}, "reference: got 'nowhere.npz'"),
    (
        {"settings": {"reference": None}},
        "reference: got None, expected an existing ADM .npz or folder.",
    ),
    ({"settings": {"reference": "cut.npz"}}, "reference: got 'cut.npz', expected an .npz file"),
    ({"settings": {"extractor": FEATURES}, "tasks": ["sFID"]}, "expected one that returns 'spatial' for sFID"),
    ({"models": {"sana": Painter()}, "tasks": ["IS"]}, "got Painter, expected a pipeline that takes class_labels"),
    ({"recipe": "table_4_text_to_image", "settings": {}, "tasks": ["CLIP score"]}, "prompts: got None"),
]


@pytest.mark.parametrize("changes, says", BAD)
def test_bad_arguments_are_one_sentence_and_no_image_is_made(pipeline, tmp_path, reference, changes, says, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cut.npz").write_bytes(b"PK and no more")
    with refused(says):
        judge(pipeline, tmp_path, reference, **changes)
    assert not list((tmp_path / "samples").rglob("*.png"))


def test_top_1_is_the_share_of_images_named_right_known_for_its_pictures_and_its_processor(tmp_path, monkeypatch):
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    small |= {"image_size": 8, "patch_size": 4, "initializer_range": 3.0}
    model = ViTForImageClassification(ViTConfig(**small, id2label={0: "cat", 1: "ant", 2: "bee"})).eval()
    runs, true = [], judging.top1_accuracy
    monkeypatch.setattr(judging, "top1_accuracy", lambda *given: runs.append(1) or true(*given))
    options = {"recipe": "table_2_imagenet", "progress": False, "batch_size": 5, "output": tmp_path / "vit.json"}

    def square(mean=0.0):
        normal = {"image_mean": [mean] * 3, "image_std": [1.0] * 3}
        return ViTImageProcessorPil(size={"height": 8, "width": 8}, **normal)

    def accuracy(mean=0.0, data=tmp_path / "data", **changes):
        settings = {"data": str(data), "processor": square(mean)}
        return mhla_hf.evaluate({"vit": model}, settings=settings, **options, **changes)

    names = ["ant", "bee", "cat"]
    save_photos(tmp_path / "data", dict.fromkeys(names, 4), seed=1)
    compared = accuracy()
    (record,) = compared["vit"]
    right = 0
    for file in sorted((tmp_path / "data").rglob("*.png")):
        with torch.no_grad():
            said = model(**square()([Image.open(file)], return_tensors="pt")).logits.argmax().item()
        right += model.config.id2label[said] == file.parent.name
    assert record.value == right / 12 and record.samples == 12 and 0 < record.value < 1
    assert record.stderr == pytest.approx((record.value * (1 - record.value) / 12) ** 0.5)
    assert f"| vit | {100 * record.value:.2f} ±" in compared.paper_table("markdown")
    assert accuracy() and len(runs) == 1 and accuracy(force=True) and len(runs) == 2
    assert accuracy(0.5) and accuracy(0.5) and len(runs) == 3
    save_photos(tmp_path / "data", dict.fromkeys(names, 4), seed=2)
    again = accuracy()["vit"][0].value
    assert accuracy() and len(runs) == 4
    files = sorted((tmp_path / "data").rglob("*.png"))
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=names))
    columns = {"image": list(map(str, files)), "label": [names.index(file.parent.name) for file in files]}
    table = datasets.Dataset.from_dict(columns, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: table)
    assert accuracy(data="some/data")["vit"][0].value == again and accuracy(data="some/data") and len(runs) == 5
    assert accuracy(limit=3)["vit"][0].samples == 3
