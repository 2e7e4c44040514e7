"""Models that verbs work on, wherever they come from."""

from typing import Annotated

import typer

SOURCES = "A run folder, a Hugging Face folder with safetensors, or a GGUF file."
"""What a verb reads models from, for its help."""

Step = Annotated[int | None, typer.Option(min=0, help="The checkpoint of a run, by its step; the newest without it.")]
