"""Sequence parallelism for causal language models: each process computes a shard of the tokens of every sequence.

MHLA layers exchange their states, whose size does not depend on the sequence length if they mix by decays (see
`ops/causal_shards.py`). The softmax layers of a hybrid gather the keys and values of all processes.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ..models.causal_attention import (
    SOFTMAX_ONLY,
    find_causal_attentions,
    packed_arguments,
    packed_borders,
    padding_mask,
)
from ..models.transformers_api import set_attention_function
from ..nn.core import MHLA
from ..nn.local import DecayMHLA
from ..ops.causal_shards import RowShards, gather_parts, sharded_causal_mhla, sharded_local_attention, shards_of

GATHERED = "mhla_gathered"  # name of the attention function
IGNORED_LABEL = -100
BATCH_KEYS = {
    "input_ids", "labels", "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
}  # fmt: skip
UNSUPPORTED_ROPE = ("dynamic", "longrope")


def share_of_sequence(batch: dict[str, Any], model: Any, group: Any = None) -> dict[str, Any]:
    """Return this process's share of a batch, the arguments for calling `model` inside `sequence_parallel`.

    All processes of the group must call this.

    Args:
        batch: The whole batch, the same in all processes: `input_ids` [B, T], B rows of T tokens without padding, and for
            training `labels` [B, T]. Sequences that are packed into one row (B = 1) come with `position_ids`, `seq_idx` or
            `cu_seq_lens_q`, as on a single process.
        model: A converted language model.
        group: Process group of the P processes that share sequences; None means all processes.

    Returns:
        A dict with `input_ids` and `position_ids` of this process, [B, t] where t differs from T / P by at most a block,
        and `cu_seq_lens_q` of the whole row. With labels, also `labels`, `shift_labels` and `num_items_in_batch`, so that
        the losses of all processes add up to the loss of the whole batch.

    Raises:
        ValueError: There is less than one block per process, there is padding, or the processes have different batches.
            It is raised in all processes.
    """
    if unknown := sorted(batch.keys() - BATCH_KEYS):
        raise ValueError(
            f"batch: got {', '.join(unknown)}, expected only {', '.join(sorted(BATCH_KEYS))} (no padding)."
        )
    ids = batch["input_ids"]
    rank = dist.get_rank(group)
    _check_same_batch(ids, group)
    borders = packed_borders(batch, len(ids), 0)
    if borders is None:
        borders = torch.tensor([0, ids.shape[1]], dtype=torch.int32)
    shards = RowShards(borders, get_block_size(model), dist.get_world_size(group))
    tokens = slice(*shards.token_borders[rank : rank + 2].tolist())
    positions = batch.get("position_ids")
    if positions is None:
        positions = packed_arguments({}, borders.to(ids.device), ids.shape[1])["position_ids"].expand_as(ids)
    share = {"input_ids": ids[:, tokens], "position_ids": positions[:, tokens], "cu_seq_lens_q": borders}
    if "labels" in batch:
        shift_labels = F.pad(batch["labels"], (0, 1), value=IGNORED_LABEL)[:, 1:]
        share["labels"] = batch["labels"][:, tokens]
        share["shift_labels"] = shift_labels[:, tokens].contiguous()
        share["num_items_in_batch"] = int((shift_labels != IGNORED_LABEL).sum())
    return share


def _check_same_batch(ids: torch.Tensor, group: Any) -> None:
    """Raise ValueError in all processes if their `ids` differ in shape or sum. All processes must call this."""
    summary = torch.tensor([*ids.shape, int(ids.sum())], device=ids.device)
    maxima = torch.stack([summary, -summary])  # the second row: minima, negated
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
    if not torch.equal(maxima[0], -maxima[1]):
        raise ValueError(
            f"input_ids: got {list(ids.shape)} with other tokens than another process, expected the same batch in all."
        )


def get_block_size(model: nn.Module) -> int:
    """Return the number of tokens per block of a model's MHLA layers; 1 if it has none."""
    return max((core.settings.block_size for core in find_mhla_cores(model)), default=1)


def find_mhla_cores(model: nn.Module) -> list[Any]:
    """Return the causal MHLA cores of a model."""
    return [module for module in model.modules() if isinstance(module, (MHLA, DecayMHLA))]


