"""Everything that needs a GPU, in ten minutes: python -m experiments.gpu (`make gpu`)

Every kernel is compared with the T x T definition in fp64; then the operators of the paper and whole models are timed
beside what a user would pick instead. A failure is a row, and so is what there was no time for. Writes
docs/bench/gpu.json and renders docs/performance.md from it.
"""

import argparse
import time

import torch
from tqdm import tqdm

from mhla_hf import Blocks, mhla, mhla_step
from mhla_hf.bench import TOLERANCES, describe_failure, relative_error, time_case
from mhla_hf.checkpoints.file_io import write_json
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.cli import script

from .docs import ROOT, render_gpu, write_documents
from .paper_shapes import Window, model_cases, paper_cases, target_cases
from .speed import LENGTHS, SMOLLM2, make_models, measure_decoding, measure_prefill

PLACE = ROOT / "docs" / "bench" / "gpu.json"
LIMIT = 480  # seconds after which no further case is begun
CHECKS_LIMIT = 200  # of them for comparing kernels
SEQUENCE, LONG, GRID, VIDEO = (
    Blocks.sequence(150, 32),
    Blocks.sequence(600, 256),
    Blocks.grid((8, 12), (2, 3)),
    Blocks.grid((3, 7, 9), (2, 3, 4)),
)
LANGUAGE = SMOLLM2 | {  # four layers with the heads of Llama-3.2-1B
    "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
CAUSAL = {"causal": True, "normalize": False}
# name -> blocks, what `inputs` is told, options of `mhla`
VARIANTS = {
    "sequence": (SEQUENCE, {}, CAUSAL),
    "sequence, long blocks": (LONG, {}, CAUSAL),
    "sequence, normalized": (SEQUENCE, {}, {"causal": True}),
    "sequence, grouped heads, a matrix per head": (SEQUENCE, {"groups": 2, "per_head": True}, CAUSAL),
    "sequence, wide values": (SEQUENCE, {"widths": (32, 96)}, CAUSAL),
    "sequence, padded": (SEQUENCE, {"padded": True}, CAUSAL),
    "sequence, packed": (SEQUENCE, {"packed": True}, CAUSAL),
    "grid": (GRID, {}, {"normalize": False}),
    "grid, normalized": (GRID, {}, {}),
    "grid, official denominator": (GRID, {}, {"normalize": "official"}),
    "grid, masked keys": (GRID, {"masked": True}, {}),
    "grid, features of its own for the denominator": (GRID, {"denominator": True}, {}),
    "video, uneven blocks": (VIDEO, {}, {"normalize": False}),
}


def inputs(
    blocks, device, dtype, *, groups=4, per_head=False, widths=(64, 64), padded=False, packed=False, masked=False,
    denominator=False,
):  # fmt: skip
    """(q, k, v, mixing and perhaps features for the denominator, with gradients; options of `mhla`), 4 heads."""
    batch, length, options = 1 if packed else 2, blocks.length, {}
    make = torch.Generator(device).manual_seed(0)
    sizes = [(4, widths[0]), (groups, widths[0]), (groups, widths[1])]
    sizes += sizes[:2] if denominator else []
    tensors = [torch.randn(batch, length, *size, generator=make, device=device).to(dtype) for size in sizes]
    tensors = [x if place == 2 else x.abs() for place, x in enumerate(tensors)]  # features, but for the values
    rows = blocks.num_blocks
    tensors.insert(3, torch.rand(*([4] if per_head else []), rows, rows, generator=make, device=device))
    if padded:
        options["starts"] = torch.tensor([0, 21], device=device)
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 40, 97, length], device=device, dtype=torch.int32)
    if masked:
        options["key_mask"] = torch.rand(batch, length, generator=make, device=device) > 0.3
    return [x.requires_grad_() for x in tensors], options


def variant_errors(blocks, told, options, device, dtype, impl="triton"):
    """{"output", "dq", ...: relative error} of one kind of call against the definition in fp64."""
    tensors, more = inputs(blocks, device, dtype, **told)
    options = {"blocks": blocks, **options, **more}

    def outcome(tensors, impl):
        q, k, v, mixing, *features = tensors
        own = dict(zip(("q_den", "k_den"), features, strict=bool(features)))
        o = mhla(q, k, v, mixing, impl=impl, **own, **options)
        toward = torch.randn(o.shape, generator=torch.Generator(device).manual_seed(1), device=device).to(o.dtype)
        return o, *torch.autograd.grad(o, tensors, toward)

    exact = outcome([x.detach().double().requires_grad_() for x in tensors], "reference")
    names = ("output", "dq", "dk", "dv", "dmixing", "dq_den", "dk_den")
    return {name: relative_error(x, y) for name, x, y in zip(names, outcome(tensors, impl), exact, strict=False)}


