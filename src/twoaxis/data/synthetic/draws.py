"""Random numbers that stay the same on every machine and with every version of numpy."""

import numpy as np


class Draws:
    """A stream of random numbers that is a function of its key alone.

    Only raw bits are taken from numpy, which keeps those the same in all versions, but not its distributions.

    Example:
        >>> draws = Draws(0, 1)
        >>> draws.below(10, 4).tolist(), draws.order(4).tolist()
        ([9, 0, 6, 8], [3, 0, 1, 2])
    """

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(list(key)))

    def below(self, limit: int, size: int) -> np.ndarray:
        """Draws `size` whole numbers from 0 to `limit` - 1, each as likely as the others."""
        return (self._bits.random_raw(size) % np.uint64(limit)).astype(np.int64)

    def order(self, size: int) -> np.ndarray:
        """Draws one order of the numbers from 0 to `size` - 1."""
        return np.argsort(self._bits.random_raw(size), kind="stable")
