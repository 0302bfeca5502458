"""A start from the teacher, decays from a dense matrix, layers kept by measurement: on a Llama that has learned a little."""

import copy
import json
import math

import pytest
import torch
from small_models import CACHE, VOCAB, refused, softmax_model, tokens
from small_repos import save_model
from small_scores import small_tokenizer
from small_types import small_model_of

import mhla_hf
from mhla_hf import calibrate, choose_layers, fit_decays
from mhla_hf.cli import main
from mhla_hf.convert import keep_softmax, kl_to_teacher
from mhla_hf.convert.keep import bytes_of_layer, layers_in_budget
from mhla_hf.convert.start import mhla_layers, softmax_instead
from mhla_hf.models.attention import softmax_attentions
from mhla_hf.training.start import parse_budget

WINDOW = {"block_size": 8, "mixing_form": "decay", "local": "softmax", "layers": "all"}


def urns(count, seed, length=96, reach=40):
    """Rows `[count, length]` of which most tokens are one of the `reach` before: the past counts, the distant one not."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (count, length), generator=draw)
    for place in range(1, length):
        back = torch.randint(1, min(place, reach) + 1, (count,), generator=draw)
        again = torch.rand(count, generator=draw) < 0.8
        ids[:, place] = torch.where(again, ids[torch.arange(count), place - back], ids[:, place])
    return ids


@pytest.fixture(scope="module")
def teacher():
    model, steps = softmax_model(initializer_range=0.05), 60
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        ids = urns(8, seed=step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture(scope="module")
def batches():
    return [urns(4, seed=1000 + n) for n in range(3)]


def converted(teacher, **settings):
    return mhla_hf.convert(copy.deepcopy(teacher), **{**WINDOW, **settings})


def dense(**settings):
    return mhla_hf.convert(softmax_model(), mixing_form="softmax", **settings)


@torch.no_grad()
def test_the_teacher_is_in_the_model(batches):
    original = softmax_model("qwen3")
    model = mhla_hf.convert(copy.deepcopy(original), **WINDOW)
    with softmax_instead(model):
        torch.testing.assert_close(model(batches[0]).logits, original(batches[0]).logits, rtol=1e-6, atol=1e-6)
    assert kl_to_teacher(model, batches) > 1e-3
    assert not any(type(attention.mhla).__name__ == "SoftmaxCore" for attention in mhla_layers(model).values())


@pytest.mark.parametrize("decays", [1, 2])
def test_balance_is_found_again(teacher, batches, decays):
    balances = []
    for moved in (0.0, 2.0):
        model = converted(teacher, num_decays=decays, learn_mixing=decays > 1)
        mixings = [attention.mhla.mixing for attention in mhla_layers(model).values()]
        weights = [mixing.weight.clone() for mixing in mixings]
        for mixing in mixings:
            mixing.balance.data += moved
        report = calibrate(model, batches, steps=0)
        balances.append(torch.cat([mixing.balance for mixing in mixings]))
        assert decays > 1 or all(map(torch.equal, weights, (mixing.weight for mixing in mixings)))  # frozen
    torch.testing.assert_close(*balances)
    assert report["kl"] < 0.5 * report["kl_start"]
    assert report["kl"] == pytest.approx(kl_to_teacher(model, batches[-1:]))


@pytest.mark.parametrize("dtype, changes", [(torch.float32, {}), (torch.bfloat16, {"gate": True})])
def test_steps_on_outputs_at_least_halve_the_kl(teacher, batches, dtype, changes):
    model = mhla_hf.convert(copy.deepcopy(teacher).to(dtype), **WINDOW, **changes)
    before = {name: x.clone() for name, x in model.named_parameters() if ".mhla." not in name}
    report = calibrate(model, batches, steps=20, lr=2e-2)
    assert report["kl"] <= 0.5 * report["kl_start"]
    assert all(torch.equal(before[name], x) for name, x in model.named_parameters() if name in before)
    assert all(x.grad is None for x in model.parameters())
    assert mhla_layers(model)[0].mhla.q_map.weight.dtype == dtype


@pytest.mark.parametrize("form, per_head", [("softmax", True), ("direct", False)])
def test_a_matrix_starts_from_the_teacher(teacher, batches, form, per_head):
    """Wherever it started; blocks that the text does not reach keep their rows."""
    fitted, choices = [], {"mixing_form": form, "per_head": per_head, "block_size": 8, "num_blocks": 14}
    for start in ("uniform", "locality"):
        model = converted(teacher, local=None, mixing_start=start, **choices)
        mixings = [attention.mhla.mixing for attention in mhla_layers(model).values()]
        begun = [mixing.weight.clone() for mixing in mixings]
        report = calibrate(model, batches, steps=0)
        assert report["kl"] < report["kl_start"] * (1.0 if start == "uniform" else 0.9)  # which suits urns
        fitted.append(torch.stack([mixing.core()[..., :12, :12] for mixing in mixings]))
        assert all(torch.equal(a[..., 12:, :], b.weight[..., 12:, :]) for a, b in zip(begun, mixings, strict=True))
    torch.testing.assert_close(*fitted)


def test_heads_that_look_at_nothing_far_stay_as_they_are(batches):
    """Large constant queries and keys: RoPE alone says where such a head looks, at its own token."""
    model = softmax_model(attention_bias=True)
    attention = model.model.layers[0].self_attn
    for projection in (attention.q_proj, attention.k_proj):
        torch.nn.init.constant_(projection.bias, 40.0)
    student = converted(model)
    core = student.model.layers[0].self_attn.mhla
    start = core.mixing.balance.detach().clone()
    report = calibrate(student, batches, steps=0)
    assert torch.equal(core.mixing.balance, start) and torch.isfinite(core.mixing.weight).all()
    assert math.isfinite(report["kl"])


@torch.no_grad()
def test_decays_that_were_a_matrix_are_found_again(batches):
    model = dense(layers=[0, 2], block_size=8, num_blocks=12, per_head=True)
    distance = (torch.arange(12)[:, None] - torch.arange(12)).clamp_min(0)
    for attention in mhla_layers(model).values():
        for head, weight in enumerate(attention.mhla.mixing.weight):
            weight.copy_((0.1 * (1 + head) + 0.5**distance).log())
    report = fit_decays(model, 2, batches)
    assert min(report["r2"].values()) > 0.999 and report["kl"] < 1e-5
    assert model.config.mhla["mixing_form"] == "decay" and model.config.mhla["num_decays"] == 2
    model.generate(batches[0][:, :20], max_new_tokens=3)


def test_more_decays_fit_the_ramp_of_locality_better(teacher, batches):
    form = {"layers": "all", "block_size": 8, "num_blocks": 12, "mixing_form": "softmax"}
    one, two = (fit_decays(mhla_hf.convert(copy.deepcopy(teacher), **form), count, batches) for count in (1, 2))
    assert one["r2"][0] == pytest.approx(0, abs=1e-9) and two["r2"][0] > 0.9 and one["kl"] > 2 * two["kl"]


def test_kept_layers_are_chosen_by_the_damage_they_spare(teacher, batches, tmp_path):
    model = converted(teacher)
    report = choose_layers(model, batches, keep=2)
    assert sorted(report["kept"] + report["layers"]) == [0, 1, 2] and len(report["kept"]) == 2
    assert report["start"]["kl"] == pytest.approx(kl_to_teacher(model, batches))
    alone = next(row for row in report["single"] if row["layer"] == report["layers"][0])
    assert report["steps"][1]["kl"] == pytest.approx(alone["kl"])  # two of three kept: one is converted
    keep_softmax(model, report["kept"])
    same = converted(teacher, layers=report["layers"])
    assert torch.equal(model(batches[0]).logits, same(batches[0]).logits)
    assert model.config.to_dict() == same.config.to_dict()
    model.config.mhla_measured = report
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.mhla_measured["kept"] == report["kept"]
    assert torch.equal(loaded(batches[0]).logits, model(batches[0]).logits)


def test_what_takes_long_shows_how_long_it_will_take(teacher, batches, capsys):
    for shown in (True, False):
        model = converted(teacher)
        calibrate(model, batches[:2], steps=2, progress=shown)
        choose_layers(model, batches[:1], keep=1, progress=shown)
        told = capsys.readouterr().err
        for bar in ("distance: 100%|██████████| 1/1 [", "calibrate: 100%|██████████| 2/2 [", "| 7/7 ["):
            assert (bar in told) == shown
        assert told == "" or shown


def test_a_budget_of_bytes_is_a_number_of_layers(teacher, batches):
    model = converted(teacher)
    model.generate(batches[0][:1], max_new_tokens=1)
    cache = model(batches[0][:1], use_cache=True)[CACHE]
    state = cache.layers[0].state.nbytes()
    softmax = 2 * 2 * 8 * 4 * 1000  # keys and values, 2 heads of 8, fp32, 1,000 tokens
    for spare, kept in ((0, 2), (-1, 1)):
        report = choose_layers(model, batches[:1], cache_bytes=2 * softmax + state + spare, context=1000)
        assert len(report["kept"]) == kept
    with refused("cache_bytes", str(softmax + 2 * state)):
        choose_layers(model, batches, cache_bytes=softmax, context=1000)


def test_softmax_of_latent_attention_keeps_latents():
    """16 numbers and a rotated key of 8 for all heads: what its own cache holds."""
    model = small_model_of("deepseek_v3")
    held = model(tokens(1, 10))[CACHE].layers[0]
    mhla_hf.convert(model, layers="all")
    token, state = bytes_of_layer(softmax_attentions(model)[0], model.dtype)
    assert 10 * token == held.keys.nbytes + held.values.nbytes == 10 * 4 * (16 + 8)
    context = 2 * state // token
    budget = 2 * token * context + 2 * state
    assert layers_in_budget(model, budget, context) == 2 and layers_in_budget(model, budget - 1, context) == 1


REFUSED = {
    "MHLA": lambda m, b: calibrate(softmax_model(), b),
    "local": lambda m, b: calibrate(dense(normalize=False), b),
    "batches: got 1": lambda m, b: calibrate(m, b[:1]),
    "T over": lambda m, b: calibrate(m, [x[:, :24] for x in b]),
    "mixing_form": lambda m, b: fit_decays(m, 2),
    "normalize": lambda m, b: fit_decays(dense(normalize=False), 2),
    "training": lambda m, b: choose_layers(m.train(), b, keep=1),
    "cache_bytes, or neither": lambda m, b: choose_layers(m, b, keep=1, cache_bytes=1),
    "keep: got 3": lambda m, b: choose_layers(m, b, keep=3),
    "cache_bytes": lambda m, b: choose_layers(dense(), b, cache_bytes=1),
    "layers": lambda m, b: keep_softmax(m, [7]),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_said_in_one_sentence(words):
    model = mhla_hf.convert(softmax_model(), **WINDOW)
    with refused(words, kind=(TypeError, ValueError)):
        REFUSED[words](model, [tokens(1, 32)] * 2)


def test_command_line_starts_from_the_teacher_and_keeps_what_it_measures(teacher, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokenizer = small_tokenizer()
    model = softmax_model(vocab_size=len(tokenizer), max_position_embeddings=64)
    save_model(tmp_path / "llama", model)
    (tmp_path / "notes.txt").write_text("what is read here is what the layers are measured on. " * 40)
    form = [f"--set={name}={value}" for name, value in WINDOW.items() if name != "layers"]
    command, measured = ["convert", "llama", "out", *form, "--quiet"], ["--calibrate", "notes.txt", "--keep", "auto"]
    assert main([*command, *measured, "--budget", "1"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    calibration, choice = config["mhla_measured"]["calibration"], config["mhla_measured"]["choice"]
    assert len(config["mhla"]["layers"]) == 2 and sorted(config["mhla"]["layers"] + choice["kept"]) == [0, 1, 2]
    assert calibration["kl"] < calibration["kl_start"]
    for wrong, word in ((["--keep", "auto"], "keep"), ([*measured, "--budget", "half"], "budget")):
        capsys.readouterr()
        assert main([*command, "--overwrite", *wrong]) == 2
        assert word in capsys.readouterr().err
    assert parse_budget("64MiB") == {"cache_bytes": 64 * 2**20}
