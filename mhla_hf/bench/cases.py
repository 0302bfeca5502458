"""The shapes of the paper's speed figures and tables, as operators and as whole models at random weights.

Unusual: a whole model is timed as users run it, so without CUDA graphs; its attention is checked as an operator first.
"""

import copy
import dataclasses

import torch
from diffusers import DiTTransformer2DModel, WanTransformer3DModel
from transformers import LlamaConfig, LlamaForCausalLM

from ..convert import convert
from ..models.configuration import MHLAConfig
from ..models.language import MHLAForCausalLM
from ..ops.blocks import Blocks
from .compare import FORWARD, LINEAR_BLOCK, TRAINING, Comparison, Operator, without_gradients
from .kernels import Kernels

DIT = {"patch_size": 2, "in_channels": 4, "out_channels": 8, "attention_bias": True, "num_embeds_ada_norm": 1000}
DIT_S = {**DIT, "num_layers": 12, "num_attention_heads": 6, "attention_head_dim": 64}
DIT_XL = {**DIT, "num_layers": 28, "num_attention_heads": 16, "attention_head_dim": 72}
WAN_1B = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30}
LLAMA_340M = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16}
WAN_GRID = (21, 30, 50)


@dataclasses.dataclass(frozen=True)
class WholeModel:
    """A model of diffusers (`DiTTransformer2DModel`, `WanTransformer3DModel`) or the paper's language model.

    config: arguments of the stock model. grid: its tokens; one number for a language model. batch: inputs at once. text:
    tokens of a prompt and their width, for Wan. operator: its attention.
    """

    name: str
    config: dict
    grid: tuple
    batch: int
    operator: Operator
    text: tuple = (512, 4096)
    graph = False

    def check(self, device, seed):
        """Of the attention; `Operator.check`."""
        return self.operator.check(device, seed)

    def models(self, device):
        """name -> model, all of the same size: the stock one, plain linear, MHLA, and for Wan the hybrid."""
        if len(self.grid) == 1:
            own = {**self.config, "num_attention_heads": self.operator.heads}
            size = min(LINEAR_BLOCK, self.grid[0])  # blocks that weigh the same, as in the operators' "linear ours"
            linear = {"block_size": size, "num_blocks": -(-self.grid[0] // size), "mixing_start": "uniform"}
            linear = {**MHLAConfig(**own).mhla, **linear, "learn_mixing": False}
            made = {
                "softmax": LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **self.config)),
                "linear": MHLAForCausalLM(MHLAConfig(**own, mhla=linear)),
                "mhla": MHLAForCausalLM(MHLAConfig(**own)),
            }
        else:
            size = {"sample_size": 2 * self.grid[0]} if len(self.grid) == 2 else {}
            stock = (DiTTransformer2DModel if size else WanTransformer3DModel)(**self.config, **size)
            counts = list(self.operator.blocks.counts)
            made = {
                "softmax": stock,
                "linear": convert(copy.deepcopy(stock), layout=[1] * len(counts), layers="all"),
                "mhla": convert(copy.deepcopy(stock), layout=counts, layers="all"),
            }
            if not size:
                made["mhla hybrid 2/3"] = convert(copy.deepcopy(stock), layout=counts, layers="2/3")
        return {name: as_loaded(model, getattr(torch, self.operator.dtype)).to(device) for name, model in made.items()}

    def inputs(self, device, seed):
        """The keyword arguments of a forward pass."""
        random = torch.Generator(device).manual_seed(seed)
        dtype = getattr(torch, self.operator.dtype)
        if len(self.grid) == 1:
            ids = torch.randint(1000, (self.batch, *self.grid), generator=random, device=device)
            return {"input_ids": ids, "use_cache": False}
        step = torch.full((self.batch,), 500, device=device)
        if len(self.grid) == 2:
            shape = (self.batch, self.config["in_channels"], *(2 * side for side in self.grid))
            latents = torch.randn(shape, generator=random, device=device).to(dtype)
            return {"hidden_states": latents, "timestep": step, "class_labels": torch.zeros_like(step)}
        frames, rows, columns = self.grid
        shape = (self.batch, self.config.get("in_channels", 16), frames, 2 * rows, 2 * columns)
        latents, text = (
            torch.randn(size, generator=random, device=device).to(dtype) for size in (shape, (self.batch, *self.text))
        )
        return {"hidden_states": latents, "timestep": step, "encoder_hidden_states": text}

    def work(self, device, seed):
        """what -> name -> function of nothing, to be timed."""
        inputs, work = self.inputs(device, seed), {FORWARD: {}, TRAINING: {}}
        for name, model in self.models(device).items():
            weights = [weight for weight in model.parameters() if weight.requires_grad]

            def forward(model=model):
                return model(**inputs, return_dict=False)[0]

            with torch.no_grad():
                direction = torch.ones_like(forward())
            work[FORWARD][name] = without_gradients(forward, ())
            work[TRAINING][name] = Step(forward, weights, direction)
        return work


