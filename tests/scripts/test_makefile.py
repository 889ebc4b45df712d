"""The Makefile: its targets name scripts that exist, and set up what these import."""

import importlib.util
import re
import subprocess
import sys

from tests import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_makefile_and_the_readme_name_the_scripts() -> None:
    for target in ("sweep", "latency", "throughput", "trace"):
        recipe = re.search(rf"^{target}: .* #[#+] .*\n\t(.*)$", MAKEFILE, re.MULTILINE)
        assert recipe and importlib.util.find_spec(re.findall(r"-m (scripts[.\w]+)", recipe[1])[0])
    rows = re.findall(r"^\| `([a-z-]+)` \| `([\w/]+)\.py` \|", (ROOT / "scripts" / "README.md").read_text(), re.MULTILINE)
    assert len(rows) > 2
    for target, script in rows:
        assert re.search(rf"^{target}: .*\n\t.* -m scripts\.{script.replace('/', '[.]')}( |$)", MAKEFILE, re.MULTILINE), target


def test_targets_that_need_setup_alone_import_nothing_that_setup_dev_installs() -> None:
    recipes = "".join(re.findall(r"^[\w-]+: setup #.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE))
    commands = set(re.findall(r"(?:\(PY\)|-m) (\w[\w.]*)", recipes)) | {"scripts.sweep.worker"}
    names = {name.removesuffix(".py") for name in commands}
    assert {"generate", "server", "scripts.sweep", "scripts.quality.accuracy", "scripts.bench.comm.all_reduce"} <= names
    started = sorted(name + ".__main__" * (ROOT / name.replace(".", "/") / "__main__.py").exists() for name in names)
    packages = re.findall(r"^[\w-]+", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    absent = {name.replace("-", "_") for name in packages} - {"triton"}  # which torch brings along where there is a GPU
    code = f"import sys, importlib; sys.modules |= dict.fromkeys({absent}); [importlib.import_module(n) for n in {started}]"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
