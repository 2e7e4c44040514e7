"""`twoaxis serve MODEL`: a server with the OpenAI API."""

from pathlib import Path
from typing import Annotated

import typer

from twoaxis.cli.models import SOURCES, Step, model_to_run
from twoaxis.cli.output import name_of, say


def serve(
    model: Annotated[Path, typer.Argument(help=SOURCES)],
    host: Annotated[str, typer.Option(help="Address to listen at; the default only from this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Name of the model for clients; by default that of its folder.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Generations that run at once; 1 makes answers exact to the bit.")] = 16,
    queue: Annotated[int, typer.Option(min=1, help="Generations that wait; more get status 429.")] = 64,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="The longest prompt.")] = 2048,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 1024,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="The largest body of a request.")] = 1 << 20,
    prefill_chunk_tokens: Annotated[int, typer.Option(min=1, help="Read prompts in pieces of this length.")] = 256,
    grace_seconds: Annotated[int, typer.Option(min=0, help="How long running requests may take after a signal to stop.")] = 10,
    compile: Annotated[
        bool,
        typer.Option("--compile", help="Compile the step of the batch at start, which takes minutes; needs a C++ compiler."),
    ] = False,
    step: Step = None,
) -> None:
    """Serve a model with the OpenAI completions and chat API (needs the extra twoaxis[serve]).

    Routes: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics. Requests that come in together run as one
    batch. Chats use the chat template of the model, if it has one. There is no authentication. SIGTERM or Ctrl-C
    lets running requests end; those that take longer get an error.

    Example: twoaxis serve runs/delta --port 8000
    """
    import torch

    from twoaxis.checkpoints.published_folder import chat_template, read_source_files
    from twoaxis.interop.serve.http.routes import Service, create_app, is_loopback
    from twoaxis.interop.serve.http.server import Server, address_of, bind
    from twoaxis.interop.serve.scheduler import Engine
    from twoaxis.interop.serve.work import Limits, Served
    from twoaxis.model.static_cache import check_compiler

    opened = bind(host, port)
    with opened:
        # Before the model, which may take long to load.
        if compile:
            check_compiler(torch.device("cpu"))
        template = chat_template(read_source_files(model))
        loaded = model_to_run(model, step)
        limits = Limits(
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            max_body_bytes=max_body_bytes,
            max_choices=queue,
        )
        called, takes = name or name_of(Path(model.resolve().name)), loaded.model.config.max_seq_len
        served = Served(called, loaded.tokenizer, takes, limits, loaded.ends, template)
        if not is_loopback(host):
            say(f"warning: anyone who can reach {address_of(opened)} can use the model: there is no authentication")
        max_tokens = max_prompt_tokens + max_new_tokens
        with Engine(loaded.model, max_batch, queue, prefill_chunk_tokens, max_tokens, compile, say) as engine:
            ready = f"{served.name}, chats as {served.chat.name}, at {address_of(opened)}/v1"
            service = Service(engine, served)
            Server(create_app(service, host), service.close, lambda: print(ready, flush=True), grace_seconds).serve_on(opened)
