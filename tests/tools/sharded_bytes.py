"""Run by `accelerate launch`: measure the memory and the traffic of sharded training, and print them as JSON.

Every process counts the bytes of its shards, and the largest sum of bytes of gathered parameters, each time that FSDP
has gathered a unit. It also counts the bytes that it sends to each other process in a step: its shards of weights, and
the others' shards of gradients.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from transformers import LlamaConfig, LlamaForCausalLM

import mhla_hf

torch.set_num_threads(1)
GROUPS, PEAK, SENT = [], [0, 0], []
Group = _fsdp_param_group.FSDPParamGroup
original_init, original_wait = Group.__init__, Group.wait_for_unshard


def init_and_register(self, *arguments, **options):
    """Initialize a unit of FSDP, and add it to `GROUPS`."""
    original_init(self, *arguments, **options)
    GROUPS.append(self)


def wait_and_count(self):
    """Wait until a unit is gathered, and update `PEAK`."""
    original_wait(self)
    parameters = [p for group in GROUPS for p in group.fsdp_params]
    gathered = sum(tensor.untyped_storage().size() for p in parameters for tensor in p.all_gather_outputs)
    PEAK[:] = sum(p._sharded_param_data.untyped_storage().size() for p in parameters), max(PEAK[1], gathered)


def count_sent(function, sent_tensor):
    """Wrap a collective so that it counts the bytes of the tensor that `sent_tensor` selects from its arguments."""

    def call(*args, **kwargs):
        SENT.append(sent_tensor(*args, **kwargs).nbytes)
        return function(*args, **kwargs)

    return call


def main(out, loss, tied=False):
    """Distill a small model into the folder `out` by the loss `loss`, and print the counts."""
    Group.__init__, Group.wait_for_unshard = init_and_register, wait_and_count
    dist.all_gather_single = count_sent(dist.all_gather_single, lambda _, shard, **kwargs: shard)
    dist.reduce_scatter_single = count_sent(dist.reduce_scatter_single, lambda output, **kwargs: output)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12, "num_attention_heads": 4}
    teacher = LlamaForCausalLM(LlamaConfig(vocab_size=128, tie_word_embeddings=bool(tied), **sizes)).eval()
    student = mhla_hf.convert(LlamaForCausalLM(teacher.config), block_size=16)
    student.load_state_dict(teacher.state_dict(), strict=False)
    total = sum(p.nbytes for model in (student, teacher) for p in model.parameters())
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in student.model.layers]
    stage = {"name": "s", "loss": loss, "steps": 2, "lr": 1e-3, "seq_len": 32, "batch_size": 8}
    if loss == "transfer":
        stage["trainable"] = "mhla"
    tokens = torch.randint(0, 128, (2000,))
    mhla_hf.distill(student, teacher, out=out, data=tokens, stages=[stage], progress=False)
    tied_bytes = tied and student.lm_head.weight.nbytes
    report = {
        "rank": dist.get_rank(),
        "share": PEAK[0],
        "gathered": PEAK[1],
        "sent": sum(SENT) // 2,
        "tied": tied_bytes,
    }
    report |= {"total": total, "layer": max(layers), "student": sum(p.nbytes for p in student.parameters())}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
