"""Continuous batching: decode requests together as they arrive and finish, each with a fixed-size state in its own slot.

This is the engine-independent core of a server. A prompt is prefilled alone, in chunks, as in `generate`; its state is then
copied into a free slot, and all slots are decoded together in forward passes of [slots, 1] tokens, always with the same
graph. The continuous batching of transformers cannot be used, because it is based on pages of keys and values, which MHLA
layers do not have.
"""

import copy
import dataclasses
from collections import deque
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from .models.cache import MHLACacheLayer
from .models.causal_attention import find_causal_attentions
from .models.transformers_api import cache_argument, forward_cached
from .nn.local import DecayMHLA

MASKED_LAYER_TYPES = ("full_attention", "sliding_attention")  # for which `ContinuousBatch` makes masks


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and the tokens generated for it.

    Attributes:
        request_id: Name of the request.
        prompt: Token ids of the prompt.
        max_new_tokens: Maximum number of tokens to generate.
        tokens: Token ids generated so far.
        finished: Whether generation has ended.
        slot: Slot in which the request is decoded; None before and after.
        num_cached: Number of tokens prefilled so far.
        cache: Cache of the prompt during prefill; None before and after.
        processors: Logits processors, as in `generate`.
    """

    request_id: str
    prompt: list[int]
    max_new_tokens: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    finished: bool = False
    slot: int | None = None
    num_cached: int = 0
    cache: DynamicCache | None = None
    processors: Any = None


class SoftmaxSlots(CacheLayerMixin):
    """Cache layer for softmax attention: keys and values [slots, G, max_length, D] for G KV heads of width D.

    Args:
        position: Position of the next token in each slot, int64 [slots], shared by all layers.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, position: torch.Tensor) -> None:
        super().__init__()
        self.position = position

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing, because `admit` allocates memory with the shapes of the first request."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token per slot, [slots, G, 1, D], at `position`, and return all keys and values.

        Masks have to hide the positions that are not used.
        """
        rows = torch.arange(len(self.position), device=self.position.device)
        # Under autocast, the dtype may differ from that of the cache.
        self.keys[rows, :, self.position] = key_states[:, :, 0].to(self.keys.dtype)
        self.values[rows, :, self.position] = value_states[:, :, 0].to(self.values.dtype)
        return self.keys, self.values

    def admit(self, slot: int, slots: int, max_length: int, layer: Any, length: int) -> None:
        """Copy the keys and values of a request into a slot. The first call allocates memory for all slots.

        Args:
            slot: Index of the slot.
            slots: Total number of slots.
            max_length: Capacity of a slot, in tokens.
            layer: Cache layer from the prefill of the request.
            length: Number of tokens that were prefilled.
        """
        for name in ("keys", "values"):
            source = getattr(layer, name)
            if getattr(self, name) is None:
                setattr(self, name, source.new_zeros(slots, source.shape[1], max_length, source.shape[3]))
            # Zeros, because NaN left by an earlier request would survive an attention weight of 0.
            target = getattr(self, name)[slot].zero_()
            target[:, length - source.shape[2] : length] = source[0]

    def get_seq_length(self) -> int:
        return 0  # slots have no common length; positions and masks are passed at each step

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class MHLASlots(MHLACacheLayer):
    """Cache layer for MHLA: the states of all slots, and the keys and values of KV heads that keep softmax.

    Args:
        softmax: Holds these keys and values; None if no head keeps softmax.
    """

    def __init__(self, softmax: SoftmaxSlots | None = None) -> None:
        super().__init__(static=True, softmax=softmax)

    @torch.inference_mode(False)
    def admit(self, slot: int, slots: int, max_length: int, layer: Any, length: int) -> None:
        """Copy the state of a request into a slot. See `SoftmaxSlots.admit` for the arguments."""
        source = layer.state.tensors()
        state: Any = self.state
        if state is None:
            empty = {name: x.new_zeros(slots, *x.shape[1:]) for name, x in source.items()}
            self.state = state = dataclasses.replace(layer.state, **empty)
        self.mixing = layer.mixing
        for name, x in state.tensors().items():
            x[slot] = source[name][0]
        if self.softmax is not None:
            self.softmax.admit(slot, slots, max_length, layer.softmax, length)


class ContinuousBatch:
    """Decode requests together as they arrive: `add` them, and call `step` while any are `pending`.

    Args:
        model: A converted causal language model whose MHLA layers mix by decays (the default), so that their state has a
            fixed size.
        slots: Number of requests decoded together.
        max_length: Maximum number of tokens of prompt and answer together, for which softmax layers and heads allocate
            memory. Models without softmax have no limit.
        chunk_size: Number of prompt tokens read in one step, so that a long prompt does not block the other requests.
        generation_config: Settings of greedy decoding or sampling, with one sequence per request (default: the model's own).
        compile: Whether to compile the decoding step; a string names the backend.

    Raises:
        ValueError: An argument is not valid, or slots cannot hold the cache of a layer.
    """

    def __init__(
        self, model: PreTrainedModel, *, slots: int = 32, max_length: int = 4096, chunk_size: int = 512,
        generation_config: GenerationConfig | None = None, compile: bool | str = False,
    ) -> None:  # fmt: skip
        for name, value in {"slots": slots, "max_length": max_length, "chunk_size": chunk_size}.items():
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected a whole number of at least 1.")
        self.model = model
        self.slots = slots
        self.max_length = max_length
        self.chunk_size = chunk_size
        self.position = torch.zeros(slots, dtype=torch.int64, device=model.device)
        layers = make_slot_layers(model, self.position)
        self.cache = Cache(layers=layers)
        self.has_softmax = any(isinstance(getattr(layer, "softmax", layer), SoftmaxSlots) for layer in layers)
        configs = (config for config in (generation_config, model.generation_config) if config is not None)
        self.default_length = next((config.max_length for config in configs if config.max_length is not None), None)
        self.config, _ = model._prepare_generation_config(generation_config)
        model._prepare_special_tokens(self.config, device=model.device)
        if self.config.num_beams > 1 or self.config.num_return_sequences > 1:
            raise ValueError(
                "generation_config: got beams or several sequences, expected one sequence for each request."
            )
        for name in ("stop_strings", "max_time"):
            value = getattr(self.config, name)
            if value is not None:
                expected = "tokens and lengths alone to end a request"
                raise ValueError(f"generation_config: got {name}={value!r}, expected {expected}.")
        self.forward: Any = model
        if compile:
            backend = compile if isinstance(compile, str) else "inductor"
            self.forward = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # slot -> request
        self.counter = 0

    @property
    def pending(self) -> int:
        """Number of unfinished requests."""
        return len(self.waiting) + len(self.running)

    def add(self, prompt: list[int], max_new_tokens: int | None = None, request_id: str | None = None) -> Request:
        """Put a request at the end of the queue.

        Args:
            prompt: Token ids.
            max_new_tokens: Maximum number of tokens to generate (default: as in `generation_config`).
            request_id: Name of the request (default: "request-N").

        Returns:
            The request, whose `tokens` grow with every step.

        Raises:
            ValueError: The prompt is empty, the maximum number of tokens is less than 1, prompt and answer could exceed
                `max_length` (only with softmax layers or heads), or an unfinished request has the same name.
        """
        new_tokens = max_new_tokens if max_new_tokens is not None else self.config.max_new_tokens
        if new_tokens is None:
            new_tokens = 20 if self.default_length is None else self.default_length - len(prompt)
        request_id = request_id or f"request-{self.counter}"
        self.counter = self.counter + 1
        sizes = f"{len(prompt)} tokens and {new_tokens} new ones"
        if not prompt or new_tokens < 1:
            raise ValueError(f"prompt: got {sizes}, expected at least one of each.")
        if self.has_softmax and len(prompt) + new_tokens > self.max_length:
            raise ValueError(f"prompt: got {sizes}, expected at most max_length, {self.max_length}.")
        if any(request_id == other.request_id for other in (*self.waiting, *self.running.values())):
            raise ValueError(f"request_id: got {request_id!r}, expected one that no pending request has.")
        request = Request(request_id, list(prompt), new_tokens)
        config = copy.copy(self.config)
        ids = torch.tensor([request.prompt], device=self.model.device)
        config.max_length = len(prompt) + new_tokens  # some processors force the last token to be an end
        request.processors = self.model._get_logits_processor(config, len(prompt), ids, device=self.model.device)
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Finish a waiting or running request early. It keeps the tokens generated so far."""
        if request in self.waiting:
            self.waiting.remove(request)
        self.finish(request)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Decode one token in every occupied slot, and read a chunk of the next prompt if a slot is free.

        If it raises an error, later steps prefill all unfinished requests again, with the tokens generated so far.

        Returns:
            The requests for which a token was generated, in the order in which they were assigned to slots.
        """
        was_training = self.model.training
        advanced = []
        self.model.eval()
        try:
            if self.running:
                advanced = list(self.running.values())
                self.decode(advanced)
            if self.waiting and len(self.running) < self.slots and self.read_chunk(self.waiting[0]):
                advanced.append(self.waiting.popleft())
        except BaseException:  # the caches of some layers may have been updated and others not
            self.requeue()
            raise
        finally:
            self.model.train(was_training)
        return advanced

    def read_chunk(self, request: Request) -> bool:
        """Prefill the next chunk of a request. After the last chunk, copy its cache to a free slot and generate a token.

        Returns:
            Whether the prefill is complete.
        """
        if request.cache is None:
            request.cache = DynamicCache(config=self.model.config)
        context = request.prompt + request.tokens  # a request that was interrupted by an error has tokens
        chunk = context[request.num_cached : request.num_cached + self.chunk_size]
        ids = torch.tensor([chunk], device=self.model.device)
        logits = forward_cached(self.model, ids, request.cache, logits_to_keep=1)[0].logits
        request.num_cached += len(chunk)
        if request.num_cached < len(context):
            return False
        request.slot = min(set(range(self.slots)) - self.running.keys())
        for slots_layer, layer in zip(self.cache.layers, request.cache.layers, strict=True):
            slots_layer.admit(request.slot, self.slots, self.max_length, layer, request.num_cached)
        request.cache = None
        self.running[request.slot] = request
        self.append([request], logits[:, -1])
        return True

    def requeue(self) -> None:
        """Move running requests back to the head of the queue, and drop the cache of every request."""
        running = [request for request in self.running.values() if request not in self.waiting]
        self.waiting.extendleft(reversed(running))
        self.running.clear()
        for request in self.waiting:
            request.slot = None
            request.cache = None
            request.num_cached = 0

    def decode(self, requests: list[Request]) -> None:
        """Generate the next token of each of these running requests, in one forward pass over all slots."""
        ids, position = torch.zeros(2, self.slots, dtype=torch.int64)
        for request in requests:
            ids[request.slot] = request.tokens[-1]
            position[request.slot] = len(request.prompt) + len(request.tokens) - 1
        self.position.copy_(position)
        inputs: dict[str, Any] = {"position_ids": self.position[:, None], "mhla_padding": (None, None)}
        if self.has_softmax:
            inputs["attention_mask"] = self.masks()
        inputs[cache_argument(self.model)] = self.cache
        logits = self.forward(ids.to(self.position.device)[:, None], use_cache=True, **inputs).logits[:, -1]
        self.append(requests, logits[[request.slot for request in requests]])

    def masks(self) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the additive mask of softmax attention, [slots, 1, 1, max_length].

        If the configuration has `layer_types`, return a dict from layer type to such a mask.
        """
        config = self.model.config.get_text_config()
        column = torch.arange(self.max_length, device=self.position.device)
        visible = {"full_attention": column <= self.position[:, None]}
        if (window := getattr(config, "sliding_window", None)) is not None:
            visible["sliding_attention"] = visible["full_attention"] & (column > self.position[:, None] - window)
        lowest = torch.finfo(self.model.dtype).min
        masks = {
            layer_type: (~mask)[:, None, None].to(self.model.dtype) * lowest for layer_type, mask in visible.items()
        }
        return masks if getattr(config, "layer_types", None) is not None else masks[list(masks)[-1]]

    def append(self, requests: list[Request], logits: torch.Tensor) -> None:
        """Choose the next token of each request as `generate` does, and finish requests that have ended.

        Args:
            requests: Running requests.
            logits: Logits of their last tokens, [number of requests, vocabulary size].
        """
        logits = logits.float()
        if any(request.processors for request in requests):
            rows = []
            for request, row in zip(requests, logits.split(1), strict=True):
                ids = torch.tensor([request.prompt + request.tokens], device=logits.device)
                rows.append(request.processors(ids, row))
            logits = torch.cat(rows)
        if self.config.do_sample:
            chosen = torch.multinomial(logits.softmax(-1), 1)[:, 0]
        else:
            chosen = logits.argmax(-1)
        ends = self.config.eos_token_id
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        for request, token in zip(requests, chosen.tolist(), strict=True):
            request.tokens.append(token)
            if token in ends or len(request.tokens) == request.max_new_tokens:
                self.finish(request)

    def finish(self, request: Request) -> None:
        """Mark a request as finished, and free its slot for the next request."""
        if request.slot is not None:
            self.running.pop(request.slot, None)
        request.finished = True
        request.slot = None
        request.cache = None


def make_slot_layers(model: PreTrainedModel, position: torch.Tensor) -> list[CacheLayerMixin]:
    """Return a cache layer with slots for each layer of the model.

    Args:
        model: See `ContinuousBatch`.
        position: See `SoftmaxSlots`.

    Raises:
        ValueError: A layer's state grows with the length, or the layer is neither MHLA nor softmax attention with a mask.
    """
    config = model.config.get_text_config()
    attentions = find_causal_attentions(model)
    types = getattr(config, "layer_types", None)
    layers: list[Any] = []
    for index in range(config.num_hidden_layers):
        attention: Any = attentions.get(index)
        is_mhla = attention is not None and hasattr(attention, "mhla")
        softmax = getattr(attention, "softmax_heads", None) if is_mhla else attention
        start = f"model: got layer {index}"
        if is_mhla and not isinstance(attention.mhla, DecayMHLA):
            raise ValueError(f'{start} with a mixing matrix, whose state grows, expected mixing_form="decay".')
        if attention is None or (not is_mhla and types is not None and types[index] not in MASKED_LAYER_TYPES):
            raise ValueError(f"{start}, which is neither MHLA nor softmax, expected one of these.")
        if softmax is not None and (implementation := softmax.config._attn_implementation) not in ("sdpa", "eager"):
            raise ValueError(
                f'{start} with attention {implementation!r}, which takes no mask per slot, expected "sdpa" or "eager".'
            )
        softmax_slots = None if softmax is None else SoftmaxSlots(position)
        layers.append(MHLASlots(softmax_slots) if is_mhla else softmax_slots)
    return layers


def generate_batch(
    model: PreTrainedModel, prompts: list[list[int]], *, max_new_tokens: int | None = None, **options: Any
) -> list[list[int]]:
    """Continue several prompts of any lengths by continuous batching.

    Args:
        model: See `ContinuousBatch`.
        prompts: Token ids of each prompt.
        max_new_tokens: Maximum number of tokens to generate for each (default: as in the generation config).
        **options: Further arguments of `ContinuousBatch`.

    Returns:
        The generated token ids for each prompt.
    """
    batch = ContinuousBatch(model, **options)
    requests = [batch.add(prompt, max_new_tokens) for prompt in prompts]
    while batch.pending:
        batch.step()
    return [request.tokens for request in requests]
