"""`--dry_run` with a prepared folder as data: printed from its manifest, refused without one."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from minimind.cli.main import main
from minimind.config.deepspeed.backend_choice import ELSEWHERE, Setup, advice, read_setup
from minimind.config.deepspeed.resolve import resolve
from minimind.config.launcher_env import planned_launch, read_launch
from minimind.config.parse import parse_flags
from minimind.engine import build
from minimind.errors import DataError, UsageError
from minimind.runtime.device import HOST
from minimind.train.dry_run import dry_run_text
from tests.conftest import Messages, sentences
from tests.train.starts import planned
from tools.runs import MEETING


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some text, and `data`, what `prepare` makes of it with a vocabulary of another size."""
    place = tmp_path_factory.mktemp("made")
    text = place / "t.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in sentences(1, 200)))
    words = ["prepare", str(text), "--vocab_size", "520", "--val_fraction", "0.1"]
    assert main([*words, "--out", str(place / "data")]) == 0
    return place


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of the prepared folder, which a test may change."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "data"


def dry_run(folder: Path, *words: str) -> str:
    given = ["--deepspeed_config", "none", "--data_path", str(folder), *words]
    return dry_run_text(planned(parse_flags(given)))


def test_the_table_reports_what_the_folder_holds(folder: Path):
    found = json.loads((folder / "manifest.json").read_bytes())["splits"]
    out = dry_run(folder, "--max_seq_len", "63")
    assert f"data: {folder}" in out
    tokens, documents = found["train"]["tokens"], found["train"]["documents"]
    assert f"{tokens:,} tokens, {documents} documents, about {tokens // 64:,} rows of 64" in out
    (line,) = (line for line in out.splitlines() if line.split()[:2] == ["vocab_size", "520"])
    assert str(folder) in line


def test_another_tokenizer_than_the_folder_was_made_with_is_refused(folder: Path, tmp_path: Path):
    words = ["tokenizer", "train", str(tmp_path / "t.jsonl"), "--vocab_size", "512", "--out"]
    assert main([*words, str(tmp_path / "other")]) == 0
    with pytest.raises(DataError, match="is not the tokenizer of"):
        dry_run(folder, "--tokenizer", str(tmp_path / "other"))


@pytest.mark.parametrize("case", ["cut", "missing", "manifest"])
def test_a_folder_that_cannot_be_used_is_refused(folder: Path, case: str):
    shard = folder / "train-00000.bin"
    if case == "cut":
        shard.write_bytes(shard.read_bytes()[:-2])
    elif case == "missing":
        shard.unlink()
    else:
        (folder / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="was changed" if case == "cut" else "cannot be read"):
        dry_run(folder)


LENGTHS = [
    (["--epochs", "1", "--warmup_steps", "10000"], "warmup_steps = 10000 .* is more than the"),
    (["--schedule", "wsd", "--decay_steps", "5000"], "decay_steps = 5000 .* is more than the"),
    (["--trace_steps", "9000:9001"], "trace_steps = 9000:9001 .* after the run's last step"),
]


@pytest.mark.parametrize(("words", "sentence"), LENGTHS)
def test_what_does_not_fit_the_steps_of_the_folder_is_refused(
    folder: Path, words: list[str], sentence: str
):
    with pytest.raises(UsageError, match=sentence):
        dry_run(folder, "--max_seq_len", "31", *words)


def test_a_trace_may_begin_with_the_last_step(folder: Path):
    words = ["--max_seq_len", "31", "--max_steps", "4", "--trace_steps"]
    assert "length: 4 steps" in dry_run(folder, *words, "4:5")
    with pytest.raises(UsageError, match=r"trace_steps = 5:6 .* after the run's last step, 4"):
        dry_run(folder, *words, "5:6")


@pytest.mark.parametrize("left_out", [0, 100])
def test_the_length_is_that_of_the_rows_of_the_folder(folder: Path, tmp_path: Path, left_out: int):
    manifest = json.loads((folder / "manifest.json").read_bytes())
    rows = manifest["splits"]["train"]["tokens"] // 32 - left_out
    words = ["--max_seq_len", "31", "--batch_size", "4", "--epochs", "3"]
    if left_out:
        (tmp_path / "rows.txt").write_text(f"0:{left_out - 1}\n")
        words += ["--skip_rows", str(tmp_path / "rows.txt")]
    steps = rows // 4
    out = dry_run(folder, *words)
    assert f"length: {3 * steps:,} steps of 124 tokens, {3 * steps * 124:,} tokens\n" in out
    assert f"\n  {steps:,} steps an epoch\n  rate: cosine, " in out
    assert f"length: {steps + 1:,} steps of" in dry_run(
        folder, *words, "--max_steps", str(steps + 1)
    )


def test_a_micro_batch_that_does_not_fit_the_memory_is_warned_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type(HOST), "memory", lambda self, index=None: 64 * 2**30)
    given = "--model 0.4b --dtype float32 --device cpu --deepspeed_config none --batch_size"
    few, many = (
        dry_run_text(planned(parse_flags([*given.split(), rows]))) for rows in ("1", "300")
    )
    assert "warning  a micro-batch of" not in few
    counted = re.search(r"300 rows x 1024 tokens: `minimind plan` counts ([\d.]+) GiB", many)
    assert counted
    for share, warns in (0.99, True), (1.01, False):
        room = int(share * float(counted[1]) * 2**30)
        monkeypatch.setattr(type(HOST), "memory", lambda self, index=None, room=room: room)
        text = dry_run_text(planned(parse_flags([*given.split(), "300"])))
        assert ("warning  a micro-batch of" in text) == warns


GPU_HOST = "--model tiny --device cuda --dry_run"


