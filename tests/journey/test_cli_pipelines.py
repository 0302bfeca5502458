"""mhla-hf convert with a diffusers pipeline."""

import pytest
import torch
from diffusers import DiffusionPipeline
from tiny_pipelines import generate, sana_pipeline, wan_pipeline

from mhla_hf.cli import main


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        raise SystemExit(main(list(map(str, arguments))))
    return end.value.code


def test_a_pipeline_is_converted_and_stays_itself(tmp_path, capsys):
    sana_pipeline().save_pretrained(tmp_path / "sana")
    assert not run("convert", tmp_path / "sana", tmp_path / "out", "--set", "layout=2,2")
    assert "MHLASanaTransformer2DModel, layers [0, 1] are MHLA" in capsys.readouterr().out
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert pipe.transformer.config.mhla["layout"] == [2, 2]
    assert (generate(pipe) - generate(sana_pipeline())).abs().max() <= 1e-5


def test_layers_dtype_and_refusals(tmp_path, capsys):
    wan_pipeline().save_pretrained(tmp_path / "wan")
    options = ("--layers", "all", "--dtype", "bfloat16")
    assert not run("convert", tmp_path / "wan", tmp_path / "out", *options)
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "out", trust_remote_code=True, dtype=torch.bfloat16)
    assert pipe.transformer.config.mhla["layers"] == [0, 1, 2] and pipe.transformer.dtype == torch.bfloat16
    for arguments, words in (
        ((tmp_path / "wan", tmp_path / "new", "--set", "layout=4,4"), "layout: got [4, 4], expected 3 counts"),
        ((tmp_path / "out", tmp_path / "new"), "holds the source of its MHLA model"),
        ((tmp_path / "wan", tmp_path / "out"), "is not empty"),
    ):
        assert run("convert", *arguments) == 2
        assert words in capsys.readouterr().err
        assert not (tmp_path / "new").exists()
