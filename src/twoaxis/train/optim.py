"""AdamW, or Muon for matrices and AdamW for the rest, with groups derived from how each parameter is declared."""

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.core.parameters import Declaration, Fused, Tag, declarations
from twoaxis.model import Decoder

Rule = Literal["adamw", "muon"]

NUMBERS: Mapping[Rule, int] = {"adamw": 2, "muon": 1}
"""Numbers that a rule keeps for each parameter: two moments, or one momentum."""

Change = Callable[[str, Tensor], Tensor]
"""Computes a tensor from a whole one of the same shape, given its name."""

OfWholes = Callable[[Mapping[str, Tensor], Change], Iterable[tuple[str, Tensor]]]
"""Yields, by name, what a process holds of the changed whole tensors, given what it holds of them."""

DECAYED: frozenset[Tag] = frozenset({"matrix", "head", "embedding"})
"""Tags with weight decay; tables, norms, biases, gates, queries and mixing weights have none."""


class GroupConfig(Config):
    """Options for the parameters whose name matches a pattern; the last match wins.

    Args:
        pattern: matches whole parameter names, with `*`, `?` and `[...]`, such as `*.pseudo_query`.
        lr_scale: factor on the learning rate; None leaves that of the mixer, which is 1 for all but some tables; 0 freezes: no
            gradient and no optimizer state.
        weight_decay: replaces the default one; None leaves it.
    """

    pattern: str = Field(min_length=1)
    lr_scale: float | None = Field(default=None, ge=0)
    weight_decay: float | None = Field(default=None, ge=0)


