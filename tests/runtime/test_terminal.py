"""No control character of a foreign text reaches a terminal; a pipe gets what there is."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from minimind.cli import generate as generate_commands
from minimind.errors import UsageError
from minimind.runtime.terminal import (
    Guarded,
    aligned,
    columns_of,
    first_lines,
    fitted,
    folded,
    guarded,
    one_line,
    printable,
)

CONTROLS = [*range(0x20), 0x7F, *range(0x80, 0xA0)]
HARMLESS = {0x09, 0x0A}
ROOT = Path(__file__).resolve().parents[2]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_screen(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Let standard output, captured or not, be a terminal of so many columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("minimind.runtime.terminal._is_terminal", lambda stream: True)


def has_controls(text: str) -> bool:
    return any(ord(c) in CONTROLS and ord(c) not in HARMLESS for c in text)


@pytest.mark.parametrize("code", CONTROLS)
def test_a_control_character_is_escaped_at_a_terminal_alone(code: int, monkeypatch):
    text = f"a{chr(code)}[31mb"
    for stream, is_raw in ((Screen(), code in HARMLESS), (io.StringIO(), True)):
        monkeypatch.setattr(sys, "stdout", stream)
        with guarded():
            print(text)
            sys.stdout.writelines([text])
        assert (stream.getvalue() == f"{text}\n{text}") == is_raw
        assert sys.stdout is stream


def test_a_bar_returns_to_the_start_of_its_line_and_a_name_within_a_line_does_not(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with guarded():
        print("\r 10%", end="", file=sys.stderr)
        print("\r", end="", file=sys.stderr)
        print("out_dir  a\rFAKE", file=sys.stderr)
    assert screen.getvalue() == "\r 10%\rout_dir  a\\rFAKE\n"


@pytest.mark.parametrize("code", CONTROLS)
def test_generated_text_is_raw_in_a_pipe_and_escaped_at_a_terminal(code: int, monkeypatch):
    for stream in (Screen(), io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stream)
        for piece in ("a", chr(code), "[2J"):  # a sequence in several pieces
            generate_commands.show(piece)
        assert has_controls(stream.getvalue()) == (not stream.isatty() and code not in HARMLESS)


@pytest.mark.parametrize("code", CONTROLS)
def test_an_error_line_has_none_even_in_a_pipe(code: int):
    assert not has_controls(
        one_line("program", UsageError(f"unknown flag --x{chr(code)}[0m; none"))
    )


def test_what_is_no_control_character_stays():
    assert printable("naïve 春眠 🤗 \t\n é\u00a0") == "naïve 春眠 🤗 \t\n é\u00a0"
    assert printable("a\x1b\x9bb\x7f") == r"a\x1b\x9bb\x7f"


def test_a_terminal_that_is_closed_drops_what_is_written():
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as stream:
        guard = Guarded(stream)
        print("seen", file=guard, flush=True)
        assert os.read(parent, 100) == b"seen\r\n"
        os.close(parent)
        for _ in range(2):
            print("unseen", file=guard, flush=True)
        stream.close()  # nor does the interpreter's own flush fail
    with pytest.raises(ValueError, match="closed"):  # any other error is raised
        guard.flush()


@pytest.mark.parametrize(
    "words",
    [
        ["train_pretrain.py", "--sav\x1b[31m\x9b1m"],
        ["-m", "minimind", "rep\x1b]0;title\x07ort"],
        ["-m", "minimind", "checkpoint", "list", "no\x1bcwhere"],
        ["-m", "minimind", "report", "RUN"],
    ],
    ids=["flag", "command", "place", "foreign metrics"],
)
def test_commands_at_a_real_terminal(words: list[str], tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"event": "run_start", "time": 1.0, "step": 0, "dtype": "\\u001b[2J\\u009b31m"}\n'
    )
    words = [str(tmp_path) if word == "RUN" else word for word in words]
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, stdin=child, stdout=child, stderr=child
    )
    os.close(child)
    shown = b""
    try:
        while part := os.read(parent, 4096):
            shown += part
    except OSError:  # the other side is closed
        pass
    process.wait(60)
    os.close(parent)
    text = shown.decode().replace("\r\n", "\n")
    assert "\\x1b" in text
    assert not has_controls(text)


def test_columns_are_aligned():
    rows = [("a", "1", "x"), ("bbb", "33", ""), ("数据", "5", "y")]
    assert aligned(rows, "<>", "  ").splitlines() == [
        "  a      1  x",
        "  bbb   33",
        "  数据   5  y",  # two columns a character
    ]
    assert aligned([("a", "b"), ("ccc", "d")]) == "a    b\nccc  d"
    assert aligned([["a"], ["bb"]], "><") == " a\nbb"
    assert aligned([]) == ""


# Name, value and source of a flag; a folder, numbers and a sentence.
TABLES = {
    "flags": [
        ("data_path", "/数据/中文语料/第一部分.jsonl 更多的文本", "--data_path"),
        ("batch_size", "16", "auto (2.36M parameters, 20.5K tokens, 1.07 epochs)"),
        ("out_dir", "out/" + "x" * 90, "run.yaml"),
        ("eval_tasks", "cloze " * 12, "--config configs/strong.yaml, which is read first"),
    ],
    "checkpoints": [
        ("checkpoint", "tokens", "saved", "files", "size", "saved by", "state", "kept"),
        *(
            (
                *(f"step_{n:08}", f"{n:,}", "2026-11-30 00:37", "10", "1,601.6 MiB", "2 x ZeRO-2"),
                *("published, hashes not read", "最后一个检查点，也是最好的一个"),
            )
            for n in (12, 99_999_999)
        ),
    ],
}


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_fits_the_screen_and_loses_no_word(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch
):
    use_screen(monkeypatch, columns)
    rows = TABLES[name]
    lines = aligned(rows, indent="  ").splitlines()
    words = [word for row in rows for cell in row for word in cell.split()]
    text = "".join("".join(lines).split())
    for line in lines:
        if "x" * 90 not in line:
            assert columns_of(line) <= columns
    for word in words:
        if word.isascii():
            assert any(word in line for line in lines)
        assert all(text.count(one) >= 1 for one in word)
    assert sorted(text) == sorted("".join(words))


def test_a_table_in_a_pipe_has_a_line_for_each_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "40")
    for rows in TABLES.values():
        assert len(aligned(rows).splitlines()) == len(rows)


def test_lines_are_folded_below_their_text_between_words_and_wide_characters():
    assert folded("data   one two three", 7, 14) == ["data   one two", "       three"]
    assert folded("数据，中文语料。", 2, 10) == ["数据，中文", "  语料。"]
    assert folded("a " + "x" * 20, 4, 10) == ["a", "    " + "x" * 20]
    assert columns_of("e\u0301数") == 3
    assert folded("数据，" * 10_000, 2, sys.maxsize) == ["数据，" * 10_000]  # in linear time


def test_a_command_is_not_folded(monkeypatch: pytest.MonkeyPatch):
    use_screen(monkeypatch, 20)
    command = "  bash run_accelerate.sh \\\n    --dim 64 --max_seq_len 1024"
    assert fitted(f"one two three four five\n{command}\nsix two three four five") == (
        f"one two three four\n  five\n{command}\nsix two three four\n  five"
    )


def test_the_first_lines_of_an_error_are_one():
    error = ValueError("\n one  thing.\n\n and another \nlast.\n")
    assert first_lines(error) == "one thing"
    assert first_lines(error, 2) == "one thing. and another"
    assert first_lines(error, None) == "one thing. and another last"
    assert first_lines(KeyError()) == "KeyError"
