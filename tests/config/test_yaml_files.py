"""A value in a --config file is the text that stands there: what the command line makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from minimind.config.parse import parse_flags, type_name
from minimind.config.run_config import FLAGS, RunConfig
from minimind.errors import UsageError

TEXTS = """010 017 0123 0x10 0o17 1_000 1:30 1:30.5 1.10 3.0e-4 1e3 .5 .inf .nan -3 +5 no on off yes
    y n 007 2024-01-02 1.0.0 =""".split()
NAMES = [name for name in FLAGS if name not in ("config", "model")]
EMPTY = ("", "~", "null", "Null", "NULL")


def outcome(argv: list[str]) -> RunConfig | None:
    try:
        return parse_flags(argv)
    except UsageError:
        return None


@pytest.mark.sample(15)
@pytest.mark.parametrize("name", [n for n in NAMES if type_name(FLAGS[n]) != "bool"])
def test_the_file_means_what_the_command_line_means(name: str, tmp_path: Path):
    file = tmp_path / "run.yaml"
    for text in TEXTS:
        typed = outcome([f"--{name}={text}"])
        by_flag = typed and getattr(typed, name)
        for written in (text, f'"{text}"', f"'{text}'"):
            file.write_text(f"{name}: {written}\n")
            by_file = outcome(["--config", str(file)])
            assert (by_file and getattr(by_file, name)) == by_flag, f"{name}: {written}"


@pytest.mark.sample(24)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", EMPTY)
def test_an_empty_value_is_refused_with_its_place(name: str, text: str, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(f"# first\n{name}: {text}\n")
    with pytest.raises(UsageError, match=r"run.yaml:[23]:\d+: the value is empty"):
        parse_flags(["--config", str(file)])


@pytest.mark.parametrize("name", [n for n in NAMES if type_name(FLAGS[n]) == "bool"])
def test_on_and_off_are_true_and_false_alone(name: str, tmp_path: Path):
    file = tmp_path / "run.yaml"
    for text, value in (("true", True), ("False", False), ("TRUE", True)):
        file.write_text(f"{name}: {text}\n")
        found = outcome(["--config", str(file)])
        assert found is None or getattr(found, name) is value
    for text in ("yes", "on", "no", "off", "1", "0", "maybe"):
        file.write_text(f"{name}: {text}\n")
        with pytest.raises(UsageError, match="is not true or false"):
            parse_flags(["--config", str(file)])


def test_an_anchor_repeats_its_text(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("max_steps: &n 010\nsave_interval: *n\n")
    run = parse_flags(["--config", str(file)])
    assert (run.max_steps, run.save_interval) == (10, 10)
