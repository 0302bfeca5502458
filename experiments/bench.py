"""Time MHLA beside softmax and plain linear attention: python -m experiments.bench (`make bench`)

Every implementation is compared with its definition in fp64 before it is timed. All take turns, and the fastest round of
each counts. What is wrong, fails, or does not fit gets the reason in place of a time. `make gpu` times the paper's shapes.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DiTTransformer2DModel, WanTransformer3DModel
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from mhla_hf import Blocks, MHLAConfig, MHLAForCausalLM, convert, mhla
from mhla_hf.checkpoints.file_io import write_json
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.cli.main import script
from mhla_hf.evaluation.speed import clock

from .rows import make_parser, markdown, parse_call

TOLERANCES = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 1.5e-2}
MIN_TURN_SECONDS = 0.02  # in which a call is repeated and timed
ROUNDS = 5  # the fastest counts
MODES = FORWARD, TRAINING = "forward", "forward + backward"
NUM_SAMPLED_QUERIES = 16  # compared with the definition
WRONG = "is wrong"  # beginning of the reason if results differ from the definition
DIT = {"patch_size": 2, "in_channels": 4, "out_channels": 8, "attention_bias": True, "num_embeds_ada_norm": 1000}
DIT_S = {**DIT, "num_layers": 12, "num_attention_heads": 6, "attention_head_dim": 64}
DIT_XL = {**DIT, "num_layers": 28, "num_attention_heads": 16, "attention_head_dim": 72}
WAN_1B = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30}
LLAMA_340M = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16}
WAN_GRID = (21, 30, 50)
IMAGES = ((256, 32), (512, 32), (1024, 8), (2048, 1), (4096, 1))  # side in pixels, batch size

Device = torch.device | str
Prepared = tuple[list[torch.Tensor], torch.Tensor]  # (inputs of `Operator`, gradient of its output)


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mixing: torch.Tensor | None, queries: torch.Tensor, blocks: Blocks,
    causal: bool, normalize: bool,
) -> torch.Tensor:  # fmt: skip
    """Compute MHLA, or softmax attention if `mixing` is None, for the tokens `queries` [N] in fp64: [B, N, H, V]."""
    later = (torch.arange(k.shape[1], device=q.device) > queries[:, None]) & causal
    index = blocks.index(q.device)
    outputs = []
    for head in range(q.shape[2]):
        weights = q[:, queries, head].double() @ k[:, :, head].double().mT * q.shape[-1] ** -0.5
        if mixing is None:
            weights = weights.masked_fill(later, -torch.inf).softmax(-1)
        else:
            weights = weights * (mixing.double()[index[queries]][:, index] * ~later)
            weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
        outputs.append(weights @ v[:, :, head].double())
    return torch.stack(outputs, 2)


def relative_errors(names: Sequence[str], actual: Any, expected: Any) -> dict[str, float]:
    """Return ||actual - expected|| / ||expected|| in the Frobenius norm, computed in fp64, of each pair of tensors."""
    pairs = ((x.detach().double(), y.detach().double()) for x, y in zip(actual, expected, strict=True))
    return {name: float((x - y).norm() / y.norm()) for name, (x, y) in zip(names, pairs, strict=False)}


def describe_wrong(errors: Mapping[str, float], dtype: str) -> str | None:
    wrong = [f"{name} with a relative error of {x:.1e}" for name, x in errors.items() if not x < TOLERANCES[dtype]]
    return f"{WRONG}: {wrong[0]}" if wrong else None


@dataclasses.dataclass(frozen=True)
class Operator:
    """A case that times attention of one shape; `widths` are those of keys and of values."""

    name: str
    blocks: Blocks
    batch: int
    heads: int
    widths: tuple[int, int]
    causal: bool = False
    normalize: bool = False
    dtype: str = "bfloat16"

    def competitors(self, device: Device) -> list[str]:
        return ["sdpa", "linear", "mhla triton" if torch.device(device).type == "cuda" else "mhla torch"]

    def prepare(self, device: Device, seed: int) -> Prepared:
        generator = torch.Generator(device).manual_seed(seed)
        randn = functools.partial(torch.randn, generator=generator, device=device)
        size = (self.batch, self.blocks.length, self.heads)
        dtype = getattr(torch, self.dtype)
        q, k, v = (randn(*size, width).to(dtype) for width in (self.widths[0], *self.widths))
        if self.normalize:
            q, k = q.abs(), k.abs()
        mixing = torch.rand(self.blocks.num_blocks, self.blocks.num_blocks, generator=generator, device=device)
        return [x.requires_grad_() for x in (q, k, v, mixing)], randn(*size, self.widths[1]).to(dtype)

    def attend(self, name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mixing: Any = None) -> Any:
        if name.startswith("mhla"):
            options: dict[str, Any] = {"causal": self.causal, "normalize": self.normalize}
            return mhla(q, k, v, mixing, blocks=self.blocks, impl=name.removeprefix("mhla "), **options)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if name == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)
        length, scale = q.shape[2], q.shape[-1] ** -0.5
        v = F.pad(v, (0, 1), value=1.0) if self.normalize else v  # its last column sums the weights
        if self.causal:
            q, k, v = (F.pad(x, (0, 0, 0, -length % 64)).unflatten(2, (-1, 64)) for x in (q, k, v))  # chunks
            summary = (k.mT @ v).float()
            before = (summary.cumsum(2) - summary).to(v.dtype)
            o = (q @ before + (q @ k.mT).tril() @ v).flatten(2, 3)[:, :, :length]
        else:
            o = q @ (k.mT @ v)
        o = o[..., :-1] / o[..., -1:] if self.normalize else o * scale
        return o.transpose(1, 2)

    def errors(self, name: str, device: Device, seed: int) -> dict[str, float]:
        """Return the relative errors of "output", "dq", ... of one sequence, for a sample of its queries."""
        tensors, output_gradient = dataclasses.replace(self, batch=1).prepare(device, seed)
        length = self.blocks.length
        queries = torch.linspace(0, length - 1, min(NUM_SAMPLED_QUERIES, length), device=device).round().long()
        inputs = tensors if name.startswith("mhla") else tensors[:3]
        exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
        mixing = {"sdpa": None, "linear": torch.ones_like(tensors[3])}.get(name, exact_inputs[-1])
        output = self.attend(name, *inputs)[:, queries]
        q, k, v = exact_inputs[:3]
        exact_output = exact_attention(q, k, v, mixing, queries, self.blocks, self.causal, self.normalize)
        actual = output, *torch.autograd.grad(output, inputs, output_gradient[:, queries])
        expected = exact_output, *torch.autograd.grad(exact_output, exact_inputs, output_gradient[:, queries].double())
        return relative_errors(("output", "dq", "dk", "dv", "dmixing"), actual, expected)

    def work(self, prepared: Prepared, mode: str, name: str) -> Callable[[], Any]:
        """Return a function that runs a forward pass and, for `TRAINING`, computes the gradients of all inputs."""
        tensors, output_gradient = prepared
        inputs = tensors if name.startswith("mhla") else tensors[:3]
        if mode == FORWARD:
            return torch.no_grad()(functools.partial(self.attend, name, *inputs))
        return lambda: torch.autograd.grad(self.attend(name, *inputs), inputs, output_gradient)


@dataclasses.dataclass(frozen=True)
class WholeModel:
    """A case that times a model with random weights: a Llama, DiT, or Wan, by the axes of the operator's tokens."""

    name: str
    config: dict[str, Any]
    operator: Operator

    @property
    def dtype(self) -> str:
        return self.operator.dtype

    def competitors(self, device: Device) -> list[str]:
        return ["softmax", "mhla", "linear (one block)", *["hybrid 2/3"] * (len(self.operator.blocks.shape) == 3)]

    def errors(self, name: str, device: Device, seed: int) -> dict[str, float]:
        """Return the relative errors of MHLA's operator, in the implementation that impl="auto" selects."""
        return self.operator.errors("mhla auto", device, seed) if name == "mhla" else {}

    def prepare(self, device: Device, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        torch.manual_seed(seed)
        *frames, side = self.operator.blocks.shape[:-1] or [0]
        models = self.models()
        dtype, batch = getattr(torch, self.dtype), self.operator.batch
        models = {name: cast_as_loaded(model, dtype).to(device) for name, model in models.items()}
        if not side:
            ids = torch.randint(1000, (batch, *self.operator.blocks.shape)).to(device)
            return models, {"input_ids": ids, "use_cache": False}
        columns = self.operator.blocks.shape[-1]
        latents = torch.randn(batch, self.config.get("in_channels", 16), *frames, 2 * side, 2 * columns)
        times = torch.full((batch,), 500, device=device)
        inputs = {"hidden_states": latents.to(device, dtype), "timestep": times}
        if not frames:
            return models, {**inputs, "class_labels": torch.zeros_like(times)}
        text = torch.randn(batch, 512, self.config.get("text_dim", 4096))
        return models, {**inputs, "encoder_hidden_states": text.to(device, dtype)}

    def models(self) -> dict[str, Any]:
        blocks, config = self.operator.blocks, {**self.config, "num_attention_heads": self.operator.heads}
        if len(blocks.shape) == 1:
            settings: Any = MHLAConfig(**config).mhla
            one_block = {**settings, "block_size": blocks.length, "num_blocks": 1}
            return {
                "softmax": LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **self.config)),
                "mhla": MHLAForCausalLM(MHLAConfig(**config)),
                "linear (one block)": MHLAForCausalLM(MHLAConfig(**config, mhla=one_block)),
            }
        sizes = {"sample_size": 2 * blocks.shape[0]} if len(blocks.shape) == 2 else {}
        softmax: Any = (DiTTransformer2DModel if sizes else WanTransformer3DModel)(**self.config, **sizes)
        models = {"softmax": softmax}
        for name in self.competitors("cpu")[1:]:
            layout = [1] * len(blocks.counts) if "one block" in name else list(blocks.counts)
            layers = "2/3" if "hybrid" in name else "all"
            models[name] = convert(copy.deepcopy(softmax), layout=layout, layers=layers)
        return models

    def work(self, prepared: tuple[dict[str, Any], dict[str, Any]], mode: str, name: str) -> Callable[[], Any]:
        models, inputs = prepared
        weights = [weight for weight in models[name].parameters() if weight.requires_grad]

        def forward() -> torch.Tensor:
            return models[name](**inputs, return_dict=False)[0]

        if mode == FORWARD:
            return torch.no_grad()(forward)
        return lambda: torch.autograd.grad(forward().sum(), weights, allow_unused=True)


