"""The shapes of the paper's speed figures and tables, as operators and as whole models at random weights.

Of a whole model its attention is what is checked before it is timed.
"""

import copy
import dataclasses

import torch
from diffusers import DiTTransformer2DModel, WanTransformer3DModel
from transformers import LlamaConfig, LlamaForCausalLM

from mhla_hf import Blocks, MHLAConfig, MHLAForCausalLM, convert
from mhla_hf.bench import FORWARD, TRAINING, Operator, relative_error
from mhla_hf.ops.decays import Decays, LocalForm
from mhla_hf.ops.local import local_attention

DIT = {"patch_size": 2, "in_channels": 4, "out_channels": 8, "attention_bias": True, "num_embeds_ada_norm": 1000}
DIT_S = {**DIT, "num_layers": 12, "num_attention_heads": 6, "attention_head_dim": 64}
DIT_XL = {**DIT, "num_layers": 28, "num_attention_heads": 16, "attention_head_dim": 72}
WAN_1B = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30}
LLAMA_340M = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16}
WAN_GRID = (21, 30, 50)
IMAGES = ((256, 32), (512, 32), (1024, 8), (2048, 1), (4096, 1))  # pixels, batch


@dataclasses.dataclass(frozen=True)
class WholeModel:
    """A model: stock softmax, MHLA, MHLA with one block (plain linear attention by MHLA's code), and for Wan the hybrid.

    config: arguments of the stock model: `DiTTransformer2DModel`, `WanTransformer3DModel`, or for a language model
    `LlamaConfig`. grid: its tokens; one number for a language model. operator: its attention. text: tokens of a prompt and
    their width, for Wan.
    """

    name: str
    config: dict
    grid: tuple
    batch: int
    operator: Operator
    text: tuple = (512, 4096)
    modes = (FORWARD, TRAINING)

    @property
    def dtype(self):
        """Of its attention."""
        return self.operator.dtype

    def competitors(self, device):
        """The competitors."""
        return ["softmax", "mhla", "linear (one block)", *(["hybrid 2/3"] if len(self.grid) == 3 else [])]

    def errors(self, name, device, seed):
        """Of its attention, by the implementation that impl="auto" takes."""
        return self.operator.errors("mhla auto", device, seed) if name == "mhla" else {}

    def prepare(self, device, seed):
        """(name -> model of the same size, the keyword arguments of a forward pass)."""
        torch.manual_seed(seed)
        made = self.language_models() if len(self.grid) == 1 else self.denoisers()
        made = {name: as_loaded(model, getattr(torch, self.dtype)).to(device) for name, model in made.items()}
        return made, self.inputs(device, seed)

    def language_models(self):
        """The stock Llama, and the paper's language model."""
        own = {**self.config, "num_attention_heads": self.operator.heads}
        one = {**MHLAConfig(**own).mhla, "block_size": self.grid[0], "num_blocks": 1}
        return {
            "softmax": LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **self.config)),
            "mhla": MHLAForCausalLM(MHLAConfig(**own)),
            "linear (one block)": MHLAForCausalLM(MHLAConfig(**own, mhla=one)),
        }

    def denoisers(self):
        """The stock transformer of diffusers, and what `convert` makes of it."""
        size = {"sample_size": 2 * self.grid[0]} if len(self.grid) == 2 else {}
        stock = (DiTTransformer2DModel if size else WanTransformer3DModel)(**self.config, **size)
        counts = list(self.operator.blocks.counts)
        asked = {
            "mhla": (counts, "all"),
            "linear (one block)": ([1] * len(counts), "all"),
            "hybrid 2/3": (counts, "2/3"),
        }
        made = {
            name: convert(copy.deepcopy(stock), layout=layout, layers=layers)
            for name, (layout, layers) in asked.items()
            if name in self.competitors(None)
        }
        return {"softmax": stock, **made}

    def inputs(self, device, seed):
        """The keyword arguments of a forward pass."""
        random = torch.Generator(device).manual_seed(seed)
        dtype = getattr(torch, self.dtype)
        if len(self.grid) == 1:
            ids = torch.randint(1000, (self.batch, *self.grid), generator=random, device=device)
            return {"input_ids": ids, "use_cache": False}
        *frames, rows, columns = self.grid
        shape = (self.batch, self.config.get("in_channels", 16), *frames, 2 * rows, 2 * columns)
        step = torch.full((self.batch,), 500, device=device)
        given = {"hidden_states": torch.randn(shape, generator=random, device=device).to(dtype), "timestep": step}
        if not frames:
            return given | {"class_labels": torch.zeros_like(step)}
        text = torch.randn((self.batch, *self.text), generator=random, device=device).to(dtype)
        return given | {"encoder_hidden_states": text}

    def work(self, prepared, what, name):
        """A forward pass, or one with the gradients of all weights that the output depends on."""
        models, inputs = prepared
        weights = [weight for weight in models[name].parameters() if weight.requires_grad]

        def forward():
            return models[name](**inputs, return_dict=False)[0]

        def step():
            return torch.autograd.grad(forward().sum(), weights, allow_unused=True)

        return torch.no_grad()(forward) if what == FORWARD else step


