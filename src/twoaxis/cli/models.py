"""Models that verbs work on: runs, exports, published folders, and the reference size of `list` and `show`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from twoaxis import DecoderConfig
from twoaxis.api import Loaded, load_model
from twoaxis.cli.output import say
from twoaxis.core.cost import Cost, Shape
from twoaxis.depth import DepthConfig
from twoaxis.ledger.decoder_memory import decoder_trace
from twoaxis.ledger.stack import StackTrace

REFERENCE = DecoderConfig(vocab_size=512, d_model=256, n_layers=12, norm_eps=1e-6)
REFERENCE_STACK = REFERENCE.stack
REFERENCE_SHAPE = Shape(batch=1, tokens=512)
REFERENCE_SITE = REFERENCE_STACK.sites[-2]


def depth_cost(config: DepthConfig) -> Cost:
    """The cost of a depth mixer in the whole reference model, its ends included."""
    stack = config.prepare(REFERENCE_STACK)
    total = config.ends_cost(stack, REFERENCE_SHAPE)
    for site in stack.sites:
        total += config.cost(site, REFERENCE_SHAPE)
    return total


def depth_trace(config: DepthConfig) -> StackTrace:
    """Measured saved bytes, traffic and states of a depth mixer in the whole reference model."""
    return decoder_trace(REFERENCE.replace(depth=config), REFERENCE_SHAPE)


SOURCES = "A run folder, a Hugging Face folder with safetensors, or a GGUF file."
"""The help of an argument from which a verb reads a model."""

Step = Annotated[int | None, typer.Option(min=0, help="The checkpoint of a run, by its step; the newest without it.")]


def model_to_run(source: Path, step: int | None, note: Callable[[str], None] = say) -> Loaded:
    """Reads a model with its tokenizer, and compiles the kernels that it will run on, which takes a while and is said.

    Args:
        source: as `SOURCES` says.
        step: of a run.
        note: receives one line when kernels are compiled.
    """
    from twoaxis.train.environment import prepare_kernels

    loaded = load_model(source, step)
    prepare_kernels(loaded.model.embedding.weight.device, note)
    return loaded
