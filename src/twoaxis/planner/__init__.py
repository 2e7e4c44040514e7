"""Floor 4: what each choice costs, from one token to a pipeline of GPUs. Reads configurations; builds and trains nothing."""

from twoaxis.planner.ledger import Ledger, ledger
from twoaxis.planner.model import ModelShape, read_model
from twoaxis.planner.quantities import Precision

__all__ = ["Ledger", "ModelShape", "Precision", "ledger", "read_model"]
