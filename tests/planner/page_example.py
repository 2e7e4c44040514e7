"""A small plan with a page, and its numbers by way of `Setting`, which the page never calls."""

import random
from functools import cache
from typing import Any

from twoaxis.model import DecoderConfig
from twoaxis.planner.coefficients import coefficients
from twoaxis.planner.formulas.counts import cache_bytes_of
from twoaxis.planner.hardware import read_device
from twoaxis.planner.methods import fitted, methods
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.page import planner_page
from twoaxis.planner.page.data import tables, with_layers
from twoaxis.planner.setting import ParallelLayout, Setting

Data = dict[str, Any]


@cache
def model() -> ModelShape:
    attention = {"kind": "attention", "n_heads": 8, "n_kv_heads": 4, "head_dim": 32}
    sublayers = [attention, {"kind": "swiglu", "d_ff": 512}]
    data = {"vocab_size": 1000, "d_model": 256, "n_layers": 2, "blocks": [sublayers]}
    return ModelShape.of_decoder(DecoderConfig.from_data(data))


@cache
def setting() -> Setting:
    return Setting(
        read_device("h100"), ParallelLayout(gpus=8, tensor=2, pipeline=2, data=2, microbatches=4), batch=16, tokens=2048
    )


@cache
def page_tables() -> Data:
    return tables(model(), setting())


@cache
def page_text() -> str:
    return planner_page(model(), setting(), "shortcut")


def setting_of(choice: Data) -> Setting:
    """The setting that a choice on the page stands for."""
    found = page_tables()
    grid = {name: choice[name] for name in ("tensor", "pipeline", "virtual", "data", "microbatches", "schedule")}
    layout = ParallelLayout(
        gpus=choice["tensor"] * choice["pipeline"] * choice["data"],
        sequence=choice["sequence"] if choice["tensor"] > 1 else "none",
        **grid,
    )
    words = {name: choice[name] for name in ("batch", "tokens", "forwarding", "recompute", "sharding", "transfers")}
    return Setting(read_device(found["devices"][choice["device"]]["name"]), layout, **words)


def numbers_of(choice: Data, method: int) -> Data:
    """The numbers of a method, from its own coefficients."""
    shape = fitted(methods(choice["window"])[method], with_layers(model(), page_tables()["layers"][choice["layers"]]))
    assert isinstance(shape, ModelShape)
    own, plan = coefficients(shape), setting_of(choice)
    step = plan.training_step(own)
    token = plan.generation_step(own, choice["prompts"], choice["tokens"])
    return {
        "step_seconds": step["step_seconds"],
        "tokens_per_second": step["tokens_per_second"],
        "depth_seconds": step["depth_seconds"],
        "memory_bytes": max(step["memory_bytes"]),
        "sent_bytes": max(step["sent_bytes"], default=0),
        "token_seconds": token["seconds"],
        "token_depth_seconds": token["depth_seconds"],
        "cache_bytes": cache_bytes_of(own, choice["tokens"], 1),
        "prompt_seconds": plan.prefill(own, choice["prompts"], choice["tokens"])["seconds"],
        "prompt_state_bytes": plan.prefill_state_bytes(own, choice["prompts"], choice["tokens"]),
    }


def some_choice(seed: int) -> Data:
    """A choice at random, which may be one that cannot run."""
    pick = random.Random(seed)
    return {
        "device": pick.randrange(len(page_tables()["devices"])),
        "layers": pick.randrange(3),
        "tokens": pick.choice([512, 4096, 131072]),
        "window": pick.choice([16, 256]),
        "batch": pick.choice([8, 32, 128]),
        "microbatches": pick.choice([1, 4, 8, 32]),
        "pipeline": pick.choice([1, 2, 4]),
        "virtual": pick.choice([1, 1, 2]),
        "tensor": pick.choice([1, 2, 4]),
        "data": pick.choice([1, 4]),
        "prompts": pick.choice([1, 64]),
        "sequence": pick.choice(["none", "tensor"]),
        "schedule": pick.choice(["1f1b", "1f1b", "gpipe"]),
        "forwarding": pick.choice(["naive", "cached", "cached_own"]),
        "recompute": pick.choice(["off", "block"]),
        "sharding": pick.choice(["none", "optimizer", "weights"]),
        "transfers": pick.choice(["overlapped", "blocking"]),
    }