@contextlib.contextmanager
def sequence_parallel(model: Any, group: Any = None) -> Iterator[None]:
    """Context manager in which each process runs `model` on its shard of every sequence (see `share_of_sequence`).

    All processes of the group must call the model together, with `use_cache=False`. In the backward pass, each process
    computes the gradients of the weights from its own tokens only, so they have to be summed over the group. The attention
    of the model is replaced within the block and restored at the end.

    Args:
        model: A converted language model, the same in every process of the group.
        group: Process group of the processes that share sequences; None means all processes.

    Raises:
        ValueError: The model is called with a cache, or has one of these: a layer that is neither MHLA nor softmax;
            `window_dropout`; a RoPE type that depends on the sequence length; a load-balancing loss of experts.
    """
    cores: list[Any] = find_mhla_cores(model)
    attentions: dict[int, Any] = find_causal_attentions(model)
    _check_model(model, cores, len(attentions))
    softmax_layers = [attention for attention in attentions.values() if not hasattr(attention, "mhla")]
    configs = {id(layer.config): (layer.config, layer.config._attn_implementation) for layer in softmax_layers}
    hooks = [core.register_forward_pre_hook(refuse_cache, with_kwargs=True) for core in cores]
    try:
        for core in cores:
            core.attend = make_sharded_attend(core, group)
        for layer in softmax_layers:
            set_attention_function(layer.config, GATHERED)
            layer.mhla_shards = get_block_size(model), group
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for core in cores:
            del core.attend
        for layer in softmax_layers:
            del layer.mhla_shards
        for config, implementation in configs.values():
            set_attention_function(config, implementation)


def _check_model(model: Any, cores: list[Any], num_layers: int) -> None:
    """Raise ValueError if the model has a layer or a loss that cannot be computed from shards of sequences."""
    config = model.config.get_text_config()
    if num_layers != config.num_hidden_layers:
        raise ValueError(
            f"model: got {num_layers} layers that are MHLA or softmax, expected {config.num_hidden_layers}."
        )
    for module in model.modules():
        rope_types = getattr(module, "rope_type", None)
        for rope_type in rope_types.values() if isinstance(rope_types, dict) else (rope_types,):
            if rope_type in UNSUPPORTED_ROPE:
                raise ValueError(
                    f"rope_type: got {rope_type!r}, expected "
                    "one whose rotations do not depend on the length, of which a process only knows its share."
                )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "output_router_logits: got True, expected "
            "False, because a loss that balances experts does not add up over shares."
        )
    for core in cores:
        if core.settings.window_dropout:
            raise ValueError(
                f"window_dropout: got {core.settings.window_dropout} with shares of sequences, expected 0."
            )


def refuse_cache(core: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook that raises ValueError if there is a cache, because it would treat a shard as a whole sequence."""
    if kwargs.get("cache") is not None:
        raise ValueError("use_cache: got a cache with a share of a sequence, expected False.")


def make_sharded_attend(core: Any, group: Any) -> Callable[..., torch.Tensor]:
    """Return a function to replace `core.attend`. It computes the outputs of this process's shard of the sequences.

    All processes of `group` must call the returned function.
    """
    if isinstance(core, DecayMHLA):
        return lambda *inputs, **padding: sharded_local_attention(*inputs, group=group, **padding)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _blocks: Any, **options: Any) -> torch.Tensor:
        return sharded_causal_mhla(q, k, v, core.mixing, block_size=core.settings.block_size, group=group, **options)

    return attend


def gathered_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute causal softmax attention of this process's queries to the keys and values of all processes.

    All processes of the group must call this. B is the batch size, H and G are the numbers of query and KV heads, K and V
    the widths of a key and of a value, and t is the number of tokens in the shard.

    Args:
        module: The attention module, with the attribute `mhla_shards` that `sequence_parallel` sets.
        query: [B, H, t, K].
        key: [B, G, t, K].
        value: [B, G, t, V].
        attention_mask: Ignored, since there is no padding.
        scaling: Multiplier of the scores; None means 1 / sqrt(K).
        dropout: Dropout probability.
        **kwargs: `cu_seq_lens_q`, the borders of the sequences in the whole row, and optionally `sliding_window`.

    Returns:
        The outputs [B, t, H, V], and None in place of the attention weights.

    Raises:
        ValueError: The layer has soft-capped scores, attention sinks or a position bias.
    """
    if any(kwargs.get(name) is not None for name in SOFTMAX_ONLY if name != "sliding_window"):
        raise ValueError(
            f"model: got a softmax layer with one of {', '.join(SOFTMAX_ONLY)}, "
            "expected none of them but sliding_window."
        )
    block_tokens, group = module.mhla_shards
    borders = kwargs.get("cu_seq_lens_q")
    shards, rank = shards_of(borders, block_tokens, group)
    assert borders is not None  # `shards_of` refuses None
    k, v = (gather_parts(x, shards.token_borders, 2, group) for x in (key, value))
    position = torch.arange(k.shape[2], device=query.device)
    sequence = torch.searchsorted(borders.to(position.device), position, right=True)
    rows = slice(*shards.token_borders[rank : rank + 2].tolist())
    distance = position[rows, None] - position
    visible = (distance >= 0) & (sequence[rows, None] == sequence)
    if kwargs.get("sliding_window") is not None:
        visible = visible & (distance < kwargs["sliding_window"])
    o = F.scaled_dot_product_attention(query, k, v, visible, dropout, scale=scaling, enable_gqa=True)
    return o.transpose(1, 2).contiguous(), None


AttentionInterface.register(GATHERED, gathered_attention)
AttentionMaskInterface.register(GATHERED, padding_mask)
