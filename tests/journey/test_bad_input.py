"""Bad input to what stands around a converted model: one sentence that names the argument, what came, what was expected."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tools.small_encoders import converted_encoder
from tools.small_models import refused, softmax_model
from tools.small_scores import small_tokenizer

import mhla_hf
from mhla_hf.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's
STAGE = {"name": "a", "loss": "lm", "steps": 1, "lr": 1e-3, "seq_len": 16, "batch_size": 1}
REWARD = transformers.AutoModelForSequenceClassification
DAMAGED = {  # folder -> its config.json, and what is said of it
    "list": ("[1, 2]", "config.json: got list, expected a JSON object"),
    "type": ('{"model_type": ["llama"]}', "model_type in config.json: got ['llama'], expected a name"),
    "class": ('{"model_type": "llama", "architectures": "Llama"}', "got 'Llama', expected a list of names"),
    "settings": ('{"model_type": "mhla_llama", "mhla": [1]}', "mhla: got list, expected a dictionary of settings"),
    "layers": ('{"model_type": "mhla_llama", "mhla": {"layers": [99]}}', "layers: got index 99, expected less than"),
}


def converted(**settings):
    return mhla_hf.convert(softmax_model(), **{"block_size": 8, **settings})


def adapted(model, **lora):
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], **lora))


def taught(student=None, teacher=None, **given):
    given = {"out": "new", "data": torch.arange(60).repeat(9), "stages": [STAGE], "progress": False, **given}
    return mhla_hf.distill(converted() if student is None else student, teacher, **given)


def of_type(name):
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 64}
    config = transformers.AutoConfig.for_model(name, intermediate_size=16, **sizes)
    return transformers.AutoModel.from_config(config)


CASES = {
    "convert: settings": (lambda: mhla_hf.convert(softmax_model(), {}), "settings: got dict, expected MHLASettings"),
    "convert: adapters": (lambda: mhla_hf.convert(adapted(softmax_model())), "model: got PeftModel, expected LlamaFor"),
    "convert: mamba": (lambda: mhla_hf.convert(of_type("mamba")), "'mamba', which cannot be converted: it has no so"),
    "convert: deberta": (lambda: mhla_hf.convert(of_type("deberta-v2")), "'deberta-v2', which cannot be converted: "),
    "convert: no layers": (lambda: converted(layers=[]), 'layers: got [], expected "all", "2/3" or a list'),
    "encoder: distilled": (lambda: taught(converted_encoder("bert", "ForMaskedLM")),
        "stage 'a': loss: got 'lm', expected one of ['transfer', 'embeddings']"),
    "head: of classes, distilled": (lambda: taught(mhla_hf.convert(REWARD.from_config(softmax_model().config))),
        "student: got MHLALlamaForSequenceClassification, expected a causal language model"),
    "distill: where to": (lambda: taught(out=None), "out: got NoneType, expected the path of a folder to create"),
    "distill: a stage": (lambda: taught(stages=["lm"]), "stage 1: got 'lm', expected a mapping"),
    "adapter: no adapter": (lambda: mhla_hf.save_adapter(softmax_model(), "new"), "model: got LlamaForCausalLM, expected a"),
    "push: nothing": (lambda: mhla_hf.push(None, "me/model"), "what: got NoneType, expected a folder, a model or a pipe"),
}  # fmt: skip


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shelf")
    for name, (text, _) in DAMAGED.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text)
        (folder / name / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
        small_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said_in_one_sentence(shelf, monkeypatch, case):
    monkeypatch.chdir(shelf)
    call, words = CASES[case]
    with refused(words, kind=(ValueError, TypeError)):
        call()
    assert not any(shelf.glob("new*"))


@pytest.mark.parametrize("line", ["convert {} new", "info {}"])
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_configuration_is_said_in_one_sentence(shelf, monkeypatch, capsys, line, name):
    monkeypatch.chdir(shelf)
    assert main([*line.format(name).split(), "--quiet"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and DAMAGED[name][1] in error and error.count("\n") == 1, error
