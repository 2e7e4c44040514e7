"""From a built model to the counts of its sublayers: parameters, FLOPs, experts, caches; and what could not be counted."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from twoaxis.core.cost import ElementCount
from twoaxis.core.errors import ConfigError
from twoaxis.core.measure import storage_of
from twoaxis.ledger.published.build import Built, build, quietly
from twoaxis.ledger.published.sublayers import COUNTED, COUNTED_WITH_MASK, OUTSIDE, Attention, Counted, Run, run

FEED_FORWARD = re.compile(r"mlp|moe|expert|feed_?forward|ffn?\b|fc\d|router|dense")
POSITIONS = re.compile(r"attn|attention|mamba|mixer|conv|ssm|temporal|recurrent|linear")
FEED_FORWARD_CLASS = re.compile(r"(MLP|MoE|MOE|FeedForward|Experts|SparseMoeBlock)$")
PLACE = re.compile(r"idx|index|layer_id|layer_number")
"""Attributes that say where a module stands, not what it is."""

CHUNKS = ("chunk_size", "mamba_chunk_size", "block_size")
CHUNK = 64
"""Tokens of the chunks of linear attention: by these keys, else as in all families without one."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k", "num_experts_per_token")

NOTHING = ElementCount()


@dataclass(frozen=True)
class PublishedSublayer:
    """One sublayer, between its norm and the residual stream.

    Attributes:
        kind: `attention`, or the name of its class in transformers.
        mixes_positions: whether it is a sequence mixer; else it is a feed-forward.
        params: parameters, those of an earlier sublayer left out.
        shapes: of its tensors with two axes and more, routed experts left out.
        experts: (experts, those that a token is sent to, parameters of one), or nothing.
        matmul: FLOPs per token of products with parameters.
        products: FLOPs per token of other products.
        pairs: (FLOPs, window) per visible pair of tokens; 0 for no window.
        elementwise: numbers per token that pointwise operations make.
        saved: numbers per token that autograd saves in eager PyTorch, with one kernel for attention.
        cache: (numbers per token, tokens up to which they grow or 0).
        state: numbers per sequence that generation keeps, however many tokens.
        attention: the softmax attention inside it, or None.
        expert_matrices: parameters of one expert in matrices, its biases left out.
        beside: parameters of the layer outside its sublayers, such as norms; stated by the first one.
    """

    kind: str
    mixes_positions: bool
    params: int
    shapes: tuple[tuple[int, ...], ...]
    experts: tuple[int, int, int] | tuple[()] = ()
    matmul: int = 0
    products: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    elementwise: int = 0
    saved: ElementCount = NOTHING
    cache: tuple[tuple[ElementCount, int], ...] = ()
    state: ElementCount = NOTHING
    attention: Attention | None = None
    expert_matrices: int = 0
    beside: int = 0


@dataclass(frozen=True)
class PublishedModel:
    """A whole model.

    Attributes:
        blocks: sublayers of each decoder layer.
        params: all parameters, with the corrections of routers, which are buffers.
        tables: those outside the layers of which a token reads few or none: further embeddings, and what text does not reach.
        vocab_size: rows of the embedding.
        d_model: width.
        tied: whether the head is the embedding.
        norm: `layer` where the last norm has a bias, else `rms`.
        parallel: whether the sublayers of a layer read the same stream.
        max_seq_len: tokens that it was made for.
        config: the configuration as transformers understood it, by key.
        not_counted: what is left out or uncertain, one line each.
    """

    blocks: tuple[tuple[PublishedSublayer, ...], ...]
    params: int
    tables: int
    vocab_size: int
    d_model: int
    tied: bool
    norm: str
    parallel: bool
    max_seq_len: int
    config: Mapping[str, Any]
    not_counted: tuple[str, ...]