@torch.no_grad()
def decode_errors(device, dtype, impl="triton"):
    """The error of tokens decoded one by one over the end of a block, against the definition of the whole sequence."""
    (q, k, v, mixing), _ = inputs(SEQUENCE, device, dtype)
    wanted = mhla(*(x.double() for x in (q, k, v, mixing)), blocks=SEQUENCE, impl="reference", **CAUSAL)
    first = SEQUENCE.length // SEQUENCE.block_size * SEQUENCE.block_size - 2
    blocks = Blocks.sequence(first, SEQUENCE.block_size)
    state = mhla(*(x[:, :first] for x in (q, k, v)), mixing, blocks=blocks, impl=impl, return_state=True, **CAUSAL)[1]
    tokens = [[x[:, i : i + 1] for x in (q, k, v)] for i in range(first, SEQUENCE.length)]
    got = [mhla_step(*token, mixing, state, normalize=False, impl=impl)[0] for token in tokens]
    return {"tokens": relative_error(torch.cat(got, 1), wanted[:, first:])}


def window_errors(device, dtype, impl="triton"):
    """{"output", "dq", ...: relative error} of near and far attention against its definition in fp64."""
    case = Window("window", SEQUENCE, 1, 4, (64, 64), dtype=str(dtype).removeprefix("torch."))
    return case.errors(f"mhla {impl}", device, 0, exact="mhla reference")


def check_kernels(device, limit=CHECKS_LIMIT, impl="triton", variants=VARIANTS):
    """A row per kind of call and dtype: "kind", "dtype", "error" (what -> relative error), "failed" (why, or None)."""
    begun, rows = time.monotonic(), []
    calls = {
        name: lambda dtype, given=given: variant_errors(*given, device, dtype, impl) for name, given in variants.items()
    }
    calls["window"] = lambda dtype: window_errors(device, dtype, impl)
    calls["decoding"] = lambda dtype: decode_errors(device, dtype, impl)
    for dtype in ("bfloat16", "float32"):
        for kind, call in tqdm(calls.items(), desc=f"kernels, {dtype}"):
            row = {"kind": kind, "dtype": dtype, "error": {}, "failed": None}
            if time.monotonic() - begun > limit:
                row["failed"] = f"not begun within {limit} s"
            else:
                try:
                    row["error"] = call(getattr(torch, dtype))
                    if wrong := [w for w, error in row["error"].items() if not error < TOLERANCES[dtype]]:
                        row["failed"] = f"is wrong: {', '.join(wrong)}"
                except Exception as error:
                    row["failed"] = describe_failure(error)
            rows.append(row)
    return rows


def time_language(device, sizes=LANGUAGE, lengths=LENGTHS, batch=16, dtype=torch.bfloat16):
    """A row per length: a converted language model beside its base, as `experiments.speed` times them."""
    rows = []
    models = {name: model.to(device, dtype) for name, model in make_models(sizes, max(lengths)).items()}
    for length in tqdm(lengths, desc="language model"):
        try:
            timed = measure_decoding(models, length, batch)
            for name, model in models.items():
                timed[name]["prefill"] = measure_prefill(model, length)
            rows.append({"length": length, "batch": batch, **timed})
        except Exception as error:
            rows.append({"length": length, "batch": batch, "failed": describe_failure(error)})
    return rows


def main(arguments=None):
    """Check, time, write; returns the record."""
    argparse.ArgumentParser("python -m experiments.gpu", description=__doc__).parse_args(arguments)
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU that torch can use here, so nothing was measured")
    begun = time.monotonic()
    record = {**describe_run("make gpu", "cuda"), "seed": 0, "rows": [], "kernels": check_kernels("cuda")}
    record["language"] = time_language("cuda")
    cases = [*target_cases(), *model_cases()[:2], *paper_cases(), *model_cases()[2:]]
    for case in tqdm(cases, desc="cases"):
        if time.monotonic() - begun > LIMIT:
            late = {"all": f"not begun within {LIMIT} s"}
            record["rows"].append({"case": case.name, "what": "", "ms": {}, "error": {}, "failed": late})
        else:
            record["rows"] += time_case(case, "cuda")
            torch.cuda.empty_cache()
        write_json(PLACE, record)
    write_documents()
    print(render_gpu(record))
    return record


if __name__ == "__main__":
    script(main, "gpu")
