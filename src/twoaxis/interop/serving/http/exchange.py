"""One request and its generations: between the thread of the model and the loop that answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from twoaxis.data import Tokenizer
from twoaxis.interop.serving.choice import Choice, Piece
from twoaxis.interop.serving.engine import Engine, QueueFull, Stopped
from twoaxis.interop.serving.refusal import Refusal
from twoaxis.interop.serving.work import Work


class Exchange:
    """Queues the generations of a request at once and hands over their pieces; belongs to the running event loop.

    Args:
        engine: runs them.
        tokenizer: makes text of tokens.
        work: what is asked.

    Raises:
        Refusal: the queue is full, or the server is stopping.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, work: Work) -> None:
        self.choices = len(work.generations)
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        listeners = [Choice(index, tokenizer, work.stops, work.lead, self._deliver) for index in range(self.choices)]
        try:
            self._tickets = engine.submit(list(zip(work.generations, listeners, strict=True)))
        except QueueFull as error:
            raise Refusal(str(error), 429, code="queue_full") from None
        except Stopped as error:
            raise Refusal(str(error), 503) from None

    def cancel(self) -> None:
        """Takes all generations out that still run."""
        for ticket in self._tickets:
            ticket.cancel()

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces until every choice has ended.

        Raises:
            Refusal: a generation failed, or the server is stopping.
        """
        running = self.choices
        while running:
            piece = await self._pieces.get()
            if piece.ending == "error":
                raise Refusal("the model failed on this request; the log of the server says why", 500)
            if piece.ending == "cancelled":
                raise Refusal("the server is stopping; ask again later", 503)
            running -= piece.ending is not None
            yield piece

    async def whole(self) -> tuple[list[str], list[Piece]]:
        """The text and the last piece of every choice; errors as in `pieces`."""
        texts, last = [""] * self.choices, {}
        async for piece in self.pieces():
            texts[piece.choice] += piece.text
            last[piece.choice] = piece
        return texts, [last[index] for index in range(self.choices)]

    def _deliver(self, piece: Piece) -> None:
        # The loop may be gone when the last generations are cancelled.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
