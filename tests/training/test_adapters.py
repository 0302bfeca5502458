"""A conversion saved without its base: trained through PEFT, mounted elsewhere, on the base and on a fine-tune of it."""

import os
import resource
import shutil

import pytest
import torch
from huggingface_hub import HfApi
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tools.model_checks import check_unchanged, snapshot
from tools.small_models import refused, scratch_model, softmax_model, tokens

import mhla_hf

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # read by PEFT


def converted(windowed=False):
    """A model whose MHLA layers have weights or, with a window, none."""
    return mhla_hf.convert(softmax_model(), layers=[0, 1], block_size=8, windowed=windowed)


def trained_adapter(seed=0, model=None, name="default", **lora):
    torch.manual_seed(seed)
    model = converted() if model is None else model
    peft_model = get_peft_model(model, mhla_hf.adapter_config(model, r=2, **lora), name)
    trained = [name for name, value in peft_model.named_parameters() if value.requires_grad]
    assert trained and all("lora_" in x or f".mhla.modules_to_save.{name}." in x for x in trained)
    optimizer = torch.optim.Adam([x for x in peft_model.parameters() if x.requires_grad], lr=3e-2)
    for step in range(3):
        ids = tokens(2, 40, seed=10 * seed + step)
        peft_model.train()(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return peft_model.eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    mhla_hf.save_adapter(trained_adapter(), folder)
    return folder


@torch.no_grad()
@pytest.mark.parametrize("windowed", [False, True])
def test_mounted_on_the_base_and_on_a_fine_tune_and_from_the_hub(windowed, hub, tmp_path):
    ids = tokens(2, 60, seed=5)
    with torch.enable_grad():
        peft_model = trained_adapter(model=converted(windowed))
    mhla_hf.save_adapter(peft_model, tmp_path)
    tuned = softmax_model()
    for parameter in tuned.parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    outputs = []
    for model in (softmax_model(), tuned):
        mounted = mhla_hf.load_adapter(model, tmp_path)
        outputs.append(mounted(ids).logits)
        torch.testing.assert_close(mounted.merge_and_unload()(ids).logits, outputs[-1], rtol=1e-4, atol=1e-4)
    assert torch.equal(outputs[0], peft_model(ids).logits)
    assert (outputs[1] - outputs[0]).abs().max() > 0.1
    name = f"tester/adapter-{windowed}"
    HfApi().create_repo(name)
    HfApi().upload_folder(repo_id=name, folder_path=tmp_path)
    from_hub = mhla_hf.load_adapter(softmax_model(), name, revision="main")
    assert torch.equal(from_hub(ids).logits, outputs[0])
    held = load_file(tmp_path / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in held} >= {"q_proj", "v_proj"}
    assert any(".mhla." in name for name in held) is not windowed


@torch.no_grad()
@pytest.mark.parametrize("settings", [{"windowed": False}, {"window": 2, "salient": 5, "softmax_heads": {0: [1]}}])
def test_mhla_modules_alone(settings, tmp_path):
    """Without LoRA; the model that was saved stays as it was."""
    ids = tokens(2, 60, seed=5)
    model = mhla_hf.convert(softmax_model(), block_size=8, layers="all", **settings)
    for name, x in model.named_parameters():
        if ".mhla." in name:
            x += 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(len(name)))
    model.config.mhla_measured = {"kl": 0.5}
    names = list(model.state_dict())
    mhla_hf.save_adapter(model, tmp_path)
    assert list(model.state_dict()) == names
    held = load_file(tmp_path / "adapter_model.safetensors")
    assert len(held) == sum(".mhla." in name for name in names)
    mounted = mhla_hf.load_adapter(softmax_model(), tmp_path)
    assert torch.equal(mounted(ids).logits, model.eval()(ids).logits)
    assert mounted.config.mhla_measured == {"kl": 0.5}
    assert torch.equal(mounted.merge_and_unload()(ids).logits, model(ids).logits)


