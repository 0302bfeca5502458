"""Run by `accelerate launch`: prints, for every process, the most bytes of parameters that it held at once, as JSON.

Counted when a unit has been gathered: every process's own shares, and all that is gathered at that moment. And the bytes
that it sends to each other process in a step: shares of weights for others' gathering, and their shares of gradients.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from transformers import LlamaConfig, LlamaForCausalLM

import mhla_hf
from mhla_hf.training import loop

torch.set_num_threads(1)
GROUPS, PEAK, SENT = [], [0, 0], []
Group = _fsdp_param_group.FSDPParamGroup
begin, gathered = Group.__init__, Group.wait_for_unshard


def count(group):
    whole = sum(tensor.untyped_storage().size() for p in group.fsdp_params for tensor in p.all_gather_outputs)
    return sum(p._sharded_param_data.untyped_storage().size() for p in group.fsdp_params), whole


def remember(self, *arguments, **options):
    begin(self, *arguments, **options)
    GROUPS.append(self)


def look(self):
    gathered(self)
    own, whole = map(sum, zip(*map(count, GROUPS), strict=True))
    PEAK[:] = own, max(PEAK[1], whole)


def counting(function, share_of):
    def call(*args, **kwargs):
        SENT.append(share_of(*args, **kwargs).nbytes)
        return function(*args, **kwargs)

    return call


def main(out, loss, tied=False):
    Group.__init__, Group.wait_for_unshard = remember, look
    dist.all_gather_single = counting(dist.all_gather_single, lambda _, share, **kwargs: share)
    dist.reduce_scatter_single = counting(dist.reduce_scatter_single, lambda output, **kwargs: output)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12, "num_attention_heads": 4}
    teacher = LlamaForCausalLM(LlamaConfig(vocab_size=128, tie_word_embeddings=bool(tied), **sizes)).eval()
    student = mhla_hf.convert(LlamaForCausalLM(teacher.config), block_size=16)
    student.load_state_dict(teacher.state_dict(), strict=False)
    total = sum(p.nbytes for model in (student, teacher) for p in model.parameters())
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in student.model.layers]
    both = {"transfer": {"trainable": "mhla"}}.get(loss, {})
    stages = [{"name": "s", "loss": loss, "steps": 2, "lr": 1e-3, "seq_len": 32, "batch_size": 8, **both}]
    tokens = torch.randint(0, 128, (2000,))
    mhla_hf.distill(student, teacher, out=out, data=tokens, stages=stages, progress=False)
    found = {
        "share": PEAK[0],
        "gathered": PEAK[1],
        "sent": sum(SENT) // 2,
        "tied": tied and student.lm_head.weight.nbytes,
        "total": total,
        "layer": max(layers),
        "student": sum(p.nbytes for p in student.parameters()),
    }
    print(json.dumps({"rank": dist.get_rank()} | found), flush=True)


if __name__ == "__main__":
    assert loop  # the loop is what is measured
    main(*sys.argv[1:])