def setup_of(words: str, environ: dict[str, str] | None = None) -> Setup:
    environ = environ or {}
    launch = planned_launch(read_launch(environ), environ)
    return read_setup(parse_flags(["--deepspeed_config", "none", *words.split()]), launch)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--dtype float16 --deepspeed_config configs/deepspeed/fp16.json", "dtype", "float16"),
        ("--dtype float32 --tf32", "tf32", True),
        ("--compile on", "compile", "on"),
        ("", "compile", "on"),
        ("--deepspeed_config configs/ds_config.json", "dtype", "bfloat16"),
    ],
)
def test_a_login_node_checks_the_run_of_a_gpu_host(words: str, name: str, value: Any):
    setup = setup_of(f"{GPU_HOST} {words}", {"NUM_PROCESSES": "16"})
    assert (setup.device, setup.launch.world_size) == ("cuda", 16)
    assert getattr(setup.resolve().run, name) == value
    assert ELSEWHERE not in [*advice(setup, setup.resolve(), False)]


@pytest.mark.parametrize("words", ["--dtype float16", "--dtype float32 --tf32"])
def test_a_setting_of_gpus_names_the_flag_that_checks_it_on_a_login_node(words: str):
    with pytest.raises(UsageError, match=r"or check the run of a GPU host \(--device cuda\)"):
        setup_of(f"--model tiny --dry_run {words}").resolve()
    setup = setup_of("--model tiny --dry_run")
    assert ELSEWHERE in [*advice(setup, setup.resolve(), False)]
    setup = setup_of("--model tiny --dry_run --device cpu")
    assert ELSEWHERE not in [*advice(setup, setup.resolve(), False)]


def test_the_number_of_processes_is_that_of_the_launch(tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text("distributed_type: DEEPSPEED\nnum_processes: 4\n")
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "NUM_PROCESSES": "8"}
    launched |= MEETING
    for environ, count in (
        ({}, 1),
        ({"NUM_PROCESSES": "8"}, 8),
        ({"CONFIG_FILE": str(path)}, 4),
        ({"CONFIG_FILE": str(path), "NUM_PROCESSES": "8"}, 8),
        ({"CONFIG_FILE": "configs/accelerate_config.yaml"}, 1),
        (launched, 2),
    ):
        assert setup_of(GPU_HOST, environ).launch.world_size == count
    for value in ("0", "-1", "two", "1.5"):
        with pytest.raises(UsageError, match=r"NUM_PROCESSES: .* is not a number of processes"):
            setup_of(GPU_HOST, {"NUM_PROCESSES": value})


def test_the_text_of_a_url_is_left_to_the_start():
    given = "--model tiny --dry_run --data_path https://user:secret@localhost:1/t.jsonl"
    out = dry_run_text(planned(parse_flags([*given.split(), "--deepspeed_config", "none"])))
    assert "localhost:1/t.jsonl holds is read by the run itself, not by this check" in out
    assert "secret" not in out.split("data: ")[1]


@pytest.mark.parametrize("has_text", [False, True])
def test_a_scheduler_of_deepspeeds_has_no_invented_length(
    folder: Path, tmp_path: Path, has_text: bool
):
    given = ["--deepspeed_config", "warmup_cosine", "--device", "cpu", "--max_seq_len", "31"]
    given += ["--data_path", str(folder if has_text else tmp_path / "t.jsonl")]
    out = dry_run_text(planned(parse_flags(given)))
    found = {words[0]: words[1] for words in map(str.split, out.splitlines()) if len(words) > 1}
    total = found["scheduler.params.total_num_steps"]
    assert total.isdecimal() if has_text else total == '"auto"'
    assert found["schedule"] == "-"  # the file's scheduler decides
    assert found["accumulation_steps"] == ("1" if has_text else "auto")
    warmup = found["warmup_steps"]
    assert warmup.isdecimal() if has_text else warmup == "auto"
    warmup = warmup if has_text else f'"{warmup}"'
    assert found["scheduler.params.warmup_num_steps"] == warmup


def test_a_trial_of_the_scheduler_prints_none_of_deepspeeds_warnings(
    messages: Messages, monkeypatch: pytest.MonkeyPatch
):
    of_deepspeed, configure = logging.getLogger("DeepSpeed"), build.configure_libraries

    def imported_after(device: str) -> None:
        configure(device)
        of_deepspeed.setLevel(logging.INFO)  # as its first import in a process does

    monkeypatch.setattr(build, "configure_libraries", imported_after)
    monkeypatch.setattr(of_deepspeed, "handlers", [messages])
    schedule = {"type": "WarmupLR", "params": {}}
    document = {"zero_optimization": {"stage": 2}, "scheduler": schedule}
    with warnings.catch_warnings(), mock.patch.dict(os.environ):
        warnings.simplefilter("ignore")  # its import is full of them
        build.require_accepted(resolve(document, "ds.json", parse_flags([]), 1, "cpu"), "cpu")
    assert messages.found == []


@pytest.mark.parametrize("flag", ["--source", "--stages"])
def test_text_of_another_flag_leaves_the_default_of_data_path_out(
    folder: Path, tmp_path: Path, flag: str
):
    stages = tmp_path / "stages.yaml"
    stages.write_text(f"sources: {{a: {folder}}}\nstages: [{{name: all, weights: {{a: 1}}}}]\n")
    given = ["--source", f"a={folder}:1"] if flag == "--source" else ["--stages", str(stages)]
    given += ["--deepspeed_config", "none", "--max_seq_len", "31", "--max_steps", "2"]
    given += ["--cache_dir", str(tmp_path / "cache"), "--batch_size", "2"]
    rows = dry_run_text(planned(parse_flags(given))).splitlines()
    assert ["data_path", "-", "by", flag] in map(str.split, rows)
