"""The shapes of the paper's speed figures and tables, as cases of `mhla_hf.bench`: operators, and whole models.

Whole models have random weights. Before one is timed, the operator of its attention is checked.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DiTTransformer2DModel, WanTransformer3DModel
from transformers import LlamaConfig, LlamaForCausalLM

from mhla_hf import Blocks, MHLAConfig, MHLAForCausalLM, convert
from mhla_hf.bench import FORWARD, TRAINING, Device, Operator, Prepared, relative_error
from mhla_hf.ops.decays import Decays, LocalForm
from mhla_hf.ops.inputs import WindowedInputs
from mhla_hf.ops.local import local_attention

DIT = {"patch_size": 2, "in_channels": 4, "out_channels": 8, "attention_bias": True, "num_embeds_ada_norm": 1000}
DIT_S = {**DIT, "num_layers": 12, "num_attention_heads": 6, "attention_head_dim": 64}
DIT_XL = {**DIT, "num_layers": 28, "num_attention_heads": 16, "attention_head_dim": 72}
WAN_1B = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30}
LLAMA_340M = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16}
WAN_GRID = (21, 30, 50)
IMAGES = ((256, 32), (512, 32), (1024, 8), (2048, 1), (4096, 1))  # side in pixels, batch size


@dataclasses.dataclass(frozen=True)
class WholeModel:
    """A case that times a whole model: with softmax, MHLA, MHLA with one block (plain linear attention), and, for Wan,
    the hybrid.

    Attributes:
        name: Shown in the table.
        config: Arguments of the softmax model: `DiTTransformer2DModel`, `WanTransformer3DModel`, or, for a language
            model, `LlamaConfig`.
        grid: Number of tokens along each axis: one for a language model, two for images, three for videos.
        batch: Batch size.
        operator: Its attention.
        text: Number of tokens of a prompt, and their width; for Wan.
        modes: What is timed.
    """

    name: str
    config: dict[str, Any]
    grid: tuple[int, ...]
    batch: int
    operator: Operator
    text: tuple[int, int] = (512, 4096)
    modes = (FORWARD, TRAINING)

    @property
    def dtype(self) -> str:
        """Name of the dtype of weights and inputs."""
        return self.operator.dtype

    def competitors(self, device: Device | None) -> list[str]:
        """Return the names of the competitors, the same on all devices."""
        return ["softmax", "mhla", "linear (one block)", *(["hybrid 2/3"] if len(self.grid) == 3 else [])]

    def errors(self, name: str, device: Device, seed: int) -> dict[str, float]:
        """Return the relative errors of MHLA's operator, in the implementation that impl="auto" selects."""
        return self.operator.errors("mhla auto", device, seed) if name == "mhla" else {}

    def prepare(self, device: Device, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the models by competitor, and the keyword arguments of a forward pass."""
        torch.manual_seed(seed)
        models = self.language_models() if len(self.grid) == 1 else self.denoisers()
        dtype = getattr(torch, self.dtype)
        models = {name: cast_as_loaded(model, dtype).to(device) for name, model in models.items()}
        return models, self.inputs(device, seed)

    def language_models(self) -> dict[str, Any]:
        """Make a Llama and the paper's language model of the same size."""
        config = {**self.config, "num_attention_heads": self.operator.heads}
        settings: Any = MHLAConfig(**config).mhla
        one_block = {**settings, "block_size": self.grid[0], "num_blocks": 1}
        return {
            "softmax": LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **self.config)),
            "mhla": MHLAForCausalLM(MHLAConfig(**config)),
            "linear (one block)": MHLAForCausalLM(MHLAConfig(**config, mhla=one_block)),
        }

    def denoisers(self) -> dict[str, Any]:
        """Make a transformer of diffusers and its conversions."""
        if len(self.grid) == 2:
            softmax: Any = DiTTransformer2DModel(**self.config, sample_size=2 * self.grid[0])
        else:
            softmax = WanTransformer3DModel(**self.config)
        counts = list(self.operator.blocks.counts)
        conversions = {
            "mhla": (counts, "all"),
            "linear (one block)": ([1] * len(counts), "all"),
            "hybrid 2/3": (counts, "2/3"),
        }
        models = {"softmax": softmax}
        for name, (layout, layers) in conversions.items():
            if name in self.competitors(None):
                models[name] = convert(copy.deepcopy(softmax), layout=layout, layers=layers)
        return models

    def inputs(self, device: Device, seed: int) -> dict[str, Any]:
        """Make the keyword arguments of a forward pass."""
        generator = torch.Generator(device).manual_seed(seed)
        dtype = getattr(torch, self.dtype)
        if len(self.grid) == 1:
            ids = torch.randint(1000, (self.batch, *self.grid), generator=generator, device=device)
            return {"input_ids": ids, "use_cache": False}
        *frames, rows, columns = self.grid
        shape = (self.batch, self.config.get("in_channels", 16), *frames, 2 * rows, 2 * columns)
        latents = torch.randn(shape, generator=generator, device=device).to(dtype)
        timestep = torch.full((self.batch,), 500, device=device)
        if not frames:
            return {"hidden_states": latents, "timestep": timestep, "class_labels": torch.zeros_like(timestep)}
        text = torch.randn((self.batch, *self.text), generator=generator, device=device).to(dtype)
        return {"hidden_states": latents, "timestep": timestep, "encoder_hidden_states": text}

    def work(self, prepared: tuple[dict[str, Any], dict[str, Any]], mode: str, name: str) -> Callable[[], Any]:
        """Return a function that runs a forward pass, or one with the gradients of all weights."""
        models, inputs = prepared
        weights = [weight for weight in models[name].parameters() if weight.requires_grad]

        def forward() -> torch.Tensor:
            return models[name](**inputs, return_dict=False)[0]

        def forward_backward() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(forward().sum(), weights, allow_unused=True)

        return torch.no_grad()(forward) if mode == FORWARD else forward_backward


