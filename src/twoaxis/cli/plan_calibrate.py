"""`twoaxis plan --calibrate`: this machine's ceilings, and how well they predict what was not fitted."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twoaxis.cli.output import print_json
from twoaxis.core.errors import ConfigError, problem
from twoaxis.display.numbers import seconds_text as _seconds
from twoaxis.display.tables import print_item, print_table

if TYPE_CHECKING:
    from twoaxis.planner.hardware import Device

CEILINGS = ("operation", "measured", "fitted", "fitted/measured")
HELD_OUT = ("computation, not fitted", "operators", "predicted", "measured", "predicted/measured", "bound by")


def plan_calibrate(as_json: bool, out: Path | None = None) -> int:
    """Measures this machine and prints its ceilings and residual errors.

    Args:
        as_json: whether to print JSON.
        out: a file for the device, which `--hardware` accepts.

    Raises:
        ConfigError: a file of another kind, or one that is there already.
    """
    from twoaxis.planner.hardware.calibrate import LIMIT_SECONDS, calibrate, write_device

    # Before the measurement, which takes a while.
    if out is not None and out.suffix != ".toml":
        raise ConfigError(problem("out", str(out), "a file that ends in .toml", f"write to {out.with_suffix('.toml')}"))
    if out is not None and out.exists():
        raise ConfigError(problem("out", str(out), "a new file", "choose another name, or remove this one"))
    print(f"measuring this machine for about {LIMIT_SECONDS:.0f} s", file=sys.stderr)
    found = calibrate()
    if out is not None:
        write_device(found.device, out)
        print(f"wrote {out}", file=sys.stderr)
    if as_json:
        print_json(found.to_data())
        return 0
    _print_device(found.device)
    print()
    rows = [
        (row.name, _seconds(row.measured_seconds), _seconds(row.fitted_seconds), f"{row.ratio:.2f}") for row in found.ceilings
    ]
    print_table("Ceilings", CEILINGS, rows, CEILINGS[1:])
    print()
    held_out = [
        (p.name, p.operators, _seconds(p.predicted_seconds), _seconds(p.measured_seconds), f"{p.ratio:.2f}", p.bound)
        for p in found.predictions
    ]
    print_table("Residual errors", HELD_OUT, held_out, HELD_OUT[1:-1])
    error = found.median_absolute_log_error
    if not math.isnan(error):
        print(f"\nthe median prediction is off by a factor of {math.exp(error):.2f}")
    for name in found.left_out:
        print(f"left out, for lack of time: {name}")
    if found.disturbed:
        print_item("runs of the same thing differed: something else used this machine, so measure again when it is idle", "")
    if out is None:
        print("`--out FILE.toml` keeps the device for --hardware")
    return 0


def _print_device(device: "Device") -> None:
    rows = [(path, f"{figure.value:.4g}") for path, figure in device.figures().items()]
    print_table(f"{device.name}: {device.description}", ("figure", "value"), rows, ("value",))
