"""Mixers built by keywords: `DeepDelta(d_model=64, value_target="paper")`, for code that has no `DecoderConfig`."""

import inspect
import math
from abc import ABCMeta
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar, overload

from torch import nn

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import DeclaredModule
from twoaxis.core.position import HeadShape, LayerStack, SublayerInfo, SublayerPosition
from twoaxis.core.views import QKV

T = TypeVar("T")

ORDER = ("config", "d_model", "norm_eps")
"""Arguments that may be given without their name."""

ALONE: Mapping[str, Any] = {"norm_eps": 1e-6, "n_layers": 1, "sublayers": 1, "index": 0}
"""Keywords about the model around a mixer that is built alone, with the values for one that stands alone."""

ALONE_IN_ATTENTION: Mapping[str, Any] = {**ALONE, "n_heads": 4, "n_kv_heads": None, "head_dim": None}
"""The same for a mixer that works on the heads of attention, which are those of `AttentionConfig`."""

EMPTY = inspect.Parameter.empty


class MixerType(ABCMeta):
    """Metaclass of mixers: a call with keywords builds the module of the configuration in the class header.

    `class DeepDelta(DepthMixer, config=DeepDeltaConfig)` names the configuration. It is a metaclass since a configuration may
    build a variant of another class, and since the constructor `DeepDelta(config, site)`, which a decoder calls, stays simple.
    A subclass without a configuration is called as it is written.
    """

    config_class: type[Config] | None

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], config: type[Config] | None = None, **kwargs: Any
    ) -> "MixerType":
        """Makes a class of mixers."""
        return super().__new__(mcs, name, bases, {**namespace, "config_class": config}, **kwargs)

    def __init__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], config: type[Config] | None = None, **_: Any
    ) -> None:
        super().__init__(name, bases, namespace)
        if config is not None and cls.__abstractmethods__:
            raise ConfigError(f"mixer {name} has no {', '.join(sorted(cls.__abstractmethods__))}; define it in that class")

    # Any in the first: for T alone, a type checker also checks the keywords against the constructor of T.
    @overload
    def __call__(
        cls: type[T],
        config: Config | Mapping[str, Any] | str | None = None,
        d_model: int | None = None,
        *args: float,
        **options: Any,
    ) -> T | Any: ...
    @overload
    def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T: ...
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Builds a mixer by its constructor, given a configuration and a place, else by keywords."""
        if cls.config_class is None or _calls_constructor(cls, args, kwargs):
            return super().__call__(*args, **kwargs)
        return _by_keywords(cls, cls.config_class, args, kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The keywords with their defaults, for `help` and notebooks."""
        if cls.config_class is None:
            raise AttributeError("__signature__")
        options = {name: field.get_default() for name, field in cls.config_class.model_fields.items() if name != "kind"}
        mixer: Any = cls
        named = {"d_model": EMPTY, **mixer.around, **options}
        parts = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value) for name, value in named.items()]
        return inspect.Signature([inspect.Parameter("config", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None), *parts])


class Mixer(DeclaredModule, metaclass=MixerType):
    """A part of a decoder, on any axis, which keywords can also build alone.

    Attributes:
        places: types of the second argument of the constructor.
        around: keywords about the surrounding model, with their defaults.
    """

    places: ClassVar[tuple[type, ...]] = (SublayerPosition, LayerStack)
    around: ClassVar[Mapping[str, Any]] = ALONE

    @classmethod
    def build_alone(cls, config: Any, site: SublayerPosition) -> nn.Module:
        """Builds the module of a configuration for a model that is not our decoder."""
        return accept_rows(config.build(site))