def test_bad_input(saved, tmp_path):
    with refused("expected a text model with MHLA layers", kind=TypeError):
        mhla_hf.adapter_config(softmax_model())
    with refused("model: got LlamaForCausalLM, expected a", kind=TypeError):
        mhla_hf.save_adapter(softmax_model(), tmp_path / "new")
    with refused("model: got NoneType, expected a language model", kind=TypeError):
        mhla_hf.load_adapter(None, saved)
    model = softmax_model()
    state = snapshot(model)
    for source, name, said in (
        (tmp_path, "default", "which has no mhla.json, expected"),
        ("nobody/nothing", "default", "source: got 'nobody/nothing', expected a folder or an adapter"),
        (saved, "v1.0", f"source: got '{saved}', expected an adapter that fits LlamaForCausalLM ("),  # PEFT's reason
    ):
        with refused(said):
            mhla_hf.load_adapter(model, source, name)
    check_unchanged(model, state)
    for model, said in (
        (softmax_model("qwen3"), "model: got base_model_type 'qwen3', expected 'llama', as the base of "),
        (softmax_model(num_hidden_layers=5), "model: got num_hidden_layers 5, expected 3, as the base of "),
        (mhla_hf.convert(softmax_model(), layers=[1]), "model: got MHLA settings unlike those of "),
        (scratch_model(), "model: got base_model_type 'mhla', expected 'llama'"),
    ):
        before = model.config.to_dict()
        with refused(said):
            mhla_hf.load_adapter(model, saved)
        assert model.config.to_dict() == before and model(tokens(1, 9)).logits.isfinite().all()


@torch.no_grad()
def test_changes_of_distillation_as_lora(tmp_path):
    base, ids = softmax_model(), tokens(2, 60, seed=5)
    base.config.name_or_path = "the base"
    model = converted()
    for name, module in model.named_modules():
        if name.endswith((".q_proj", ".v_proj", ".o_proj")):
            factors = [torch.randn(n, 2, generator=torch.Generator().manual_seed(n)) for n in module.weight.shape]
            module.weight += 0.02 * factors[0] @ factors[1].T
    mhla_hf.save_adapter(model, tmp_path / "adapter", base=base, rank=4)
    loaded = mhla_hf.load_adapter(softmax_model(), tmp_path / "adapter")
    assert loaded.peft_config["default"].base_model_name_or_path == "the base"
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert (base(ids).logits - model(ids).logits).abs().max() > 0.1

    mhla_hf.save_adapter(model, tmp_path / "coarse", base=base, rank=1)
    coarse = mhla_hf.load_adapter(softmax_model(), tmp_path / "coarse")(ids).logits
    assert 0 < (coarse - model(ids).logits).norm() < (base(ids).logits - model(ids).logits).norm()
    model.model.norm.weight += 1
    with refused("base: got a model whose 'model.norm.weight' differs from the converted model's, expected one"):
        mhla_hf.save_adapter(model, tmp_path / "adapter", base=base)
    with refused("base: got LlamaForCausalLM, whose 'model.embed_tokens.weight' does not fit the model, expected the"):
        mhla_hf.save_adapter(model, tmp_path / "adapter", base=softmax_model(vocab_size=40))


@torch.no_grad()
@pytest.mark.parametrize("first", ["default", "mine"])
def test_two_adapters_load_again_by_name(first, tmp_path):
    ids, logits = tokens(2, 40), {}
    with torch.enable_grad():
        both = trained_adapter(name=first)
        mhla_hf.save_adapter(trained_adapter(1), tmp_path / "second")
    assert mhla_hf.load_adapter(both, tmp_path / "second", "second") is both
    with refused("adapter_name: got 'second', which the model already has"):
        mhla_hf.load_adapter(both, tmp_path / "second", "second")
    mhla_hf.save_adapter(both, tmp_path / "saved")
    for name in (first, "second"):
        both.set_adapter(name)
        logits[name] = mhla_hf.load_adapter(softmax_model(), tmp_path / "saved", name)(ids).logits
        assert torch.equal(logits[name], both(ids).logits)
    assert (logits[first] - logits["second"]).abs().max() > 0.1


