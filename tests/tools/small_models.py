"""Small language models of each family with fixed random weights."""

import contextlib

import pytest
import torch
import transformers

import mhla_hf
from mhla_hf.models.transformers_api import cache_argument

CACHE = cache_argument(transformers.LlamaForCausalLM)  # name of the KV cache in calls and outputs
VOCAB = 64
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "olmo2": ("Olmo2", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
}


def softmax_model(family: str = "llama", **overrides):
    torch.manual_seed(7)
    name, extra = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **extra, **overrides})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def converted_model(
    family: str = "llama", layers="all", *, block_size=8, num_blocks=4, heads=(4, 2), num_layers=3, **settings
):
    """Return a converted model whose new parameters are not at their initial values, so that each of them matters.

    It has a dense mixing matrix unless `settings` differ.
    """
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "num_hidden_layers": num_layers}
    model = softmax_model(family, **sizes)
    settings = {"windowed": False, "window": 2, **settings}
    return shaken(mhla_hf.convert(model, layers=layers, block_size=block_size, num_blocks=num_blocks, **settings))


def scratch_model(*, block_size=8, num_blocks=4, **settings):
    """Return a from-scratch model whose MHLA parameters are not at their initial values."""
    torch.manual_seed(7)
    sizes = {"block_size": block_size, "num_blocks": num_blocks, "layers": "all"}
    mhla = {**mhla_hf.MHLAConfig().mhla, **sizes, **settings}
    names = ("vocab_size", "hidden_size", "intermediate_size", "initializer_range", "pad_token_id", "eos_token_id")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, **{name: SIZES[name] for name in names}}
    config = mhla_hf.MHLAConfig(**sizes, mhla=mhla)
    return shaken(mhla_hf.MHLAForCausalLM(config).eval())


def shaken(model):
    """Add fixed noise to every parameter of the MHLA cores, in place, and return the model."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mhla." in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def twenty_steps(model, step) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, foreach=False)
    losses = []
    for number in range(20):
        losses.append(step(number).detach())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: x.detach() for name, x in model.named_parameters()}
    weights = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in weights.items()}
    return {"losses": torch.stack(losses), **weights}


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Return random token ids without the padding token: int64 `[batch, length]`."""
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def refused(*words, kind=ValueError, match=None):
    """Check that the block raises an error whose message is one sentence that contains all `words` and matches `match`."""
    with pytest.raises(kind, match=match) as error:
        yield
    text = str(error.value)
    assert all(w in text for w in words), text
    assert "\n" not in text and text.rstrip().endswith(".") and len(text) < 300, text


WINDOW = {"windowed": True, "salient": 0}
MODELS = {
    "scratch": scratch_model,
    "scratch-before": lambda: scratch_model(rope="before", per_head=True, normalize=True, output_norm=False, gate=False),
    "llama-all": converted_model,
    "llama-window": lambda: converted_model(**WINDOW),
    "llama-heads": lambda: converted_model(softmax_heads={0: [1], 2: [0]}, **WINDOW),  # GQA
    "smollm3-heads": lambda: converted_model("smollm3", heads=(4, 4), softmax_heads={0: [0, 2], 1: [1]}, **WINDOW),
    "llama-hybrid": lambda: converted_model(layers="2/3"),
    "qwen3-hybrid": lambda: converted_model("qwen3", layers=[0, 2]),
    "qwen2-gated": lambda: converted_model("qwen2", gate=True, output_norm=True, normalize=False, feature_map="relu"),
    "mistral-first": lambda: converted_model("mistral", layers=[0], feature_map="elu"),
    "olmo2-all": lambda: converted_model("olmo2", per_head=True, feature_map="exp"),
    "mixtral-hybrid": lambda: converted_model("mixtral", layers="2/3"),
}  # fmt: skip
