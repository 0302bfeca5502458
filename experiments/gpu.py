"""Run all checks and measurements that need a GPU, in ten minutes: python -m experiments.gpu (`make gpu`)

Every kernel is compared with the T x T definition in fp64; then the paper's operators and whole models are timed. What fails
gets a row with the reason. docs/performance.md is rendered from the results in docs/bench/gpu.json.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from mhla_hf import Blocks, mhla
from mhla_hf.checkpoints.file_io import write_json
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.cli.main import script
from mhla_hf.ops.windowed.definition import salient_reference, two_way_reference
from mhla_hf.ops.windowed.options import WindowedOptions
from mhla_hf.ops.windowed.salient import salient_attention
from mhla_hf.ops.windowed.two_way import FarPart, two_way_attention

from .bench import describe_wrong, model_cases, paper_cases, record_failure, relative_errors, target_cases, time_case
from .docs import ROOT, render_gpu, write_documents
from .rows import make_parser
from .speed import LENGTHS, SMOLLM2, make_models, measure_decoding, measure_passes

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
CAUSAL: dict[str, Any] = {"causal": True, "normalize": False}
VARIANTS: dict[str, tuple[Blocks, dict[str, Any], dict[str, Any]]] = {  # options of `make_inputs`, options of `mhla`
    "sequence": (SEQUENCE, {}, CAUSAL),
    "sequence, long blocks": (LONG, {}, CAUSAL),
    "sequence, normalized": (SEQUENCE, {}, {"causal": True}),
    "sequence, grouped heads, a matrix per head": (SEQUENCE, {"groups": 2, "per_head": True}, CAUSAL),
    "sequence, wide values": (SEQUENCE, {"widths": (32, 96)}, CAUSAL),
    "sequence, padded": (SEQUENCE, {"padded": True}, CAUSAL),
    "sequence, packed": (SEQUENCE, {"packed": True}, CAUSAL),
    "sequence, masked keys, unrounded": (SEQUENCE, {"masked": True}, CAUSAL | {"unrounded": True}),
    "grid": (GRID, {}, {"normalize": False}),
    "grid, normalized": (GRID, {}, {}),
    "grid, official denominator": (GRID, {}, {"normalize": "official"}),
    "grid, masked keys": (GRID, {"masked": True}, {}),
    "grid, features of its own for the denominator": (GRID, {"denominator": True}, {}),
    "video, uneven blocks": (VIDEO, {}, {"normalize": False}),
}
WINDOW = WindowedOptions(32, scale=0.125)
CAUSAL_WINDOW, TWO_WAYS = (salient_attention, salient_reference), (two_way_attention, two_way_reference)
WINDOWS: dict[str, tuple[tuple[Any, Any], WindowedOptions, dict[str, Any]]] = {  # with options of `make_inputs`
    "window": (CAUSAL_WINDOW, WINDOW, {}),
    "window, long blocks": (CAUSAL_WINDOW, replace(WINDOW, block_size=70, window=1, sinks=20), {}),
    "window, grouped heads, padded": (CAUSAL_WINDOW, WINDOW, {"groups": 2, "padded": True}),
    "window, wide values, packed": (CAUSAL_WINDOW, WINDOW, {"widths": (32, 96), "packed": True}),
    # Of fewer tokens, rounding could change the choice.
    "window, all tokens before it salient": (CAUSAL_WINDOW, replace(WINDOW, salient=150), {}),
    "both ways": (TWO_WAYS, replace(WINDOW, sinks=0), {}),
    "both ways, grouped heads, masked keys": (TWO_WAYS, replace(WINDOW, sinks=0), {"groups": 2, "masked": True}),
}


def make_inputs(
    blocks: Blocks, device: torch.device | str, dtype: torch.dtype, *, groups: int = 4, per_head: bool = False,
    widths: tuple[int, int] = (64, 64), padded: bool = False, packed: bool = False, masked: bool = False,
    denominator: bool = False,
) -> tuple[list[torch.Tensor], dict[str, Any]]:  # fmt: skip
    """Make q, k, v, the mixing matrix, and features for the denominator, of 4 query heads, and options of `mhla`."""
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


def variant_errors(variant: Any, device: Any, dtype: torch.dtype, impl: str = "triton") -> dict[str, float]:
    """Return the relative errors of one of `VARIANTS` against the definition in fp64: of the output and all gradients."""
    blocks, input_options, options = variant
    tensors, data_options = make_inputs(blocks, device, dtype, **input_options)
    results = []
    for exact in (False, True):
        tensors = [x.detach().double().requires_grad_() for x in tensors] if exact else tensors
        q, k, v, mixing, *features = tensors
        denominator: dict[str, Any] = dict(zip(("q_den", "k_den"), features, strict=bool(features)))
        how = {"impl": "reference" if exact else impl, **denominator, **options, **data_options}
        results.append(with_gradients(mhla(q, k, v, mixing, blocks=blocks, **how), tensors))
    return relative_errors(("output", "dq", "dk", "dv", "dmixing", "dq_den", "dk_den"), *results)


def with_gradients(o: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return an output, and the gradients of tensors for a random gradient of the output."""
    generator = torch.Generator(o.device).manual_seed(1)
    output_gradient = torch.randn(o.shape, generator=generator, device=o.device).to(o.dtype)
    return [o, *torch.autograd.grad(o, tensors, output_gradient)]


