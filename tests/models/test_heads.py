"""Bodies and heads of language models: fine-tuned, saved, loaded by each Auto class, here and where the package is not."""

import pytest
import torch
import transformers
from tools.elsewhere import check_elsewhere
from tools.small_models import SIZES, converted_model, refused, scratch_model, shaken, softmax_model, tokens
from tools.small_types import small_model_of

import mhla_hf
from mhla_hf.models.families import auto_class_of
from mhla_hf.training.loop import Stage

HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
CONFIG = {**SIZES, "num_hidden_layers": 2, "num_labels": 3}
LABELS = {
    "ForCausalLM": {"labels": tokens(2, 20)},
    "ForSequenceClassification": {"labels": torch.tensor([0, 2])},
    "ForTokenClassification": {"labels": tokens(2, 20) % 3},
    "ForQuestionAnswering": {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([5, 9])},
}


def make(kind, head):
    if kind == "scratch":
        return shaken(getattr(mhla_hf, f"MHLA{head}")(scratch_model().config))
    torch.manual_seed(7)
    base = getattr(transformers, f"Llama{head}")(transformers.LlamaConfig(**CONFIG))
    return shaken(mhla_hf.convert(base, layers=[1], block_size=8))


def train(model, **labels):
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(4):
        losses.append(model.train()(tokens(2, 20), **labels).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    return model.eval()


@torch.no_grad()
def first(model, ids):
    return model.eval()(ids)[0]


def test_every_head_is_trained_saved_and_loaded_here_and_elsewhere(tmp_path):
    ids, wanted = tokens(2, 20, seed=5), {}
    for kind in ("converted", "scratch"):
        for head in HEADS if kind == "converted" else HEADS[:2]:
            model = make(kind, head)
            if head in LABELS:
                train(model, **LABELS[head])
            auto = auto_class_of(type(model).__name__)
            folder = f"{kind}-{head}"
            model.save_pretrained(tmp_path / folder)
            loaded = getattr(transformers, auto).from_pretrained(tmp_path / folder)
            wanted[f"{folder}-{auto}"] = first(model, ids)
            assert type(loaded) is type(model) and torch.equal(first(loaded, ids), first(model, ids))
    check_elsewhere(tmp_path, {"input_ids": ids}, wanted)


def test_a_language_models_folder_is_also_a_body_and_a_reward_model(tmp_path):
    model, ids = converted_model(), tokens(2, 20)
    model.save_pretrained(tmp_path)
    body = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(first(body, ids), first(model.model, ids))
    reward = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    assert first(reward, ids).shape == (2, 1) and torch.equal(first(reward.model, ids), first(body, ids))
    with refused("student: got MHLALlamaForSequenceClassification, expected a causal language model", kind=TypeError):
        mhla_hf.distill(reward, out=tmp_path / "out", data=ids[0], stages=[Stage("a", "lm", 1, 1e-3)])


def test_a_configuration_that_is_none_of_mhla_is_refused():
    settings = converted_model().config.mhla
    for config in (softmax_model().config, transformers.LlamaConfig(**CONFIG, mhla=settings)):
        with refused("config: got LlamaConfig, expected MHLALlamaConfig", "mhla_hf.convert"):
            mhla_hf.MHLALlamaForCausalLM(config)


BODIES = {
    "llama": lambda: mhla_hf.convert(transformers.LlamaModel(softmax_model().config), layers="all", block_size=8),
    "gpt2": lambda: mhla_hf.convert(small_model_of("gpt2").transformer, layers=[1], block_size=8),
    "scratch": lambda: scratch_model().model,
}


@torch.no_grad()
@pytest.mark.parametrize("kind", BODIES)
def test_padding_is_seen_whoever_calls_forward(kind):
    """sentence-transformers calls the body's `forward` itself, which runs no hook."""
    body, ids = shaken(BODIES[kind]()).eval(), tokens(2, 20)
    padded, mask = torch.nn.functional.pad(ids, (4, 0)), torch.nn.functional.pad(torch.ones_like(ids), (4, 0))
    whole = body(ids)[0]
    for run in (body, body.forward):
        torch.testing.assert_close(run(padded, attention_mask=mask)[0][:, 4:], whole)


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3_5_text"])
def test_a_reward_model_whose_class_is_not_named_like_the_language_model(model_type, tmp_path):
    """Its name comes from transformers' mapping: `Gemma3TextForSequenceClassification` beside `Gemma3ForCausalLM`."""
    config = small_model_of(model_type).config
    config.num_labels = 3
    torch.manual_seed(7)
    base = transformers.AutoModelForSequenceClassification.from_config(config)
    model = shaken(mhla_hf.convert(base, layers="all", block_size=8))
    model.save_pretrained(tmp_path)
    loaded, info = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and type(loaded) is type(model)
    assert torch.equal(first(loaded, tokens(2, 20)), first(model, tokens(2, 20)))
