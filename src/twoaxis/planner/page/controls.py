"""The controls of the page: what a reader can set."""

from collections.abc import Sequence

from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.page.data import Data, powers, tensor_ranks, with_own

GOALS = (("all", "every method"), ("shortcut", "a better shortcut"), ("local-mixing", "local mixing along positions"))
SHARDING = (("none", "nothing"), ("optimizer", "optimizer state"), ("weights", "weights, gradients, optimizer"))
FORWARDING = (("naive", "the whole state"), ("cached", "what the rank has not received"), ("cached_own", "nor made itself"))
WORDS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "sequence": ("Tokens between matrices", (("none", "whole on every tensor rank"), ("tensor", "shared by tensor ranks"))),
    "schedule": ("Schedule with one stage", (("1f1b", "1F1B"), ("gpipe", "GPipe"))),
    "forwarding": ("Stage boundaries send", FORWARDING),
    "transfers": ("Transfers", (("overlapped", "overlapped with computation"), ("blocking", "blocking"))),
    "recompute": ("Backward pass recomputes", (("off", "nothing"), ("block", "blocks"))),
    "sharding": ("Replicas share out", SHARDING),
}
"""Alternatives with names: the words of `Setting`, and what they mean."""


def controls(found: Data, choice: Data, model: ModelShape, view: Data) -> dict[str, list[Data]]:
    """The groups of the form; every control holds the name of what it sets."""
    fit = [(str(at), found["methods"][at]["name"]) for at, packs in enumerate(found["models"][choice["layers"]]) if packs]
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
            _numbers("tensor", "Tensor ranks", tensor_ranks(model, 16), choice),
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
    """A slider over a list of numbers, so that every place of it is one that makes sense."""
    texts = [f"{value:,}".replace(",", "\u202f") for value in shown]
    return {"name": name, "label": label, "values": list(values), "at": list(values).index(own), "texts": texts}


def _words(name: str, choice: Data) -> Data:
    label, options = WORDS[name]
    return _select(name, label, options, choice[name])


def _select(name: str, label: str, options: Sequence[tuple[str, str]], own: str) -> Data:
    return {"name": name, "label": label, "options": options, "own": own}
