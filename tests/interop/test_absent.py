"""Without the libraries of extras everything else works, and what needs one says so in one line."""

import subprocess
import sys

HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "fastapi"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in ("transformers", "fastapi") else find_spec(name, package)
from twoaxis.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_export_names_the_extra(tmp_path):
    command = [sys.executable, "-c", HIDE, "export", str(tmp_path), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "twoaxis: transformers is not installed: must be there for Hugging Face folders; pip install 'twoaxis[hf]'\n"
    )


def test_serve_names_the_extra(tmp_path):
    done = subprocess.run([sys.executable, "-c", HIDE, "serve", str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "twoaxis: fastapi is not installed: must be there to serve; pip install 'twoaxis[serve]'\n"


def test_other_verbs_do_not_need_it():
    assert subprocess.run([sys.executable, "-c", HIDE, "list"], capture_output=True).returncode == 0
