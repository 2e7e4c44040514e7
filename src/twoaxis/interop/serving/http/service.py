"""What all routes share."""

import asyncio
from dataclasses import dataclass, field

from twoaxis.interop.serving.engine import Engine
from twoaxis.interop.serving.metrics import Metrics
from twoaxis.interop.serving.work import Served


@dataclass
class Service:
    """One served model.

    Attributes:
        engine: has been started; whoever started it stops it.
        served: the model as its clients see it.
        metrics: counts.
        closing: set when requests are to be told that the server stops.
    """

    engine: Engine
    served: Served
    metrics: Metrics = field(init=False)
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.engine)

    async def close(self) -> None:
        """Ends every request that is not answered yet, with a word to its client; it takes as long as a step of the batch."""
        self.closing.set()
        await asyncio.to_thread(self.engine.stop)