@dataclasses.dataclass(frozen=True)
class Window(Operator):
    """The attention of converted language models, of two decays and a softmax near by: the kernel, PyTorch, and softmax."""

    def competitors(self, device):
        return ["sdpa", "mhla torch", *(["mhla triton"] if torch.device(device).type == "cuda" else [])]

    def prepare(self, device, seed):
        """q, k, v and, as wide as Hedgehog's, features of q and k, with gradients, and dL/do."""
        (*tensors, _), direction = super().prepare(device, seed)
        tensors += [torch.cat([x, -x], -1).detach().softmax(-1).requires_grad_() for x in tensors[:2]]
        return tensors, direction

    def attend(self, name, q, k, v, *features):
        if name == "sdpa":
            return super().attend(name, q, k, v)
        weight, balance = q.new_full((self.heads, 2), 0.5).float(), q.new_full((self.heads,), 3.0).float()
        impl = name.removeprefix("mhla ")
        form = LocalForm(self.blocks.block_size, scale=self.widths[0] ** -0.5, impl=impl, unrounded=False)
        return local_attention(q, k, v, *features, Decays(weight, -0.1 * weight), balance, form).to(v.dtype)

    def errors(self, name, device, seed, exact="mhla torch"):
        """{"output", "dq", ...: relative error} of one sequence against `exact` in fp64; nothing of softmax."""
        if name == "sdpa":
            return {}
        tensors, direction = dataclasses.replace(self, batch=1).prepare(device, seed)
        doubles, results = [x.detach().double().requires_grad_() for x in tensors], []
        for competitor, given in ((name, tensors), (exact, doubles)):
            o = self.attend(competitor, *given)
            results.append([o, *torch.autograd.grad(o, given, direction.to(o.dtype))])
        names = ("output", "dq", "dk", "dv", "dfq", "dfk")
        return {what: relative_error(x, y) for what, x, y in zip(names, *results, strict=True)}


def as_loaded(model, dtype):
    """`model` as `from_pretrained(dtype=...)` gives it: what it keeps in fp32, such as the mixing, stays so, and buffers."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None)  # of transformers
    kept = set(strict or model._keep_in_fp32_modules or ())
    for name, weight in model.named_parameters():
        if not kept & set(name.split(".")):
            weight.data = weight.data.to(dtype)
    return model


def dit(pixels, batch, heads=6, width=64, counts=(4, 4), name="DiT-S/2"):
    """The attention of a DiT with patches of 2 on images of so many pixels."""
    side = pixels // 16
    blocks = Blocks.grid((side, side), counts)
    what = f"{name} {pixels} px, {blocks.num_blocks} blocks, batch {batch}"
    return Operator(what, blocks, batch, heads, (width, width), normalize=True)


def language(tokens, batch, heads=16, widths=(64, 64), size=64, name="LM"):
    """The attention of a language model; blocks of `size` tokens."""
    what = f"{name} {tokens:,} tokens, K {widths[0]}, V {widths[1]}, blocks of {size}, batch {batch}"
    return Operator(what, Blocks.sequence(tokens, size), batch, heads, widths, causal=True)


def video(counts=(3, 5, 10)):
    """The attention of Wan2.1-1.3B on 81 frames of 480 x 800."""
    blocks = Blocks.grid(WAN_GRID, counts)
    return Operator(f"Wan 31,500 tokens, {blocks.num_blocks} blocks", blocks, 1, 12, (128, 128))


def target_cases():
    """The six operators that docs/performance.md has targets for."""
    return [dit(256, 32), dit(512, 32), dit(2048, 1), video(), language(2048, 8), language(8192, 2)]


def paper_cases():
    """The other operators of figures 1b and 1d and of tables 5 and 14, the language models' lengths, and the window."""
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


def model_cases():
    """Whole models: Wan, the language model, DiT-S/2 by size, and DiT-XL/2."""
    lm = language(2048, 8, 4, (128, 256), name="LM-340M")
    cases = [WholeModel("Wan2.1-1.3B, whole", WAN_1B, WAN_GRID, 1, video())]
    cases.append(WholeModel("LM-340M 2,048 tokens, whole", LLAMA_340M, (2048,), 8, lm))
    for pixels, batch in IMAGES:
        grid = (pixels // 16, pixels // 16)
        cases.append(WholeModel(f"DiT-S/2 {pixels} px, whole", DIT_S, grid, batch, dit(pixels, batch)))
    cases.append(WholeModel("DiT-XL/2 512 px, whole", DIT_XL, (32, 32), 8, dit(512, 8, 16, 72, name="DiT-XL/2")))
    return cases
