"""`twoaxis show NAME`: equation, source, initialisation, cost and parameters of one mixer."""

import inspect
from typing import Annotated, Any

import torch
import typer
from torch import nn

from twoaxis.cli.list import AXES, complete_mixer
from twoaxis.cli.models import REFERENCE_SHAPE, REFERENCE_SITE, REFERENCE_STACK, depth_trace
from twoaxis.cli.output import Json, print_json
from twoaxis.core.config import apply_overrides
from twoaxis.core.cost import Cost
from twoaxis.core.errors import ConfigError, nearest
from twoaxis.core.parameters import declarations
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.display.tables import print_table
from twoaxis.ledger.sublayer import sublayer_cache_bytes

COSTS = {
    "parameters": "parameters",
    "table_parameters": "of these in tables of tokens, vocabulary 512",
    "matmul_flops_per_token": "matmul flops per token",
    "attention_flops_per_token": "attention flops per token",
    "elementwise_flops_per_token": "elementwise flops per token",
    "cache_bytes": "cache bytes after all tokens",
    "state_bytes_per_token": "state bytes per token, last boundary",
    "saved_bytes": "bytes saved for backward beyond the state",
}
"""Labels of the costs."""


def show(
    name: Annotated[
        str, typer.Argument(help="A kind that `twoaxis list` prints, such as deep_delta.", autocompletion=complete_mixer)
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Options as key=value, such as value_target=code.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a mixer does: equation, source, initialisation, options, parameters and cost.

    Costs are those of the last of 12 blocks at d_model 256 and 512 tokens, float32: of the block for a depth mixer, else of one
    sublayer or one place inside it.

    Example: twoaxis show attention_residuals block_size=4
    """
    axis = _axis(name)
    data = apply_overrides({"kind": name}, overrides or [])
    config = AXES[axis].parse(data)
    described = _described(axis, config)
    if as_json:
        print_json(described)
        return
    print(f"{name} ({axis.replace('_', '-')})\n")
    print(inspect.getdoc(type(config)), end="\n\n")
    if "init_equivalence" in described:
        print("At initialisation: {relation}: {reason}\n".format(**described["init_equivalence"]))
    print(f"Evidence: {described['evidence']}\n")
    print_table("Options", ("key", "value"), list(described["options"].items()))
    print()
    parameters = [(one["name"], " x ".join(map(str, one["shape"])), one["init"], one["tag"]) for one in described["parameters"]]
    place = {"depth": "the last block", "local": "one place of d_model channels"}.get(axis, "one sublayer")
    title = f"Parameters of {place}" + (" and the ends" if axis == "depth" else "")
    print_table(title, ("name", "shape", "initial value", "tag"), parameters, whole=("name", "shape"))
    print()
    costs = [(COSTS[key], f"{value:,}") for key, value in described["cost"].items()]
    print_table(f"Cost of {place}, 12 blocks, d_model 256, 512 tokens, float32", ("what", "count"), costs, ("count",))


def _axis(name: str) -> str:
    for axis, table in AXES.items():
        if name in table:
            return axis
    known = [row.kind for table in AXES.values() for row in table]
    raise ConfigError(f"unknown mixer {name!r}; {nearest(name, known)}")


def _described(axis: str, config: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"axis": axis, "kind": config.kind, "documentation": inspect.getdoc(type(config))}
    if axis != "feed_forward":
        equivalence = config.init_equivalence
        described["init_equivalence"] = {"relation": equivalence.relation, "reason": equivalence.reason}
    described["evidence"] = _evidence(AXES[axis][config.kind].certified_by(config))
    described["options"] = {key: value for key, value in config.to_data().items() if key != "kind"}
    described["parameters"] = _parameters(axis, config)
    described["cost"] = _cost(axis, config)
    return described


def _evidence(fixture: str | None) -> str:
    """Whether these options equal public code."""
    if fixture is None:
        return "reconstructed from text, or an option of ours; no golden tensors of public code have these options"
    return f"certified: equals public code in outputs and all gradients (golden tensors {fixture})"


def _parameters(axis: str, config: Any) -> list[dict[str, Any]]:
    with torch.device("meta"):
        module = _depth_part(config) if axis == "depth" else config.build(*_place(axis))
    return [
        {"name": name, "shape": list(parameter.shape), "init": str(declaration.init), "tag": declaration.tag}
        for name, parameter, declaration in declarations(module)
    ]


def _place(axis: str) -> tuple[Any, ...]:
    return (REFERENCE_STACK.d_model, REFERENCE_SITE) if axis == "local" else (REFERENCE_SITE,)


def _depth_part(config: Any) -> nn.Module:
    """The depth mixers of the last block, and both ends."""
    stack = config.prepare(REFERENCE_STACK)
    mixers, ends = config.build(stack)
    part = nn.ModuleDict({f"sublayer {site.index}": mixers[site.index] for site in _last_block(stack)})
    part["ends"] = ends
    return part


def _last_block(stack: LayerStack) -> list[SublayerPosition]:
    return [site for site in stack.sites if site.block == stack.n_blocks - 1]


def _cost(axis: str, config: Any) -> dict[str, int]:
    stack = config.prepare(REFERENCE_STACK) if axis == "depth" else REFERENCE_STACK
    sites = _last_block(stack) if axis == "depth" else [REFERENCE_SITE]
    places = [(site,) for site in sites] if axis == "depth" else [_place(axis)]
    cost = sum((config.cost(*place, REFERENCE_SHAPE) for place in places), Cost())
    tokens = REFERENCE_SHAPE.total_tokens
    found = {
        "parameters": cost.params,
        **({"table_parameters": cost.table_params} if cost.table_params else {}),
        "matmul_flops_per_token": cost.matmul_flops // tokens,
        "attention_flops_per_token": cost.pair_flops // tokens,
        "elementwise_flops_per_token": cost.elementwise_flops // tokens,
    }
    if axis != "depth":
        return found | {"cache_bytes": sublayer_cache_bytes(config, REFERENCE_SITE, REFERENCE_SHAPE)}
    traced = depth_trace(config)
    operations = [traced.sublayers[site.index] for site in sites]
    return found | {
        "cache_bytes": sum(operation.cache for operation in operations),
        "state_bytes_per_token": traced.state_bytes(stack.n_sublayers),
        "saved_bytes": sum(operation.saved for operation in operations),
    }
