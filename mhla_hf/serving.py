"""Continuous batching: requests that come and go, decoded together, each with a state of fixed size in a slot of its own.

The engine-free core of a server. A prompt is read alone, in chunks, by the path that `generate` takes; its state is then
copied into a free slot, and all slots decode together: one forward pass of `[slots, 1]` tokens, the same graph whoever is
in it. transformers' own continuous batching keeps pages of keys and values, which MHLA layers do not have.
"""

import copy
import dataclasses
from collections import deque

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from .models.attention import softmax_attentions
from .models.cache import MHLACacheLayer
from .models.transformers_api import cache_argument, forward_cached
from .nn.local import DecayMHLA

MASKS = ("full_attention", "sliding_attention")


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and, in `tokens`, what has been generated so far; `slot` is None before and after it is decoded."""

    request_id: str
    prompt: list[int]
    max_new_tokens: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    finished: bool = False
    slot: int | None = None
    read: int = 0  # tokens in `cache`
    cache: DynamicCache | None = None
    processors: list | None = None


class SoftmaxSlots(CacheLayerMixin):
    """Keys and values `[slots, G, max_length, D]` of a hybrid's softmax layer, written where each slot stands."""

    is_compileable = True
    is_sliding = False

    def __init__(self, position: torch.Tensor):
        super().__init__()
        self.position = position

    def lazy_initialization(self, key_states, value_states) -> None:
        """Nothing to do: the first request brings the shapes."""

    def update(self, key_states, value_states, *args, **kwargs):
        """Write one token `[slots, G, 1, D]` of every slot; all keys and values, of which the mask hides the rest."""
        rows = torch.arange(len(self.position), device=self.position.device)
        self.keys[rows, :, self.position] = key_states[:, :, 0].to(self.keys.dtype)  # autocast changes its mind
        self.values[rows, :, self.position] = value_states[:, :, 0].to(self.values.dtype)
        return self.keys, self.values

    def admit(self, slot: int, slots: int, max_length: int, layer: CacheLayerMixin, length: int) -> None:
        """Put the keys and values of one request, as read by `layer`, into `slot`; it stands behind `length` tokens."""
        for name in ("keys", "values"):
            given = getattr(layer, name)
            if getattr(self, name) is None:
                setattr(self, name, given.new_zeros(slots, given.shape[1], max_length, given.shape[3]))
            own = getattr(self, name)[slot].zero_()  # NaN of the request before would get through a weight of 0
            own[:, length - given.shape[2] : length] = given[0]

    def get_seq_length(self) -> int:
        return 0  # slots have no common length: positions and masks come with each step

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class MHLASlots(MHLACacheLayer):
    """The states of all slots in one MHLA layer, and the keys and values of its heads that keep softmax."""

    def __init__(self, softmax: SoftmaxSlots | None = None):
        super().__init__(static=True, softmax=softmax)

    @torch.inference_mode(False)
    def admit(self, slot: int, slots: int, max_length: int, layer: MHLACacheLayer, length: int) -> None:
        """Put the state of one request, as left by `layer`, into `slot`."""
        given = layer.state.tensors()
        if self.state is None:
            empty = {name: x.new_zeros(slots, *x.shape[1:]) for name, x in given.items()}
            self.state = dataclasses.replace(layer.state, **empty)
        self.mixing = layer.mixing
        for name, x in self.state.tensors().items():
            x[slot] = given[name][0]
        if self.softmax is not None:
            self.softmax.admit(slot, slots, max_length, layer.softmax, length)


