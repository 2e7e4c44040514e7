"""An inference engine in small, with the calling contract of vLLM's Transformers backend.

It is written from that contract, to be called as vLLM calls a model and to give what vLLM gives to one: parameters on the
meta device, linear maps and the embedding replaced, weights loaded by name, one attention per block with pages of keys and
values, and tokens of several requests packed in one row. Nothing of vLLM runs here.

Letters: N tokens of all requests of a step, H heads, G kv-heads, K key width, D width, V vocabulary.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "small_engine"
PAGE = 4


class Work(NamedTuple):
    """The next tokens of a request: some of its prompt, or the one that was generated last."""

    request: str
    tokens: list[int]


class Plan(NamedTuple):
    """Where the tokens of one request stand in a step."""

    begins: int
    count: int
    before: int
    pages: list[int]


class PagedAttention:
    """Keys and values of one layer in pages, and the attention over them."""

    def __init__(self, engine: "Engine", num_heads: int, head_size: int, num_kv_heads: int, window: int | None) -> None:
        self.engine, self.window, self.scale = engine, window, head_size**-0.5
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.pages: dict[int, Tensor] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[N H*K] from [N H*K], [N G*K], [N G*K]."""
        q, k, v = q.view(-1, self.num_heads, self.head_size), self._heads(k), self._heads(v)
        return torch.cat(
            [self._request(plan, *(x[plan.begins :][: plan.count] for x in (q, k, v))) for plan in self.engine.plans]
        )

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(-1, self.num_kv_heads, self.head_size)

    def _request(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for offset in range(plan.count):
            place = plan.before + offset
            page = self.pages.setdefault(plan.pages[place // PAGE], k.new_full((2, PAGE, *k.shape[1:]), torch.nan))
            page[0, place % PAGE], page[1, place % PAGE] = k[offset], v[offset]
        total = plan.before + plan.count
        keys, values = torch.cat([self.pages[number] for number in plan.pages], dim=1)[:, :total]
        groups = self.num_heads // self.num_kv_heads
        scores = torch.einsum("thk,shk->hts", q, keys.repeat_interleave(groups, dim=1)) * self.scale
        age = torch.arange(plan.before, total)[:, None] - torch.arange(total)
        hidden = (age < 0) if self.window is None else (age < 0) | (age >= self.window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return torch.einsum("hts,shk->thk", weights, values.repeat_interleave(groups, dim=1)).flatten(1)


def engine_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_instances: Mapping[int, PagedAttention] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What the engine registers with transformers: [1 H N K] queries, [1 G N K] keys and values; returns [N H*K]."""
    assert attention_mask is None and attention_instances is not None
    attention, tokens = attention_instances[module.layer_idx], query.shape[-2]
    if scaling is not None:
        attention.scale = float(scaling)
    return attention.forward(*(x.transpose(1, 2).reshape(tokens, -1) for x in (query, key, value))), None


ALL_ATTENTION_FUNCTIONS.register(NAME, engine_attention)


class EngineLinear(nn.Module):
    """A linear map that is no `nn.Linear`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(linear.weight.shape, torch.nan, dtype=linear.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class EngineEmbedding(nn.Module):
    """An embedding that is no `nn.Embedding`."""

    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.weight = nn.Parameter(torch.full((num_embeddings, embedding_dim), torch.nan, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class Engine:
    """Runs the base model of a configuration and its weights."""

    def __init__(self, config: Any, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> None:
        self.config = copy.deepcopy(config)
        self.config._attn_implementation = NAME
        with parameters_on_meta():
            self.model: Any = AutoModel.from_config(self.config, dtype=dtype)
        assert all(parameter.is_meta for parameter in self.model.parameters())
        _replace_linears(self.model)
        self.model.set_input_embeddings(EngineEmbedding(config.vocab_size, config.hidden_size, dtype))
        _give_memory(self.model)
        self.head = self._load(weights)
        self.attention_instances = {layer: self._attention(layer) for layer in range(config.num_hidden_layers)}
        self.plans: list[Plan] = []
        self._lengths: dict[str, int] = {}
        self._tables: dict[str, list[int]] = {}

    def _attention(self, layer: int) -> PagedAttention:
        config = self.config
        sliding = config.layer_types[layer] == "sliding_attention"
        window = config.sliding_window if sliding else None
        return PagedAttention(self, config.num_attention_heads, config.head_dim, config.num_key_value_heads, window)

    def _load(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Loads every weight by its name, and returns the head."""
        missing = {f"model.{name}": parameter for name, parameter in self.model.named_parameters()}
        for name, weight in weights.items():
            if name != "lm_head.weight":
                missing.pop(name).data.copy_(weight)
        assert not missing, f"not in the file: {sorted(missing)}"
        return self.model.get_input_embeddings().weight if self.config.tie_word_embeddings else weights["lm_head.weight"]

    @torch.no_grad()
    def step(self, works: list[Work]) -> dict[str, Tensor]:
        """Runs the next tokens of some requests together; returns logits [count V] of each."""
        tokens, positions, self.plans = list[int](), list[int](), []
        for work in works:
            before, count = self._lengths.get(work.request, 0), len(work.tokens)
            table = self._tables.setdefault(work.request, [])
            while len(table) * PAGE < before + count:
                table.append(sum(map(len, self._tables.values())))
            self.plans.append(Plan(len(tokens), count, before, table))
            tokens += work.tokens
            positions += range(before, before + count)
            self._lengths[work.request] = before + count
        hidden, *_ = self.model(
            input_ids=torch.tensor([tokens]),
            inputs_embeds=None,
            use_cache=False,
            position_ids=torch.tensor([positions]),
            attention_instances=self.attention_instances,
            return_dict=False,
        )
        logits = hidden[0] @ self.head.T
        return {work.request: logits[plan.begins :][: plan.count] for work, plan in zip(works, self.plans, strict=True)}


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters lose their memory when they are registered; buffers keep theirs."""

    # Any, since torch's own annotation denies what its documentation says of the value that is returned.
    def move(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
        return None if parameter is None else nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()


def _replace_linears(module: nn.Module) -> None:
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, EngineLinear(child))
        else:
            _replace_linears(child)


def _give_memory(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(module, name, nn.Parameter(torch.full(parameter.shape, torch.nan, dtype=parameter.dtype)))
