"""Commands in messages: they run as they are printed, in a checkout and from a wheel."""

import shlex
import sys
from pathlib import Path

import pytest

from minimind.runtime import installed
from minimind.runtime.installed import install_extra, install_packages, minimind_command
from tests.conftest import ROOT


def test_a_python_without_the_script_runs_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "its own" / "bin"
    folder.mkdir(parents=True)
    python = folder / "python3"
    assert minimind_command(str(python)) == f"'{python}' -m minimind"
    (folder / "minimind").touch()
    assert minimind_command(str(python)) == f"'{folder / 'minimind'}'"
    monkeypatch.chdir(tmp_path)
    assert minimind_command(str(python)) == "'its own/bin/minimind'"


@pytest.mark.parametrize(
    ("project", "here", "expected"),
    [
        (ROOT, ROOT, ["-e", ".[gguf]"]),
        (ROOT, ROOT / "docs", ["-e", f"{ROOT}[gguf]"]),
        (Path("/venv/lib/python3.11/site-packages"), ROOT, ["minimind-deepspeed[gguf]"]),
    ],
)
def test_an_extra_is_added_to_the_installation_that_is_there(
    project: Path, here: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(installed, "PROJECT", project)
    monkeypatch.chdir(here)
    python, *words = shlex.split(install_extra("gguf"))
    assert Path(python).absolute() == Path(sys.executable)
    assert words == ["-m", "pip", "install", *expected]
    assert install_packages("a", "b").endswith(" -m pip install a b")


def test_a_path_is_absolute_where_the_current_directory_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert installed.near(tmp_path) == str(tmp_path)
