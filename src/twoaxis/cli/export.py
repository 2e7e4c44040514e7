"""`twoaxis export RUN` and `twoaxis import DIR`: models for other tools, and back."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from twoaxis.api import with_tokenizer
from twoaxis.cli.models import Step
from twoaxis.cli.output import Json, name_of, print_json
from twoaxis.core.errors import CheckpointError


class Target(StrEnum):
    """The library that a folder is written for."""

    HF = "hf"
    VLLM = "vllm"
    SGLANG = "sglang"


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a training run.")],
    out: Annotated[Path, typer.Option(help="The folder to write, new or empty.")],
    to: Annotated[
        Target, typer.Option(help="The library: hf, Hugging Face transformers; vllm or sglang, engines that run it.")
    ] = Target.HF,
    step: Step = None,
    code: Annotated[
        bool, typer.Option("--code", help="Add a line of code that imports twoaxis, for programs with trust_remote_code.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a trained model and its tokenizer for another library (needs the extra twoaxis[hf]).

    The folder loads with `import twoaxis.hf` and AutoModelForCausalLM.from_pretrained, without code of its own. vLLM serves the
    same folder where twoaxis is installed too; for SGLang it also holds a line of code that imports twoaxis, which SGLang runs
    with --trust-remote-code; `--code` adds that line for other programs, such as lm_eval. What engines cannot run is refused;
    docs/engines.md lists it, and docs/hugging_face.md has commands.

    Example: twoaxis export runs/delta --to hf --out delta-hf
    """
    from twoaxis.checkpoints.published_folder import read_source_files
    from twoaxis.interop.engines import check_engine
    from twoaxis.interop.hugging_face import export_folder
    from twoaxis.train import load_trained

    trained = load_trained(run, step)
    if to is not Target.HF:
        check_engine(trained.model.config)
    folder = export_folder(trained.model, out, trained.tokenizer, read_source_files(run), code=code or to is Target.SGLANG)
    if as_json:
        print_json({"folder": name_of(folder), "format": to.value, "step": trained.step})
    else:
        reader = "transformers" if to is Target.HF else to.value
        print(f"{name_of(folder)}: step {trained.step} of {name_of(run)}, for {reader}")


def import_(
    folder: Annotated[Path, typer.Argument(help="A folder that export, or save_pretrained of such a model, has written.")],
    out: Annotated[Path, typer.Option(help="The run folder to write, new or empty.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="FOLDER|bytes", help="Where the tokenizer is, if not in the folder: in another one, or bytes."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run folder from a Hugging Face folder of this library's models.

    The run has one checkpoint, at step 0, which every verb that takes a run reads, and `train` begins with. Trainer and
    save_pretrained of transformers save a model without its tokenizer, unless they are given it; then name it here. The model
    alone is read by `twoaxis.load`. Models of other libraries come in by `retrofit`.

    Example: twoaxis import delta-hf/checkpoint-500 --tokenizer delta-hf --out runs/imported
    """
    from twoaxis.checkpoints.decoder_folder import read_decoder, tokenizer_from
    from twoaxis.checkpoints.published_folder import keep_source_files
    from twoaxis.train import save_trained

    model, own = read_decoder(folder)
    if tokenizer is None and own is None:
        remedy = "name it with --tokenizer FOLDER, or --tokenizer bytes; the model alone is read by twoaxis.load"
        raise CheckpointError(f"{folder}: holds no tokenizer: a run must have one, to train and to generate; {remedy}")
    loaded = with_tokenizer(folder, model, own if tokenizer is None else tokenizer_from(tokenizer))
    # Special tokens and chats belong to the tokenizer.
    source = folder if tokenizer in (None, "bytes") else Path(str(tokenizer))
    written = save_trained(out, loaded.model, loaded.tokenizer, write_more=keep_source_files(source))
    if as_json:
        print_json({"run": name_of(written)})
    else:
        print(f"{name_of(written)}: the model of {name_of(folder)}")