@torch.no_grad()
def test_merged_lora_is_saved_or_refused(tmp_path):
    ids = tokens(2, 40)
    with torch.enable_grad():
        peft_model = trained_adapter()
    mhla_hf.save_adapter(peft_model, tmp_path / "trained")
    loaded = mhla_hf.load_adapter(softmax_model(), tmp_path / "trained")
    merged = [model.merge_and_unload() for model in (peft_model, loaded)]
    for model in merged:
        with refused("model: got LoRA merged into 'model.layers.0.self_attn.q_proj'", "base=", "rank=SUM OF"):
            mhla_hf.save_adapter(model, tmp_path / "merged")
        mhla_hf.save_adapter(model, tmp_path / "merged", base=softmax_model(), rank=2)
        loaded = mhla_hf.load_adapter(softmax_model(), tmp_path / "merged")
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    with torch.enable_grad():
        again = trained_adapter(1, merged[1])
    with refused("expected the model that merge_and_unload() returned, with base=ORIGINAL and rank="):
        mhla_hf.save_adapter(again, tmp_path / "again")
    with refused("rank: got 0, expected a whole number of at least 1."):
        mhla_hf.save_adapter(merged[0], tmp_path / "merged", base=softmax_model(), rank=0)


def edited(folder, tensors=None, cut=None):
    """Cut a file, or change tensors (None removes one)."""
    file = folder / (cut or "adapter_model.safetensors")
    if cut:
        file.write_bytes(file.read_bytes()[:60])
    else:
        weights = {**{name: x.clone() for name, x in load_file(file).items()}, **tensors}
        save_file({name: x for name, x in weights.items() if x is not None}, file)


CORE, LORA = "base_model.model.model.layers.0.self_attn.mhla.", "base_model.model.model.layers.1.self_attn.q_proj."
UNFIT = {
    "no weight of MHLA": ({"tensors": {f"{CORE}q_map.weight": None}}, "with nothing for 'base_model.model.model.layers.0.s"),
    "another shape": ({"tensors": {f"{CORE}mixing.weight": torch.zeros(3)}}, "with shape [3] for", "expected shape [32,"),
    "a leftover": ({"tensors": {f"{CORE}mixing.old": torch.zeros(3)}}, "mixing.old', expected nothing."),
    "NaN": ({"tensors": {f"{LORA}lora_A.weight": torch.full((2, 32), torch.nan)}}, "NaN or infinity in", "finite numbers."),
    **{f"damaged {file}": ({"cut": file}, "expected an adapter that can be read (")
       for file in ("mhla.json", "adapter_config.json", "adapter_model.safetensors")},
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_an_adapter_that_does_not_fit_changes_nothing(case, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    edit, *words = UNFIT[case]
    edited(tmp_path, **edit)
    model = softmax_model()
    state = snapshot(model)
    with refused(f"source: got '{tmp_path}'", *words):
        mhla_hf.load_adapter(model, tmp_path)
    check_unchanged(model, state)


def test_what_cannot_be_loaded_is_not_saved(tmp_path):
    peft_model = get_peft_model(converted(), LoraConfig(r=2))
    assert {name.split(".")[-1] for name in peft_model.targeted_module_names} == {"q_proj", "v_proj"}
    with refused("model: got the adapter 'default' with nothing for", ".mhla.", "expected shape"):
        mhla_hf.save_adapter(peft_model, tmp_path / "new")

    broken = trained_adapter()
    broken.get_parameter(f"{CORE}modules_to_save.default.mixing.weight").data[:] = torch.nan
    with refused("model: got the adapter 'default' with NaN or infinity in"):
        mhla_hf.save_adapter(broken, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_other_files_stay(saved, tmp_path, monkeypatch):
    peft_model, notes = trained_adapter(1), tmp_path / "notes"
    notes.write_text("mine")
    for path in (tmp_path, notes):
        with refused(f"folder: got '{path}', expected a new or empty folder, or an adapter to replace"):
            mhla_hf.save_adapter(peft_model, path)
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    mhla_hf.save_adapter(peft_model, tmp_path)
    assert notes.read_text() == "mine" and sorted(os.listdir(tmp_path)) == sorted(["notes", *os.listdir(saved)])
    monkeypatch.chdir(tmp_path)
    with refused("folder: got '.', expected", "not the working folder"):
        mhla_hf.save_adapter(peft_model, ".")


def test_a_full_disk_leaves_the_old_adapter(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "adapter")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    new, limits = trained_adapter(1), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(map(len, files.values())) - 100, limits[1]))
    try:
        with refused("folder: got ", "expected a folder that can be written ("):
            mhla_hf.save_adapter(new, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert list(tmp_path.iterdir()) == [folder]
