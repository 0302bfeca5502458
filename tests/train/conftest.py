"""A teacher and a student of 25,000 weights, tokens with something to learn in them, and a short two-stage run."""

import copy

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM

import mhla_hf
from mhla_hf.training.loop import Stage, distill

VOCAB, LENGTH = 64, 48


@pytest.fixture(autouse=True)
def _no_accelerator_of_another_test():
    AcceleratorState._reset_state(reset_partial_state=True)


class Lab:
    """What the tests of training share."""

    vocab, length = VOCAB, LENGTH

    def teacher(self, seed=0, **changes):
        torch.manual_seed(seed)
        values = {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
        }
        return LlamaForCausalLM(LlamaConfig(**(values | changes))).eval()

    def student(self, teacher=None, **settings):
        torch.manual_seed(1)
        values = {"layers": "all", "block_size": 16, "num_blocks": 4} | settings
        return mhla_hf.convert(copy.deepcopy(teacher or self.teacher()), **values)

    def tokens(self, count=4000, seed=0):
        """Each token follows from the two before it, one time in four at random."""
        random = torch.Generator().manual_seed(seed)
        noise = torch.randint(0, VOCAB, (count,), generator=random)
        pick = torch.rand(count, generator=random) < 0.25
        tokens = noise.clone()
        for i in range(2, count):
            if not pick[i]:
                tokens[i] = (tokens[i - 1] * 5 + tokens[i - 2]) % VOCAB
        return tokens

    def stages(self, steps=30, **changes):
        values = dict(seq_len=LENGTH, batch_size=4, **changes)
        return [
            Stage("transfer", "transfer", steps, 1e-2, trainable="mhla", **values),
            Stage("logits", "logits", steps, 1e-3, warmup=3, ce_weight=0.1, weight_decay=0.01, **values),
        ]

    def lm(self, steps=10, **changes):
        values = {"name": "lm", "lr": 3e-3, "seq_len": LENGTH, "batch_size": 4} | changes
        return [Stage(loss="lm", steps=steps, **values)]

    def distill(self, out, teacher="own", student=None, **changes):
        """Two stages on the tokens; returns the student."""
        teacher = self.teacher() if teacher == "own" else teacher
        student = student or self.student(teacher)
        values = {"data": self.tokens(), "out": out, "stages": self.stages(), "save_every": 4, "progress": False}
        return distill(student, teacher, **(values | changes))

    def weights(self, folder):
        return (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="session")
def lab():
    return Lab()
