"""Whatever a stranger's folder holds, each reader ends in seconds and names the file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from minimind.cli.main import main
from tests.interop.hostile import COMMANDS, HARMLESS, STATUSES, TEXT, cases, good_folder, words

CASES = cases()
PATIENCE = 120.0  # seconds, of a loaded machine; each takes one or two


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_folder(tmp_path_factory.mktemp("good") / "folder")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    (tmp_path / "text.jsonl").write_text(TEXT, encoding="utf-8")
    return Path(shutil.copytree(good, tmp_path / "folder"))


def test_there_are_enough():
    assert len(CASES) >= 100
    assert {reader for case in CASES.values() for reader in case.readers} == {*COMMANDS}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_each_reader_ends_soon_and_names_the_file(name: str, folder: Path, nursery: Any):
    case = CASES[name]
    case.change(folder)
    for reader in case.readers:
        argv = words(reader, folder)
        place = folder.parent / f"ended-{reader}"
        module = "tools.faults.bounded_command"
        (status,), _, stderr = nursery.run(module, argv, place, processes=1, seconds=PATIENCE)
        report = [line for line in stderr.splitlines() if "error[" in line]
        assert status in STATUSES[reader], (reader, status, stderr)
        assert len(report) == 1, (reader, stderr)
        assert f"{folder}" in report[0], (reader, stderr)
        assert case.named in report[0], (reader, stderr)
        assert "; " in report[0], (reader, stderr)


@pytest.mark.sample(12)
@pytest.mark.parametrize("reader", COMMANDS)
@pytest.mark.parametrize("name", [*HARMLESS, "nothing"])
def test_what_is_not_read_does_not_matter(name: str, reader: str, folder: Path):
    HARMLESS.get(name, lambda _: None)(folder)
    try:
        status = main(words(reader, folder))
    except SystemExit as ended:  # of a run
        status = ended.code or 0
    assert status == 0
