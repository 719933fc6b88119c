"""A panic of a Rust library, which is no Exception, ends like any other error."""

from pathlib import Path

import pytest
from tokenizers import decoders

from minimind.checkpoint.tensor_files import readable
from minimind.cli import main as commands
from minimind.errors import CheckpointError, RunError
from minimind.runtime.panics import Panic, panics_caught
from minimind.train import program


def panic(*_: object) -> None:
    strip = decoders.Strip(content="a", left=5, right=9)
    strip.decode(["a"])


def test_it_is_an_exception():
    with pytest.raises(BaseException, match=r"^index out of bounds") as caught:
        panic()
    assert not isinstance(caught.value, Exception)  # else this module has no purpose
    with pytest.raises(Panic, match=r"^index out of bounds"), panics_caught():
        panic()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError, GeneratorExit])
def test_nothing_else_is_changed(kind: type[BaseException]):
    with pytest.raises(kind), panics_caught():
        raise kind


def test_a_tensor_file_is_named():
    with pytest.raises(
        CheckpointError, match=r"^a\.safetensors: cannot be read \(index out of.*; get"
    ):
        with readable(Path("a.safetensors"), "get another"):
            panic()


def test_a_command_ends_with_its_line(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(commands.Env, "execute", panic)
    assert commands.main(["env"]) == RunError.status
    assert "minimind: error[E_INTERNAL]: index out of bounds" in capsys.readouterr().err


def test_a_run_ends_with_its_line(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(program, "require_inputs", panic)
    monkeypatch.setattr(program.Ending, "watch", lambda _: None)
    assert program.main([]) == RunError.status
    assert "train_pretrain: error[E_INTERNAL] rank=0" in capsys.readouterr().err
