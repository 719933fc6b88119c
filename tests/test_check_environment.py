"""What make installs: for a run the packages of a run, for tests those too, for `gpu` none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from scripts.check_environment import is_within, main, problems, requirements
from tests.conftest import ROOT


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # of a make that runs the tests
    env = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(
        ["make", *words], cwd=folder, capture_output=True, text=True, timeout=60, env=env
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the check reads; of the rest nothing, so that a suite that is started fails."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "scripts/check_environment.py"):
        (tmp_path / "checkout" / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    return tmp_path / "checkout"


@pytest.mark.parametrize("target", ["gpu", "gpu-bench"])
def test_an_interpreter_without_the_packages_is_refused_in_one_sentence(
    checkout: Path, tmp_path: Path, target: str
):
    venv.create(tmp_path / "bare")
    python = tmp_path / "bare" / "bin" / "python"
    before = {path.name for path in checkout.iterdir()}
    done = make(checkout, target, f"PYTHON={python}", "DEVICE=cpu")
    assert done.returncode == 2
    sentence, *rest = done.stderr.splitlines()
    assert sentence.startswith(
        f"{python} cannot run this: torch>=2.11,<2.15 is missing, accelerate==1.15.0"
    )
    assert "transformers>=5.17,<5.25 is missing" in sentence
    assert (
        f"; install with {python} -m pip install 'torch>=2.11,<2.15' accelerate==1.15.0 "
        in sentence
    )
    assert len(rest) == 1  # make's own
    assert {path.name for path in checkout.iterdir()} == before  # no .venv, no out
    assert done.stdout == ""


def test_the_given_interpreter_runs_the_suite_on_the_given_device(checkout: Path):
    shown = make(checkout, "--dry-run", "gpu", f"PYTHON={sys.executable}", "DEVICE=cpu").stdout
    assert shown.splitlines() == [
        f"{sys.executable} scripts/check_environment.py pytest",
        f"{sys.executable} -m tools.gpu --device cpu --out out/gpu",
    ]
    without = make(checkout, "--dry-run", "gpu").stdout
    assert " -m venv .venv" in without
    assert without.splitlines()[-1] == (
        f"{checkout}/.venv/bin/python -m tools.gpu --device cuda --out out/gpu"
    )
    bench = make(checkout, "--dry-run", "gpu-bench", "PYTHON=python3").stdout.splitlines()
    assert bench[-1] == "python3 -m benchmarks.gpu --out out/gpu.json"


def test_make_train_takes_the_device_that_is_given_and_else_chooses(checkout: Path):
    assert "--device cpu" in make(checkout, "--dry-run", "train", "DEVICE=cpu").stdout
    assert "--device" not in make(checkout, "--dry-run", "train").stdout


def test_this_interpreter_has_all_of_pyproject_toml():
    assert main([]) == ""
    assert {"torch>=2.11,<2.15", "transformers>=5.17,<5.25"} <= set(requirements())


def test_a_version_below_its_bound_is_named_with_the_bound():
    found = problems(["pytest>=999.1", "pytest", "no-such-distribution>=1"])
    assert found["pytest>=999.1"] == f"pytest is {pytest.__version__}, not >=999.1"
    assert found["no-such-distribution>=1"] == "no-such-distribution>=1 is missing"
    assert "pytest" not in found
    sentence = main(["pytest>=999.1"])
    assert sentence.startswith(
        f"{sys.executable} cannot run this: pytest is {pytest.__version__}, not"
    )
    assert "-m pip install 'pytest>=999.1', or leave out PYTHON=" in sentence


@pytest.mark.parametrize(
    ("installed", "bounds", "is_ok"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.11.0a0+git12", ">=2.11", False),  # which sorts before 2.11
        ("2.12.0a0+nv25.11", ">=2.11", True),  # of a container
        ("2.10.1", ">=2.11", False),
        ("2.14.1+cu130", ">=2.11,<2.15", True),
        ("2.15.0", ">=2.11,<2.15", False),
        ("1.15.1", "==1.15.0", False),
    ],
)
def test_versions_are_compared_as_pip_compares_them(installed, bounds, is_ok):
    assert is_within(installed, bounds) == is_ok


INSTALLED = re.compile(r"pip install .*'\.\[([\w,]+)\]'")


@pytest.mark.parametrize("target", ["train", "setup", "test", "check"])
def test_a_run_and_the_tests_install_what_each_needs_once(checkout: Path, target: str):
    needed = "data,serve" if target == "train" else "dev"
    ready = checkout / ".venv" / (".run-ready" if target == "train" else ".ready")
    first = make(checkout, "--dry-run", target).stdout
    assert INSTALLED.findall(first) == [needed]
    assert f"touch {ready.relative_to(checkout)}\n" in first
    ready.parent.mkdir()
    ready.touch()
    assert not INSTALLED.findall(make(checkout, "--dry-run", target).stdout)
    again = make(checkout, "--dry-run", "-W", "pyproject.toml", target).stdout
    assert INSTALLED.findall(again) == [needed]


def test_a_run_uses_the_packages_of_the_tests_where_they_are(checkout: Path):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / ".run-ready").touch()
    assert INSTALLED.findall(make(checkout, "--dry-run", "test").stdout) == ["dev"]
    (checkout / ".venv" / ".ready").touch()
    # An update must not leave the tests' packages behind.
    again = make(checkout, "--dry-run", "-W", "pyproject.toml", "train").stdout
    assert INSTALLED.findall(again) == ["dev"]


def test_make_train_uses_the_checkouts_environment(checkout: Path):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / ".run-ready").touch()
    shown = make(checkout, "--dry-run", "PYTHON=python3.12", "CONDA_PREFIX=/x", "train").stdout
    assert f"PYTHON={checkout}/.venv/bin/python bash run_accelerate.sh" in shown
    assert "python3.12" not in shown
