"""Attention layers of converted models inside vLLM: MHLA heads with their states in pages, softmax heads with paged keys."""

from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import nn
from vllm.config import CompilationMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends.linear_attn import LinearAttentionMetadata
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec

from ..nn.salient import SalientCore
from .pages import DecodeBatch, PagedAttention, PageLayout, PagePool, warm_up

OPERATOR = "mhla_attention"


class StatePage(MambaBase):
    """The state of some KV heads of a layer, for which vLLM allocates pages."""

    def __init__(self, layout: PageLayout, pages_per_layer: int):
        self.layout, self.pages_per_layer = layout, pages_per_layer
        self.kv_cache: tuple[torch.Tensor, ...] = ()

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Store vLLM's view of the pages of this layer, int8 [blocks, 1, 1, bytes]."""
        self.kv_cache = (kv_cache,)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.layout.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.layout.dtypes

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """vLLM's backend of linear attention, whose metadata name the tokens and the page of each request."""
        return MambaAttentionBackendEnum.LINEAR

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """Return vLLM's specification, with the padded size of a whole layer divided among the pages of its heads."""
        spec: Any = super().get_kv_cache_spec(vllm_config)
        padded = spec.page_size_padded
        return spec if padded is None else replace(spec, page_size_padded=padded // self.pages_per_layer)


class BatchPlan:
    """The plan of vLLM's current batch, which the first layer of a model makes for all layers."""

    metadata: Any = None  # the object by which vLLM describes the batch
    decodes: DecodeBatch | None  # the step of requests with one new token, which come first
    prefills: list[tuple[slice, int]]  # for each other request, the slice of its tokens, and the first one's position
    is_warm: bool = False  # whether steps are compiled already

    def update(self, metadata: Any, batch: LinearAttentionMetadata, attention: PagedAttention) -> None:
        """Plan a batch, unless it is the current one."""
        if self.metadata is metadata:
            return
        self.metadata, self.prefills, count = metadata, [], batch.num_decodes
        self.decodes = attention.plan(batch.seq_lens[:count].long() - 1) if count else None
        if batch.num_prefills:
            borders, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
            for row in range(count, count + batch.num_prefills):
                tokens = slice(borders[row], borders[row + 1])
                self.prefills.append((tokens, lengths[row] - (tokens.stop - tokens.start)))


class PagedMHLA(SalientCore):
    """A `SalientCore` whose states are in vLLM's pages."""

    attention: PagedAttention | None = None  # until the first batch
    memory: torch.Tensor | None = None  # the pages for which `attention` was made

    def install(self, name: str, heads_per_page: int, plan: BatchPlan, vllm_config: VllmConfig) -> None:
        """Declare the pages of the MHLA heads to vLLM, once `heads` and `options` are final."""
        self.name, self.plan = name, plan
        compilation = vllm_config.compilation_config
        self.is_compiled = compilation.mode != CompilationMode.NONE and compilation.backend == "inductor"
        layout = PageLayout.of(self.settings, heads_per_page, self.value_dim, vllm_config.model_config.dtype)
        num_heads = self.num_kv_heads if self.heads is None else self.heads.counts[False]
        self.page_names = [f"{name}.state_{index}" for index in range(num_heads // heads_per_page)]
        context = vllm_config.compilation_config.static_forward_context
        context[name] = self
        for page_name in self.page_names:
            context[page_name] = StatePage(layout, self.num_kv_heads // heads_per_page)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **unused: Any) -> torch.Tensor:
        """Compute attention for all tokens of vLLM's batch; arguments [1, T, ...] as in `SalientCore.forward`.

        Those in `unused` are None: vLLM has neither padding nor caches of transformers, and `options` has the scale.
        """
        o = v.new_empty(*q.shape[:3], v.shape[-1])
        torch.ops.vllm.mhla_attention(*(x[0].to(v.dtype).contiguous() for x in (q, k, v)), o[0], self.name)
        return o

    def attach(self, pages: list[StatePage]) -> PagedAttention:
        """Return the attention over the pages that vLLM has allocated; it is made anew when they change."""
        views = [page.kv_cache[0] for page in pages]
        if self.attention is not None and views[0] is self.memory:
            return self.attention
        self.memory = views[0]
        rows, self.first_page, self.page_step = page_rows(views)
        self.attention = PagedAttention(PagePool(rows, pages[0].layout), self.options, self.is_compiled)
        return self.attention

    def attend_batch(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor) -> None:
        """Write the output of vLLM's current batch into `o` [T, H, V], or zeros without a batch, and update the pages."""
        context = get_forward_context()
        metadata: Any = context.attn_metadata
        if metadata is None:  # vLLM measures memory, and compiles
            o.zero_()
            if self.is_compiled and not self.plan.is_warm:
                self.plan.is_warm = True
                page = context.no_compile_layers[self.page_names[0]]
                warm_up(page.layout, self.options, self.num_heads // self.num_kv_heads, q.device)
            return
        attention = self.attach([context.no_compile_layers[name] for name in self.page_names])
        blocks = torch.stack([metadata[name].state_indices_tensor for name in self.page_names], 1).long()
        pages, plan = self.first_page + blocks * self.page_step, self.plan
        plan.update(metadata, metadata[self.page_names[0]], attention)
        count = len(pages) - len(plan.prefills)
        if plan.decodes is not None:
            o[:count] = attention.decode(q[:count], k[:count], v[:count], pages[:count], plan.decodes)
        for row, (tokens, start) in enumerate(plan.prefills, count):
            o[tokens] = attention.prefill(q[tokens], k[tokens], v[tokens], pages[row : row + 1], start)


def mhla_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, name: str) -> None:
    """Custom operator, opaque to torch.compile; see `PagedMHLA.attend_batch`."""
    get_forward_context().no_compile_layers[name].attend_batch(q, k, v, o)


direct_register_custom_op(OPERATOR, mhla_attention, mutates_args=["o"], fake_impl=lambda *_: None)


def page_rows(views: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """View the memory behind N `views`, int8 [blocks, 1, 1, bytes of a page], as rows, with each page at the start of a row.

    Return the memory, int8 [rows, bytes of a row]; the row of each view's block 0, int64 [N]; and the number of rows from
    one block of a view to its next, int64 [N].
    """
    starts, steps = [view.storage_offset() for view in views], [view.stride(0) for view in views]
    row, page = gcd(*starts, *steps), views[0].shape[-1]
    if row < page:
        raise ValueError(f"kv_cache: got pages of {page} bytes in rows of {row} bytes, expected longer rows.")
    device = views[0].device
    memory = torch.empty(0, dtype=torch.int8, device=device).set_(views[0].untyped_storage())
    num_rows = len(memory) // row
    first, step = (torch.tensor([size // row for size in sizes], device=device) for sizes in (starts, steps))
    return memory[: num_rows * row].view(num_rows, row), first, step


class PagedSoftmax(nn.Module):
    """Softmax attention of some KV heads of a layer, as one vLLM `Attention` per page of `heads_per_page` KV heads."""

    def __init__(self, name: str, num_kv_heads: int, heads_per_page: int, queries_per_kv: int, **options: Any):
        super().__init__()
        self.parts = nn.ModuleList(
            Attention(
                num_heads=heads_per_page * queries_per_kv,
                num_kv_heads=heads_per_page,
                prefix=f"{name}.softmax_{index}",
                **options,
            )
            for index in range(num_kv_heads // heads_per_page)
        )

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Compute attention for all tokens of vLLM's batch: query [T, H, D], key [T, G, D], value [T, G, D] -> [T, H, D]."""
        parts = zip(*(x.chunk(len(self.parts), 1) for x in (query, key, value)), strict=True)
        outputs = [part(*(x.flatten(1) for x in tensors)) for part, tensors in zip(self.parts, parts, strict=True)]
        return torch.cat(outputs, -1).view_as(query)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Attend as `SoftmaxHeads` does: [1, H, T, D] -> [1, T, H, D]."""
        return self.attend(*(x[0].transpose(0, 1) for x in (query, key, value)))[None]


class SplitSoftmax(PagedSoftmax):
    """`PagedSoftmax` for a layer whose heads all keep softmax, called by vLLM's attention function."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Compute attention for all tokens: query [T, H * D], key and value [T, G * D] -> [T, H * D]."""
        width = self.parts[0].head_size
        return self.attend(*(x.unflatten(1, (-1, width)) for x in (query, key, value))).flatten(1)
