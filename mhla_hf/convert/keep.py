"""Which layers keep softmax, by measurement: what it costs the model's next tokens, and its recall, to do without each."""

from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from ..models.attention import ATTENTION_NAME
from ..models.transformers_api import set_attention_function
from ..nn.settings import MHLASettings, is_whole
from ..ops.local_state import LocalState
from .start import log_probabilities, mean_kl, mhla_layers, softmax_instead


def choose_layers(
    model: torch.nn.Module, batches: Sequence[torch.Tensor], *, keep: int | None = None, cache_bytes: int | None = None,
    context: int = 0, progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Choose the layers that keep softmax, one after the other: each time the one whose softmax leaves the least damage.

    Damage is against the softmax original, which is in the model (`kl_to_teacher`): the KL of the next tokens, and what the
    probability of a text's second copy falls by (half of each row, repeated: a token is recalled from half a row back, so
    rows of more than four blocks reach beyond a window). Both are in nats per token; greedy choice looks at their sum.
    Nothing is changed: `keep_softmax(model, chosen["kept"])` does that.

    Args:
        model: a language model that was just converted, better calibrated too, in all the layers to choose from.
        batches: tensors of token ids, int64 `[B, T]`, without padding.
        keep: how many layers keep softmax, fewer than there are MHLA layers; or
        cache_bytes: of one sequence's cache, all these layers together, at `context` tokens (`mixing_form="decay"` only).
        progress: show a bar on stderr.

    Returns:
        kept and layers: the indices that are softmax and those that stay MHLA; start: the damage as the model is; single:
        the damage of each layer when only it is converted; steps: the damage after each choice. A damage is {"kl",
        "recall"}. Plain values, for a configuration or a card.

    Raises:
        TypeError, ValueError: one sentence.
    """
    found = mhla_layers(model)
    if (keep is None) == (cache_bytes is None):
        raise ValueError("keep: got it with cache_bytes, or neither, expected one of the two.")
    keep = layers_in_budget(model, cache_bytes, context) if keep is None else keep
    if not is_whole(keep, 1, len(found) - 1):
        raise ValueError(f"keep: got {keep!r} layers, expected at least 1 of {len(found)}, and not all.")
    if not batches:
        raise ValueError("batches: got none, expected at least one.")
    everything = sorted(found)
    alone = [[other for other in everything if other != index] for index in everything]
    choices = 1 + len(everything) + sum(len(everything) - chosen for chosen in range(keep))
    kept, steps = [], []
    with tqdm(total=choices * len(batches), desc="choose layers", unit="try", disable=not progress) as bar:
        start, *single = damages(model, batches, [[], *alone], bar)
        while len(kept) < keep:
            left = [index for index in everything if index not in kept]
            measured = damages(model, batches, [[*kept, index] for index in left], bar)
            rows = [{"layer": index, **row} for index, row in zip(left, measured, strict=True)]
            steps.append(min(rows, key=lambda row: row["kl"] + max(row["recall"], 0.0)))
            kept.append(steps[-1]["layer"])
    layers = [index for index in everything if index not in kept]
    single = [{"layer": index, **row} for index, row in zip(everything, single, strict=True)]
    return {"kept": sorted(kept), "layers": layers, "start": start, "single": single, "steps": steps}


def damages(model, batches, choices, bar) -> list[dict]:
    """For each list of layers in `choices`, the damage that is left with softmax in these: see `choose_layers`.

    bar: of tqdm, which moves by one for each of them and each batch.
    """
    sums = torch.zeros(len(choices), 2)
    for ids in batches:
        half = ids.shape[1] // 2
        twice = ids[:, :half].repeat(1, 2).to(model.device)

        def answers(kept, ids=ids, half=half, twice=twice):
            with softmax_instead(model, kept):
                again = log_probabilities(model, twice)[:, half:-1].gather(-1, twice[:, half + 1 :, None])
                return log_probabilities(model, ids), float(again.mean())

        wanted, remembered = answers(None)
        for row, kept in zip(sums, choices, strict=True):
            got, recalled = answers(kept)
            row += torch.tensor([mean_kl(wanted, got), remembered - recalled])
            bar.update()
    return [{"kl": kl, "recall": recall} for kl, recall in (sums / len(batches)).tolist()]


def layers_in_budget(model, cache_bytes: int, context: int) -> int:
    """How many MHLA layers can keep softmax where the cache of all of them has so many bytes a row at `context` tokens."""
    found = mhla_layers(model)
    attention = next(iter(found.values()))
    if not hasattr(attention.mhla, "form"):
        raise ValueError('cache_bytes: came for a dense mixing, whose state grows, expected mixing_form="decay".')
    if context < 1:
        raise ValueError(f"context: got {context}, expected the tokens at which cache_bytes count.")
    token, state = bytes_of_layer(attention, model.dtype)
    softmax = token * context
    left = cache_bytes - len(found) * state
    if softmax <= state or left < softmax - state:
        what = f"one softmax layer of {softmax} bytes at {context} tokens beside MHLA layers of {state}"
        raise ValueError(f"cache_bytes: got {cache_bytes}, expected {(len(found) - 1) * state + softmax}: {what}.")
    return left // (softmax - state)


def bytes_of_layer(attention: torch.nn.Module, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that one token takes with softmax, and those of the state of one sequence, in this MHLA layer by decays.

    Latent attention keeps one latent and one rotated key of a token for all heads, others keys and values.
    """
    core = attention.mhla
    key = torch.empty(1, 1, core.num_kv_heads, core.q_map.head_dim, dtype=dtype, device="meta")
    value = key.new_empty(1, 1, core.num_kv_heads, core.value_dim)
    state = LocalState.empty(key, value, core.mixing.num_decays, core.k_map.num_features, core.form)
    if (latent := getattr(attention, "kv_lora_rank", None)) is not None:
        return (latent + attention.qk_rope_head_dim) * dtype.itemsize, state.nbytes()
    return key.nbytes + value.nbytes, state.nbytes()


def keep_softmax(model, layers) -> None:
    """Give the MHLA layers of these indices their softmax back, in place: as if `convert` had never taken them."""
    found = mhla_layers(model)
    settings = MHLASettings.from_dict(model.config.mhla)
    wrong = [index for index in layers if index not in found]
    if wrong or len(set(layers)) >= len(found):
        raise ValueError(f"layers: got {list(layers)}, expected some of the MHLA layers {sorted(found)}, and not all.")
    if model.config._attn_implementation == ATTENTION_NAME:
        set_attention_function(model.config, "sdpa")  # the default of transformers
    for index in layers:
        attention = found[index]
        attention.__class__ = type(attention).__bases__[1]
        attention.config = model.config
        del attention.mhla
    settings.layers = [index for index in settings.layers if index not in layers]
    model.config.mhla = settings.to_dict()
