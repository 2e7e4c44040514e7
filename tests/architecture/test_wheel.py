"""The source distribution builds a wheel that has the package and its data, and nothing else."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import twoaxis

MOST_BYTES = 2_000_000

FILTER: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Known since Python 3.11.4; 3.12 warns without it."""

BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def built(what: str, source: Path, folder: Path) -> Path:
    folder.mkdir()
    command = [sys.executable, "-c", BUILD, f"build_{what}", str(folder)]
    found = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    [path] = folder.iterdir()
    return path


def test_a_wheel_from_the_source_distribution_has_the_package_alone(root: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(root / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(root / "tests" / "architecture", tree / "tests")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(root / name, tree)
    with tarfile.open(built("sdist", tree, tmp_path / "sdist")) as packed:
        packed.extractall(tmp_path / "unpacked", **FILTER)
    [source] = (tmp_path / "unpacked").iterdir()
    assert source.name == f"twoaxis-{twoaxis.__version__}" and not (source / "tests").exists()
    wheel = built("wheel", source, tmp_path / "wheel")
    assert wheel.name == f"twoaxis-{twoaxis.__version__}-py3-none-any.whl" and wheel.stat().st_size <= MOST_BYTES
    with zipfile.ZipFile(wheel) as packed_wheel:
        names = [Path(name) for name in packed_wheel.namelist()]
    files = (path.relative_to(tree / "src") for path in (tree / "src" / "twoaxis").rglob("*") if path.is_file())
    assert {name for name in names if not name.parts[0].endswith(".dist-info")} == set(files)
