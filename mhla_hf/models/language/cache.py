"""The MHLA layer of a KV cache: at first use, an attention module puts it into a `Cache`, in place of its cache layer.

It has two base classes: because it is an attention layer, a cache that has only MHLA layers knows its length; because it is
a linear attention layer, transformers 5.19 does not size the masks of softmax layers by it (for 5.24: `get_mask_sizes`).
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin, StaticLayer

from ..transformers_api import find_cache


class MHLACacheLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """Holds the decoder state of one MHLA layer in a KV cache of transformers."""

    is_compileable = True  # else transformers drops the mask that a hybrid's static softmax layers need
    is_croppable = True
    is_sliding = False

    def __init__(self, static: bool = False, max_cache_len: int | None = None, softmax: CacheLayerMixin | None = None):
        LinearAttentionCacheLayerMixin.__init__(self)
        CacheLayerMixin.__init__(self)
        self.state: Any = None  # from the first forward pass on
        # Counts padding, too. A tensor if this replaces a static layer: a compiled step would recompile as an int grows.
        self.seen_tokens: Any = torch.tensor(0) if static else 0
        self.mixing: Any = None  # the matrix with which an `MHLAState` is read
        self.max_cache_len = max_cache_len
        self.softmax: Any = softmax  # layer of transformers for the heads that keep softmax
        self.padded: Any = None  # the mask of the last call with padding, bool [B, T], and `seen_tokens` after it
        self.leader: Any = self  # the first MHLA layer of the cache, which plans a step for all
        self.plan: Any = (-1, None)  # a leader's `seen_tokens` before its last plan, and that plan

    def shared_plan(self, make: Callable[[], Any], device: torch.device) -> Any:
        """Return the plan of a one-token step (slots, masks): the leader's if it fits length and device, else a new one."""
        if torch.compiler.is_compiling() or isinstance(self.seen_tokens, Tensor):
            return make()
        if self.leader is self:
            self.plan = self.seen_tokens, make()
        seen_tokens, plan = self.leader.plan
        return plan if seen_tokens == self.seen_tokens and plan.slot.device == device else make()

    def count(self, hidden_states: Tensor) -> None:
        if not isinstance(self.seen_tokens, Tensor):
            self.seen_tokens += hidden_states.shape[1]
            return
        if self.seen_tokens.device != hidden_states.device:
            self.seen_tokens = self.seen_tokens.to(hidden_states.device)
        self.seen_tokens.add_(hidden_states.shape[1])  # `+=` would make it an output of a compiled step

    def note_padding(self, key_mask: Tensor) -> None:
        """Store the mask of a call with padding, bool [B, T], for `crop`; not under torch.compile."""
        if not torch.compiler.is_compiling():
            self.padded = key_mask, self.seen_tokens + key_mask.shape[1]

    def get_seq_length(self) -> Any:
        return self.seen_tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[Any, int]:
        """Return KV length and offset as the replaced layer would: transformers may size other layers' masks by them."""
        return (self.seen_tokens + query_length if self.max_cache_len is None else self.max_cache_len), 0

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the first forward pass creates the state."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("past_key_values: got keys from a layer without MHLA, expected a cache that one model fills.")

    update_conv_state = update_recurrent_state = update

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

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state.repeat(repeats)
        if self.softmax is not None:
            self.softmax.batch_repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every row; raise ValueError for more than a block or for padding."""
        if self.state is None or tokens_to_remove == 0:
            return
        if not 0 < -tokens_to_remove <= self.state.block_size:
            expected = f"{-self.state.block_size} to 0, at most one block; lower num_assistant_tokens"
            raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, expected {expected}.")
        if self.padded is not None:
            is_real, columns = self.padded
            num_removed = int(columns) - int(self.seen_tokens) - tokens_to_remove  # of that call's columns
            if num_removed > 0 and not bool(is_real[:, -num_removed:].all()):
                raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, including padding, expected real tokens.")
        self.state.crop(-tokens_to_remove)
        self.seen_tokens += tokens_to_remove
        if self.softmax is not None:
            self.softmax.crop(tokens_to_remove)


class MHLADynamicCache(DynamicCache):
    """A `DynamicCache` that crops MHLA layers first, so that an error in them leaves softmax layers unchanged."""

    def crop(self, tokens_to_remove: int) -> None:
        for layer in sorted(self.layers, key=lambda layer: not isinstance(layer, MHLACacheLayer)):
            layer.crop(tokens_to_remove)


def take_cache_layer(kwargs: dict[str, Any], layer_idx: int, keeps_softmax: bool = False) -> MHLACacheLayer | None:
    """Pop the KV cache, if any, from `kwargs`; return its layer `layer_idx`, at first use replaced by an MHLA layer.

    With `keeps_softmax`, the replaced layer holds the keys and values of the heads that keep softmax.
    """
    if (name := find_cache(kwargs)) is None:
        return None
    past_key_values = kwargs.pop(name)
    layers: Any = past_key_values.layers
    while len(layers) <= layer_idx:
        layers.append(past_key_values.layer_class_to_replicate())
    layer = layers[layer_idx]
    if isinstance(layer, MHLACacheLayer):
        return layer
    if isinstance(layer, CacheLayerMixin) and layer.is_initialized and layer.get_seq_length():
        got = f"a cache with {layer.get_seq_length()} tokens of softmax in layer {layer_idx}"
        raise ValueError(f"past_key_values: got {got}, expected an empty cache or one that this model filled.")
    static = isinstance(layer, StaticLayer)
    length = layer.max_cache_len if static else None
    if keeps_softmax and static and layer.is_initialized:
        layer = type(layer)(max_cache_len=length)  # the old one was made for all heads
    leader = next((other for other in layers if isinstance(other, MHLACacheLayer)), None)
    layers[layer_idx] = MHLACacheLayer(static, max_cache_len=length, softmax=layer if keeps_softmax else None)
    layers[layer_idx].leader = leader or layers[layer_idx]
    if type(past_key_values) is DynamicCache and not torch.compiler.is_compiling():
        past_key_values.__class__ = MHLADynamicCache
    return layers[layer_idx]
