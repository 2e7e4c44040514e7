"""Models that verbs work on, wherever they come from."""

from typing import Annotated

import typer

SOURCES = "A run folder, a Hugging Face folder with safetensors, or a GGUF file."
"""The help of an argument from which a verb reads a model."""

Step = Annotated[int | None, typer.Option(min=0, help="The checkpoint of a run, by its step; the newest without it.")]