def _calls_constructor(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if args or kwargs:
        return len(args) > 1 and isinstance(args[0], Config) and isinstance(args[1], cls.places)
    # A class without sizes needs no argument.
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return all(one.default is not EMPTY or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters)


def _by_keywords(cls: Any, config_class: type[Config], args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    if len(args) > len(ORDER):
        raise ConfigError(f"{cls.__name__}: got {len(args)} arguments without names: must be at most 3; name the others")
    ordered = dict(zip(ORDER, args, strict=False))
    if twice := sorted(ordered.keys() & kwargs.keys()):
        raise ConfigError(f"{cls.__name__}: {twice[0]} is given twice; give it once")
    given = {**ordered, **kwargs}
    config, d_model = given.pop("config", None), given.pop("d_model", None)
    fields = config_class.model_fields
    around = {name: given.pop(name, default) for name, default in cls.around.items() if name not in fields}
    if unknown := [name for name in given if name not in fields]:
        known = {*fields, *around, "d_model"} - {"kind"}
        raise ConfigError(f"{cls.__name__}: unknown keyword {unknown[0]!r}; {nearest(unknown[0], known)}")
    if d_model is None:
        raise ConfigError(f"{cls.__name__}: d_model is missing: must be the width of the model; add it, such as d_model=64")
    parsed = _configured(cls, config_class, config, given)
    try:
        site = _site(d_model, **around)
    except ConfigError as error:
        raise ConfigError(f"{cls.__name__}: {error}") from None
    return cls.build_alone(parsed, site)


def _configured(cls: type, config_class: type[Config], config: Any, options: dict[str, Any]) -> Config:
    if isinstance(config, Config) and not isinstance(config, config_class):
        raise ConfigError(problem(f"{cls.__name__}: config", config, f"a {config_class.__name__}", "give keywords alone"))
    if isinstance(config, Config):
        return config.replace(**options) if options else config
    table = {"kind": config} if isinstance(config, str) else {} if config is None else config
    return config_class.parse({**table, **options} if isinstance(table, Mapping) else table)


def _site(d_model: int, index: int = 0, **around: Any) -> SublayerPosition:
    """The position of sublayer `index` in a model of equal blocks."""
    stack = uniform_stack(d_model, **around)
    if type(index) is not int or not 0 <= index < stack.n_sublayers:
        allowed = f"a whole number from 0 to {stack.n_sublayers - 1}"
        raise ConfigError(problem("index", index, allowed, "raise n_layers or sublayers"))
    return stack.sites[index]


def uniform_stack(
    d_model: int,
    norm_eps: float = 1e-6,
    n_layers: int = 1,
    sublayers: int = 1,
    vocab_size: int | None = None,
    **heads: int | None,
) -> LayerStack:
    """Returns a stack of equal blocks; with `heads` every sublayer is attention that has these.

    Raises:
        ConfigError: a size that is not a whole number >= 1, kv-heads that do not divide the heads, or a norm_eps that is not
            positive.
    """
    sizes = {"d_model": d_model, "n_layers": n_layers, "sublayers": sublayers}
    given = {"vocab_size": vocab_size, **heads}
    for name, value in (sizes | {name: one for name, one in given.items() if one is not None}).items():
        if type(value) is not int or value < 1:
            raise ConfigError(problem(name, value, "a whole number >= 1", "correct it"))
    if isinstance(norm_eps, bool) or not isinstance(norm_eps, int | float) or not 0 < norm_eps < math.inf:
        raise ConfigError(problem("norm_eps", norm_eps, "a finite number > 0", "leave it out for 1e-6"))
    slots: tuple[SublayerInfo, ...] = ()
    if n_heads := heads.get("n_heads"):
        kv_heads = heads["n_kv_heads"] or n_heads
        if n_heads % kv_heads:
            raise ConfigError(
                problem(
                    "n_kv_heads", kv_heads, f"a divisor of n_heads={n_heads}", "use n_kv_heads=1 or n_heads for the extremes"
                )
            )
        shape = HeadShape(n_heads, kv_heads, heads["head_dim"] or max(1, d_model // n_heads))
        slots = (SublayerInfo("attention", takes_views=True, heads=shape),) * (n_layers * sublayers)
    return LayerStack(d_model, norm_eps, (sublayers,) * n_layers, slots, vocab_size)


def accept_rows(module: nn.Module) -> nn.Module:
    """Lets a mixer along positions be called without a layout: then every row is one document from its first token on.

    Padding may hold anything: it is taken for zeros, as in a decoder.

    Raises (when the module is called):
        ConfigError: a cache without a layout, which has the positions of the next tokens; a layout that is something else.
    """
    module.register_forward_pre_hook(_with_layout, with_kwargs=True)
    return module


def _with_layout(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not args:
        name = next((name for name in ("context", "x") if name in kwargs), None)
        if name is None:
            return args, kwargs
        args, kwargs = (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}
    context, *rest = args
    names = ("layout", "cache")[len(rest) :]
    if len(rest) > 2 or not kwargs.keys() <= set(names):
        got = ", ".join(sorted(kwargs.keys() - set(names))) or f"{len(args)} arguments"
        raise ConfigError(problem(f"{type(module).__name__}: arguments", got, "context, layout, cache", "leave others out"))
    layout, cache = [*rest, *(kwargs.get(name) for name in names)]
    if layout is None:
        if cache is not None:
            raise ConfigError("layout=None: must be given with a cache; pass TokenLayout.contiguous(tokens, start)")
        tokens = context[0] if isinstance(context, QKV) else context
        layout = TokenLayout.contiguous(tokens.shape[1], device=tokens.device)
    if not isinstance(layout, TokenLayout):
        got, remedy = type(layout).__name__, "leave it out where every row is one document"
        raise ConfigError(problem(f"{type(module).__name__}: layout", got, "a TokenLayout", remedy))
    finite = layout.without_padding
    return (QKV(*map(finite, context)) if isinstance(context, QKV) else finite(context), layout, cache), {}
