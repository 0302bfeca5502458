"""Encoders learn the embeddings of their softmax originals, from the shell and in Python."""

import copy
import json

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from tools.small_encoders import softmax_encoder
from tools.small_scores import TRAINING, small_tokenizer
from transformers import AutoModel, AutoTokenizer

import mhla_hf
from mhla_hf.cli.main import main
from mhla_hf.training.recipe import EncoderStage
from mhla_hf.training.tasks.encoders import EncoderTask

SIZES = {"seq_len": 24, "batch_size": 4}
STAGES = [
    {"name": "transfer", "loss": "transfer", "trainable": "mhla", "steps": 5, "lr": 1e-2, **SIZES},
    {"name": "distill", "loss": "embeddings", "steps": 30, "lr": 1e-3, **SIZES},
]


@pytest.fixture
def tokenizer():
    """One that puts a token before each text and another behind it."""
    made = small_tokenizer()
    made.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    special = [("[CLS]", made.cls_token_id), ("[SEP]", made.sep_token_id)]
    made.backend_tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    return made


def pair(kind, head="Model"):
    teacher = softmax_encoder(kind, head, vocab_size=402)
    student = mhla_hf.convert(copy.deepcopy(teacher), layers=[1, 2], block_size=8)
    for name, value in student.named_parameters():
        value.data *= 0.3 if name.endswith("value.weight") else 1  # a random encoder loses little by a conversion
    return teacher, student.eval()


@torch.no_grad()
def likeness(one, other):
    ids = torch.arange(60).view(3, 20) + 5
    return torch.cosine_similarity(one.base_model(ids)[0], other.base_model(ids)[0], dim=-1).mean()


@pytest.mark.parametrize("kind, head", [("bert", "Model"), ("roberta", "ForMaskedLM")])
def test_embeddings_come_nearer_to_the_teachers(tmp_path, tokenizer, kind, head):
    teacher, student = pair(kind, head)
    before, known = likeness(student, teacher), next(student.parameters()).clone()
    (tmp_path / "text.txt").write_text(TRAINING)
    given = {"out": tmp_path / "out", "data": tmp_path / "text.txt", "stages": STAGES, "progress": False}
    files = {"modules.json": [{"idx": 0}]}
    trained = mhla_hf.distill(student, teacher, tokenizer=tokenizer, files=files, **given)
    assert likeness(trained.eval(), teacher) > before + 0.2
    record = json.loads((tmp_path / "out/train.json").read_text())
    assert (record["task"], record["tokens"]) == ("encoders", 35 * 4 * 24)
    assert json.loads((tmp_path / "out/modules.json").read_text()) == [{"idx": 0}]
    assert not torch.equal(known, next(trained.parameters()))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").cls_token == "[CLS]"


def test_sequences_have_the_special_tokens_and_as_many_tokens_as_the_stage_says(tokenizer):
    task, stage = EncoderTask(*reversed(pair("bert")), tokenizer), EncoderStage(**STAGES[1])
    reader = task.reader(task.open(torch.arange(5, 300), [stage]), stage, 0, 0, None)
    (ids,), shares = task.take(reader, stage, slice(1, 3))
    assert ids.shape == (2, 24) and shares == (1 / 4,)
    assert set(ids[:, 0].tolist()) == {tokenizer.cls_token_id} and set(ids[:, -1].tolist()) == {tokenizer.sep_token_id}
    with pytest.raises(ValueError, match="seq_len: got 65 in stage 'distill', expected more than 2 tokens and at most"):
        task.open(torch.arange(5, 300), [EncoderStage(**{**STAGES[1], "seq_len": 65})])


def test_distill_converts_an_encoder_and_trains_it(tmp_path, tokenizer, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    softmax_encoder("bert", vocab_size=402).save_pretrained("encoder")
    tokenizer.save_pretrained("encoder")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    (tmp_path / "encoder/modules.json").write_text(json.dumps(modules))
    (tmp_path / "text.txt").write_text(TRAINING)
    line = ["distill", "encoder", "--recipe", "encoder", "--data", "text.txt", "--out", "out", "--max-steps", "2"]
    assert main([*line, "--set", "*.seq_len=16", "--set", "settings.block_size=8", "--batch-size", "2"]) == 0
    assert capsys.readouterr().out == "out: trained\n"
    assert type(AutoModel.from_pretrained("out")).__name__ == "MHLABertModel"
    assert (tmp_path / "out/modules.json").is_file()
    assert main(["distill", "encoder", "--recipe", "language_cpu", "--data", "text.txt", "--out", "new"]) == 2
    assert "recipe: got one for language, expected one for encoders" in capsys.readouterr().err