class OptimizerConfig(Config):
    """AdamW, or Muon for matrices and AdamW for everything else.

    With `muon`, parameters that are tagged `matrix` are updated by torch's Muon; embeddings, the head, norms, biases, gates,
    queries and mixing weights by AdamW. Matrices that are stored as one are orthogonalised one by one: gate and value of a
    SwiGLU, each head of queries, keys and values (Muon Split of GLM-5, arXiv:2602.15763), each map of a depth mixer. Updates
    have the root mean square of AdamW's (arXiv:2502.16982, eq. 4), so one `lr` and one `weight_decay` serve both.

    A model with `parametrization = "completep"` changes rates, decay and eps of its groups, see `group_factors`.

    Args:
        kind: `adamw` or `muon`.
        lr: learning rate after the warm-up.
        betas: decay rates of the two moments of AdamW.
        eps: added to the root of the second moment of AdamW.
        weight_decay: of matrices, embeddings and the head, times the learning rate per step.
        momentum: decay rate of the momentum of Muon.
        clip_norm: largest norm of the whole gradient; None or infinity does not clip.
        groups: options by parameter name.

    Source: Decoupled Weight Decay Regularization, arXiv:1711.05101, algorithm 2; Muon as in `Muon`.
    """

    called: ClassVar[str] = "optimizer"

    kind: Rule = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    clip_norm: float | None = Field(default=1.0, gt=0, allow_inf_nan=True)
    groups: tuple[GroupConfig, ...] = ()

    @field_validator("clip_norm")
    @classmethod
    def _finite(cls, clip_norm: float | None) -> float | None:
        # JSON has no infinity.
        return None if clip_norm == math.inf else clip_norm

    @field_validator("betas")
    @classmethod
    def _decay_rates(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(problem("betas", betas, "at least 0 and below 1", "write for example [0.9, 0.95]"))
        return betas

    @model_validator(mode="after")
    def _read_by_the_kind(self) -> "OptimizerConfig":
        if self.kind == "adamw":
            self.refuse_options(("momentum",), " with kind='adamw', which has betas", "remove it, or use kind='muon'")
        return self


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with the same optimizer options.

    Attributes:
        rule: that updates them.
        lr_scale: factor on the learning rate; 0 freezes.
        weight_decay: times the learning rate per step.
        eps: of AdamW.
        tags: declared ones, sorted.
        parameters: by full name.
        fused: the matrices of a parameter by name, where it has several.
    """

    rule: Rule
    lr_scale: float
    weight_decay: float
    eps: float
    tags: tuple[Tag, ...]
    parameters: dict[str, nn.Parameter]
    fused: Mapping[str, Fused] = field(default_factory=dict[str, Fused])


def group_factors(declaration: Declaration, rule: Rule, model: nn.Module, name: str) -> tuple[float, float]:
    """The factors of the learning rate and of eps for a parameter; weight decay is divided by that of the rate.

    Equation: with m_N and m_L the width and the depth over those of the base model, and `stacked` p of the declaration:
              rate m_L^-p, times 1/m_N for AdamW where an output sums over the width, and for Muon times 1/m_N where only inputs
              grow with the width and 1/sqrt(m_N) where outputs grow too; eps 1/m_N, in blocks 1/(m_N m_L)
    Source:   CompleteP, arXiv:2505.01618, table 1 with alpha = 1, eq. 40 for eps; Muon: the spectral condition of
              arXiv:2310.17813, eq. 1, for an update whose norm is the rate times 0.2 sqrt(max(rows, columns))
    """
    if not isinstance(model, Decoder) or model.config.parametrization == "standard":
        return 1.0, 1.0
    width, depth = model.config.width_ratio, model.config.depth_ratio
    power = {"both": 0.5 if rule == "muon" else 1.0, "inputs": 1.0}.get(declaration.grows, 0.0)
    # The head has its factor in the forward pass.
    power = 0.0 if declaration.tag == "head" else power
    return width**-power * depth**-declaration.stacked, 1 / (width * (depth if name.startswith("blocks.") else 1.0))


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[ParameterGroup]:
    """Puts every parameter of the model into exactly one group; tables of tokens have groups of their own.

    A parameter that requires no gradient stays frozen.

    Raises:
        ConfigError: a pattern that matches no parameter.
    """
    declared = list(declarations(model))
    check_patterns("optimizer.groups", [change.pattern for change in config.groups], [name for name, _, _ in declared])
    members: dict[tuple[Rule, float, float, float, bool], dict[str, nn.Parameter]] = {}
    found = {name: declaration for name, _, declaration in declared}
    for name, parameter, declaration in declared:
        lr_scale, weight_decay = declaration.lr_scale, config.weight_decay if declaration.tag in DECAYED else 0.0
        for change in config.groups:
            if fnmatch.fnmatchcase(name, change.pattern):
                lr_scale = lr_scale if change.lr_scale is None else change.lr_scale
                weight_decay = weight_decay if change.weight_decay is None else change.weight_decay
        lr_scale = lr_scale if parameter.requires_grad else 0.0
        rule: Rule = "muon" if config.kind == "muon" and declaration.tag == "matrix" else "adamw"
        rate, eps = group_factors(declaration, rule, model, name)
        key = (rule, lr_scale * rate, weight_decay / rate, config.eps * eps, declaration.tag == "table")
        members.setdefault(key, {})[name] = parameter
    groups = []
    for key, own in members.items():
        tags: set[Tag] = {found[name].tag for name in own}
        fused = {name: one for name in own if (one := found[name].fused) is not None}
        groups.append(ParameterGroup(*key[:4], tuple(sorted(tags)), own, fused))
    return groups


def group_table(groups: Iterable[ParameterGroup]) -> str:
    """The groups as text, one line each."""
    lines = [f"{'weight decay':>12}  {'lr scale':>8}  {'eps':>8}  {'tensors':>7}  {'parameters':>12}  {'by':<5}  what"]
    for group in groups:
        count = sum(parameter.numel() for parameter in group.parameters.values())
        eps = f"{group.eps:g}" if group.rule == "adamw" else "-"
        options = f"{group.weight_decay:>12g}  {group.lr_scale:>8g}  {eps:>8}"
        lines.append(f"{options}  {len(group.parameters):>7}  {count:>12,}  {group.rule:<5}  {', '.join(group.tags)}")
    return "\n".join(lines)


def of_wholes(held: Mapping[str, Tensor], change: Change) -> Iterable[tuple[str, Tensor]]:
    """The changed tensors of a process that holds everything."""
    return ((name, change(name, tensor)) for name, tensor in held.items())


def build_optimizer(
    groups: Iterable[ParameterGroup], config: OptimizerConfig, wholes: OfWholes = of_wholes
) -> torch.optim.Optimizer:
    """Builds AdamW over the groups, fused where the device and the dtype support it, and Muon over those of its rule.

    Groups with an `lr_scale` of 0 are frozen: their parameters no longer require a gradient.

    Args:
        groups: of the parameters of this process.
        config: the options.
        wholes: how this process computes on whole matrices.

    Raises:
        ConfigError: all groups are frozen.
    """
    groups = list(groups)
    trained = [group for group in groups if group.lr_scale]
    if not trained:
        raise ConfigError(
            "optimizer: every parameter is frozen: must leave one to train; give some an lr_scale above 0 in optimizer.groups, "
            "or let them require gradients"
        )
    for group in groups:
        if not group.lr_scale:
            for parameter in group.parameters.values():
                parameter.requires_grad_(False)
    options: dict[Rule, list[dict[str, Any]]] = {"adamw": [], "muon": []}
    for group in trained:
        lr, parameters = config.lr * group.lr_scale, list(group.parameters.values())
        own = {"params": parameters, "lr": lr, "weight_decay": group.weight_decay, "full_lr": lr}
        options[group.rule].append(own | ({"eps": group.eps} if group.rule == "adamw" else {"names": [*group.parameters]}))
    every = (parameter for group in trained for parameter in group.parameters.values())
    fused = all(parameter.is_floating_point() and parameter.device.type in ("cpu", "cuda") for parameter in every)
    parts: list[torch.optim.Optimizer] = []
    if options["adamw"]:
        parts.append(torch.optim.AdamW(options["adamw"], lr=config.lr, betas=config.betas, eps=config.eps, fused=fused))
    if options["muon"]:
        matrices = {name: one for group in trained for name, one in group.fused.items()}
        parts.append(Muon(options["muon"], config.momentum, matrices, wholes))
    return parts[0] if not options["muon"] else CombinedOptimizer(parts, fused)


def orthogonalised(update: Tensor, fused: Fused | None = None) -> Tensor:
    """The step of torch's Muon at rate 1 for this update: each matrix orthogonal, times -0.2 sqrt(max(rows, columns)).

    Example:
        >>> orthogonalised(torch.tensor([[3.0, 0.0], [0.0, 5.0]]), Fused((1, 1))).round(decimals=2)
        tensor([[-0.1900, 0.0000],
                [ 0.0000, -0.1900]])
    """
    step = torch.zeros_like(update)
    sizes, dim = fused or Fused((len(update),))
    matrices = [nn.Parameter(part) for part in step.split(sizes, dim)]
    for matrix, part in zip(matrices, update.split(sizes, dim), strict=True):
        matrix.grad = part
    torch.optim.Muon(matrices, lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    return step


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are orthogonalised.

    Gradients are replaced by the updates. The state of a parameter is its momentum, of the shape that the process holds.

    Source: Muon is Scalable for LLM Training, arXiv:2502.16982, algorithm of section 2.1 and eq. 4, as torch.optim.Muon
            computes it: Nesterov momentum, five Newton-Schulz iterations in bfloat16, decoupled weight decay

    Args:
        groups: `params`, `names` of these, `lr` and `weight_decay`.
        momentum: decay rate of the mean gradient.
        fused: the matrices of a parameter by name, where it has several.
        wholes: how a process computes on whole matrices.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        momentum: float,
        fused: Mapping[str, Fused],
        wholes: OfWholes = of_wholes,
    ) -> None:
        super().__init__(groups, {"momentum": momentum})
        self._fused, self._wholes = fused, wholes

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = dict(zip(group["names"], group["params"], strict=True))
            updates = {name: self._update(one, group) for name, one in parameters.items() if one.grad is not None}
            for name, step in self._wholes(updates, lambda name, whole: orthogonalised(whole, self._fused.get(name))):
                parameters[name].mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=group["lr"])

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp_(mean, group["momentum"])


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers, each of some parameters, as one: the groups and the state of all."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer], fused: bool) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {"fused": fused})
        self._parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: Any = None) -> Any:
        """Takes the step of each."""
        for part in self._parts:
            part.step()


def set_learning_rate(optimizer: torch.optim.Optimizer, multiplier: float) -> None:
    """Sets the learning rate of every group to its full value times the multiplier."""
    for group in optimizer.param_groups:
        group["lr"] = group["full_lr"] * multiplier


def check_patterns(where: str, patterns: Iterable[str], names: list[str]) -> None:
    """Refuses patterns without a match.

    Raises:
        ConfigError: a pattern that matches no parameter.
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"{where} pattern {pattern!r} matches no parameter of this model; {nearest(pattern, _endings(names))}"
            )


def _endings(names: list[str]) -> set[str]:
    """Patterns that match: the last one or two parts of each name."""
    parts = [name.split(".") for name in names]
    return {"*." + ".".join(part[-length:]) for part in parts for length in (1, 2) if len(part) > length}
