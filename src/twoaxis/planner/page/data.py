"""The data of the page: coefficients of every method, the devices, and the controls of the reader."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from twoaxis.core.errors import ConfigError
from twoaxis.planner.advice import RECOMMENDED
from twoaxis.planner.coefficients import coefficients
from twoaxis.planner.formulas.rows import methods_of
from twoaxis.planner.hardware import Device, read_device, shipped_devices
from twoaxis.planner.methods import WINDOW, Goal, Method, Refusal, fitted, methods
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.quantities import Precision
from twoaxis.planner.search import RESERVE
from twoaxis.planner.setting import ParallelLayout, Setting

Data = dict[str, Any]

WINDOWS = (4, 8, 16, 32, 64, WINDOW, 256, 512, 1024, 2048, 4096, 8192)
"""Windows of ShortSWA that a reader can choose; each is counted, since saved bytes are no simple function of the window."""

OF_ONE_MODEL = ("name", "depth_kind", "n_layers", "sublayers", "ends", "leaves")
"""Coefficients that differ between methods; the others are shared."""

MOST_TENSOR_RANKS = 16

GOALS: tuple[tuple[Goal | Literal["all"], str], ...] = (
    ("all", "every method"),
    ("shortcut", "a better shortcut"),
    ("local-mixing", "local mixing along positions"),
)


def tables(model: ModelShape, setting: Setting) -> Data:
    """Returns the data that the formulas of the page read, ready for JSON; see `formulas.rows` for its form.

    Args:
        model: of the plan; every method is applied to it.
        setting: where the page starts.
    """
    found: Data = {name: [] for name in ("rows", "depths", "packs", "families", "models")}
    found |= {"layers": depths_of(model), "windows": list(WINDOWS)}
    pool = Pool(found)
    for n_layers in found["layers"]:
        deep = with_layers(model, n_layers)
        found["models"].append([pool.model(method, deep, setting.precision) for method in range(len(methods()))])
    found["methods"] = [{"name": named(method), "goal": method.goal} for method in methods()]
    found["tensor"] = [ranks_of(method, model, setting.layout.tensor) for method in methods()]
    names = [method["name"] for method in found["methods"]]
    found["recommended"] = [
        {"goal": goal, "words": words, "method": names.index(RECOMMENDED[goal][0].removesuffix(f" w={WINDOW}"))}
        for goal, words in GOALS
        if goal != "all"
    ]
    found["devices"] = [numbers for device in devices_of(setting) if (numbers := device_numbers(device, setting)) is not None]
    return found


def depths_of(model: ModelShape) -> list[int]:
    """The numbers of blocks that a reader can choose: half of them, all, and twice as many."""
    return sorted({max(1, model.n_layers // 2), model.n_layers, 2 * model.n_layers})


def with_layers(model: ModelShape, n_layers: int) -> ModelShape:
    """The model with fewer or more blocks: its first ones, or all of them repeated.

    Example:
        >>> from twoaxis.planner.model import read_model
        >>> with_layers(read_model("dense-7b"), 48).n_layers
        48
    """
    return replace(model, blocks=tuple(model.blocks[index % model.n_layers] for index in range(n_layers)))


def named(method: Method) -> str:
    """The name of a method without its window, which a reader sets."""
    return method.name.removesuffix(f" w={WINDOW}")


def devices_of(setting: Setting) -> list[Device]:
    """The device of the setting, then the shipped ones."""
    own = setting.device
    return [own, *(read_device(name) for name in shipped_devices() if name != own.name)]


def device_numbers(device: Device, setting: Setting) -> Data | None:
    """The numbers of a device for the formulas; None if it has no matrix products in the precision of the setting."""
    try:
        rates = device.numbers(setting.number_format)
    except ConfigError:
        return None
    fast, links = device.fast_link, []
    if fast is not None:
        links.append([0 if fast.devices is None else int(fast.devices.value), fast.numbers()])
    if device.network is not None:
        links.append([0, device.network.numbers()])
    return {
        "name": device.name,
        "description": device.description,
        "rates": rates,
        "links": links,
        "limit_bytes": device.memory_bytes.value * (1 - RESERVE),
    }


class Pool:
    """Coefficients of many models, with equal parts stored once.

    Args:
        tables: whose `rows`, `depths`, `packs` and `families` it fills.
    """

    def __init__(self, tables: Data) -> None:
        self._tables = tables
        self._numbers: dict[str, int] = {}

    def model(self, method: int, model: ModelShape, precision: Precision) -> list[int]:
        """The packs of a method in training and in generation; none if it does not fit the model."""
        shape = fitted(methods()[method], model)
        if isinstance(shape, Refusal):
            return []
        wider = methods(2 * WINDOW)[method].apply(model)
        training = self._pack(shape, precision, {} if wider == shape else self._windowed(method, model, precision))
        generating = shape.in_generation()
        if generating == shape:
            return [training, training]
        families = {} if wider == shape else self._windowed(method, model.in_generation(), precision)
        return [training, self._pack(generating, precision, families)]

    def _windowed(self, method: int, model: ModelShape, precision: Precision) -> dict[int, int]:
        """The family of every sublayer whose numbers depend on the window."""
        shapes = [methods(window)[method].apply(model) for window in WINDOWS]
        places = [at for at, parts in enumerate(zip(*(shape.parts for shape in shapes), strict=True)) if len(set(parts)) > 1]
        # Places with the same sublayers have the same numbers, so one of them is counted.
        first: dict[str, int] = {}
        found = {}
        for at in places:
            key = repr(shapes[0].parts[at])
            if key not in first:
                first[key] = self._family([coefficients(shape, precision)["sublayers"][at] for shape in shapes])
            found[at] = first[key]
        return found

    def _family(self, subs: list[Data]) -> int:
        return self._kept("families", [self._row(sub) for sub in subs])

    def _pack(self, model: ModelShape, precision: Precision, families: dict[int, int]) -> int:
        numbers = coefficients(model, precision)
        self._tables.setdefault("shared", {name: value for name, value in numbers.items() if name not in OF_ONE_MODEL})
        sublayers = [
            [sub["block"], self._row(sub), self._kept("depths", sub["depth"]), families.get(at, -1)]
            for at, sub in enumerate(numbers["sublayers"])
        ]
        pack = {name: numbers[name] for name in ("n_layers", "ends", "leaves")} | {"sublayers": sublayers}
        return self._kept("packs", pack)

    def _row(self, sub: Data) -> int:
        return self._kept("rows", {name: value for name, value in sub.items() if name not in ("block", "depth")})

    def _kept(self, table: str, value: Any) -> int:
        key = table + json.dumps(value)
        if key not in self._numbers:
            self._numbers[key] = len(self._tables[table])
            self._tables[table].append(value)
        return self._numbers[key]


def first_choice(found: Data, model: ModelShape, setting: Setting, prompts: int) -> Data:
    """The setting as the page takes it; see `formulas.rows` for its keys.

    Args:
        found: the tables of the page.
        model: of the plan.
        setting: where the page starts.
        prompts: sequences that generate at once.
    """
    layout = setting.layout
    return {
        "device": [device["name"] for device in found["devices"]].index(setting.device.name),
        "layers": found["layers"].index(model.n_layers),
        "tokens": setting.tokens,
        "window": WINDOW,
        "batch": setting.batch,
        "microbatches": layout.microbatches,
        "pipeline": layout.pipeline,
        "virtual": layout.virtual,
        "tensor": layout.tensor,
        "data": layout.data,
        "prompts": prompts,
        "sequence": layout.sequence,
        "schedule": layout.schedule,
        "forwarding": setting.forwarding,
        "recompute": setting.recompute,
        "sharding": setting.sharding,
        "transfers": setting.transfers,
    }


def tensor_ranks(model: ModelShape, most: int) -> list[int]:
    """Powers of two that divide the heads of the model."""
    return [ranks for ranks in powers(1, most) if _divides(model, ranks)]


def ranks_of(method: Method, model: ModelShape, own: int) -> list[int]:
    """The numbers of tensor ranks on the page that can share the heads of the model with a method."""
    shape = fitted(method, model)
    known = with_own(tensor_ranks(model, MOST_TENSOR_RANKS), own)
    return [] if isinstance(shape, Refusal) else [ranks for ranks in known if _divides(shape, ranks)]


def powers(first: int, last: int) -> list[int]:
    """Powers of two from one to another."""
    return [2**power for power in range(first.bit_length() - 1, last.bit_length())]


def with_own(values: Sequence[int], own: int) -> list[int]:
    """Values in order, with that of the setting among them."""
    return sorted({*values, own})


def _divides(model: ModelShape, ranks: int) -> bool:
    try:
        ParallelLayout(gpus=ranks, tensor=ranks).check(model, ranks)
    except ConfigError:
        return False
    return True


SHARDING = (("none", "nothing"), ("optimizer", "optimizer state"), ("weights", "weights, gradients, optimizer"))
FORWARDING = (("naive", "the whole state"), ("cached", "what the rank has not received"), ("cached_own", "nor made itself"))
WORDS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "sequence": ("Tokens between matrices", (("none", "whole on every tensor rank"), ("tensor", "shared by tensor ranks"))),
    "schedule": ("Schedule with one stage", (("1f1b", "1F1B"), ("gpipe", "GPipe"))),
    "forwarding": ("Stage boundaries send", FORWARDING),
    "transfers": ("Transfers", (("overlapped", "overlapped with computation"), ("blocking", "blocking"))),
    "recompute": ("Backward pass recomputes", (("off", "nothing"), ("block", "blocks"))),
    "sharding": ("Replicas shard", SHARDING),
}
"""The words of `Setting` with their labels."""


def controls(found: Data, choice: Data, model: ModelShape, view: Data) -> dict[str, list[Data]]:
    """The groups of the form; every control has the name of what it sets."""
    fit = [(str(at), found["methods"][at]["name"]) for at in methods_of(found, choice)]
    devices = [(str(at), device["name"]) for at, device in enumerate(found["devices"])]
    depths, windows = found["layers"], found["windows"]
    return {
        "Question": [
            _select("goal", "What for", GOALS, view["goal"]),
            _select("chosen", "Method in detail", fit, str(view["chosen"])),
        ],
        "Model": [
            _slider("layers", "Blocks", list(range(len(depths))), choice["layers"], depths),
            _numbers("tokens", "Tokens in a sequence", powers(512, 2**20), choice),
            _slider("window", "Window of ShortSWA", windows, choice["window"], windows),
        ],
        "Training": [
            _numbers("batch", "Sequences in a batch", powers(1, 8192), choice),
            _numbers("microbatches", "Microbatches", powers(1, 128), choice),
            _words("recompute", choice),
            _words("sharding", choice),
        ],
        "Devices": [
            _select("device", "Device", devices, str(choice["device"])),
            _numbers("tensor", "Tensor ranks", tensor_ranks(model, MOST_TENSOR_RANKS), choice),
            _numbers("pipeline", "Pipeline ranks", powers(1, 32), choice),
            _numbers("virtual", "Stages on each", powers(1, 8), choice),
            _numbers("data", "Replicas", powers(1, 1024), choice),
        ],
        "Messages": [_words(name, choice) for name in ("schedule", "forwarding", "transfers", "sequence")],
        "Generation": [_numbers("prompts", "Sequences at once", powers(1, 512), choice)],
    }


def _numbers(name: str, label: str, values: Sequence[int], choice: Data) -> Data:
    known = with_own(values, choice[name])
    return _slider(name, label, known, choice[name], known)


def _slider(name: str, label: str, values: Sequence[int], own: int, shown: Sequence[int]) -> Data:
    """A slider over a list of numbers."""
    texts = [f"{value:,}".replace(",", "\u202f") for value in shown]
    return {"name": name, "label": label, "values": list(values), "at": list(values).index(own), "texts": texts}


def _words(name: str, choice: Data) -> Data:
    label, options = WORDS[name]
    return _select(name, label, options, choice[name])


def _select(name: str, label: str, options: Sequence[tuple[str, str]], own: str) -> Data:
    return {"name": name, "label": label, "options": options, "own": own}
