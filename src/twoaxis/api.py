"""Loads, saves and retrofits models: the part of the public interface that reads and writes files."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twoaxis.core.errors import CheckpointError, ConfigError, problem

if TYPE_CHECKING:
    from twoaxis.data import Tokenizer
    from twoaxis.model import Decoder


class Loaded(NamedTuple):
    """A model with its tokenizer.

    Attributes:
        model: on the CPU, in evaluation mode.
        tokenizer: of the model.
        step: steps of a run that the weights have taken; None for models from elsewhere.
        ends: tokens that end a generated text.
    """

    model: "Decoder"
    tokenizer: "Tokenizer"
    step: int | None = None
    ends: frozenset[int] = frozenset()


def load(path: Path | str, step: int | None = None) -> "Decoder":
    """Reads a model, ready to generate: on the CPU, in evaluation mode, with its tokenizer as `model.tokenizer`.

    Args:
        path: a run folder, a Hugging Face folder (ours, or Llama-like), or a GGUF file.
        step: whose checkpoint of a run is read; None for the newest.

    Raises:
        CheckpointError: nothing there, or something damaged.
        ConfigError: a model that our decoder cannot be, or a step of a folder that is no run.

    Example:
        >>> load("runs/none")
        Traceback (most recent call last):
        ...
        twoaxis.core.errors.CheckpointError: runs/none/config.json: cannot be read (No such file or directory); name the folder
        of a whole checkpoint
    """
    from twoaxis.checkpoints.published_folder import read_source_files

    source = Path(path)
    model, tokenizer, _ = _read(source, step)
    model.tokenizer = tokenizer
    if tokenizer is not None:
        model.source_files, model.end_tokens = read_source_files(source), end_tokens(source, tokenizer)
    return model


def load_model(source: Path, step: int | None = None) -> Loaded:
    """Reads a model that has a tokenizer; arguments and errors as in `load`.

    Raises:
        CheckpointError: no tokenizer.
    """
    model, tokenizer, taken = _read(source, step)
    return with_tokenizer(source, model, tokenizer)._replace(step=taken)


def _read(source: Path, step: int | None) -> tuple["Decoder", "Tokenizer | None", int | None]:
    from twoaxis.checkpoints.decoder_folder import read_decoder
    from twoaxis.checkpoints.published_folder import read_json, read_pretrained
    from twoaxis.data.tokenizer import SubwordTokenizer
    from twoaxis.model.config_json import MODEL_TYPE
    from twoaxis.train import RunFolder, load_trained

    if RunFolder(source).is_begun:
        trained = load_trained(source, step)
        return trained.model.eval(), trained.tokenizer, trained.step
    if step is not None:
        raise ConfigError(problem("step", step, f"left out, since {source} is no run folder", "name a run, or leave it out"))
    if (source / "config.json").is_file() and read_json(source / "config.json").get("model_type") == MODEL_TYPE:
        ours = read_decoder(source)
        return ours.model, ours.tokenizer, None
    model, text, end = read_pretrained(source)
    tokenizer = None if text is None else SubwordTokenizer(text, end, f"tokenizer of {source}")
    return model.eval(), tokenizer, None


def with_tokenizer(source: Path, model: "Decoder", tokenizer: "Tokenizer | None") -> Loaded:
    """Puts a model and its tokenizer together.

    Raises:
        CheckpointError: there is none.
    """
    if tokenizer is None:
        remedy = f"call tokenizer.save_pretrained({str(source)!r}) in transformers; the model alone is read by twoaxis.load"
        raise CheckpointError(f"{source}: has no tokenizer.json: must have one to go on with; {remedy}")
    return Loaded(model, tokenizer, ends=end_tokens(source, tokenizer))


def end_tokens(source: Path, tokenizer: "Tokenizer") -> frozenset[int]:
    """The tokens that end a generated text: the end of a document, and those in `generation_config.json`."""
    from twoaxis.checkpoints.published_folder import generation_defaults, read_source_files
    from twoaxis.data.text_stream import stop_tokens

    named = generation_defaults(read_source_files(source)).get("eos_token_id", [])
    return stop_tokens(tokenizer) | frozenset(named if isinstance(named, list) else [named])


def save(model: "Decoder", path: Path | str) -> Path:
    """Writes a model for `load`: a folder with `config.json`, `model.safetensors`, and its tokenizer where it has one.

    Raises:
        DataError: the folder holds something, or cannot be written.
    """
    from twoaxis.checkpoints.decoder_folder import write_decoder

    return write_decoder(model, Path(path), _tokenizer(model), model.source_files)


def save_pretrained(model: "Decoder", path: Path | str) -> Path:
    """Writes a model for `load` and for transformers, with its tokenizer files and generation settings.

    Raises:
        ConfigError: transformers is not installed.
        DataError: the folder holds something, or cannot be written.
    """
    from twoaxis.interop.hugging_face import export_folder

    return export_folder(model, Path(path), _tokenizer(model), model.source_files)


def _tokenizer(model: "Decoder") -> "Tokenizer | None":
    from twoaxis.data import Tokenizer

    if model.tokenizer is None or isinstance(model.tokenizer, Tokenizer):
        return model.tokenizer
    got, allowed = type(model.tokenizer).__name__, "a Tokenizer of twoaxis.data, which can be written"
    raise ConfigError(problem("model.tokenizer", got, allowed, "set it to None to save the model alone"))


def retrofit(
    source: "Decoder | Path | str", depth: Any = None, sequence: Any = (), *, bound: float = 1e-3, seed: int = 0
) -> "Decoder":
    """Adds mixers to a trained model, which computes the same at first; `twoaxis retrofit` also writes a run to train on.

    Args:
        source: the model, or what `load` reads.
        depth: the new depth mixer, by kind, table or configuration; None leaves it.
        sequence: a new mixer along positions, such as `short_swa` or `canon`, or several.
        bound: the largest difference of logits that is accepted, on random tokens.
        seed: of the values of new parameters, and of the tokens.

    Returns:
        A new model with the weights of the old one, its tokenizer, and the new mixers.

    Raises:
        ConfigError: nothing to add, mixers that do not fit, logits that differ by more than the bound, or a model that is
            not in float32 on the CPU.

    Example:
        >>> from twoaxis import Decoder
        >>> plain = Decoder({"vocab_size": 16, "d_model": 8, "n_layers": 2})
        >>> retrofit(plain, depth="attention_residuals", sequence=["canon"]).config.depth.kind
        'attention_residuals'
    """
    import torch

    from twoaxis.checkpoints.retrofit import convert, largest_difference, target_config
    from twoaxis.model import Decoder

    if depth is None and not sequence:
        raise ConfigError("nothing to add; name a mixer with depth or sequence")
    base = source if isinstance(source, Decoder) else load(source)
    if (got := (base.embedding.weight.dtype, base.embedding.weight.device.type)) != (torch.float32, "cpu"):
        remedy = 'convert it first with model.float().to("cpu"), and back afterwards'
        raise ConfigError(problem("model", f"{got[0]} on {got[1]}", "torch.float32 on cpu", remedy))
    sequence = [sequence] if isinstance(sequence, str | Mapping) else [*sequence]
    model = convert(base, target_config(base.config, depth, sequence), seed).model
    width = min(256, base.config.max_seq_len)
    rows = torch.randint(base.config.vocab_size, (4, width), generator=torch.Generator().manual_seed(seed))
    difference, _ = largest_difference(base, model, rows)
    # A difference that is no number is not accepted either.
    if not difference <= bound:
        remedy = "choose a mixer that starts as the model was, or raise bound"
        raise ConfigError(problem("difference of logits", difference, f"at most bound={bound:g}", remedy))
    model.tokenizer, model.end_tokens, model.source_files = base.tokenizer, base.end_tokens, base.source_files
    return model.train(base.training)
