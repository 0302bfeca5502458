"""A teacher and a student of a few thousand weights, tokens with something to learn in them, and a short two-stage run."""

import copy
import json
import multiprocessing
import os
import signal
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mhla_hf
from mhla_hf.training.loop import Stage, distill

VOCAB, LENGTH = 64, 48
FORK = multiprocessing.get_context("fork")


class Lab:
    def teacher(self, seed=0, **changes):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        values = {"vocab_size": VOCAB, "max_position_embeddings": 128, "tie_word_embeddings": True} | sizes
        return LlamaForCausalLM(LlamaConfig(**(values | changes))).eval()

    def student(self, teacher=None, **settings):
        torch.manual_seed(1)
        form = {"layers": "all", "block_size": 16, "num_blocks": 4, "mixing_form": "softmax", "windowed": False}
        return mhla_hf.convert(copy.deepcopy(teacher or self.teacher()), **{**form, **settings})

    def dropped(self):
        """A student whose softmax layer drops out, so that random states count."""
        return self.student(self.teacher(attention_dropout=0.2), layers=[1])

    def tokens(self, count=2000, seed=0):
        """Each token follows from the two before it, one time in four at random."""
        random = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, VOCAB, (count,), generator=random).tolist()
        pick = (torch.rand(count, generator=random) < 0.25).tolist()
        for i in range(2, count):
            if not pick[i]:
                tokens[i] = (tokens[i - 1] * 5 + tokens[i - 2]) % VOCAB
        return torch.tensor(tokens)

    def rows(self, file):
        parts = [{"input_ids": part.tolist()} for part in self.tokens().split(37)]
        file.write_text("".join(json.dumps(part) + "\n" for part in parts))
        return file

    def stages(self, steps=10, **changes):
        values = {"seq_len": LENGTH, "batch_size": 4} | changes
        return [
            Stage("transfer", "transfer", steps, 1e-2, trainable="mhla", **values),
            Stage("logits", "logits", steps, 1e-3, warmup=3, ce_weight=0.1, weight_decay=0.01, **values),
        ]

    def lm(self, steps=4, **changes):
        values = {"name": "lm", "lr": 3e-3, "seq_len": LENGTH, "batch_size": 4} | changes
        return [Stage(loss="lm", steps=steps, **values)]

    def distill(self, out, teacher="own", student=None, **changes):
        """Two stages on the tokens; returns the student."""
        teacher = self.teacher() if teacher == "own" else teacher
        student = student or self.student(teacher)
        values = {"data": self.tokens(), "out": out, "stages": self.stages(), "save_every": 4, "progress": False}
        return distill(student, teacher, **(values | changes))

    def train(self, out, student=None, **changes):
        return self.distill(out, None, student, **({"stages": self.lm()} | changes))

    def weights(self, folder):
        return next(folder.rglob("*.safetensors")).read_bytes()

    def record(self, out):
        return json.loads((out / "train.json").read_text())

    def history(self, out):
        return [{key: value for key, value in e.items() if key != "seconds"} for e in self.record(out)["history"]]

    def newest(self, out):
        names = [path.name for path in out.with_name(f"{out.name}.state").glob("step-*") if ".tmp-" not in path.name]
        return max((int(name.removeprefix("step-")) for name in names), default=0)

    def stop_in(self, monkeypatch, objective, *calls):
        """From now on, Ctrl-C in the forward passes of a kind of objective with these numbers."""
        real, seen = objective.forward, []

        def forward(self, *arguments):
            seen.append(1)
            if len(seen) in calls:
                os.kill(os.getpid(), signal.SIGINT)
            return real(self, *arguments)

        monkeypatch.setattr(objective, "forward", forward)

    def start(self, work, until):
        """`work` in a process of its own, until the condition is true; the process, to be killed."""
        process = FORK.Process(target=work)
        process.start()
        while process.is_alive() and not until():
            time.sleep(0.002)
        return process

    def kill(self, work, until):
        """kill -9 of `work` as soon as the condition is true."""
        process = self.start(work, until)
        process.kill()
        process.join()


@pytest.fixture(scope="session")
def lab():
    return Lab()