@dataclasses.dataclass(frozen=True)
class Window(Operator):
    """A case that times the attention of converted language models: a softmax window and a far part of two decays."""

    def competitors(self, device: Device) -> list[str]:
        """Return the names of the competitors that run on the device."""
        return ["sdpa", "mhla torch", *(["mhla triton"] if torch.device(device).type == "cuda" else [])]

    def prepare(self, device: Device, seed: int) -> Prepared:
        """Return q, k, v, and features of q and k, as wide as Hedgehog's, and the gradient of the output."""
        (*tensors, _), output_gradient = super().prepare(device, seed)
        tensors += [torch.cat([x, -x], -1).detach().softmax(-1).requires_grad_() for x in tensors[:2]]
        return tensors, output_gradient

    def attend(self, name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *features: torch.Tensor) -> Any:
        """Return the output of one competitor."""
        if name == "sdpa":
            return super().attend(name, q, k, v)
        weight = q.new_full((self.heads, 2), 0.5).float()
        balance = q.new_full((self.heads,), 3.0).float()
        impl = name.removeprefix("mhla ")
        form = LocalForm(self.blocks.sizes()[0], scale=self.widths[0] ** -0.5, impl=impl, unrounded=False)
        q_features, k_features = features
        decays = Decays(weight, -0.1 * weight)
        return local_attention(WindowedInputs(q, k, v, q_features, decays, balance, form), k_features).to(v.dtype)

    def errors(self, name: str, device: Device, seed: int, exact: str = "mhla torch") -> dict[str, float]:
        """Return the relative errors of the output ("output") and of the gradients ("dq", ...) of one sequence.

        They are against the competitor `exact` in fp64. Softmax is not checked.
        """
        if name == "sdpa":
            return {}
        tensors, output_gradient = dataclasses.replace(self, batch=1).prepare(device, seed)
        exact_tensors = [x.detach().double().requires_grad_() for x in tensors]
        results = []
        for competitor, inputs in ((name, tensors), (exact, exact_tensors)):
            o = self.attend(competitor, *inputs)
            results.append([o, *torch.autograd.grad(o, inputs, output_gradient.to(o.dtype))])
        names = ("output", "dq", "dk", "dv", "dfq", "dfk")
        return {compared: relative_error(x, y) for compared, x, y in zip(names, *results, strict=True)}


