"""How every group of parameters of a recipe is optimised: its learning rate and weight decay, by what it declares to be."""

import torch

from twoaxis.core.parameters import declarations
from twoaxis.model import Decoder
from twoaxis.study.costs import vocab_size
from twoaxis.study.report_data import RatesData
from twoaxis.train.optim import parameter_groups
from twoaxis.train.recipe import TrainConfig


def rates_of(recipe: TrainConfig) -> tuple[RatesData, ...]:
    """Learning rate and weight decay of the parameters of a recipe, by group and declared kind.

    Example:
        >>> recipe = TrainConfig(model={"d_model": 8, "n_layers": 1, "depth": "residual_scalars",
        ...                             "blocks": [[{"kind": "attention", "n_heads": 1}, "swiglu"]]})
        >>> {one.what: (one.lr, one.weight_decay) for one in rates_of(recipe)}["mixing"]
        (0.001, 0.0)
    """
    with torch.device("meta"):
        model = Decoder(recipe.decoder(vocab_size(recipe)))
    tags = {name: declaration.tag for name, _, declaration in declarations(model)}
    found = []
    for group in parameter_groups(model, recipe.optimizer):
        for tag in group.tags:
            own = [parameter for name, parameter in group.parameters.items() if tags[name] == tag]
            found.append(
                RatesData(
                    what=tag,
                    lr=recipe.optimizer.lr * group.lr_scale,
                    weight_decay=group.weight_decay,
                    tensors=len(own),
                    parameters=sum(parameter.numel() for parameter in own),
                )
            )
    return tuple(found)
