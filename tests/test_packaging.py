"""A wheel works where there is no checkout: presets and DeepSpeed files are inside the package."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT, sentences

# What a wheel is built from.
SOURCES = ("minimind", "configs", "pyproject.toml", "README.md", "LICENSE")
TRAIN = """
import minimind
from minimind.cli.main import main
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
print(minimind.__file__)
print(DEFAULT_DEEPSPEED_CONFIG)
assert main(["plan", "--model", "104m"]) == 0
assert main(["plan"]) == 0
assert minimind.train({"model": "tiny", "vocab_size": 600, "max_seq_len": 32}, max_steps=1,
    data_path=["text.txt"], batch_size=2, device="cpu", eval_rows=0, out_dir="run") == 0
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as building writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / "copy" / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / "copy" / name)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)],
        cwd=folder / "copy",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = folder.glob("minimind_deepspeed-*.whl")
    return found


def test_a_wheel_has_every_module_and_configuration_file(wheel):
    there = {name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name}
    tracked = subprocess.check_output(
        ["git", "ls-files", "minimind", "configs"], cwd=ROOT, text=True
    ).splitlines()
    inside = {f"minimind/{n}" if n.startswith("configs/") else n for n in tracked}
    assert there == inside
    assert "minimind/py.typed" in there


def test_every_package_of_the_checkout_is_listed():
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^packages = (\[.*?\])", text, re.DOTALL | re.MULTILINE)
    files = [*(ROOT / "minimind").rglob("*.py"), *(ROOT / "configs").rglob("*.*")]
    found = {file.parent.relative_to(ROOT) for file in files if file.is_file()}
    inside = {Path("minimind") / path if path.parts[0] == "configs" else path for path in found}
    assert sorted(".".join(path.parts) for path in inside) == ast.literal_eval(listed)


def test_an_installed_wheel_plans_and_trains_without_a_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (tmp_path / "text.txt").write_text("\n\n".join(sentences(3, 80)))
    environ = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(str(site / "minimind"))
    assert f"\n{site / 'minimind' / 'configs' / 'ds_config.json'}\n" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "step_00000001").is_dir()
