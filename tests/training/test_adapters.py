"""A conversion saved without its base: trained through PEFT, mounted elsewhere, on the base and on a fine-tune of it."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch
from huggingface_hub import HfApi
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tools.small_models import refused, scratch_model, softmax_model, tokens

import mhla_hf

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # read by PEFT

MOUNT = """
import sys
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
import mhla_hf
torch.set_num_threads(1)
ids, out = load_file("ids.safetensors")["ids"], {}
for name in ("base", "tuned"):
    model = mhla_hf.load_adapter(AutoModelForCausalLM.from_pretrained(name), "adapter")
    with torch.no_grad():
        out[name] = model(ids).logits.contiguous()
        out[f"{name} merged"] = model.merge_and_unload()(ids).logits.contiguous()
save_file(out, "out.safetensors")
"""


def trained_adapter(seed=0, model=None, name="default", **lora):
    """A converted model with LoRA, a few steps in."""
    torch.manual_seed(seed)
    model = mhla_hf.convert(softmax_model(), layers=[0, 1], block_size=8) if model is None else model
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


@torch.no_grad()
def test_mounted_in_another_process_on_the_base_and_on_a_fine_tune(tmp_path):
    with torch.enable_grad():
        peft_model = trained_adapter()
    mhla_hf.save_adapter(peft_model, tmp_path / "adapter")
    softmax_model().save_pretrained(tmp_path / "base")
    tuned = softmax_model()
    for parameter in tuned.parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    tuned.save_pretrained(tmp_path / "tuned")
    ids = tokens(2, 60, seed=5)
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    wanted = {"base": peft_model(ids).logits, "tuned": mhla_hf.load_adapter(tuned, tmp_path / "adapter")(ids).logits}
    done = subprocess.run([sys.executable, "-c", MOUNT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    out = load_file(tmp_path / "out.safetensors")
    for name, logits in wanted.items():
        assert torch.equal(out[name], logits)
        torch.testing.assert_close(out[f"{name} merged"], logits, rtol=1e-4, atol=1e-4)
    assert (out["tuned"] - out["base"]).abs().max() > 0.1
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(".lora_" in name or ".mhla." in name for name in held)


@torch.no_grad()
def test_mhla_modules_alone(tmp_path):
    """Of a conversion that kept some heads, without LoRA; the model that was saved stays as it was."""
    ids, settings = tokens(2, 60, seed=5), {"block_size": 8, "window": 2, "layers": "all", "softmax_heads": {0: [1]}}
    model = mhla_hf.convert(softmax_model(), **settings)
    for name, x in model.named_parameters():
        if ".mhla." in name:
            x += 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(len(name)))
    model.config.mhla_measured = {"kl": 0.5}
    names = list(model.state_dict())
    mhla_hf.save_adapter(model, tmp_path)
    assert list(model.state_dict()) == names
    held = load_file(tmp_path / "adapter_model.safetensors")
    assert held and all(".mhla." in name for name in held)
    mounted = mhla_hf.load_adapter(softmax_model(), tmp_path)
    assert torch.equal(mounted(ids).logits, model.eval()(ids).logits)
    assert mounted.config.mhla_measured == {"kl": 0.5}
    assert torch.equal(mounted.merge_and_unload()(ids).logits, model(ids).logits)


def test_an_adapter_is_small_beside_a_base_of_usual_size():
    """Counted on no data: the heads and widths of Llama-3.2-1B."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "vocab_size": 128_256}
    with torch.device("meta"):
        base = softmax_model(**sizes, num_attention_heads=32, num_key_value_heads=8, head_dim=64)
        count = base.num_parameters()
        model = mhla_hf.convert(base, layers="all")
        peft_model = get_peft_model(model, mhla_hf.adapter_config(model, r=8))
    trained = sum(value.numel() for value in peft_model.parameters() if value.requires_grad)
    assert trained < 0.02 * count


@torch.no_grad()
def test_mounted_from_the_hub(hub, tmp_path):
    with torch.enable_grad():
        peft_model, ids = trained_adapter(), tokens(2, 40)
    mhla_hf.save_adapter(peft_model, tmp_path)
    api = HfApi()
    api.create_repo("tester/adapter")
    api.upload_folder(repo_id="tester/adapter", folder_path=tmp_path)
    mounted = mhla_hf.load_adapter(softmax_model(), "tester/adapter", revision="main")
    assert torch.equal(mounted(ids).logits, peft_model(ids).logits)


