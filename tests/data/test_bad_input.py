"""What a run reports when its data or configuration cannot be: kind, file, field, value, way out.

In process up to where workers would meet; two real launches show the line and the exit status.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from minimind.config.parse import parse_flags
from minimind.errors import RunError, UsageError
from minimind.runtime.process import Progress
from minimind.train.inputs import require_inputs
from minimind.train.pretrain import pretrain
from tests.conftest import SHAPE, Launcher
from tools.runs import MEETING, left_over


@pytest.fixture
def start_error(monkeypatch, tmp_path, corpus):
    """Runs rank 0 of two up to its first mistake, and gives that back."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    for name, value in {**ranks, **MEETING}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def run(flags: str) -> RunError:
        places = f"--cache_dir {tmp_path / 'cache'} --out_dir {tmp_path / 'out'} --device cpu"
        data = "" if "--data_path" in flags else f"--data_path {corpus}"
        requested = parse_flags(f"{SHAPE} {places} {data} {flags}".split())
        progress = Progress()
        try:
            require_inputs(requested)
            pretrain(requested, progress)
        except RunError as error:
            return error
        finally:
            if progress.lock:
                progress.lock.close()
        pytest.fail("no mistake was found")

    return run


def test_a_tokenizer_of_another_size_than_the_flag_is_refused(start_error, tmp_path):
    from minimind.data.tokenizer.sentencepiece import train_tokenizer

    train_tokenizer(["some words to learn from, again and again " * 20], 512, tmp_path / "t.model")
    error = start_error(f"--tokenizer {tmp_path / 't.model'}")
    assert isinstance(error, UsageError)
    assert "vocab_size = 600 (--vocab_size)" in str(error)
    assert "512" in str(error)


@pytest.mark.launch
def test_a_launched_mistake_is_one_line_and_its_status(launch: Launcher, tmp_path: Path):
    done = launch.run(tmp_path / "out", "--data_path gone.jsonl")
    assert left_over(tmp_path, 0) == []
    assert done.status == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith("run_accelerate.sh: error[E_DATA]: gone.jsonl: ")
    assert not (tmp_path / "out").exists()
