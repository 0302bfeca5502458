"""The KV cache of MHLA layers, as a layer of any transformers `Cache`.

A cache is made by transformers before the model runs, from a configuration that says nothing of MHLA. So an MHLA attention
module exchanges its layer of the cache for this one at first use (`mhla_cache_layer`). It calls itself a linear
attention layer so that softmax layers of a hybrid never size their masks by it, and an attention layer so that a cache
made of nothing else still knows its length. Where some heads of the layer keep softmax, it holds the keys and values of
these in a layer of transformers' own (`softmax`).
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin, StaticLayer


class MHLACacheLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """What one layer remembers (`state`, an `MHLAState` or a `LocalState`), the mixing it is read with, and its length.

    `state` is None until the first forward pass. `seen_tokens` counts columns, padding included, as transformers does.

    Args:
        static: whether it stands for a static layer, which counts in a tensor.
        max_cache_len: of that layer.
        softmax: the layer for the keys and values of the heads that keep softmax; None if there are none.
    """

    is_compileable = True  # False would make transformers drop the mask that a hybrid's static softmax layers need
    is_croppable = True
    is_sliding = False

    def __init__(self, static: bool = False, max_cache_len: int | None = None, softmax: CacheLayerMixin | None = None):
        LinearAttentionCacheLayerMixin.__init__(self)
        CacheLayerMixin.__init__(self)
        self.state = None
        self.seen_tokens = torch.tensor(0) if static else 0  # as in transformers' layers: no recompilation by a tensor
        self.mixing = None  # a matrix, or packed decays
        self.max_cache_len = max_cache_len
        self.softmax = softmax
        self.padded = None  # the last call with padding: its real tokens, and the columns there were after it

    def count(self, hidden_states: torch.Tensor) -> None:
        """Note the columns of `hidden_states` `[B, T, ..]`, in place if static."""
        if not isinstance(self.seen_tokens, torch.Tensor):
            self.seen_tokens += hidden_states.shape[1]
            return
        if self.seen_tokens.device != hidden_states.device:
            self.seen_tokens = self.seen_tokens.to(hidden_states.device)
        self.seen_tokens.add_(hidden_states.shape[1])  # `+=` would make it an output of a compiled step

    def mixing_for(self, mixing, new_tokens: int, block_size: int) -> torch.Tensor:
        """The mixing weights for the blocks reached after `new_tokens` more, computed once per doubling of the length."""
        needed = -(-(int(self.seen_tokens) + new_tokens) // block_size)
        if torch.is_grad_enabled() and mixing.weight.requires_grad:
            return mixing(needed)
        if self.mixing is None or self.mixing.shape[-1] < needed:
            capacity = max(mixing.num_blocks, 1 << (needed - 1).bit_length())
            self.mixing = mixing(capacity).detach()
        return self.mixing

    def note_padding(self, key_mask: torch.Tensor) -> None:
        """Remember the padding `[B, T]` of the call that is under way, for `crop`, which reads it."""
        if not torch.compiler.is_compiling():
            self.padded = key_mask, self.seen_tokens + key_mask.shape[1]

    def get_seq_length(self) -> int:
        return self.seen_tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # As the softmax layer in whose place this one is: transformers may size the masks of the other layers by it.
        return (self.seen_tokens + query_length if self.max_cache_len is None else self.max_cache_len), 0

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Nothing to do: the first forward pass makes the state."""

    def update(self, *args, **kwargs):
        raise ValueError("past_key_values: a layer without MHLA wrote to an MHLA cache; expected one model's layers.")

    update_conv_state = update_recurrent_state = update

    def offload(self) -> None:
        """Stays where it is: transformers offloads before the layer has read its state."""

    prefetch = offload

    def reset(self) -> None:
        self.state, self.mixing, self.padded = None, None, None
        self.seen_tokens *= 0
        if self.softmax is not None:
            self.softmax.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.state is not None:
            self.state.select(beam_idx)
        if self.softmax is not None:
            self.softmax.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state.repeat(repeats)
        if self.softmax is not None:
            self.softmax.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.state is not None:
            self.state.select(indices)
        if self.softmax is not None:
            self.softmax.batch_select_indices(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, exactly; at most one block of them."""
        if self.state is None or tokens_to_remove == 0:
            return
        if not 0 < -tokens_to_remove <= self.state.block_size:
            what = f"{-self.state.block_size} to 0: an MHLA cache forgets one block exactly (see num_assistant_tokens)"
            raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, expected {what}.")
        if self.padded is not None:
            real, columns = self.padded
            back = int(columns) - int(self.seen_tokens) - tokens_to_remove
            if back > 0 and not bool(real[:, -back:].all()):
                raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, expected none that is padding.")
        self.state.crop(-tokens_to_remove)
        self.seen_tokens += tokens_to_remove
        if self.softmax is not None:
            self.softmax.crop(tokens_to_remove)


class MHLADynamicCache(DynamicCache):
    """A `DynamicCache` with MHLA layers."""

    def crop(self, tokens_to_remove: int) -> None:
        """As the base; what the MHLA layers refuse, they refuse before a softmax layer has forgotten it."""
        for layer in sorted(self.layers, key=lambda layer: not isinstance(layer, MHLACacheLayer)):
            layer.crop(tokens_to_remove)


def mhla_cache_layer(past_key_values: Cache | None, layer_idx: int, mixed: bool = False) -> MHLACacheLayer | None:
    """The MHLA layer number `layer_idx` of a cache, put there at first use; None without a cache.

    mixed: some heads of the layer keep softmax; their keys and values go into a layer such as the one that it replaces.
    """
    if past_key_values is None:
        return None
    layers = past_key_values.layers
    while len(layers) <= layer_idx:
        layers.append(past_key_values.layer_class_to_replicate())
    layer = layers[layer_idx]
    if isinstance(layer, MHLACacheLayer):
        return layer
    if isinstance(layer, CacheLayerMixin) and layer.is_initialized and layer.get_seq_length():
        raise ValueError(
            f"past_key_values: layer {layer_idx} holds {layer.get_seq_length()} tokens of softmax keys and values, "
            "expected an empty cache or one that this model filled."
        )
    static = isinstance(layer, StaticLayer)
    length = layer.max_cache_len if static else None
    if mixed and static and layer.is_initialized:  # with room for all heads
        layer = type(layer)(max_cache_len=length)
    layers[layer_idx] = MHLACacheLayer(static, max_cache_len=length, softmax=layer if mixed else None)
    if type(past_key_values) is DynamicCache and not torch.compiler.is_compiling():
        past_key_values.__class__ = MHLADynamicCache
    return layers[layer_idx]
