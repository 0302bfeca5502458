"""The KV cache of MHLA layers, as a layer of any `Cache` of transformers.

transformers makes a cache from a configuration that does not mention MHLA, so at first use an attention module replaces its
layer (`mhla_cache_layer`). The layer calls itself a linear attention layer, so that softmax layers of a hybrid never size
their masks by it, and an attention layer, so that a cache of MHLA layers alone still knows its length.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin, StaticLayer


class MHLACacheLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """Holds the decoder state of one MHLA layer in a KV cache of transformers.

    Attributes:
        state: The `MHLAState` or `WindowedState`; None until the first forward pass.
        seen_tokens: Tokens per row, including padding; a tensor if this layer replaces a static one.
        mixing: The mixing weights with which the state is read: a matrix, or packed decays; None until they are needed.
        padded: The mask of the last call with padding, bool [B, T], and the value of `seen_tokens` after that call.
        leader: The first MHLA layer of the cache, which makes the plan of a step for all.
        plan: Of a leader, the plan of the last step, and the value of `seen_tokens` before it.
        softmax: Layer of transformers for the keys and values of the heads that keep softmax; None if there are none.
    """

    # False would make transformers drop the mask that a hybrid's static softmax layers need.
    is_compileable = True
    is_croppable = True
    is_sliding = False

    def __init__(self, static: bool = False, max_cache_len: int | None = None, softmax: CacheLayerMixin | None = None):
        LinearAttentionCacheLayerMixin.__init__(self)
        CacheLayerMixin.__init__(self)
        self.state: Any = None
        # In a static layer a tensor, so that a compiled step does not recompile as it grows.
        self.seen_tokens: Any = torch.tensor(0) if static else 0
        self.mixing: Any = None
        self.max_cache_len = max_cache_len
        self.softmax: Any = softmax
        self.padded: Any = None
        self.leader: Any = self
        self.plan: Any = (-1, None)

    def shared_plan(self, make: Callable[[], Any], device: torch.device) -> Any:
        """Return the plan of a step of one token, which is the same in all layers: `make()`, or what the leader has made."""
        if torch.compiler.is_compiling() or isinstance(self.seen_tokens, torch.Tensor):
            return make()
        if self.leader is self:
            self.plan = self.seen_tokens, make()
        seen_tokens, plan = self.leader.plan
        return plan if seen_tokens == self.seen_tokens and plan.slot.device == device else make()

    def count(self, hidden_states: torch.Tensor) -> None:
        if not isinstance(self.seen_tokens, torch.Tensor):
            self.seen_tokens += hidden_states.shape[1]
            return
        if self.seen_tokens.device != hidden_states.device:
            self.seen_tokens = self.seen_tokens.to(hidden_states.device)
        self.seen_tokens.add_(hidden_states.shape[1])  # `+=` would make it an output of a compiled step

    def mixing_for(self, mixing: Any, new_tokens: int, block_size: int) -> torch.Tensor:
        """Return mixing weights [n, n] or [H, n, n] for all blocks of the sequence after `new_tokens` more tokens.

        Without gradient they are kept, for a power of two of blocks; with one, n is exact.
        """
        needed = -(-(int(self.seen_tokens) + new_tokens) // block_size)
        if torch.is_grad_enabled() and mixing.weight.requires_grad:
            return mixing(needed)
        if self.mixing is None or self.mixing.shape[-1] < needed:
            capacity = max(mixing.num_blocks, 1 << (needed - 1).bit_length())
            self.mixing = mixing(capacity).detach()
        return self.mixing

    def note_padding(self, key_mask: torch.Tensor) -> None:
        """Store the mask of a call with padding, bool [B, T], for `crop`; not under torch.compile."""
        if not torch.compiler.is_compiling():
            self.padded = key_mask, self.seen_tokens + key_mask.shape[1]

    def get_seq_length(self) -> Any:
        return self.seen_tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[Any, int]:
        """Return what the replaced softmax layer would: transformers may size the masks of other layers by it."""
        return (self.seen_tokens + query_length if self.max_cache_len is None else self.max_cache_len), 0

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, since the first forward pass creates the state."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("past_key_values: a layer without MHLA wrote to an MHLA cache; expected one model's layers.")

    update_conv_state = update_recurrent_state = update

    def offload(self) -> None:
        """Do nothing, since transformers would offload the state before the layer has read it."""

    prefetch = offload

    def reset(self) -> None:
        self.state, self.mixing, self.padded, self.plan = None, None, None, (-1, None)
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
        """Remove the last tokens of every row, at most a block and no padding; the number is negative."""
        if self.state is None or tokens_to_remove == 0:
            return
        if not 0 < -tokens_to_remove <= self.state.block_size:
            reason = "an MHLA cache takes back at most one block (see num_assistant_tokens)"
            expected = f"{-self.state.block_size} to 0, because {reason}"
            raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, expected {expected}.")
        if self.padded is not None:
            is_real, columns = self.padded
            num_removed = int(columns) - int(self.seen_tokens) - tokens_to_remove  # of the columns of that call
            if num_removed > 0 and not bool(is_real[:, -num_removed:].all()):
                raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, expected none that is padding.")
        self.state.crop(-tokens_to_remove)
        self.seen_tokens += tokens_to_remove
        if self.softmax is not None:
            self.softmax.crop(tokens_to_remove)


class MHLADynamicCache(DynamicCache):
    """A `DynamicCache` that crops MHLA layers first, so that an error in them leaves softmax layers unchanged."""

    def crop(self, tokens_to_remove: int) -> None:
        for layer in sorted(self.layers, key=lambda layer: not isinstance(layer, MHLACacheLayer)):
            layer.crop(tokens_to_remove)


def mhla_cache_layer(
    past_key_values: Cache | None, layer_idx: int, keeps_softmax: bool = False
) -> MHLACacheLayer | None:
    """Return layer `layer_idx` of a KV cache; on first use, replace it by an MHLA layer, in place.

    Keys and values of heads that keep softmax go into the layer that was there before, or, if that is static, into one like
    it.
    """
    if past_key_values is None:
        return None
    layers: Any = past_key_values.layers
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
    if keeps_softmax and static and layer.is_initialized:
        # Its storage is for all heads; the new one is made for those that keep softmax.
        layer = type(layer)(max_cache_len=length)
    leader = next((other for other in layers if isinstance(other, MHLACacheLayer)), None)
    layers[layer_idx] = MHLACacheLayer(static, max_cache_len=length, softmax=layer if keeps_softmax else None)
    layers[layer_idx].leader = leader or layers[layer_idx]
    if type(past_key_values) is DynamicCache and not torch.compiler.is_compiling():
        past_key_values.__class__ = MHLADynamicCache
    return layers[layer_idx]
