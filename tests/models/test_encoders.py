"""Converted encoders of text: every type, rows padded on either side, heads, fine-tuning, saved and loaded."""

import copy
import inspect
from unittest import mock

import pytest
import torch
import transformers
from tools.elsewhere import check_elsewhere
from tools.model_checks import by_definition, checkpointing_changes_nothing, one_graph
from tools.ops_cases import distance
from tools.small_encoders import ENCODER_TYPES, PAD, SLIDING, converted_encoder, softmax_encoder
from tools.small_models import refused
from transformers import AutoModel

from mhla_hf.hub.facts import read_model
from mhla_hf.models.derived_classes import base_classes, model_name
from mhla_hf.models.encoder.encoder_attention import find_encoder_attentions
from mhla_hf.models.families import ENCODERS, auto_class_of

IDS = torch.randint(3, 60, (3, 29), generator=torch.Generator().manual_seed(1))
LENGTHS, STARTS = (29, 11, 20), (0, 18, 5)  # whole, padded on the left, padded on both sides
MATRIX = {"mixing_form": "softmax"}
OTHER_FORMS = [("bert", MATRIX), ("eurobert", MATRIX), ("eurobert", {"window": 2, "block_size": 4})]


def padded(ids=IDS):
    """The rows of `ids` cut to `LENGTHS`, at `STARTS`, and their mask."""
    rows, mask = torch.full_like(ids, PAD), torch.zeros_like(ids)
    for row, (length, start) in enumerate(zip(LENGTHS, STARTS, strict=True)):
        rows[row, start : start + length] = ids[row, :length]
        mask[row, start : start + length] = 1
    return rows, mask


@torch.no_grad()
@pytest.mark.parametrize(("model_type", "form"), [*((name, {}) for name in ENCODER_TYPES), *OTHER_FORMS])
def test_a_converted_encoder_of_this_type(model_type, form, tmp_path):
    """Each row of a padded batch equals the row alone, all equals the definition, only MHLA is new, saved equals itself."""
    soft = softmax_encoder(model_type)
    model = converted_encoder(model_type, **form)
    before, after = soft.state_dict(), model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert all(".mhla." in key for key in after.keys() - before.keys())
    layers = [i for i in find_encoder_attentions(soft) if i != 1 or model_type not in SLIDING]
    assert model.config.mhla["layers"] == layers
    assert model.config.mhla["num_blocks"] == 64 // form.get("block_size", 8)

    rows, mask = padded()
    assert inspect.signature(model.forward) == inspect.signature(soft.forward)
    # As sentence-transformers calls it, without hooks
    output = model.forward(rows, attention_mask=mask).last_hidden_state
    for row, (length, start) in enumerate(zip(LENGTHS, STARTS, strict=True)):
        alone = model(IDS[row : row + 1, :length]).last_hidden_state
        assert distance(output[row : row + 1, start : start + length], alone) < 1e-5
        assert distance(soft(IDS[row : row + 1, :length]).last_hidden_state, alone) > 1e-3, "MHLA changes nothing"
    right = torch.arange(29) < torch.tensor(LENGTHS)[:, None]
    output = model(IDS.where(right, PAD), attention_mask=right.long()).last_hidden_state
    assert distance(output[2:, :20], alone) < 1e-5

    if form is not MATRIX:  # what fits the window is softmax, bit for bit, and nothing else runs
        real = torch.arange(8) < torch.tensor([8, 5, 1])[:, None]
        with mock.patch("mhla_hf.nn.two_way.two_way_attention", side_effect=AssertionError):
            for given in ({}, {"attention_mask": real.long()}):
                outputs = [one(IDS[:, :8], **given).last_hidden_state for one in (model, soft)]
                assert torch.equal(*(output[real] for output in outputs))

    real = mask.bool()
    expected = by_definition(model)(rows, attention_mask=mask).last_hidden_state[real]
    assert distance(model(rows, attention_mask=mask).last_hidden_state[real], expected) < 1e-5

    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="these are no weights of a softmax model"):
        type(soft).from_pretrained(tmp_path)
    loaded, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and type(loaded) is type(model)
    assert torch.equal(loaded.eval()(IDS).last_hidden_state, model(IDS).last_hidden_state)