def cast_as_loaded(model: Any, dtype: torch.dtype) -> Any:
    """Cast a model in place as `from_pretrained(dtype=...)` does, and return it.

    Buffers, and parameters that the model keeps in fp32, such as the mixing matrices, are not cast.
    """
    strict = getattr(model, "_keep_in_fp32_modules_strict", None)  # only models of transformers have it
    fp32_modules = set(strict or model._keep_in_fp32_modules or ())
    for name, weight in model.named_parameters():
        if not fp32_modules & set(name.split(".")):
            weight.data = weight.data.to(dtype)
    return model


def dit(
    pixels: int, batch: int, heads: int = 6, width: int = 64, counts: tuple[int, int] = (4, 4), name: str = "DiT-S/2"
) -> Operator:
    """Return the attention of a DiT with patches of 2 on square images; `pixels` is their side."""
    side = pixels // 16
    blocks = Blocks.grid((side, side), counts)
    label = f"{name} {pixels} px, {blocks.num_blocks} blocks, batch {batch}"
    return Operator(label, blocks, batch, heads, (width, width), normalize=True)


def language(
    tokens: int, batch: int, heads: int = 16, widths: tuple[int, int] = (64, 64), size: int = 64, name: str = "LM"
) -> Operator:
    """Return the attention of a language model with blocks of `size` tokens."""
    label = f"{name} {tokens:,} tokens, K {widths[0]}, V {widths[1]}, blocks of {size}, batch {batch}"
    return Operator(label, Blocks.sequence(tokens, size), batch, heads, widths, causal=True)


def video(counts: tuple[int, int, int] = (3, 5, 10)) -> Operator:
    """Return the attention of Wan2.1-1.3B on 81 frames of 480 x 800."""
    blocks = Blocks.grid(WAN_GRID, counts)
    return Operator(f"Wan 31,500 tokens, {blocks.num_blocks} blocks", blocks, 1, 12, (128, 128))


def target_cases() -> list[Operator]:
    """Return the six operators that docs/performance.md has targets for."""
    return [dit(256, 32), dit(512, 32), dit(2048, 1), video(), language(2048, 8), language(8192, 2)]


def paper_cases() -> list[Operator]:
    """Return the other operators of figures 1b and 1d and of tables 5 and 14, and the window."""
    cases = [dit(1024, 8), dit(4096, 1), dit(512, 8, 16, 72, name="DiT-XL/2"), video((7, 3, 5))]
    cases += [language(2048, 8, 4, (128, 256), name="LM-340M"), language(32768, 1, size=256)]
    cases += [language(*shape, widths=(128, 128)) for shape in ((2048, 8), (8192, 2))]
    cases.append(language(32768, 1, widths=(128, 128), size=256))
    for tokens, batch in ((2048, 8), (8192, 2)):
        name = f"window, {tokens:,} tokens, batch {batch}"
        cases.append(Window(name, Blocks.sequence(tokens, 64), batch, 16, (64, 64), causal=True))
    for side in (2, 4, 8, 16, 32):
        sizes = [pixels for pixels in (256, 512, 1024) if side < pixels // 16]
        cases += [dit(pixels, 8, counts=(side, side), name="table 14, DiT-S/2") for pixels in sizes]
    return cases


def model_cases() -> list[WholeModel]:
    """Return whole models: Wan, the language model, DiT-S/2 at several sizes, and DiT-XL/2."""
    lm = language(2048, 8, 4, (128, 256), name="LM-340M")
    cases = [WholeModel("Wan2.1-1.3B, whole", WAN_1B, WAN_GRID, 1, video())]
    cases.append(WholeModel("LM-340M 2,048 tokens, whole", LLAMA_340M, (2048,), 8, lm))
    for pixels, batch in IMAGES:
        grid = (pixels // 16, pixels // 16)
        cases.append(WholeModel(f"DiT-S/2 {pixels} px, whole", DIT_S, grid, batch, dit(pixels, batch)))
    cases.append(WholeModel("DiT-XL/2 512 px, whole", DIT_XL, (32, 32), 8, dit(512, 8, 16, 72, name="DiT-XL/2")))
    return cases
