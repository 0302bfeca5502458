"""Typed code that uses every public name. mypy checks this file (`make lint`); nothing runs it."""

from pathlib import Path
from typing import assert_type

import torch
from peft import PeftModel

import mhla_hf


def operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    blocks = mhla_hf.Blocks.sequence(128, 64)
    assert_type(mhla_hf.Blocks.grid((21, 30, 52), [3, 5, 10]), mhla_hf.Blocks)
    assert_type(blocks.index(device="cpu"), torch.Tensor)
    assert_type(blocks.sizes(), tuple[int, ...])
    assert_type(mhla_hf.mhla(q, k, v, mixing, blocks=blocks), torch.Tensor)
    o, state = mhla_hf.mhla(q, k, v, mixing, blocks=blocks, causal=True, return_state=True)
    assert_type(state, mhla_hf.MHLAState)
    empty = mhla_hf.MHLAState.empty(1, 2, 2, 8, 8, 64, device="cpu")
    assert_type(mhla_hf.mhla_step(q, k, v, mixing, empty).o, torch.Tensor)
    return o


def models() -> None:
    settings = mhla_hf.MHLASettings(block_size=32, layers=[0, 1])
    assert_type(settings.resolve_layers(4), list[int])
    config = mhla_hf.MHLAConfig.preset("tiny", mhla=settings.to_dict())
    assert_type(config, mhla_hf.MHLAConfig)
    assert_type(mhla_hf.MHLAForCausalLM(config), mhla_hf.MHLAForCausalLM)
    mhla_hf.MHLAModel(config)
    images = mhla_hf.MHLAVisionConfig.preset("deit-t", image_size=384)
    assert_type(images.image_sides(), tuple[int, int])
    mhla_hf.MHLAVisionModel(images)
    assert_type(mhla_hf.MHLAForImageClassification(images), mhla_hf.MHLAForImageClassification)
    mhla_hf.MHLALlamaForCausalLM  # noqa: B018  created on access, so that type checkers do not know it


def journey(model: torch.nn.Module, tokenizer: object, batches: list[torch.Tensor]) -> None:
    student = mhla_hf.convert(model, mhla_hf.MHLASettings(), layers="2/3", block_size=32)
    assert_type(student, torch.nn.Module)
    assert_type(
        mhla_hf.convert(model, tokenizer=tokenizer, text="train.txt", keep="64MiB", context=32768), torch.nn.Module
    )
    trained = mhla_hf.distill(student, model, out=Path("out"), recipe="recipe.yaml", data="a.txt", tokenizer=tokenizer)
    assert_type(trained, torch.nn.Module)
    scores = mhla_hf.evaluate(["out", student], recipe="recall", settings={"lengths": [512]}, batch_size="auto")
    for name, results in scores.items():
        print(name, [result.value for result in results])
    assert_type(mhla_hf.push("out", "me/model", private=True, tags="v1").revision, str)


def adapters(model: torch.nn.Module) -> PeftModel:
    print(mhla_hf.adapter_config(model, r=8))
    mounted = mhla_hf.load_adapter(model, Path("adapter"), is_trainable=True)
    mhla_hf.save_adapter(mounted, "again")
    return mounted