def as_loaded(model, dtype):
    """`model` as `from_pretrained(dtype=...)` gives it: what it keeps in fp32, such as the mixing, stays so, and buffers."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None)  # of transformers
    kept = set(strict or model._keep_in_fp32_modules or ())
    for name, weight in model.named_parameters():
        if not kept & set(name.split(".")):
            weight.data = weight.data.to(dtype)
    return model


@dataclasses.dataclass
class Step:
    """Forward and the gradients of those weights that the output depends on."""

    forward: object
    weights: list
    direction: torch.Tensor

    def __call__(self):
        return torch.autograd.grad(self.forward(), self.weights, self.direction, allow_unused=True)


def dit(pixels, batch, heads=6, width=64, counts=(4, 4), name="DiT-S/2"):
    """The attention of a DiT with patches of 2 on images of so many pixels."""
    side = pixels // 16
    blocks = Blocks.grid((side, side), counts)
    what = f"{name} {pixels} px, {blocks.num_blocks} blocks, batch {batch}"
    return Operator(what, blocks, batch, heads, (width, width), normalize=True)


def language(tokens, batch, heads, widths, size=64, name="LM"):
    """The attention of a language model; blocks of `size` tokens."""
    what = f"{name} {tokens:,} tokens, K {widths[0]}, V {widths[1]}, blocks of {size}, batch {batch}"
    return Operator(what, Blocks.sequence(tokens, size), batch, heads, widths, causal=True)


def video(counts):
    """The attention of Wan2.1-1.3B on 81 frames of 480 x 800."""
    blocks = Blocks.grid(WAN_GRID, counts)
    return Operator(f"Wan 31,500 tokens, {blocks.num_blocks} blocks", blocks, 1, 12, (128, 128))


def paper_cases():
    """Figures 1b and 1d, tables 5 and 14, and the language models' lengths; then whole models."""
    images = ((256, 32), (512, 32), (1024, 8), (2048, 1), (4096, 1))
    cases = [dit(pixels, batch) for pixels, batch in images]
    cases += [dit(512, 8, 16, 72, name="DiT-XL/2"), video((3, 5, 10)), video((7, 3, 5))]
    for width in (64, 128):
        lengths = ((2048, 8, 64), (8192, 2, 64), (32768, 1, 256))
        cases += [language(tokens, batch, 16, (width, width), size) for tokens, batch, size in lengths]
    cases.append(language(2048, 8, 4, (128, 256), name="LM-340M"))
    for side in (2, 4, 8, 16, 32):
        for pixels in (256, 512, 1024):
            if side < pixels // 16:
                cases.append(dit(pixels, 8, counts=(side, side), name="table 14, DiT-S/2"))
    for pixels, batch in images:
        grid = (pixels // 16, pixels // 16)
        cases.append(WholeModel(f"DiT-S/2 {pixels} px, whole", DIT_S, grid, batch, dit(pixels, batch)))
    cases.append(WholeModel("DiT-XL/2 512 px, whole", DIT_XL, (32, 32), 8, dit(512, 8, 16, 72, name="DiT-XL/2")))
    cases.append(WholeModel("Wan2.1-1.3B, whole", WAN_1B, WAN_GRID, 1, video((3, 5, 10))))
    lm = language(2048, 8, 4, (128, 256), name="LM-340M")
    cases.append(WholeModel("LM-340M 2,048 tokens, whole", LLAMA_340M, (2048,), 8, lm))
    return tuple(cases)


def kernel_cases():
    """The operators with a target in docs/performance.md, kernel by kernel."""
    operators = [dit(256, 32), dit(512, 32), dit(2048, 1), video((3, 5, 10))]
    operators += [language(tokens, batch, 16, (64, 64)) for tokens, batch in ((2048, 8), (8192, 2))]
    return tuple(Kernels(operator) for operator in operators)


PAPER = Comparison(paper_cases())
KERNELS = Comparison(kernel_cases())
