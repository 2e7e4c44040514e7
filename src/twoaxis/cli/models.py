"""Models that verbs work on, wherever they come from."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from twoaxis.core.errors import CheckpointError, ConfigError, problem

if TYPE_CHECKING:
    from twoaxis.data import Tokenizer
    from twoaxis.model import Decoder

SOURCES = "A run folder, a Hugging Face folder with safetensors, or a GGUF file."
"""What `load_model` reads, for the help of a verb."""

Step = Annotated[int | None, typer.Option(min=0, help="The checkpoint of a run, by its step; the newest without it.")]


class Loaded(NamedTuple):
    """A model with its tokenizer.

    Attributes:
        model: on the CPU, in evaluation mode.
        tokenizer: of the model.
        step: steps of a run that the weights have taken; None for models from elsewhere.
        ends: tokens that end what the model writes.
    """

    model: "Decoder"
    tokenizer: "Tokenizer"
    step: int | None = None
    ends: frozenset[int] = frozenset()


def load_model(source: Path, step: int | None = None) -> Loaded:
    """Reads the model of a run, of a Hugging Face folder (ours, or Llama-like), or of a GGUF file.

    Args:
        source: the folder or file.
        step: whose checkpoint of a run is read; None for the newest.

    Raises:
        CheckpointError: nothing there, something damaged, or no tokenizer.
        ConfigError: a model that our decoder cannot be, a library that is missing, or a step of what is no run.
    """
    from twoaxis.checkpoints.published_folder import read_json, read_pretrained
    from twoaxis.data.tokenizer import SubwordTokenizer
    from twoaxis.model.config_names import MODEL_TYPE
    from twoaxis.train import load_trained

    if (source / "checkpoints").is_dir():
        trained = load_trained(source, step)
        return Loaded(trained.model.eval(), trained.tokenizer, trained.step, end_tokens(source, trained.tokenizer))
    if step is not None:
        raise ConfigError(problem("--step", step, f"left out, since {source} is no run folder", "name a run, or leave it out"))
    if (source / "config.json").is_file() and read_json(source / "config.json").get("model_type") == MODEL_TYPE:
        from twoaxis.interop.hugging_face import import_folder

        model, tokenizer = import_folder(source)
    else:
        model, text, end = read_pretrained(source)
        tokenizer = None if text is None else SubwordTokenizer(text, end, f"tokenizer of {source}")
    return with_tokenizer(source, model.eval(), tokenizer)


def with_tokenizer(source: Path, model: "Decoder", tokenizer: "Tokenizer | None") -> Loaded:
    """A model from elsewhere, which needs a tokenizer too.

    Raises:
        CheckpointError: there is none.
    """
    if tokenizer is None:
        raise CheckpointError(f"{source}: has no tokenizer.json: must have one to go on with; save the tokenizer there")
    return Loaded(model, tokenizer, ends=end_tokens(source, tokenizer))


def end_tokens(source: Path, tokenizer: "Tokenizer") -> frozenset[int]:
    """The tokens that end what a model writes: the end of a document, and what its `generation_config.json` names."""
    from twoaxis.checkpoints.source_files import generation_defaults, read_source_files
    from twoaxis.data.text_stream import stop_tokens

    named = generation_defaults(read_source_files(source)).get("eos_token_id", [])
    return stop_tokens(tokenizer) | frozenset(named if isinstance(named, list) else [named])
