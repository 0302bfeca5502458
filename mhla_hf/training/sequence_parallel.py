"""Sequence parallelism for causal language models: each process works on its share of the tokens of every sequence.

MHLA layers exchange their state, which does not grow with the sequence where they mix by decays (`ops/causal_shards.py`).
Softmax layers of a hybrid gather the keys and values of all processes.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ..models.attention import SOFTMAX_ONLY, packed_arguments, packed_borders, padding_mask, softmax_attentions
from ..models.transformers_api import set_attention_function
from ..nn.core import MHLA
from ..nn.local import DecayMHLA
from ..ops.causal_shards import RowShards, gather_parts, sharded_causal_mhla, sharded_local_attention, shards_of

GATHERED = "mhla_gathered"
TAKEN = {"input_ids", "labels", "position_ids", "seq_idx"}
TAKEN |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


def share_of_sequence(batch: dict, model, group=None) -> dict:
    """What this process gives `model` of a batch that all processes have: `input_ids` `[B, T]`, and `labels` if training.

    Sequences packed into one row (B is 1) come with `position_ids`, `seq_idx` or `cu_seq_lens_q`, as for one process. Each
    process gets T / P tokens, up to a block more or less. Returns `input_ids`, `position_ids` and the row's `cu_seq_lens_q`,
    and with labels also `shift_labels` and `num_items_in_batch`, by which the losses of all processes add up to that of the
    whole batch. ValueError, in all processes: fewer tokens than a block for each, padding, batches that are not the same.
    """
    if unknown := sorted(batch.keys() - TAKEN):
        raise ValueError(f"batch: got {', '.join(unknown)}, expected {', '.join(sorted(TAKEN))} alone (no padding).")
    ids, rank = batch["input_ids"], dist.get_rank(group)
    what = torch.tensor([*ids.shape, int(ids.sum())], device=ids.device)
    most = torch.stack([what, -what])
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    if not torch.equal(most[0], -most[1]):
        raise ValueError(
            f"input_ids: got {list(ids.shape)}, and another process other tokens; expected the same batch."
        )
    borders = packed_borders(batch, len(ids), 0)
    borders = torch.tensor([0, ids.shape[1]], dtype=torch.int32) if borders is None else borders
    shards = RowShards(borders, block_size(model), dist.get_world_size(group))
    own = slice(*shards.token[rank : rank + 2].tolist())
    places = batch.get("position_ids")
    if places is None:
        places = packed_arguments({}, borders.to(ids.device), ids.shape[1])["position_ids"].expand_as(ids)
    share = {"input_ids": ids[:, own], "position_ids": places[:, own], "cu_seq_lens_q": borders}
    if "labels" in batch:
        following = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        share |= {"labels": batch["labels"][:, own], "shift_labels": following[:, own].contiguous()}
        share["num_items_in_batch"] = int((following != -100).sum())
    return share


def block_size(model) -> int:
    """Tokens per block of a model's MHLA layers."""
    return max((core.settings.block_size for core in mhla_cores(model)), default=1)


def mhla_cores(model) -> list:
    """The causal MHLA cores of a model."""
    return [module for module in model.modules() if isinstance(module, (MHLA, DecayMHLA))]


@contextlib.contextmanager
def sequence_parallel(model, group=None):
    """Within, `model` takes shares of sequences (`share_of_sequence`) in every process of `group`, None being all of them.

    Each process has the gradients that its tokens give to the weights: add them up over the group. There is no cache, pass
    `use_cache=False`. ValueError: a layer that is neither MHLA nor softmax, window dropout, a cache, rotations that depend
    on the length, a loss that balances experts.
    """
    cores, layers = mhla_cores(model), softmax_attentions(model)
    if len(layers) != model.config.get_text_config().num_hidden_layers:
        raise ValueError(f"model: got {len(layers)} layers that are MHLA or softmax, expected all of them.")
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind in ("dynamic", "longrope"):
                what = "whose rotations depend on the length, of which a share knows its own"
                raise ValueError(f"rope_type: got {kind!r}, {what}; expected another.")
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        what = "expected False, as a loss that balances experts does not add up over shares"
        raise ValueError(f"output_router_logits: got True, {what}.")
    for core in cores:
        if core.settings.window_dropout:
            what = "expected 0 where sequences are shared by processes"
            raise ValueError(f"window_dropout: got {core.settings.window_dropout}, {what}.")
    softmax = [layer for layer in layers.values() if not hasattr(layer, "mhla")]
    before = {id(layer.config): (layer.config, layer.config._attn_implementation) for layer in softmax}
    hooks = [core.register_forward_pre_hook(refuse_cache, with_kwargs=True) for core in cores]
    try:
        for core in cores:
            core.attend = attend_shards(core, group)
        for layer in softmax:
            set_attention_function(layer.config, GATHERED)
            layer.mhla_shards = block_size(model), group
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for core in cores:
            del core.attend
        for layer in softmax:
            del layer.mhla_shards
        for config, implementation in before.values():
            set_attention_function(config, implementation)


def refuse_cache(core, args, kwargs) -> None:
    """ValueError for a cache, behind which a share would attend as if it were alone."""
    if kwargs.get("cache") is not None:
        raise ValueError("use_cache: got a cache with a share of a sequence, expected False.")


def attend_shards(core, group):
    """The method `attend` of a core whose input is a share."""
    if isinstance(core, DecayMHLA):
        return lambda *inputs, **padding: sharded_local_attention(*inputs, group=group, **padding)

    def attend(q, k, v, _blocks, **options):
        return sharded_causal_mhla(q, k, v, core.mixing, block_size=core.settings.block_size, group=group, **options)

    return attend


def gathered_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Causal softmax attention of a share, `[B, H, T, K]`, to the keys and values of all; o is `[B, T, H, V]`."""
    if any(kwargs.get(name) is not None for name in SOFTMAX_ONLY if name != "sliding_window"):
        raise ValueError(f"model: a softmax layer came with one of {', '.join(SOFTMAX_ONLY)}, expected none of them.")
    (size, group), borders = module.mhla_shards, kwargs.get("cu_seq_lens_q")
    shards, rank = shards_of(borders, size, group)
    k, v = (gather_parts(x, shards.token, 2, group) for x in (key, value))
    token = torch.arange(k.shape[2], device=query.device)
    sequence = torch.searchsorted(borders.to(token.device), token, right=True)
    row = slice(*shards.token[rank : rank + 2].tolist())
    distance = token[row, None] - token
    seen = (distance >= 0) & (sequence[row, None] == sequence)
    if kwargs.get("sliding_window") is not None:
        seen = seen & (distance < kwargs["sliding_window"])
    o = F.scaled_dot_product_attention(query, k, v, seen, dropout, scale=scaling, enable_gqa=True)
    return o.transpose(1, 2).contiguous(), None


AttentionInterface.register(GATHERED, gathered_attention)
AttentionMaskInterface.register(GATHERED, padding_mask)