@torch.no_grad()
def test_several_side_by_side(tmp_path):
    ids, models = tokens(2, 40), {}
    with torch.enable_grad():
        for seed, name in enumerate(("first", "second")):
            models[name] = trained_adapter(seed)
            mhla_hf.save_adapter(models[name], tmp_path / name)
    both = mhla_hf.load_adapter(softmax_model(), tmp_path / "first", "first")
    assert mhla_hf.load_adapter(both, tmp_path / "second", "second") is both
    for name in ("second", "first"):
        both.set_adapter(name)
        assert torch.equal(both(ids).logits, models[name](ids).logits)
    with refused("adapter_name: got 'first', which the model already has"):
        mhla_hf.load_adapter(both, tmp_path / "second", "first")


def test_peft_knows_the_targets_of_converted_models():
    model = mhla_hf.convert(softmax_model())
    peft_model = get_peft_model(model, LoraConfig(r=2))
    assert {name.split(".")[-1] for name in peft_model.targeted_module_names} == {"q_proj", "v_proj"}


def test_bad_input(tmp_path):
    with refused("expected a text model with MHLA layers", kind=TypeError):
        mhla_hf.adapter_config(softmax_model())
    with refused("model: got LlamaForCausalLM", kind=TypeError):
        mhla_hf.save_adapter(softmax_model(), tmp_path)
    with refused("which has no mhla.json, expected"):
        mhla_hf.load_adapter(softmax_model(), tmp_path)
    with refused("source: got 'nobody/nothing', expected a folder or an adapter"):
        mhla_hf.load_adapter(softmax_model(), "nobody/nothing")
    mhla_hf.save_adapter(trained_adapter(), tmp_path / "adapter")
    with refused("model: got NoneType, expected a language model", kind=TypeError):
        mhla_hf.load_adapter(None, tmp_path / "adapter")
    sizes = "model: got num_hidden_layers 5, expected 3, as the base of "
    for model, said in (
        (softmax_model("qwen3"), "model: got the model type 'qwen3', expected 'llama', the base of "),
        (softmax_model(num_hidden_layers=5), sizes),
        (mhla_hf.convert(softmax_model(), layers=[1]), "model: got one converted with other settings than "),
        (scratch_model(), "model: got the model type 'mhla', expected 'llama'"),
    ):
        before = model.config.to_dict()
        with refused(said):
            mhla_hf.load_adapter(model, tmp_path / "adapter")
        assert model.config.to_dict() == before and model(tokens(1, 9)).logits.isfinite().all()


@pytest.mark.parametrize("file", ["mhla.json", "adapter_config.json", "adapter_model.safetensors"])
def test_a_damaged_adapter_leaves_the_model_as_it_was(file, tmp_path):
    mhla_hf.save_adapter(trained_adapter(), tmp_path)
    model = softmax_model()
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:60])
    with pytest.raises(
        ValueError, match=rf"source: got '{tmp_path}', expected an adapter that can be read \([^\n]+\)\.$"
    ):
        mhla_hf.load_adapter(model, tmp_path)
    (tmp_path / file).unlink()
    with refused(f"source: got '{tmp_path}', which has no {file}"):
        mhla_hf.load_adapter(model, tmp_path)
    assert getattr(model.config, "mhla", None) is None


