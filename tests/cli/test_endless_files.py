"""Devices, pipes without a writer, directories and large files where a small file is expected."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from minimind.checkpoint.run_folder import lock_out_dir
from minimind.cli.main import main
from minimind.config.deepspeed.document import read_deepspeed_json
from minimind.config.parse import load_preset
from minimind.config.yaml_files import load_yaml_texts
from minimind.data.prepare.chat_tokenizer import read_template
from minimind.data.tokenizer.load import load_tokenizer
from minimind.errors import RunError, StorageError
from minimind.inference.prompts import read_text
from minimind.runtime.durable_files import read_small_text

READERS: dict[str, Callable[[str], object]] = {
    "--config": lambda path: load_yaml_texts(path, "--config"),
    "--deepspeed_config": read_deepspeed_json,
    "--tokenizer": load_tokenizer,
    "--chat_template": read_template,
    "--prompts": lambda path: read_text(path, "--prompts"),
}


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


@pytest.mark.sample(5)
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("kind", ["device", "directory", "large"])
def test_special_and_large_files_are_rejected_at_once(tmp_path, reader, kind):
    places = {"device": Path("/dev/zero"), "directory": tmp_path, "large": tmp_path / "large.json"}
    with open(places["large"], "wb") as file:
        file.truncate(2**30)  # sparse
    with pytest.raises(RunError) as caught:
        reader(str(places[kind]))
    assert str(places[kind]) in str(caught.value)
    assert "; " in str(caught.value)


@pytest.mark.parametrize(
    "flag", ["--config", "--deepspeed_config", "--tokenizer", "--chat_template"]
)
def test_a_pipe_is_rejected_at_once(tmp_path, flag):
    with pytest.raises(RunError, match="not a regular file"):
        READERS[flag](str(pipe(tmp_path / "pipe.json")))


def test_device_or_pipe_is_not_a_preset(tmp_path):
    for path in ("/dev/zero", pipe(tmp_path / "pipe.yaml")):
        with pytest.raises(RunError, match="there is no such preset or file"):
            load_preset(str(path))


def test_prompts_come_from_a_pipe_as_well():
    read, write = os.pipe()
    os.write(write, b"one\r\ntwo\n")
    os.close(write)
    try:
        assert read_text(f"/dev/fd/{read}", "--prompts") == "one\ntwo"
    finally:
        os.close(read)


def test_lines_end_as_python_reads_them(tmp_path):
    (tmp_path / "a").write_bytes(b"a\r\nb\rc\n")
    assert read_small_text(tmp_path / "a") == (tmp_path / "a").read_text()


def test_metrics_from_a_pipe_are_rejected_at_once(tmp_path):
    pipe(tmp_path / "metrics.jsonl")
    with pytest.raises(StorageError, match=r"metrics\.jsonl: is a folder, a pipe or a device"):
        lock_out_dir(tmp_path)


def test_without_a_home_the_flag_and_the_variable_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """As of a user id without an entry in passwd, in a container."""
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n')
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    told = "error[E_USAGE]: a path begins with ~, but HOME is not set "
    for words in (["prepare", "--source"], ["chat", "--once", "what?", "--model"]):
        place = "~/x" if words[0] == "chat" else str(tmp_path / "t.jsonl")
        out = ["--out", str(tmp_path / "out")] if words[0] == "prepare" else []
        assert main([*words, place, *out]) == 2
        err = capsys.readouterr().err
        assert told in err
        assert "; set HOME, or give --cache_dir " in err