def count_published(data: Mapping[str, Any]) -> PublishedModel:
    """Counts a published causal language model from the contents of its `config.json`; nothing is downloaded.

    Raises:
        ConfigError: in one line: transformers is missing, does not know the model, or cannot build it.
    """
    built = build(data)
    model, config = built.model, built.config.get_text_config(decoder=True)
    layers = _layers(model, config)
    groups = [_groups(layer) for layer in layers]
    notes = list(built.notes)
    runs = _runs(built, layers, groups, notes)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    blocks, seen = [], {id(embedding.weight)} | ({id(head.weight)} if head is not None else set())
    twins = _twins(layers, config)
    for index, layer in enumerate(layers):
        block = [
            _sublayer(_unrun(mixes, modules, seen, config), (twins[index], at), index, runs)
            for at, (mixes, modules) in enumerate(groups[index].items())
        ]
        beside = {id(each): each.numel() for each in layer.parameters() if id(each) not in seen}
        seen |= set(beside)
        blocks.append((replace(block[0], beside=sum(beside.values())), *block[1:]))
    if runs:
        tokens, around = runs[0].tokens, [one.counted.get(OUTSIDE, Counted()).matmul for one in runs]
        further = max(0, _fit(around, tokens)[0] - 2 * embedding.weight.shape[0] * config.hidden_size)
        blocks[0] = (replace(blocks[0][0], matmul=blocks[0][0].matmul + further), *blocks[0][1:])
    unread = _unread(model, layers, twins, runs)
    read = [name for name, _ in model.named_parameters() if name not in unread]
    tables = {id(each.weight): each.weight for each in model.modules() if isinstance(each, nn.Embedding)}
    tables = {key: each.numel() for key, each in (tables | {id(p): p for p in unread.values()}).items() if key not in seen}
    last = [each for name, each in model.named_modules() if "norm" in name.rpartition(".")[2] or "ln_f" in name]
    return PublishedModel(
        blocks=tuple(blocks),
        params=sum(each.numel() for each in _unique(model)),
        tables=sum(tables.values()),
        vocab_size=embedding.weight.shape[0],
        d_model=config.hidden_size,
        tied=head is not None and head.weight is embedding.weight,
        norm="layer" if last and getattr(last[-1], "bias", None) is not None else "rms",
        parallel=bool(runs) and runs[0].parallel,
        max_seq_len=_first(config, ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length")) or 2048,
        config=config.to_dict(),
        not_counted=(*notes, *_notes([sub for block in blocks for sub in block], config, bool(runs)), *_said(unread, read)),
    )


def _unread(model: nn.Module, layers: nn.ModuleList, twins: Mapping[int, int], runs: Sequence[Run]) -> dict[str, Tensor]:
    """Parameters by name that no operation of a pass over text was given; a layer stands for all that equal it."""
    pairs = (zip(layers[at].parameters(), layers[twin].parameters(), strict=True) for at, twin in twins.items())
    run = {id(one): other for pair in pairs for one, other in pair}
    named, read = model.named_parameters() if runs else (), set[int]().union(*(one.read for one in runs))
    return {name: each for name, each in named if storage_of(run.get(id(each), each)) not in read}


def _said(unread: Mapping[str, Tensor], read: Iterable[str]) -> Iterator[str]:
    """One line for each module of which text reaches no parameter; modules of a list are one."""
    used = {name[:end] for name in read for end in _ends(name)}
    found: dict[str, int] = {}
    for name, each in unread.items():
        whole = next(name[:end] for end in _ends(name) if name[:end] not in used)
        shown = re.sub(r"\.\d+(?=\.|$)", ".*", whole)
        found[shown] = found.get(shown, 0) + each.numel()
    for name, count in found.items():
        yield f"{name}: {count:,} parameters take no part in a pass over text, so no FLOPs of them are counted"


def _ends(name: str) -> list[int]:
    """Where the modules of a parameter's name end, the outermost first."""
    return [at for at, letter in enumerate(name) if letter == "."] + [len(name)]


def _notes(sublayers: Sequence[PublishedSublayer], config: Any, ran: bool) -> Iterator[str]:
    """What is uncertain in the counts, one line each."""
    if any(sub.experts and sub.experts[0] == sub.experts[1] for sub in sublayers):
        yield "active parameters: the file does not say how many experts a token is sent to; all are counted as active"
    if any(sub.pairs and sub.attention is None for sub in sublayers):
        yield "attention is computed by code of its own: its products are counted over all earlier tokens, without windows"
    # Attention without a cache reads that of an earlier layer, where other layers have one.
    shares = any(sub.attention and sub.cache for sub in sublayers)
    keepers = [sub for sub in sublayers if ran and sub.mixes_positions and not (sub.attention and shares)]
    for kind in sorted({sub.kind for sub in keepers if not (sub.cache or sub.state.count)}):
        yield f"cache of {kind}: not counted, since transformers keeps it in a form of its own"
    if getattr(config, "attention_chunk_size", None):
        yield "attention_chunk_size: chunks are counted as a sliding window of as many tokens, which is the most they cost"


def _layers(model: nn.Module, config: Any) -> nn.ModuleList:
    """The decoder layers: of the lists that are not inside another one, the nearest to the embedding, in number, in length."""
    lists = {name: each for name, each in model.named_modules() if isinstance(each, nn.ModuleList)}
    lists = {name: each for name, each in lists.items() if not any(part.isdigit() for part in name.split("."))}
    embedding = next(name for name, each in model.named_modules() if each is model.get_input_embeddings())  # type: ignore[operator]

    def rank(name: str) -> tuple[int, bool, int]:
        pairs = zip(name.split("."), embedding.split("."), strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return shared, len(lists[name]) == config.num_hidden_layers, len(lists[name])

    return lists[max(lists, key=rank)]


def _groups(layer: nn.Module) -> dict[bool, list[nn.Module]]:
    """The sublayers of a layer, as its modules with matrices: what mixes positions (True), and the feed-forward (False)."""
    found: dict[bool, list[nn.Module]] = {}
    for name, child in layer.named_children():
        if any(each.dim() > 1 for each in child.parameters()):
            found.setdefault(_mixes_positions(name, child), []).append(child)
    return dict(sorted(found.items(), reverse=True))


def _mixes_positions(name: str, module: nn.Module) -> bool:
    if FEED_FORWARD.search(name):
        return False
    if name != "mixer" and POSITIONS.search(name):
        return True
    return not FEED_FORWARD_CLASS.search(type(module).__name__)


def _unique(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, each once, and the corrections of routers."""
    yield from module.parameters()
    kept = module.state_dict(keep_vars=True)
    yield from (each for name, each in kept.items() if name.endswith("bias") and not isinstance(each, nn.Parameter))


def _unrun(mixes: bool, modules: Sequence[nn.Module], seen: set[int], config: Any) -> PublishedSublayer:
    """What can be said of a sublayer without running it: of parameters, those that were not seen before."""
    own = {id(each): each for module in modules for each in _unique(module) if id(each) not in seen}
    seen |= set(own)
    experts = {id(each): each for module in modules for each in _expert_parameters(module, config)}
    shapes = tuple(tuple(each.shape) for key, each in own.items() if each.dim() > 1 and key not in experts)
    routed = sum(each.numel() for each in experts.values())
    counted = _first(config, EXPERTS)
    # Of the tensors with one axis for the experts, each says how many there are.
    n_experts = counted if not experts else max(each.shape[0] for each in experts.values() if each.dim() > 1)
    used = _first(config, PER_TOKEN) or n_experts or 0
    found = (n_experts, used, routed // n_experts) if experts and n_experts else ()
    # Of an expert's tensors, those with one more axis are its biases.
    matrices = sum(each.numel() for each in experts.values() if each.dim() > 2) // n_experts if found and n_experts else 0
    matmul = 2 * (sum(map(prod, shapes)) + used * matrices)
    params = sum(each.numel() for each in own.values())
    largest = max(modules, key=lambda module: sum(each.numel() for each in module.parameters()))
    return PublishedSublayer(type(largest).__name__, mixes, params, shapes, found, matmul, expert_matrices=matrices)


def _expert_parameters(root: nn.Module, config: Any) -> Iterator[Tensor]:
    """Parameters of routed experts: in tensors whose first axis counts the experts."""
    counts = {_value(getattr(config, name, None)) for name in EXPERTS} - {None, 0, 1}
    for child in root.modules():
        if "Experts" in type(child).__name__:
            yield from (each for each in child.parameters(recurse=False) if each.dim() > 1 and each.shape[0] in counts)


def _first(config: Any, names: Sequence[str]) -> int | None:
    return next((found for name in names if (found := _value(getattr(config, name, None)))), None)


def _value(value: Any) -> int | None:
    """A number, or the largest of a list with one for each layer."""
    value = max(value) if isinstance(value, list) and value and all(isinstance(each, int) for each in value) else value
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _twins(layers: Any, config: Any) -> dict[int, int]:
    """The first layer that each one equals in all but its place."""
    first: dict[Any, int] = {}
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return {
        index: first.setdefault((types[index] if index < len(types) else None, _signature(layer)), index)
        for index, layer in enumerate(layers)
    }


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    def of(name: str, module: nn.Module) -> tuple[Any, ...]:
        plain = {
            key: value for key, value in vars(module).items() if isinstance(value, int | float | str) and not PLACE.search(key)
        }
        shapes = tuple((key, tuple(each.shape)) for key, each in module.named_parameters(recurse=False))
        return name, type(module).__name__, repr(sorted(plain.items())), shapes

    return tuple(of(name, module) for name, module in layer.named_modules())


def _runs(built: Built, layers: Any, groups: list[dict[bool, list[nn.Module]]], notes: list[str]) -> list[Run]:
    """Runs of three lengths; none, and a note, where transformers cannot run the model without memory."""
    model, twins = built.model, _twins(layers, built.config.get_text_config(decoder=True))
    traced = {index: list(groups[index].values()) for index in sorted(set(twins.values()))}
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    experts = list(_expert_parameters(layers, built.config.get_text_config(decoder=True)))
    chunk = max(CHUNK, _first(built.config.get_text_config(decoder=True), CHUNKS) or 0)
    reason = ""
    for attention in (COUNTED, COUNTED_WITH_MASK, "eager"):
        built.config._attn_implementation = attention
        try:
            with quietly("transformers cannot run it without memory"):
                return [run(model, layers, traced, experts, twins, times * chunk) for times in (1, 2, 3)]
        except ConfigError as error:
            reason = str(error).removesuffix("; correct the file")
    notes.append(f"products of activations, elementwise operations, saved activations and caches: not counted: {reason}")
    return []


def _sublayer(plain: PublishedSublayer, traced: tuple[int, int], index: int, runs: list[Run]) -> PublishedSublayer:
    """A sublayer with what the runs counted."""
    if not runs:
        return plain
    experts = plain.experts
    each = [one.counted.get(traced, Counted()) for one in runs]
    tokens = runs[0].tokens
    if experts:
        experts = (experts[0], each[0].per_token or experts[1], experts[2])
    attention = each[0].attention[0] if len(each[0].attention) == 1 else None
    window, cache, state = (
        _cache(runs, index if index in runs[0].caches and runs[0].caches[index][0] else traced[0])
        if plain.mixes_positions
        else (None, (), ElementCount())
    )
    pairs = [(2 * call.n_heads * (call.key_dim + call.value_dim), call.window or window or 0) for call in each[0].attention]
    line, curve = _fit([one.products for one in each], tokens)
    # A state of fixed size makes no pairs of tokens; the reference form pairs chunks.
    curve = curve if cache or not state.count else 0
    routed = experts[1] * plain.expert_matrices if experts else 0
    return replace(
        plain,
        kind="attention" if attention and not line and not curve else plain.kind,
        experts=experts,
        matmul=_fit([one.matmul for one in each], tokens)[0] + 2 * routed,
        products=line,
        pairs=tuple(pairs) + (((curve, 0),) if curve else ()),
        elementwise=_fit([one.elementwise for one in each], tokens)[0],
        saved=ElementCount(
            _fit([one.saved.model for one in each], tokens)[0], _fit([one.saved.statistics for one in each], tokens)[0]
        ),
        cache=cache,
        state=state,
        attention=None if attention is None else replace(attention, window=attention.window or window),
    )


def _fit(values: Sequence[int], tokens: int) -> tuple[int, int]:
    """The slopes of a + b n + c n^2 through values at one, two and three times some number of tokens: b and c."""
    first, second, third = values
    curve = (third - 2 * second + first) / (2 * tokens * tokens)
    return round((second - first) / tokens - 3 * tokens * curve), round(curve)


def _cache(runs: list[Run], index: int) -> tuple[int | None, tuple[tuple[ElementCount, int], ...], ElementCount]:
    """The window of a layer's cache, what it keeps per token, and what per sequence."""
    tensors, window = runs[0].caches.get(index, ([], None))
    later = runs[1].caches.get(index, ([], None))[0]
    growing, state = ElementCount(), ElementCount()
    for one, two in zip(tensors, later, strict=False):
        if not one.is_floating_point():
            continue
        wide = one.dtype in (torch.float32, torch.float64)
        if window is not None and one.dim() == 4:
            growing += _numbers(one.numel() // max(1, one.shape[-2]), wide)
        elif one.numel() != two.numel():
            growing += _numbers((two.numel() - one.numel()) // (runs[1].tokens - runs[0].tokens), wide)
        else:
            state += _numbers(one.numel(), wide)
    bound = 0 if window is None else window - 1
    return window, ((growing, bound),) if growing.count else (), state


def _numbers(count: int, wide: bool) -> ElementCount:
    return ElementCount(statistics=count) if wide else ElementCount(count)
