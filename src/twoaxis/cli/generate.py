"""`twoaxis generate RUN`: text from a trained model."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twoaxis.cli.models import SOURCES, Step, model_to_run
from twoaxis.cli.output import Json, name_of, print_json, say
from twoaxis.core.errors import ConfigError

if TYPE_CHECKING:
    from twoaxis.data.chat_template import ChatTemplate


def generate(
    run: Annotated[Path, typer.Argument(help=SOURCES)],
    prompt: Annotated[str, typer.Option(help="The text to continue; - reads standard input.")] = "The ",
    max_new_tokens: Annotated[int, typer.Option(min=0, help="New tokens.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among this many most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Sample within this probability mass, in (0, 1].")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Format the prompt as a user's message with the chat template of the model.")
    ] = False,
    special_tokens: Annotated[
        bool, typer.Option("--special-tokens", help="Read names of special tokens in the prompt as those tokens.")
    ] = False,
    prefill_chunk_tokens: Annotated[int | None, typer.Option(min=1, help="Read the prompt in pieces of this length.")] = None,
    step: Step = None,
    as_json: Json = False,
) -> None:
    """Continue a text with a trained model; tokens are printed as they are generated.

    Example: twoaxis generate runs/delta --prompt "Fellow citizens" --temperature 0
    """
    from twoaxis.data.text_stream import TextStream
    from twoaxis.model.generate import Sampling, stream

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    # Before the model, which may take long to load.
    text = _standard_input() if prompt == "-" else prompt
    if chat and special_tokens:
        raise ConfigError("--chat with --special-tokens: must be one of them, since messages are text; leave one out")
    template = _chat_template(run) if chat else None
    trained = model_to_run(run, step)
    tokenizer = trained.tokenizer
    if template is None:
        begin = tokenizer.prompt(text, parse_special=special_tokens)
    else:
        begin = template.prompt([{"role": "user", "content": text}], tokenizer)
    _say_special(tokenizer.special_names_in(text), parsed=special_tokens, chat=chat)
    steps = stream(trained.model, [begin], max_new_tokens, sampling, prefill_chunk_tokens, tokenizer.vocab_size)
    if not as_json and template is None:
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


def _chat_template(source: Path) -> "ChatTemplate":
    from twoaxis.checkpoints.published_folder import chat_template, read_source_files

    template = chat_template(read_source_files(source))
    if template is None:
        raise ConfigError(f"--chat: {name_of(source)} has no chat template: must have one; name a chat model, or leave it out")
    return template


def _say_special(names: Sequence[str], *, parsed: bool, chat: bool) -> None:
    """Notes how names of special tokens in a prompt were read."""
    if names:
        hint = "" if chat else "; --special-tokens reads them as special tokens"
        meaning = "read as special tokens" if parsed else f"read as text{hint}"
        say(f"note: {', '.join(names)} in the prompt: {meaning}")


def _standard_input() -> str:
    from twoaxis.core.text import decode_text

    # As bytes, since the encoding of the terminal may be another.
    return decode_text(sys.stdin.buffer.read(), "standard input")
