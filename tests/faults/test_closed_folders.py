"""Paths in a folder of another user: each flag has the status of a file without permission."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from minimind.cli import main as commands
from minimind.launch import train_pretrain
from minimind.train import program
from tests.closed import closed

SWEEP = "trials: 2\nflags: {max_steps: 2}\ndimensions: {learning_rate: [1e-3, 1e-2]}\n"
# The status, and the words, in which X is a path in the closed folder.
RUN = {
    "--data_path X/a.jsonl": 3,
    "--data_path X": 3,
    "--data_path X/*.jsonl": 3,
    "--data_path X/**/*.jsonl": 3,
    "--data_path open/*/a.jsonl": 3,
    "--data_path T --val_path X/a.jsonl": 3,
    "--source a=X/a.jsonl": 3,
    "--source a=X/a.jsonl:2 --source b=.:1": 3,
    "--source a=X --source b=T": 3,
    "--data_path T --tokenizer X/tokenizer.json": 3,
    "--data_path T --tokenizer X": 3,
    "--data_path T --skip_rows X/rows.txt": 3,
    "--config X/run.yaml": 2,
    "--model X/model.yaml": 2,
    "--model hf:X/model": 2,
    "--data_path T --deepspeed_config X/zero.json": 2,
    "--data_path T --task sft --chat_template X/a.jinja": 2,
    "--max_steps 2 --stages X/stages.yaml": 2,
    "--data_path T --sample_interval 1 --sample_prompts X/prompts.txt": 3,
    "--data_path T --eval_tasks_interval 1 --eval_tasks X/task": 2,
    "--data_path T --init_from X/model": 4,
    "--data_path T --init_from X/model.safetensors": 4,
    "--data_path T --init_from hf:X/model": 4,
    "--data_path T --resume X/step_00000001": 4,
    "--data_path T --out_dir X/run": 5,
    "--data_path T --out_dir X": 5,
    "--data_path T --cache_dir X/cache --out_dir O": 5,
    "--data_path T --mirror file://X/mirror --out_dir O": 5,
}
COMMANDS = {
    "generate --checkpoint X/run --prompt a": 4,
    "generate --checkpoint X --prompt a": 4,
    "generate X/run --prompt a": 4,
    "generate --model X/model --prompt a": 4,
    "generate --checkpoint O --prompts X/prompts.txt": 3,
    "generate --checkpoint O --prompt_file X/prompt.txt": 3,
    "generate --checkpoint O --prompts T --out X/out.jsonl": 5,
    "chat --once a --model X/model": 4,
    "chat --once a --checkpoint X/run": 4,
    "serve --checkpoint X/run": 4,
    "serve --model X/model": 4,
    "eval --checkpoint X/run --data_path T": 4,
    "eval --checkpoint . --data_path X/a.jsonl": 3,
    "export --checkpoint X/run --format llama --out O": 4,
    "export --checkpoint . --format llama --out X/out": 5,
    "import X/model.safetensors --from llama --out O": 4,
    "import X/model --from llama --out O": 4,
    "report X/run": 5,
    "report X": 5,
    "report --checkpoint X/run": 5,
    "report O --out X/report.html": 5,
    "doctor X/run": 5,
    "doctor --checkpoint X/run": 5,
    "checkpoint list X/run": 5,
    "checkpoint verify X/run": 5,
    "checkpoint prune X/run": 5,
    "checkpoint diff X/a X/b": 4,
    "checkpoint diff --checkpoint X/a X/b": 4,
    "checkpoint consolidate X/run --out O": 4,
    "checkpoint average X/a X/b --out O": 4,
    "prepare X/a.jsonl --out O": 3,
    "prepare T --out X/out": 5,
    "prepare T --tokenizer X/tokenizer.json --out O": 3,
    "prepare --sources X/sources.yaml --out O": 2,
    "tokenizer train X/a.jsonl --out O": 3,
    "tokenizer train T --out X/out": 5,
    "tokenizer inspect X/tokenizer.json": 3,
    "data inspect X/prepared": 3,
    "data filter X/a.jsonl --min_chars 2 --out O": 3,
    "data filter T --min_chars 2 --out X/out": 5,
    "data filter T --decontaminate X/a.jsonl --out O": 3,
    "data logits --teacher X/run --data_path T --out O": 4,
    "data logits --teacher . --data_path T --out X/out": 5,
    "data where X/run a:1": 5,
    "data at X/run --step 1": 5,
    "data at --checkpoint X/run --step 1": 5,
    "sweep X/sweep.yaml --out_dir O": 2,
    "sweep S --out_dir X/out": 5,
    "scaling X/run": 5,
    "init X/a.jsonl": 3,
    "init T --out X/run.yaml": 5,
    "plan --config X/run.yaml": 2,
    "env --out_dir X/run": 5,
}


@pytest.fixture(params=["in it", "itself"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A closed folder, or a path in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program.Ending, "watch", lambda _: None)
    (tmp_path / "a.jsonl").write_text('{"text": "hello world"}\n' * 200)
    (tmp_path / "s.yaml").write_text(SWEEP)
    folder = tmp_path / "open" / "closed"
    folder.mkdir(parents=True)
    with closed(folder):
        yield folder / "in" if request.param == "in it" else folder


def words_of(text: str, place: Path) -> list[str]:
    """The words of a command line, with the names that stand for paths replaced."""
    for name, path in {"X": place, "T": "a.jsonl", "S": "s.yaml", "O": "new"}.items():
        text = re.sub(rf"\b{name}\b", str(path), text)
    return text.split()


@pytest.mark.parametrize(("text", "status"), RUN.items())
def test_a_run(text: str, status: int, place: Path, capsys: pytest.CaptureFixture[str]):
    common = "" if "--deepspeed_config" in text else "--deepspeed_config none"
    assert train_pretrain.main(words_of(f"{text} {common} --device cpu", place)) == status
    _require_sentence(capsys.readouterr().err)


@pytest.mark.parametrize(("text", "status"), COMMANDS.items())
def test_a_command(text: str, status: int, place: Path, capsys: pytest.CaptureFixture[str]):
    assert commands.main(words_of(text, place)) == status
    _require_sentence(capsys.readouterr().err)


def _require_sentence(err: str) -> None:
    """An AssertionError unless it is one line that names the path, the reason and a way out."""
    (line,) = (line for line in err.splitlines() if "error[" in line)
    assert re.search(r"open/closed.*Permission denied.*; (correct|check|give|name)", line)
    assert "Traceback" not in err
    assert "free" not in line
