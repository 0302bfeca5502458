"""Run all checks and measurements that need a GPU, in ten minutes: python -m experiments.gpu (`make gpu`)

Every kernel is compared with the T x T definition in fp64. Then the paper's operators and whole models are timed
beside what a user would pick instead. What fails or does not fit into the time gets a row with the reason. The results
are written to docs/bench/gpu.json, and docs/performance.md is rendered from them.
"""

import argparse
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from mhla_hf import Blocks, mhla
from mhla_hf.bench import TOLERANCES, describe_failure, relative_error, time_case
from mhla_hf.checkpoints.file_io import write_json
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.cli import script
from mhla_hf.ops.triton.paged import small_page_call

from .docs import ROOT, render_gpu, write_documents
from .paper_shapes import Window, model_cases, paper_cases, target_cases
from .speed import LENGTHS, SMOLLM2, make_models, measure_decoding, measure_prefill

OUT = ROOT / "docs" / "bench" / "gpu.json"
MAX_SECONDS = 480  # after which no other case starts
MAX_CHECK_SECONDS = 200  # after which no other kernel is checked
SEQUENCE = Blocks.sequence(150, 32)
LONG = Blocks.sequence(600, 256)
GRID = Blocks.grid((8, 12), (2, 3))
VIDEO = Blocks.grid((3, 7, 9), (2, 3, 4))
LANGUAGE = SMOLLM2 | {  # four layers with the heads of Llama-3.2-1B
    "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
PAGE_CASE: dict[str, Any] = {  # heads of SmolLM2 with the defaults of a conversion with text
    "width": 64, "value_width": 64, "num_features": 64, "num_rates": 1, "share": 3, "heads_per_page": 1, "has_power": True,
    "softmax": True, "lag": 6, "num_sinks": 4, "normalize": True,
}  # fmt: skip
CAUSAL: dict[str, Any] = {"causal": True, "normalize": False}
Variant = tuple[Blocks, dict[str, Any], dict[str, Any]]  # blocks, options of `make_inputs`, options of `mhla`
VARIANTS: dict[str, Variant] = {
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


def make_inputs(
    blocks: Blocks,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    groups: int = 4,
    per_head: bool = False,
    widths: tuple[int, int] = (64, 64),
    padded: bool = False,
    packed: bool = False,
    masked: bool = False,
    denominator: bool = False,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Make random inputs of `mhla` with 4 query heads.

    Args:
        blocks: Number and layout of the tokens.
        device: Where the tensors are.
        dtype: Of all tensors but the mixing matrix, which is fp32.
        groups: Number of KV heads.
        per_head: Whether every head has its own mixing matrix.
        widths: Of keys and of values.
        padded: Whether the second row begins with padding.
        packed: Whether a row has several sequences.
        masked: Whether some keys are masked.
        denominator: Whether the denominator has other features than the numerator.

    Returns:
        q, k, v, the mixing matrix, and features for the denominator, all of which require gradients; and options of
        `mhla`.
    """
    batch, length = 1 if packed else 2, blocks.length
    options: dict[str, Any] = {}
    generator = torch.Generator(device).manual_seed(0)
    sizes = [(4, widths[0]), (groups, widths[0]), (groups, widths[1])]
    sizes += sizes[:2] if denominator else []
    tensors = [torch.randn(batch, length, *size, generator=generator, device=device).to(dtype) for size in sizes]
    tensors = [x if index == 2 else x.abs() for index, x in enumerate(tensors)]  # all but the values are features
    shape = (*([4] if per_head else []), blocks.num_blocks, blocks.num_blocks)
    tensors.insert(3, torch.rand(shape, generator=generator, device=device))
    if padded:
        options["starts"] = torch.tensor([0, 21], device=device)
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 40, 97, length], device=device, dtype=torch.int32)
    if masked:
        options["key_mask"] = torch.rand(batch, length, generator=generator, device=device) > 0.3
    return [x.requires_grad_() for x in tensors], options


def variant_errors(
    blocks: Blocks,
    input_options: Mapping[str, Any],
    options: Mapping[str, Any],
    device: torch.device | str,
    dtype: torch.dtype,
    impl: str = "triton",
) -> dict[str, float]:
    """Return the relative errors of one kind of call against the definition in fp64.

    Args:
        blocks, input_options, options: A `Variant`.
        device: Where it runs.
        dtype: Of the inputs.
        impl: Implementation to check.

    Returns:
        Errors of "output" and of the gradients "dq", "dk", "dv", "dmixing", "dq_den", and "dk_den".
    """
    tensors, data_options = make_inputs(blocks, device, dtype, **input_options)

    def run(tensors: list[torch.Tensor], impl: str) -> tuple[torch.Tensor, ...]:
        q, k, v, mixing, *features = tensors
        denominator: dict[str, Any] = dict(zip(("q_den", "k_den"), features, strict=bool(features)))
        o = mhla(q, k, v, mixing, blocks=blocks, impl=impl, **denominator, **options, **data_options)
        generator = torch.Generator(device).manual_seed(1)
        output_gradient = torch.randn(o.shape, generator=generator, device=device).to(o.dtype)
        return o, *torch.autograd.grad(o, tensors, output_gradient)

    actual = run(tensors, impl)
    expected = run([x.detach().double().requires_grad_() for x in tensors], "reference")
    names = ("output", "dq", "dk", "dv", "dmixing", "dq_den", "dk_den")
    return {name: relative_error(x, y) for name, x, y in zip(names, actual, expected, strict=False)}


def window_errors(device: torch.device | str, dtype: torch.dtype, impl: str = "triton") -> dict[str, float]:
    """Return the relative errors of local attention, window and far part, against its definition in fp64."""
    case = Window("window", SEQUENCE, 1, 4, (64, 64), dtype=str(dtype).removeprefix("torch."))
    return case.errors(f"mhla {impl}", device, 0, exact="mhla reference")


def page_errors(device: torch.device | str, dtype: torch.dtype) -> dict[str, float]:
    """Return the relative error of decoding in the pages of a serving engine against PyTorch in fp64."""
    (o,), (exact,) = small_page_call(torch.device(device), dtype, dtype, **PAGE_CASE)
    return {"tokens": relative_error(o, exact)}


def check_kernels(
    device: torch.device | str,
    limit: float = MAX_CHECK_SECONDS,
    impl: str = "triton",
    variants: Mapping[str, Variant] = VARIANTS,
) -> list[dict[str, Any]]:
    """Compare an implementation with the definition in fp64.

    Args:
        device: Where it runs.
        limit: Seconds after which no other check starts.
        impl: Implementation to check.
        variants: Kinds of calls, beside that of `window_errors`.

    Returns:
        A row for each kind of call and dtype: "kind", "dtype", "error" (relative errors by what was compared), and
        "failed" (the reason, or None).
    """
    started = time.monotonic()
    rows = []
    calls: dict[str, Callable[[torch.dtype], dict[str, float]]] = {
        name: functools.partial(variant_errors, *variant, device, impl=impl) for name, variant in variants.items()
    }
    calls["window"] = functools.partial(window_errors, device, impl=impl)
    if impl == "triton":
        calls["decoding in pages"] = functools.partial(page_errors, device)
    for dtype in ("bfloat16", "float32"):
        for kind, call in tqdm(calls.items(), desc=f"kernels, {dtype}"):
            row: dict[str, Any] = {"kind": kind, "dtype": dtype, "error": {}, "failed": None}
            if time.monotonic() - started > limit:
                row["failed"] = f"not started within {limit} s"
            else:
                try:
                    row["error"] = call(getattr(torch, dtype))
                    wrong = [name for name, error in row["error"].items() if not error < TOLERANCES[dtype]]
                    if wrong:
                        row["failed"] = f"is wrong: {', '.join(wrong)}"
                except Exception as error:
                    row["failed"] = describe_failure(error)
            rows.append(row)
    return rows


def time_language(
    device: torch.device | str,
    sizes: Mapping[str, Any] = LANGUAGE,
    lengths: Sequence[int] = LENGTHS,
    batch: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> list[dict[str, Any]]:
    """Time a converted language model beside its original, as `experiments.speed` does; one row per length."""
    rows: list[dict[str, Any]] = []
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


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the script, and return the record."""
    argparse.ArgumentParser("python -m experiments.gpu", description=__doc__).parse_args(arguments)
    if not torch.cuda.is_available():
        raise ValueError("device: got no GPU that torch can use, expected one; nothing was measured.")
    started = time.monotonic()
    record = {**describe_run("make gpu", "cuda"), "seed": 0, "rows": [], "kernels": check_kernels("cuda")}
    record["language"] = time_language("cuda")
    cases = [*target_cases(), *model_cases()[:2], *paper_cases(), *model_cases()[2:]]
    for case in tqdm(cases, desc="cases"):
        if time.monotonic() - started > MAX_SECONDS:
            failed = {"all": f"not started within {MAX_SECONDS} s"}
            record["rows"].append({"case": case.name, "what": "", "ms": {}, "error": {}, "failed": failed})
        else:
            record["rows"] += time_case(case, "cuda")
            torch.cuda.empty_cache()
        write_json(OUT, record)
    write_documents()
    print(render_gpu(record))
    return record


if __name__ == "__main__":
    script(main, "gpu")
