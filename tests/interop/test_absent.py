"""Without the libraries of extras everything else works, and what needs one says so in one line."""

import json

from ..fresh import run_fresh

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
import contextlib, io, json
from twoaxis.cli import main

found = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    found.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""


def test_verbs_that_need_an_extra_name_it_and_the_others_do_not(tmp_path):
    verbs = [["list"], ["export", str(tmp_path), "--out", str(tmp_path / "out")], ["serve", str(tmp_path)]]
    done = run_fresh(HIDE, json.dumps(verbs))
    assert done.returncode == 0, done.stderr
    listed, export, serve = json.loads(done.stdout)
    assert listed[0] == 0
    assert export == [
        2,
        "",
        "twoaxis: transformers is not installed: must be there for Hugging Face folders; pip install 'twoaxis[hf]'\n",
    ]
    assert serve == [2, "", "twoaxis: fastapi is not installed: must be there to serve; pip install 'twoaxis[serve]'\n"]