def cast_as_loaded(model: Any, dtype: torch.dtype) -> Any:
    """Cast a model in place as `from_pretrained(dtype=...)` does, all but what it keeps in fp32, and return it."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None)  # only models of transformers have it
    fp32_modules = set(strict or model._keep_in_fp32_modules or ())
    for name, weight in model.named_parameters():
        if not fp32_modules & set(name.split(".")):
            weight.data = weight.data.to(dtype)
    return model


Case = Operator | WholeModel


def dit(pixels: int, batch: int, heads: int = 6, width: int = 64, side: int = 4, name: str = "DiT-S/2") -> Operator:
    """Return the attention of a DiT with patches of 2 on square images; `pixels` is their side."""
    blocks = Blocks.grid((pixels // 16, pixels // 16), (side, side))
    label = f"{name} {pixels} px, {blocks.num_blocks} blocks, batch {batch}"
    return Operator(label, blocks, batch, heads, (width, width), normalize=True)


def language(
    tokens: int, batch: int, heads: int = 16, widths: tuple[int, int] = (64, 64), size: int = 64, name: str = "LM"
) -> Operator:
    label = f"{name} {tokens:,} tokens, K {widths[0]}, V {widths[1]}, blocks of {size}, batch {batch}"
    return Operator(label, Blocks.sequence(tokens, size), batch, heads, widths, causal=True)


VIDEO = Operator("Wan 31,500 tokens, 150 blocks", Blocks.grid(WAN_GRID, (3, 5, 10)), 1, 12, (128, 128))
LM = language(2048, 8, 4, (128, 256), name="LM-340M")
DIT_XL_512 = dit(512, 8, 16, 72, name="DiT-XL/2")


def quick_cases() -> list[Operator]:
    """Return causal attention in fp32 at several lengths, which takes a minute or two on a CPU."""
    options: dict[str, Any] = {"batch": 1, "heads": 4, "widths": (64, 64), "causal": True, "dtype": "float32"}
    return [Operator(f"{n:,} tokens", Blocks.sequence(n, 64), **options) for n in (512, 2048, 8192)]


def target_cases() -> list[Operator]:
    """Return six operators at the sizes of the paper's models."""
    return [dit(256, 32), dit(512, 32), dit(2048, 1), VIDEO, language(2048, 8), language(8192, 2)]


