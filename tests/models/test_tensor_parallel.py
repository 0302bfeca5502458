"""A model whose heads are split over two processes, as `torchrun` starts them: what one process gives alone."""

import torch
from tools.launched import fork
from tools.small_models import CACHE, converted_model, refused, scratch_model, softmax_model, tokens, twenty_steps
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import mhla_hf

LOCAL = {"windowed": True, "salient": 3}
MODELS = {
    "hybrid": lambda: converted_model("qwen3", [0, 2], **LOCAL),
    "heads": lambda: converted_model(heads=(8, 4), softmax_heads={0: [1], 1: [0, 2]}, **LOCAL),
    "heads apart": lambda: converted_model(heads=(8, 4), softmax_heads={1: [2, 3]}, **LOCAL),  # all those of a process
    "matrix": lambda: converted_model("mixtral", gate=True, output_norm=True, normalize=False),
    "matrix by head": lambda: converted_model(per_head=True),
    "scratch": scratch_model,
}
SHARED = ("matrix", "scratch")  # one matrix for all heads, replicated
TRAINED = ("heads", "matrix")
IDS, CUT = tokens(2, 40), 21


def results(model, name):
    """Logits at once and in parts, a loss and all gradients; of some models, losses and weights of 20 steps."""

    def step(number):
        loss = model(ids := tokens(2, 40, seed=number), labels=ids).loss
        loss.backward()
        return loss

    whole = model(IDS, labels=IDS)
    whole.loss.backward()
    with torch.no_grad():
        first = model(IDS[:, :CUT], use_cache=True)
        parts = [first.logits, model(IDS[:, CUT:], **{CACHE: first[CACHE]}).logits]
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    grads = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}
    found = {"logits": whole.logits.detach(), "parts": torch.cat(parts, 1), "loss": whole.loss.detach()}
    found |= {f"gradient of {name}": grad for name, grad in grads.items()}
    model.zero_grad()
    return found | (twenty_steps(model, step) if name in TRAINED else {})


def one_process(rank, folder):
    for name in MODELS:
        config = DistributedConfig(tp_size=2, tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", distributed_config=config)
        if not name.startswith(("hybrid", "heads")):  # which have no parameters of their own
            mixing = model.model.layers[0].self_attn.mhla.mixing.weight
            assert mixing.to_local().shape[0] == len(mixing) // 2 if hasattr(mixing, "to_local") else name in SHARED
        model.save_pretrained(f"{folder}/{name}/again", is_main_process=rank == 0)
        torch.save(results(model, name), f"{folder}/{name}/{rank}.pt")
    with refused("tensor-parallel size 2", "divides the 1 key/value heads"):
        AutoModelForCausalLM.from_pretrained(f"{folder}/one head", distributed_config=config)


def test_two_processes_give_what_one_gives(tmp_path):
    expected = {}
    for name, make in MODELS.items():
        model = make()
        model.save_pretrained(tmp_path / name)
        expected[name] = results(model, name)
    mhla_hf.convert(softmax_model(num_key_value_heads=1)).save_pretrained(tmp_path / "one head")
    fork(one_process, 2, tmp_path)
    for name, wanted in expected.items():
        for rank in range(2):
            got = torch.load(tmp_path / name / f"{rank}.pt")
            assert got.keys() == wanted.keys()
            for key, value in wanted.items():
                assert (got[key] - value).norm() <= 1e-5 * value.norm() + 1e-7, (name, rank, key)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name / "again").state_dict()
        assert all(torch.equal(again[key], value) for key, value in MODELS[name]().state_dict().items())
