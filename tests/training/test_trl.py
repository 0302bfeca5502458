"""Converted models in TRL's trainers, which hand sequences over padded, packed or padding-free."""

import itertools

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from tools.small_models import SIZES
from tools.small_scores import small_tokenizer

import mhla_hf

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*padding-free:UserWarning")  # TRL's own

RUN = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-3, "report_to": "none", "use_cpu": True}
RUN |= {"save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "lr_scheduler_type": "constant"}
TEXTS = [" ".join(f"number {i * j % 17}" for j in range(3 + 5 * (i % 3))) for i in range(8)]
LONG = "one number and another " * 8  # beyond the window, where MHLA has gradients
PAIRS = [{"prompt": f"{LONG}{i}", "chosen": f" number {i}", "rejected": " no, none of it"} for i in range(8)]


@pytest.fixture(scope="module")
def tokenizer():
    found = small_tokenizer()
    found.pad_token = found.eos_token
    return found


def converted(tokenizer, head="ForCausalLM", **changes):
    torch.manual_seed(0)
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    config = transformers.LlamaConfig(**{**SIZES, "vocab_size": len(tokenizer), **ids, **changes})
    model = getattr(transformers, f"Llama{head}")(config)
    return mhla_hf.convert(model, layers=[0, 2], block_size=8)


@pytest.mark.parametrize(
    "how", [{}, {"padding_free": True, "max_length": None}, {"packing": True, "max_length": 128}], ids=str
)
def test_supervised_fine_tuning_sees_each_sequence_by_itself(tokenizer, tmp_path, how):
    """The loss of the first step is the mean over the tokens of sequences that were run one by one."""
    model = converted(tokenizer)
    arguments = trl.SFTConfig(output_dir=tmp_path, bf16=False, shuffle_dataset=False, **how, **RUN)
    rows = Dataset.from_list([{"text": text} for text in TEXTS])
    trainer = trl.SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    ids, places = batch["input_ids"], batch.get("position_ids")
    if places is not None:
        assert len(ids) == 1 and (places == 0).sum() > 1
        borders = [*(places[0] == 0).nonzero()[:, 0].tolist(), ids.shape[1]]
        parts = [ids[:, begin:end] for begin, end in itertools.pairwise(borders)]
    else:
        parts = [row[None, mask.bool()] for row, mask in zip(ids, batch["attention_mask"], strict=True)]
    with torch.no_grad():
        alone = [model(part, labels=part).loss * (part.shape[1] - 1) for part in parts]
    wanted = sum(alone) / sum(part.shape[1] - 1 for part in parts)
    history = trainer.train() and [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert float(history[0]) == pytest.approx(wanted.item(), rel=1e-3)


def test_preferences_rewards_and_policies(tokenizer, tmp_path):
    """They run, their losses are finite, and what is trained is MHLA."""
    model = converted(tokenizer)
    model.save_pretrained(tmp_path / "model")
    rows, place = Dataset.from_list(PAIRS), {"output_dir": tmp_path / "out", "bf16": False}
    prompts = Dataset.from_list([{"prompt": pair["prompt"]} for pair in PAIRS])

    def reward(completions, **kwargs):
        return [float(place) for place in range(len(completions))]

    judge = converted(tokenizer, "ForSequenceClassification", num_labels=1)
    given = {"train_dataset": rows, "processing_class": tokenizer}
    few = {"num_generations": 2, "max_completion_length": 8}
    trainers = [
        trl.DPOTrainer(str(tmp_path / "model"), args=trl.DPOConfig(**place, **RUN), **given),
        trl.RewardTrainer(judge, args=trl.RewardConfig(**place, **RUN), **given),
        trl.GRPOTrainer(model, reward, trl.GRPOConfig(**few, **place, **RUN), **{**given, "train_dataset": prompts}),
    ]
    for trainer in trainers:
        before = {name: value.detach().clone() for name, value in trainer.model.named_parameters() if ".mhla." in name}
        assert torch.isfinite(torch.tensor(trainer.train().training_loss))
        after = dict(trainer.model.named_parameters())
        assert before and any(not torch.equal(after[name], value) for name, value in before.items())
