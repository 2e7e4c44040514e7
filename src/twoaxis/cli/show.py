"""`twoaxis show NAME`: equation, source, initialisation, cost and parameters of one mixer."""

import inspect
from typing import Annotated, Any

import torch
import typer
from torch import nn

from twoaxis.cli.list import AXES
from twoaxis.cli.output import Json, print_json, print_table
from twoaxis.cli.reference import REFERENCE_SHAPE, REFERENCE_SITE, REFERENCE_STACK
from twoaxis.core.cost import Cost
from twoaxis.core.errors import ConfigError, nearest
from twoaxis.core.overrides import apply_overrides
from twoaxis.core.parameters import declarations
from twoaxis.core.site import Site, Stack


def show(
    name: Annotated[str, typer.Argument(help="A kind that `twoaxis list` prints, such as deep_delta.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Options as key=value, such as value_target=paper.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a mixer does: equation, source, initialisation, options, parameters and cost.

    The place is the last of 12 blocks at d_model 256 and 512 tokens, float32: all of it for a depth mixer, else one sublayer
    or one place inside it.

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
    print_table("Options", ("key", "value"), list(described["options"].items()))
    print()
    parameters = [tuple(parameter.values()) for parameter in described["parameters"]]
    place = {"depth": "the last block", "local": "one place of d_model channels"}.get(axis, "one sublayer")
    title = f"Parameters of {place}" + (" and the ends" if axis == "depth" else "")
    print_table(title, ("name", "shape", "initial value", "tag"), parameters)
    print()
    costs = [(key, f"{value:,}") for key, value in described["cost"].items()]
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
    described["options"] = {key: value for key, value in config.to_data().items() if key != "kind"}
    described["parameters"] = _parameters(axis, config)
    described["cost"] = _cost(axis, config)
    return described


def _parameters(axis: str, config: Any) -> list[dict[str, str]]:
    with torch.device("meta"):
        module = _depth_part(config) if axis == "depth" else config.build(_place(axis))
    return [
        {"name": name, "shape": " x ".join(map(str, parameter.shape)), "init": str(declaration.init), "tag": declaration.tag}
        for name, parameter, declaration in declarations(module)
    ]


def _place(axis: str) -> Any:
    return REFERENCE_STACK.d_model if axis == "local" else REFERENCE_SITE


def _depth_part(config: Any) -> nn.Module:
    """The depth mixers of the last block, and both ends."""
    stack = config.prepare(REFERENCE_STACK)
    sites = _last_block(stack)
    ends = config.build_ends(stack)
    mixers = config.build_block(sites, ends)
    part = nn.ModuleDict({f"sublayer {site.index}": mixer for site, mixer in zip(sites, mixers, strict=True)})
    part["ends"] = ends
    return part


def _last_block(stack: Stack) -> list[Site]:
    return [site for site in stack.sites if site.block == stack.n_blocks - 1]


def _cost(axis: str, config: Any) -> dict[str, int]:
    stack = config.prepare(REFERENCE_STACK) if axis == "depth" else REFERENCE_STACK
    sites = _last_block(stack) if axis == "depth" else [_place(axis)]
    cost = sum((config.cost(site, REFERENCE_SHAPE) for site in sites), Cost())
    tokens = REFERENCE_SHAPE.total_tokens
    found = {
        "parameters": cost.params,
        "matmul flops per token": cost.matmul_flops // tokens,
        "attention flops per token": cost.pair_flops // tokens,
        "elementwise flops per token": cost.elementwise_flops // tokens,
        "cache bytes after all tokens": cost.cache_bytes,
    }
    if axis == "depth":
        found["state bytes per token, last boundary"] = 4 * config.state_floats(stack, stack.n_sublayers)
        found["bytes saved for backward beyond the state"] = cost.saved_bytes
    return found
