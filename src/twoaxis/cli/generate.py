"""`twoaxis generate RUN`: text from a trained model."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from twoaxis.cli.models import SOURCES, load_model
from twoaxis.cli.output import Json, print_json
from twoaxis.core.errors import DataError


def generate(
    run: Annotated[Path, typer.Argument(help=SOURCES)],
    prompt: Annotated[str, typer.Option(help="The text to continue; - reads standard input.")] = "The ",
    max_new_tokens: Annotated[int, typer.Option(min=0, help="New tokens.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among this many most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Sample within this probability mass, in (0, 1].")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    prefill_chunk_tokens: Annotated[int | None, typer.Option(min=1, help="Read the prompt in pieces of this length.")] = None,
    as_json: Json = False,
) -> None:
    """Continue a text with a trained model; the new text appears as it is made.

    Example: twoaxis generate runs/delta --prompt "Fellow citizens" --temperature 0
    """
    from twoaxis.data.text_stream import TextStream
    from twoaxis.model.generate import stream
    from twoaxis.model.sampling import Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    # Before the model, which may take long to read.
    text = _standard_input() if prompt == "-" else prompt
    trained = load_model(run)
    tokenizer = trained.tokenizer
    begin = tokenizer.prompt(text)
    steps = stream(trained.model, [begin], max_new_tokens, sampling, prefill_chunk_tokens, tokenizer.vocab_size)
    if not as_json:
        print(text, end="", flush=True)
    new: list[int] = []
    written = TextStream(tokenizer)
    for (token,) in steps:
        if token in trained.ends:
            break
        new.append(token)
        piece = written.push(token)
        if not as_json:
            print(piece, end="", flush=True)
    if as_json:
        print_json({"prompt": text, "text": tokenizer.decode(new), "tokens": new, "step": trained.step})
    else:
        print(written.rest())


def _standard_input() -> str:
    try:
        # As bytes, since the encoding of the terminal may be another.
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"standard input: is not UTF-8 ({error}); must be text in UTF-8; convert it") from None