class ContinuousBatch:
    """Decode requests together as they come: `add`, then `step` until nothing is `pending`.

    Args:
        model: a converted causal LM whose MHLA layers mix by decays (the default); others keep a state that grows.
        slots: requests decoded together.
        max_length: tokens of a request, prompt and answer, that softmax layers of a hybrid keep room for; MHLA layers need
            none.
        chunk_size: tokens of a prompt read in one step, so that a long prompt does not hold up those being decoded.
        generation_config: as for `generate` (greedy or sampled, one sequence each); None is the model's own.
        compile: compile the decode step, by the backend of that name if a string.

    ValueError: a layer that no slot can hold.
    """

    def __init__(
        self, model: PreTrainedModel, *, slots: int = 32, max_length: int = 4096, chunk_size: int = 512,
        generation_config: GenerationConfig | None = None, compile: bool | str = False,
    ):  # fmt: skip
        for name, value in {"slots": slots, "max_length": max_length, "chunk_size": chunk_size}.items():
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected 1 or more.")
        self.model, self.slots, self.max_length, self.chunk_size = model, slots, max_length, chunk_size
        self.position = torch.zeros(slots, dtype=torch.int64, device=model.device)
        self.cache = Cache(layers=slot_layers(model, self.position))
        softmax = (getattr(layer, "softmax", layer) for layer in self.cache.layers)
        self.hybrid = any(isinstance(layer, SoftmaxSlots) for layer in softmax)
        given = (config for config in (generation_config, model.generation_config) if config is not None)
        self.longest = next((config.max_length for config in given if config.max_length is not None), None)
        self.config, _ = model._prepare_generation_config(generation_config)
        model._prepare_special_tokens(self.config, device=model.device)
        if self.config.num_beams > 1 or self.config.num_return_sequences > 1:
            raise ValueError(
                "generation_config: got beams or several sequences, expected one sequence for each request."
            )
        for name in ("stop_strings", "max_time"):
            if getattr(self.config, name) is not None:
                what = f"got {name}={getattr(self.config, name)!r}, expected tokens and lengths alone to end a request"
                raise ValueError(f"generation_config: {what}.")
        backend = "inductor" if compile is True else compile
        self.forward = torch.compile(model, fullgraph=True, dynamic=False, backend=backend) if compile else model
        self.waiting, self.running, self.counter = deque(), {}, 0

    @property
    def pending(self) -> int:
        """Requests that are not finished."""
        return len(self.waiting) + len(self.running)

    def add(self, prompt: list[int], max_new_tokens: int | None = None, request_id: str | None = None) -> Request:
        """Put a request at the end of the queue.

        prompt: token ids. max_new_tokens: as in `generation_config` if None. request_id: counted if None.
        ValueError: an empty prompt, more tokens than softmax layers have room for, an id that is in use.
        """
        limit = max_new_tokens if max_new_tokens is not None else self.config.max_new_tokens
        if limit is None:
            limit = 20 if self.longest is None else self.longest - len(prompt)
        request_id, self.counter = request_id or f"request-{self.counter}", self.counter + 1
        if not prompt or limit < 1:
            raise ValueError(f"prompt: got {len(prompt)} tokens and {limit} new ones, expected at least one of each.")
        if self.hybrid and len(prompt) + limit > self.max_length:
            what = f"got {len(prompt)} tokens and {limit} new ones, expected at most max_length, {self.max_length}"
            raise ValueError(f"prompt: {what}.")
        if any(request_id == other.request_id for other in (*self.waiting, *self.running.values())):
            raise ValueError(f"request_id: got {request_id!r}, expected one that no pending request has.")
        request = Request(request_id, list(prompt), limit)
        config, ids = copy.copy(self.config), torch.tensor([request.prompt], device=self.model.device)
        config.max_length = len(prompt) + limit  # where some processors force an end
        request.processors = self.model._get_logits_processor(config, len(prompt), ids, device=self.model.device)
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Stop a request, wherever it is; what it has generated stays in it."""
        if request in self.waiting:
            self.waiting.remove(request)
        self.finish(request)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Read a chunk of the next prompt if a slot is free, decode one token in every taken slot.

        Returns the requests that got a token, in order of arrival at their slots; the finished ones have left theirs. After
        an error all others are read anew, with what they have generated, by the next steps.
        """
        training, got = self.model.training, []
        self.model.eval()
        try:
            if self.running:
                got = list(self.running.values())
                self.decode(got)
            if self.waiting and len(self.running) < self.slots and self.read_chunk(self.waiting[0]):
                got.append(self.waiting.popleft())
        except BaseException:  # which may have come after some layers went on
            self.read_again()
            raise
        finally:
            self.model.train(training)
        return got

    def read_chunk(self, request: Request) -> bool:
        """Read some of a prompt; whether that was its end, which brings the next token and a slot."""
        if request.cache is None:
            request.cache = DynamicCache(config=self.model.config)
        known = request.prompt + request.tokens
        chunk = known[request.read : request.read + self.chunk_size]
        ids = torch.tensor([chunk], device=self.model.device)
        logits = forward_cached(self.model, ids, request.cache, logits_to_keep=1)[0].logits
        request.read += len(chunk)
        if request.read < len(known):
            return False
        request.slot = min(set(range(self.slots)) - self.running.keys())
        for mine, layer in zip(self.cache.layers, request.cache.layers, strict=True):
            mine.admit(request.slot, self.slots, self.max_length, layer, request.read)
        request.cache = None
        self.running[request.slot] = request
        self.append([request], logits[:, -1])
        return True

    def read_again(self) -> None:
        """Put requests that are in slots back at the head of the queue, and forget what has been read."""
        there = [request for request in self.running.values() if request not in self.waiting]
        self.waiting.extendleft(reversed(there))
        self.running.clear()
        for request in self.waiting:
            request.slot, request.cache, request.read = None, None, 0

    def decode(self, requests: list[Request]) -> None:
        """One token more for each of the requests that are in slots."""
        ids, position = torch.zeros(2, self.slots, dtype=torch.int64)
        for request in requests:
            ids[request.slot] = request.tokens[-1]
            position[request.slot] = len(request.prompt) + len(request.tokens) - 1
        self.position.copy_(position)
        given = {"position_ids": self.position[:, None], "mhla_padding": (None, None)}
        given |= {"attention_mask": self.masks()} if self.hybrid else {}
        ids = ids.to(self.position.device)[:, None]
        given[cache_argument(self.model)] = self.cache
        logits = self.forward(ids, use_cache=True, **given).logits[:, -1]
        self.append(requests, logits[[request.slot for request in requests]])

    def masks(self) -> torch.Tensor | dict[str, torch.Tensor]:
        """What softmax layers see, `[slots, 1, 1, max_length]`, by kind of layer where the model has kinds."""
        config, column = self.model.config.get_text_config(), torch.arange(self.max_length, device=self.position.device)
        seen = {"full_attention": column <= self.position[:, None]}
        if (window := getattr(config, "sliding_window", None)) is not None:
            seen["sliding_attention"] = seen["full_attention"] & (column > self.position[:, None] - window)
        hidden = torch.finfo(self.model.dtype).min
        masks = {kind: (~mask)[:, None, None].to(self.model.dtype) * hidden for kind, mask in seen.items()}
        return masks if getattr(config, "layer_types", None) is not None else masks[list(masks)[-1]]

    def append(self, requests: list[Request], logits: torch.Tensor) -> None:
        """Choose each request's next token from logits `[requests, vocab]`, as `generate` does; finish those at an end."""
        logits = logits.float()
        if any(request.processors for request in requests):
            rows = zip(requests, logits.split(1), strict=True)
            ids = [torch.tensor([r.prompt + r.tokens], device=logits.device) for r in requests]
            logits = torch.cat([r.processors(i, row) for i, (r, row) in zip(ids, rows, strict=True)])
        sampled = self.config.do_sample
        chosen = torch.multinomial(logits.softmax(-1), 1)[:, 0] if sampled else logits.argmax(-1)
        ends = self.config.eos_token_id
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        for request, token in zip(requests, chosen.tolist(), strict=True):
            request.tokens.append(token)
            if token in ends or len(request.tokens) == request.max_new_tokens:
                self.finish(request)

    def finish(self, request: Request) -> None:
        """Give back the slot; the next request overwrites what is in it."""
        self.running.pop(request.slot, None)
        request.finished, request.slot, request.cache = True, None, None


