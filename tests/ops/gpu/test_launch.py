"""When kernels run: never without Triton, never when they are switched off, and never without a word about it."""

import os

import pytest
import torch

from tests.fresh import run_fresh
from twoaxis.core.errors import ConfigError
from twoaxis.ops import kernels
from twoaxis.ops.depth_read import depth_read
from twoaxis.ops.gpu import launch
from twoaxis.train.environment import changed_environment, describe_environment


class OnGPU:
    """Stands for a tensor on a device that is not here."""

    is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda", 0)


def test_kernels_serve_tensors_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INSTALLED", True)
    there = OnGPU()
    assert launch.served(there)  # type: ignore[arg-type]
    assert not launch.served(torch.ones(1))
    there.dtype = torch.float64
    assert not launch.served(there)  # type: ignore[arg-type]


def test_they_are_switched_off_and_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INSTALLED", True)
    assert launch.status() == "on"
    with kernels.without_kernels():
        assert launch.status() == "off: TWOAXIS_KERNELS=off"
        assert not launch.served(OnGPU())  # type: ignore[arg-type]
    assert launch.status() == "on"


def test_without_triton_the_environment_of_a_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INSTALLED", False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "one")
    assert not launch.served(OnGPU())  # type: ignore[arg-type]
    assert describe_environment(torch.device("cuda", 0), torch.bfloat16)["kernels"] == "off: triton is not installed"
    without = {**describe_environment(torch.device("cpu"), torch.bfloat16), "kernels": ""}
    older = {key: value for key, value in without.items() if key != "kernels"}
    assert changed_environment(older, without) == [] and changed_environment(older, {**without, "kernels": "on"}) == [
        "kernels  -> on"
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("off", "off: TWOAXIS_KERNELS=off"),
        ("no", "ConfigError: TWOAXIS_KERNELS='no': must be 'on' or 'off'; change the environment variable"),
    ],
)
def test_the_switch_is_an_environment_variable(value: str, expected: str) -> None:
    code = "from twoaxis.ops.gpu import launch; launch.INSTALLED = True; print(launch.status())"
    done = run_fresh(code, env={**os.environ, kernels.SWITCH: value})
    assert expected in done.stdout + done.stderr


def test_triton_is_loaded_by_the_first_launch_only() -> None:
    done = run_fresh("import sys, twoaxis, twoaxis.ops.gpu.depth_read_operator; print('triton' in sys.modules)")
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_a_device_that_is_too_old_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    with pytest.raises(
        ConfigError, match=r"Tesla T4 has compute capability 7.5: must be at least 8.0; set TWOAXIS_KERNELS=off"
    ):
        launch.check_capability.__wrapped__(0)


def test_rows_that_are_not_aligned_are_copied() -> None:
    numbers = torch.arange(64, dtype=torch.bfloat16)
    aligned, shifted, strided = numbers[8:16], numbers[1:9], numbers[::2]
    assert kernels.ready(aligned) is aligned
    for one in (shifted, strided):
        copy = kernels.ready(one)
        assert torch.equal(copy, one) and copy.is_contiguous() and copy.data_ptr() % 16 == 0


def test_padding_and_sets() -> None:
    one = torch.ones(1)
    assert [len(launch.padded([one] * n, one)) for n in (1, 4, 5, 9, 63)] == [4, 4, 8, 16, 64]
    assert kernels.spread([one], 0b10, [2 * one] * 3)[1] is one
    assert kernels.bits([True, False, True]) == 0b101


def test_on_a_cpu_nothing_changes() -> None:
    v, r = [torch.ones(1, 2, 4), torch.zeros(1, 2, 4)], [torch.ones(1, 2)] * 2
    with kernels.without_kernels():
        off = depth_read(v, r, torch.ones(4))
    assert torch.equal(depth_read(v, r, torch.ones(4)), off)