def window_errors(kind: Any, device: Any, dtype: torch.dtype) -> dict[str, float]:
    """Return the relative errors of one of `WINDOWS`."""
    functions, options, input_options = kind
    (*tensors, _), padding = make_inputs(SEQUENCE, device, dtype, **input_options)
    if functions is TWO_WAYS:
        q, k, _ = tensors
        tensors += [torch.cat([x, -x], -1).softmax(-1) for x in (q, k)]
        tensors += [torch.full((k.shape[2],), -0.05, device=device), torch.full((4,), 3.0, device=device)]
    results = []
    for attend, exact in zip(functions, (False, True), strict=True):
        leaves = [(x.double() if exact else x).detach().requires_grad_() for x in tensors]
        far = [FarPart(*leaves[3:])] if functions is TWO_WAYS else []
        results.append(with_gradients(attend(*leaves[:3], *far, options, **padding), leaves))
    return relative_errors(("output", "dq", "dk", "dv", "dfq", "dfk", "d log_decay", "d balance"), *results)


def check_kernels(
    device: torch.device | str, limit: float = MAX_CHECK_SECONDS, impl: str = "triton",
    variants: Mapping[str, Any] = VARIANTS, windows: Mapping[str, Any] = WINDOWS,
) -> list[dict[str, Any]]:  # fmt: skip
    """Compare an implementation with the definition in fp64; after `limit` seconds no other check starts.

    Windows have PyTorch's only.
    """
    started = time.monotonic()
    rows = []
    calls: dict[str, Callable[[torch.dtype], dict[str, float]]] = {
        **{name: functools.partial(variant_errors, kind, device, impl=impl) for name, kind in variants.items()},
        **{name: functools.partial(window_errors, kind, device) for name, kind in windows.items()},
    }
    for dtype in ("bfloat16", "float32"):
        for kind, call in tqdm(calls.items(), desc=f"kernels, {dtype}"):
            row: dict[str, Any] = {"kind": kind, "dtype": dtype, "error": {}, "failed": None}
            if time.monotonic() - started > limit:
                row["failed"] = f"not started within {limit} s"
            else:
                with record_failure(row, "failed"):
                    row["error"] = call(getattr(torch, dtype))
                    row["failed"] = describe_wrong(row["error"], dtype)
            rows.append(row)
    return rows


def time_language(
    device: torch.device | str, sizes: Mapping[str, Any] = LANGUAGE, lengths: Sequence[int] = LENGTHS, batch: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> list[dict[str, Any]]:  # fmt: skip
    """Time a converted language model beside its original, as `experiments.speed` does; one row per length."""
    rows: list[dict[str, Any]] = []
    models = {name: model.to(device, dtype) for name, model in make_models(sizes, max(lengths)).items()}
    for length in tqdm(lengths, desc="language model"):
        row: dict[str, Any] = {"length": length, "batch": batch}
        with record_failure(row, "failed"):
            row |= measure_decoding(models, length, batch)
            row["prefill"] = measure_passes(models, length)
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    make_parser(__doc__).parse_args(arguments)
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
