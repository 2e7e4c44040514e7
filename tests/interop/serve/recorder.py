"""What tests of the server share: models, prompts, and a callback that remembers."""

import threading
from collections.abc import Callable, Sequence

from twoaxis import Decoder, generate
from twoaxis.interop.serve.generation import Ending, Generation, RequestHandle
from twoaxis.interop.serve.scheduler import Engine

WAIT_SECONDS = 300.0


class Recorder:
    """Remembers the tokens and the ending; `act` is called with the number of tokens so far, in the thread of the model."""

    def __init__(self, act: Callable[[int], bool | None] | None = None) -> None:
        self.tokens: list[int] = []
        self.ending: Ending | None = None
        self._act = act
        self._over = threading.Event()

    def token(self, token: int) -> bool:
        self.tokens.append(token)
        return bool(self._act and self._act(len(self.tokens)))

    def end(self, ending: Ending) -> None:
        assert self.ending is None
        self.ending = ending
        self._over.set()

    def wait(self) -> Ending | None:
        assert self._over.wait(WAIT_SECONDS), "no ending"
        return self.ending


def alone(model: Decoder, generation: Generation) -> list[int]:
    """The answer to a single request."""
    return generate(model, [generation.prompt], generation.max_new_tokens, generation.sampling)[0]


def submit(engine: Engine, *generations: Generation) -> tuple[list[Recorder], Sequence[RequestHandle]]:
    heard = [Recorder() for _ in generations]
    return heard, engine.submit(list(zip(generations, heard, strict=True)))