@torch.no_grad()
def test_every_head_converts_and_is_found_here_and_where_the_package_is_not(tmp_path):
    (rows, mask), wanted = padded(), {}
    for model_type in ("bert", "modernbert"):
        family, kinds = next(family for family in ENCODERS if family.base == model_type), []
        for name, base in base_classes(family).items():
            head = name.removeprefix(model_name(family))
            form = MATRIX if head == "ForMaskedLM" else {}
            model, auto = converted_encoder(model_type, head, gate=True, **form), auto_class_of(name)
            given = tuple(x[None] for x in (rows, mask)) if name.endswith("MultipleChoice") else (rows, mask)
            output = model(given[0], attention_mask=given[1])[0]
            model.save_pretrained(tmp_path / name)
            loaded = getattr(transformers, auto).from_pretrained(tmp_path / name)
            kinds.append(read_model(tmp_path / name)[0])
            assert type(loaded) is type(model) and isinstance(loaded, base)
            assert torch.equal(loaded.eval()(given[0], attention_mask=given[1])[0], output)
            if head in ("ForSequenceClassification", "ForMaskedLM"):
                wanted[f"{name}-{auto}"] = output
            if head == "ForSequenceClassification":
                wanted[f"{name}-AutoModel"] = model.base_model(rows, attention_mask=mask)[0]
        assert kinds == ["body", "sequences", "tokens", "answers", "masked", "choices"], "what they are shared as"
        assert set(loaded.config.auto_map) == {"AutoConfig", *map(auto_class_of, base_classes(family))}
    check_elsewhere(tmp_path, {"input_ids": rows, "attention_mask": mask}, wanted)


@pytest.mark.parametrize("model_type", ["bert", "distilbert", "modernbert"])
def test_fine_tuning_a_classifier(model_type):
    """A step lowers the loss, reaches all that is new, and is the same with checkpointed layers."""
    form = {**MATRIX, "per_head": True} if model_type == "distilbert" else {}
    model = converted_encoder(model_type, "ForSequenceClassification", **form)
    rows, mask = padded()
    given = {"attention_mask": mask, "labels": torch.tensor([0, 1, 1])}
    for module in model.modules():
        module.p = 0.0 if isinstance(module, torch.nn.Dropout) else getattr(module, "p", None)
    first = checkpointing_changes_nothing(model.train(), lambda model: model(rows, **given).loss)
    assert all(first[name].abs().sum() > 0 for name, _ in model.named_parameters() if ".mhla." in name)
    model.zero_grad()
    model(IDS[:, :5]).logits.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if ".mhla." in name), "also of one block"
    loss = model.eval()(rows, **given).loss
    with torch.no_grad():
        for name, p in model.named_parameters():
            p -= 1e-2 * first.get(name, torch.zeros(()))
        assert model(rows, **given).loss < loss


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["roberta", "modernbert"])
def test_what_a_caller_may_give(model_type):
    """Embeddings in place of ids, positions of their own, arguments by place, a row that is all padding, half precision."""
    model = converted_encoder(model_type)
    rows, mask = padded()
    output = model(rows, mask).last_hidden_state[mask.bool()]
    embeds = model.get_input_embeddings()(rows)
    assert distance(model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state[mask.bool()], output) < 1e-6
    mask[1] = 0
    assert model(rows, mask).last_hidden_state.isfinite().all()
    assert model(rows[:, :8], mask[:, :8]).last_hidden_state.isfinite().all()
    half = copy.deepcopy(model).bfloat16()
    assert distance(half(IDS).last_hidden_state, model(IDS).last_hidden_state) < 3e-2
    calls = {}, {"attention_mask": mask}
    one_graph(model, lambda model, call: model(rows, **call).last_hidden_state, *calls)


def test_what_a_layer_cannot_do_is_refused():
    model = converted_encoder("bert")
    for arguments, words in (
        ({"attention_mask": torch.ones(3, 1, 29, 29)}, ("attention_mask", "4 axes", "[batch, length]")),
        ({"cu_seq_lens_q": torch.tensor([0, 29])}, ("cu_seq_lens_q", "attention_mask")),
    ):
        with refused(*words):
            model(IDS, **arguments)
    embeds = torch.zeros(1, 65, 32)
    model = converted_encoder("modernbert", **MATRIX)
    with refused("65 tokens", "64"):
        model(inputs_embeds=embeds)
    assert converted_encoder("modernbert")(inputs_embeds=embeds).last_hidden_state.isfinite().all()
