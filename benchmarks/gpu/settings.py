"""On which device, and at which size, everything is measured."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Row = dict[str, Any]
"""One line of a table; the key `ok` says whether what it tests holds, in rows that test something."""

Items = dict[str, Callable[[], list[Row]]]
"""What a stage measures, by name: each may fail or be left out without the others."""

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """What all stages share.

    Attributes:
        device: of torch.
        size: `full` for a GPU of data centres, `small` to walk every path within seconds: a few tiny items, nothing compiled.
    """

    device: str
    size: Literal["full", "small"] = "full"

    def pick(self, full: T, small: T) -> T:
        """The value for this size."""
        return full if self.size == "full" else small

    @property
    def on_gpu(self) -> bool:
        """Whether there is device memory to report, and kernels that only GPUs have."""
        return self.device.startswith("cuda")