def slot_layers(model: PreTrainedModel, position: torch.Tensor) -> list[CacheLayerMixin]:
    """A cache layer with slots for each layer of the model. ValueError: a state that grows, softmax that takes no mask."""
    config, found = model.config.get_text_config(), softmax_attentions(model)
    layers = []
    for index in range(config.num_hidden_layers):
        attention = found.get(index)
        kinds = getattr(config, "layer_types", None)
        mhla = attention is not None and hasattr(attention, "mhla")
        softmax = getattr(attention, "softmax_heads", None) if mhla else attention
        if mhla and not isinstance(attention.mhla, DecayMHLA):
            what = 'mixes by a matrix, whose state grows, expected mixing_form="decay"'
            raise ValueError(f"model: layer {index} {what}.")
        if attention is None or (not mhla and kinds is not None and kinds[index] not in MASKS):
            raise ValueError(f"model: layer {index} is neither MHLA nor softmax, expected layers of these.")
        if softmax is not None and (implementation := softmax.config._attn_implementation) not in ("sdpa", "eager"):
            what = f'attends by {implementation!r}, which takes no mask by slots; expected "sdpa" or "eager"'
            raise ValueError(f"model: layer {index} {what}.")
        slots = None if softmax is None else SoftmaxSlots(position)
        layers.append(MHLASlots(slots) if mhla else slots)
    return layers


def generate_batch(
    model: PreTrainedModel, prompts: list[list[int]], *, max_new_tokens: int | None = None, **options
) -> list[list[int]]:
    """The new tokens of each prompt (token ids, of any lengths), decoded together; options as in `ContinuousBatch`."""
    batch = ContinuousBatch(model, **options)
    requests = [batch.add(prompt, max_new_tokens) for prompt in prompts]
    while batch.pending:
        batch.step()
    return [request.tokens for request in requests]