@torch.no_grad()
def test_changes_of_distillation_as_lora(tmp_path):
    """A change of rank 2 is saved exactly; what is not a weight of a linear layer is refused."""
    base, ids = softmax_model(), tokens(2, 60, seed=5)
    base.config.name_or_path = "the base"
    model = mhla_hf.convert(softmax_model(), layers=[0, 1], block_size=8)
    for name, module in model.named_modules():
        if name.endswith((".q_proj", ".v_proj", ".o_proj")):
            factors = [torch.randn(n, 2, generator=torch.Generator().manual_seed(n)) for n in module.weight.shape]
            module.weight += 0.02 * factors[0] @ factors[1].T
    mhla_hf.save_adapter(model, tmp_path / "adapter", base=base, rank=4)
    loaded = mhla_hf.load_adapter(softmax_model(), tmp_path / "adapter")
    assert loaded.peft_config["default"].base_model_name_or_path == "the base"
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert (base(ids).logits - model(ids).logits).abs().max() > 0.1
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    assert {x.shape[0] for name, x in load_file(file).items() if "lora_A" in name} == {4}
    mhla_hf.save_adapter(model, tmp_path / "coarse", base=base, rank=1)
    coarse = mhla_hf.load_adapter(softmax_model(), tmp_path / "coarse")(ids).logits
    assert 0 < (coarse - model(ids).logits).norm() < (base(ids).logits - model(ids).logits).norm()
    model.model.norm.weight += 1
    with refused("base: got a model with another 'model.norm.weight', expected changed weights of linear"):
        mhla_hf.save_adapter(model, tmp_path / "adapter", base=base)
    with refused("base: got LlamaForCausalLM whose 'model.embed_tokens.weight' does not fit, expected the model's"):
        mhla_hf.save_adapter(model, tmp_path / "adapter", base=softmax_model(vocab_size=40))


@torch.no_grad()
@pytest.mark.parametrize("names", [["mine"], ["default", "second"], ["first", "second"]])
def test_adapters_of_all_names_load_again(names, tmp_path):
    ids, logits = tokens(2, 40), {}
    with torch.enable_grad():
        both = trained_adapter(name=names[0])
        for name in names[1:]:
            mhla_hf.save_adapter(trained_adapter(1), tmp_path / name)
            mhla_hf.load_adapter(both, tmp_path / name, name)
    mhla_hf.save_adapter(both, tmp_path / "saved")
    for name in names:
        both.set_adapter(name)
        loaded = mhla_hf.load_adapter(softmax_model(), tmp_path / "saved", name)
        logits[name] = loaded(ids).logits
        assert torch.equal(logits[name], both(ids).logits)
    assert len(names) == 1 or (logits[names[0]] - logits[names[1]]).abs().max() > 0.1
    if "first" not in names:  # else there is none by the default name
        assert torch.equal(mhla_hf.load_adapter(softmax_model(), tmp_path / "saved")(ids).logits, logits[names[0]])


@torch.no_grad()
def test_merged_lora_is_saved_or_refused(tmp_path):
    """However it was merged; `rank` must hold all that was merged so far."""
    ids = tokens(2, 40)
    with torch.enable_grad():
        peft_model = trained_adapter()
    mhla_hf.save_adapter(peft_model, tmp_path / "trained")
    merged = [peft_model.merge_and_unload()]
    merged.append(mhla_hf.load_adapter(softmax_model(), tmp_path / "trained").merge_and_unload())
    for model in merged:
        with refused("model: got LoRA merged into 'model.layers.0.self_attn.q_proj'", "base=", "rank=2."):
            mhla_hf.save_adapter(model, tmp_path / "merged")
        mhla_hf.save_adapter(model, tmp_path / "merged", base=softmax_model(), rank=2)
        loaded = mhla_hf.load_adapter(softmax_model(), tmp_path / "merged")
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    with torch.enable_grad():
        again = trained_adapter(1, merged[1])
    with refused("expected the result of merge_and_unload() with base=, its softmax original, and rank=4."):
        mhla_hf.save_adapter(again, tmp_path / "again")
    mhla_hf.save_adapter(again.merge_and_unload(), tmp_path / "again", base=softmax_model(), rank=4)
    with torch.enable_grad():
        peft_model = trained_adapter()
    peft_model.merge_adapter()  # and LoRA is saved, too
    mhla_hf.save_adapter(peft_model, tmp_path / "trained")
    mhla_hf.save_adapter(mhla_hf.load_adapter(softmax_model(), tmp_path / "trained").unload(), tmp_path / "unloaded")
    for rank in (0, -2, 2.0, True):
        with refused(f"rank: got {rank!r}, expected a whole number of at least 1."):
            mhla_hf.save_adapter(merged[0], tmp_path / "merged", base=softmax_model(), rank=rank)


