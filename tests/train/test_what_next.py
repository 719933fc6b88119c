"""The commands that a finished run names: each is one that can be typed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from minimind.cli.main import build_parser
from minimind.config.parse import parse_flags
from minimind.train.what_next import what_next

DEEP = "/tmp/my runs/it's"


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch):
    """A terminal that is narrower than the commands."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("minimind.runtime.terminal._is_terminal", lambda stream: True)


@pytest.mark.parametrize(
    ("flags", "labels", "form"),
    [
        ("", "write measure fine-tune serve export own", "llama"),
        ("--use_moe", "write measure fine-tune serve export own", "minimind"),
        ("--task sft", "chat measure serve export own", "llama"),
        ("--model hf:HF", "write measure export own", "transformers"),
        ("--model hf:HF --task sft", "chat measure export own", "transformers"),
    ],
)
def test_what_comes_next_fits_the_run_and_can_be_typed(
    flags: str, labels: str, form: str, tmp_path: Path
):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    words = flags.replace("HF", str(tmp_path)).split()
    lines = what_next(parse_flags([*words, "--out_dir", DEEP])).replace("\\\n", "").splitlines()
    assert [line.split()[0] for line in lines] == labels.split()
    for line in lines:
        label, program, *rest = shlex.split(line.replace("own text", "own-text"))
        if label == "fine-tune":
            assert (program, rest[0]) == ("bash", "run_accelerate.sh")
            run = parse_flags(rest[1:])
            assert (run.task, run.init_from, run.out_dir) == ("sft", DEEP, "DIR")
            continue
        assert Path(program).name == "minimind"
        args = build_parser().parse_args(rest)
        if label == "own-text":
            assert (args.command, args.data_path, args.hours) == ("init", ["TEXT.jsonl"], 1)
            continue
        assert args.checkpoint == DEEP
        assert label != "export" or args.format == form
        assert label != "measure" or args.task == ("sft" if "sft" in flags else "pretrain")


@pytest.mark.parametrize("name", ["-dash", "--resume", "~x", "a b", "$HOME `x`", "{x}", "o[1]"])
def test_the_place_of_a_run_is_a_path_in_any_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (line,) = [
        one for one in what_next(parse_flags([f"--out_dir={name}"])).splitlines() if "write" in one
    ]
    args = build_parser().parse_args(shlex.split(line)[2:])
    assert Path(args.checkpoint).expanduser().absolute() == tmp_path / name
