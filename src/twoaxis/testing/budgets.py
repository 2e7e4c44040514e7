"""The tolerances of every check, in one table; they only tighten. Whatever is not here is exact."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """One tolerance and where its size comes from."""

    bound: float
    why: str


BUDGETS: dict[str, Budget] = {
    "same_values": Budget(1e-11, "float64, other order of sums: about 1e-15 per operation over a few hundred of them"),
    "same_gradients": Budget(1e-10, "as same_values, through the backward pass of three layers"),
    "engines": Budget(2e-12, "fused against reference in float64, one mixer: about 1e-15 per operation"),
    "engine_gradients": Budget(1e-11, "as engines, relative to the largest gradient"),
    "init_exact": Budget(1e-12, "the same float64 logits up to rounding; toy logits are below 1"),
    "init_up_to_norm": Budget(1e-10, "norm eps 1e-20 against mean squares above 1e-6 leaves rounding only"),
    "init_none": Budget(1e-4, "what is denied must differ by far more than rounding; toy logits are about 0.1"),
    "visible_change": Budget(1e-9, "a disturbance of size 1 that arrives is far above float64 rounding"),
    "position_offset": Budget(1e-9, "angles of positions near 1000 are rounded at 1e-13 and sit in a softmax"),
    "gradcheck_absolute": Budget(1e-6, "central differences with step 1e-6 in float64 are good to about 1e-9"),
    "gradcheck_relative": Budget(1e-5, "as above, for large entries"),
    "low_precision_ratio": Budget(
        3.0, "root mean square error over that of rounding the float64 result once; four independent roundings give 2"
    ),
}


def bound(name: str) -> float:
    """The bound of this name."""
    return BUDGETS[name].bound
