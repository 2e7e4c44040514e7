"""Published language models by their `config.json`: built on the meta device by transformers, and counted there."""

from twoaxis.ledger.published.count import PublishedModel, PublishedSublayer, count_published
from twoaxis.ledger.published.sublayers import Attention

__all__ = ["Attention", "PublishedModel", "PublishedSublayer", "count_published"]