def edited(folder, tensors=None, **fields):
    """Change tensors (None removes one) and fields of mhla.json, or of the settings in it (... removes one)."""
    file = folder / "adapter_model.safetensors"
    with safe_open(file, "pt") as stream:
        metadata = stream.metadata()
    weights = {**{name: x.clone() for name, x in load_file(file).items()}, **(tensors or {})}
    save_file({name: x for name, x in weights.items() if x is not None}, file, metadata)
    record = json.loads((folder / "mhla.json").read_text())
    for name, value in fields.items():
        part = record["mhla"] if name in record["mhla"] else record
        part.update({name: value}) if value is not ... else part.pop(name)
    (folder / "mhla.json").write_text(json.dumps(record))


CORE, LORA = "base_model.model.model.layers.0.self_attn.mhla.", "base_model.model.model.layers.1.self_attn.q_proj."
UNFIT = {
    "no weight of MHLA": ({"tensors": {f"{CORE}q_map.weight": None}}, "with nothing for 'base_model.model.model.layers.0.s"),
    "no weight of LoRA": ({"tensors": {f"{LORA}lora_A.weight": None}}, "lora_A.weight', expected shape [2, 32]."),
    "another shape": ({"tensors": {f"{CORE}mixing.power": torch.zeros(3)}}, "with shape [3] for", "expected shape [4]."),
    "the base's head": ({"tensors": {"base_model.model.lm_head.weight": torch.zeros(64, 32)}}, "lm_head.weight', expected"),
    "a leftover": ({"tensors": {f"{CORE}mixing.old": torch.zeros(3)}}, "mixing.old', expected nothing."),
    "NaN": ({"tensors": {f"{LORA}lora_A.weight": torch.full((2, 32), torch.nan)}}, "NaN or infinity in", "finite numbers."),
    "features without weights": ({"feature_map": "relu"}, "another 'feature_map' than 'softmax', with which it was saved"),
    "features as wide": ({"feature_map": "hedgehog"}, "another 'feature_map' than 'softmax', with which it was saved"),
    "layers": ({"layers": [0, 2]}, "another 'layers' than [0, 1], with which it was saved"),
    "a window": ({"window": 3}, "another 'window' than 6, with which it was saved"),
    "no settings": ({"mhla": ...}, "expected an adapter that can be read (mhla.json has no 'mhla')."),
    "no sizes": ({"sizes": ...}, "expected an adapter that can be read (mhla.json has no 'sizes')."),
    "no type": ({"base_model_type": ...}, "expected an adapter that can be read (mhla.json has no 'base_model_type')."),
    "sizes of no base": ({"sizes": 3}, "expected an adapter that can be read ("),
    "no window": ({"window": ...}, "another 'window' than 6"),
}  # fmt: skip


def state_of(model):
    """Everything that loading an adapter changes."""
    modules = [(name, id(module), type(module)) for name, module in model.named_modules()]
    return (
        modules,
        model.config.to_dict(),
        type(model.config),
        {name: x.clone() for name, x in model.state_dict().items()},
    )


def assert_unchanged(model, state):
    *before, weights_before = state
    *after, weights = state_of(model)
    assert before == after and weights.keys() == weights_before.keys()
    assert all(torch.equal(x, weights_before[name]) for name, x in weights.items())