def paper_cases() -> list[Operator]:
    """Return the other operators of figures 1b and 1d and of tables 5 and 14."""
    video = dataclasses.replace(VIDEO, name="Wan 31,500 tokens, 105 blocks", blocks=Blocks.grid(WAN_GRID, (7, 3, 5)))
    cases = [dit(1024, 8), dit(4096, 1), DIT_XL_512, video, LM, language(32768, 1, size=256)]
    cases += [language(2048, 8, widths=(128, 128)), language(8192, 2, widths=(128, 128))]
    for side in (2, 4, 8, 16, 32):
        sizes = [pixels for pixels in (256, 512, 1024) if side < pixels // 16]
        cases += [dit(pixels, 8, side=side, name="table 14, DiT-S/2") for pixels in sizes]
    return cases


def model_cases() -> list[WholeModel]:
    """Return whole models: Wan, the language model, DiT-S/2 at several sizes, and DiT-XL/2."""
    cases = [WholeModel("Wan2.1-1.3B, whole", WAN_1B, VIDEO)]
    cases.append(WholeModel("LM-340M 2,048 tokens, whole", LLAMA_340M, LM))
    cases += [WholeModel(f"DiT-S/2 {pixels} px, whole", DIT_S, dit(pixels, batch)) for pixels, batch in IMAGES]
    return [*cases, WholeModel("DiT-XL/2 512 px, whole", DIT_XL, DIT_XL_512)]


def time_case(case: Case, device: Device, seed: int = 0, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Check and time one case: a row for each mode, with "ms", "error", and "failed" (why there is no time) by name."""
    error: dict[str, float] = {}
    failed: dict[str, str] = {}
    rows = []
    with record_failure(failed, "all"):
        for name in case.competitors(device):
            with record_failure(failed, name):
                errors = case.errors(name, device, seed)
                error[name] = max(errors.values(), default=0.0)
                if wrong := describe_wrong(errors, case.dtype):
                    failed[name] = wrong
        prepared: Any = case.prepare(device, seed)
        for mode in MODES:
            functions: dict[str, Callable[[], Any]] = {}
            ms: dict[str, float] = {}
            failed_in_mode = dict(failed)
            for name in (name for name in error if name not in failed):
                with record_failure(failed_in_mode, name):
                    function = case.work(prepared, mode, name)
                    time_call(function, device)  # warm-up
                    functions[name] = function
            for _, name in itertools.product(range(rounds), functions):
                ms[name] = min(ms.get(name, math.inf), 1e3 * time_call(functions[name], device))
            rows.append({"case": case.name, "what": mode, "ms": ms, "error": error, "failed": failed_in_mode})
    if "all" in failed:
        return [{"case": case.name, "what": "", "ms": {}, "error": error, "failed": failed}]
    return rows


@contextlib.contextmanager
def record_failure(failed: dict[str, str], name: str) -> Iterator[None]:
    """Context manager that stores a description of an exception in `failed[name]` instead of raising it."""
    try:
        yield
    except torch.OutOfMemoryError:
        failed[name] = "did not fit the memory of the device"
    except Exception as error:  # Triton's errors are not RuntimeErrors
        failed[name] = f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def time_call(function: Callable[[], Any], device: Device) -> float:
    calls = 0
    start = clock(device)
    while calls == 0 or time.perf_counter() - start < MIN_TURN_SECONDS:
        function()
        calls += 1
    return (clock(device) - start) / calls


def render_bench(record: Mapping[str, Any]) -> str:
    """Render the rows of `time_case` as Markdown, with the fastest implementation of each kind and MHLA's speedup."""

    def find_fastest(*kinds: str) -> tuple[float, str] | None:
        times = [(value, name.partition(" ")[2]) for name, value in row["ms"].items() if name.startswith(kinds)]
        return min(times, default=None)

    largest_error = max((error for row in record["rows"] for error in row["error"].values()), default=0.0)
    versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items() if name in ("torch", "triton"))
    lines = []
    for row, kind in itertools.product(record["rows"], ("mhla", "hybrid")):
        mhla_time = find_fastest(kind)
        if mhla_time is None:
            continue
        baselines = [find_fastest("sdpa", "softmax"), find_fastest("linear")]
        ratios = [f"{baseline[0] / mhla_time[0]:.2f}" if baseline else "" for baseline in baselines]
        times = [f"{best[0]:.4g} {best[1]}".rstrip() if best else "" for best in (mhla_time, *baselines)]
        case = row["case"] if kind == "mhla" else f"{row['case']}, {kind}"
        lines.append([case, row["what"], *times, *ratios])
    columns = ["MHLA, ms", "softmax, ms", "plain linear, ms", "times softmax", "times linear"]
    failed = {f"* {row['case']}, {name}: {reason}" for row in record["rows"] for name, reason in row["failed"].items()}
    parts = [
        f"{record['hardware']}; {versions}; largest relative error found before timing: {largest_error:.0e}.",
        markdown(["case", "what", *columns], lines, left=2),
        *(["\n".join(sorted(failed))] if failed else []),
    ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the default cases, and return the record. The exit code is 1 if a result was wrong."""
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu", help="as torch names it (default: cpu)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--out", help="JSON file to write")
    args, command = parse_call(parser, "bench", arguments)
    torch.set_num_threads(args.threads)
    record = {**describe_run(command, args.device), "seed": 0, "rows": []}
    for case in tqdm(quick_cases(), desc="bench"):
        record["rows"] += time_case(case, args.device)
        if args.out is not None:
            write_json(args.out, record)
    print(render_bench(record))
    if any(reason.startswith(WRONG) for row in record["rows"] for reason in row["failed"].values()):
        raise SystemExit(1)
    return record


if __name__ == "__main__":
    script(main, "bench")