@pytest.fixture(scope="module")
def adapter_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    mhla_hf.save_adapter(trained_adapter(), folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("with_metadata", [True, False])
def test_an_adapter_that_does_not_fit_changes_nothing(case, with_metadata, adapter_files, tmp_path):
    """Without metadata, as adapters had none at first, settings that change no shape cannot be checked."""
    for name, content in adapter_files.items():
        (tmp_path / name).write_bytes(content)
    if not with_metadata:
        file = tmp_path / "adapter_model.safetensors"
        save_file({name: x.clone() for name, x in load_file(file).items()}, file, {"format": "pt"})
        mhla_hf.load_adapter(softmax_model(), tmp_path)
        if case in ("features as wide", "a window", "no window"):
            return
    edit, *words = UNFIT[case]
    edited(tmp_path, **edit)
    model = softmax_model()
    state = state_of(model)
    with refused(f"source: got '{tmp_path}'", *(words if with_metadata or "was" not in words[0] else [])):
        mhla_hf.load_adapter(model, tmp_path)
    assert_unchanged(model, state)


def test_names_that_peft_cannot_take_change_nothing(tmp_path):
    mhla_hf.save_adapter(trained_adapter(), tmp_path)
    model = softmax_model()
    state = state_of(model)
    for name in ("v1.0", "0", "mhla", "weight"):  # adapters with the last three could not be saved
        with refused(f"adapter_name: got {name!r}, expected a name without a dot that no module has."):
            mhla_hf.load_adapter(model, tmp_path, name)
        assert_unchanged(model, state)
    with refused(f"source: got '{tmp_path}', expected an adapter that fits LlamaForCausalLM (", "'keys'"):
        mhla_hf.load_adapter(model, tmp_path, "keys")  # an attribute of torch.nn.ModuleDict
    assert_unchanged(model, state)
    loaded = mhla_hf.load_adapter(model, tmp_path)
    names = list(loaded.state_dict())
    edited(tmp_path, {f"{CORE}mixing.old": torch.zeros(3)})
    with refused("mixing.old', expected nothing."):
        mhla_hf.load_adapter(loaded, tmp_path, "second")
    assert list(loaded.state_dict()) == names and list(loaded.peft_config) == ["default"]


def test_what_cannot_be_loaded_is_not_saved(tmp_path):
    model = mhla_hf.convert(softmax_model(), layers=[0, 1], block_size=8)
    peft_model = get_peft_model(model, LoraConfig(r=2))
    with refused(
        "model: got the adapter 'default' with nothing for", ".mhla.", "expected shape"
    ):  # not in modules_to_save
        mhla_hf.save_adapter(peft_model, tmp_path / "new")
    with refused("model: got MHLALlamaForCausalLM, expected a converted model or a PeftModel", kind=TypeError):
        mhla_hf.save_adapter(model, tmp_path / "new")
    broken = trained_adapter()
    broken.get_parameter(f"{CORE}modules_to_save.default.mixing.power").data[:] = torch.nan
    with refused("model: got the adapter 'default' with NaN or infinity in"):
        mhla_hf.save_adapter(broken, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_other_files_stay(tmp_path, monkeypatch):
    peft_model, folder = trained_adapter(), tmp_path / "adapter"
    folder.mkdir()
    (folder / "notes").write_text("mine")
    for path in (folder, folder / "notes"):
        with refused(f"folder: got '{path}', expected a new or empty folder, or an adapter to replace"):
            mhla_hf.save_adapter(peft_model, path)
    assert [path.name for path in folder.iterdir()] == ["notes"]
    (folder / "notes").unlink()
    monkeypatch.chdir(folder)
    with refused("folder: got '.', expected", "not the working folder"):
        mhla_hf.save_adapter(peft_model, ".")
    monkeypatch.chdir(tmp_path)
    mhla_hf.save_adapter(peft_model, "adapter")
    (folder / "notes").write_text("mine")
    mhla_hf.save_adapter(trained_adapter(1), "adapter")
    assert (folder / "notes").read_text() == "mine"
    assert {*tmp_path.rglob("*")} == {folder, *folder.iterdir()}


@torch.no_grad()
def test_a_save_that_does_not_end_leaves_the_old_adapter(tmp_path):
    """A full disk, early and late, and a process that is killed before and between its two renames."""
    ids, folder = tokens(1, 30), tmp_path / "adapter"
    with torch.enable_grad():
        old, new = trained_adapter(), trained_adapter(1)
    mhla_hf.save_adapter(old, folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 500, 3_000, max(map(len, files.values())) - 100):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(
                ValueError, match=r"^folder: got [^\n]+, expected a folder that can be written \([^\n]+\)\.$"
            ):
                mhla_hf.save_adapter(new, folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
        assert list(tmp_path.iterdir()) == [folder]
    replace = os.replace
    for ends in (("mhla.json",), ("old",), ("adapter",)):
        if (process := os.fork()) == 0:
            os.replace = lambda source, target, ends=ends: (
                os.kill(os.getpid(), signal.SIGKILL) if str(target).endswith(ends) else replace(source, target)
            )
            mhla_hf.save_adapter(new, folder)
        assert os.waitpid(process, 0)[1] == signal.SIGKILL
        loaded = mhla_hf.load_adapter(softmax_model(), folder)
        assert torch.equal(loaded(ids).logits, old(ids).logits)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    mhla_hf.save_adapter(new, folder)
    assert torch.equal(mhla_hf.load_adapter(softmax_model(), folder)(ids).logits, new(ids).logits)
    assert list(tmp_path.iterdir()) == [folder]
