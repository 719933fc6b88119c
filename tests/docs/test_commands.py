"""Every command that the READMEs and docs/ show: it parses, and it runs or says why it cannot."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from minimind.errors import UsageError
from tests.conftest import ROOT
from tests.docs.commands import (
    CHECKS,
    NEEDS,
    OUTPUT,
    REASONS,
    SHELLS,
    Block,
    all_blocks,
    blocks_of,
    check,
    files_in,
    lines_of_prose,
    pages,
)
from tests.docs.things import Things, needed

BLOCKS = all_blocks()
RUNNABLE = [block for block in BLOCKS if block.commands() and not block.needs]
SECONDS = 600
# What is run in the place of a command: fewer steps, and not these tests themselves.
INSTEAD = {"make train": "make train STEPS=10", "make test": "make --dry-run test"}
# The status a command ends with where that is not 0.
STATUS = {"minimind checkpoint diff": 1}  # its checkpoints differ


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_commands_or_output_and_reports_what_it_needs(block: Block):
    assert block.language in (*SHELLS, *OUTPUT)
    assert set(block.needs) <= set(REASONS)
    if block.language in SHELLS:
        assert block.commands()
        return
    assert not block.needs
    started = {line.split(" ")[0].removeprefix(".venv/bin/") for line in block.lines}
    assert not started & set(CHECKS), "commands; tag the block bash"


def test_no_reason_stands_away_from_a_block():
    for page in {block.page for block in BLOCKS}:
        text = (ROOT / page).read_text(encoding="utf-8")
        stated = [line for line in text.splitlines() if "<!-- needs" in line]
        assert len(stated) == sum(bool(block.needs) for block in BLOCKS if block.page == page)
        assert all(map(NEEDS.fullmatch, stated))


def faults(where: str, commands: Sequence[str], any_program: bool = False) -> Iterator[str]:
    for command in commands:
        try:
            check(command, any_program)
        except (UsageError, ValueError) as fault:
            yield f"{where}: {command}: {fault}"


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that commands name before a run."""
    monkeypatch.chdir(tmp_path)
    Path("DIR").mkdir()
    for name, text in {**files_in(BLOCKS), "DIR/config.json": "{}"}.items():
        Path(name).write_text(text)
    for name in ("configs", "accelerate_config.yaml"):
        Path(name).symlink_to(ROOT / name)


@pytest.mark.usefixtures("reader")
def test_every_command_names_what_is_there_and_its_settings_resolve():
    found = [
        fault
        for block in BLOCKS
        for fault in faults(str(block), block.commands(), "other software" in block.needs)
    ]
    for page in pages():
        found += faults(page.name, lines_of_prose(page.read_text(encoding="utf-8")))
    assert found == []


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("bash run_accelerate.sh --beta1 0.8 --optimizer muon --sgd_momentum 0.9", "no effect"),
        ("NUM_PROCESSES=3 bash run_accelerate.sh --tensor_parallel 2", "does not divide 3"),
        ("CONFIG_FILE=gone.yaml bash run_accelerate.sh", "gone.yaml: No such file"),
        ("minimind launch --tensor_parallel 3", "does not divide 2 processes"),
        ("minimind train --sequence_parallel 2", "does not divide 1 processes"),
        ("torchrun --nproc_per_node 2 train_pretrain.py --tensor_parallel 2", "needs DeepSpeed"),
        (
            "accelerate launch --multi_gpu --num_processes 2 --zero_stage 3 train_pretrain.py",
            "--zero_stage was passed to `accelerate launch`, which drops it",
        ),
        (
            "accelerate launch --config_file accelerate_config.yaml train_pretrain_accelerate.py"
            " --dtype float16",
            "needs a GPU",
        ),
        (
            "deepspeed --num_gpus 2 train_pretrain.py --schedule wsd"
            " --deepspeed_config configs/deepspeed/warmup_cosine.json",
            "ignores schedule = wsd",
        ),
    ],
)
def test_settings_that_cannot_be_resolved_are_found(command: str, fault: str):
    with pytest.raises(UsageError, match=re.escape(fault)):
        check(command)


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("minimind generate --checkpint out/mine", "--checkpint"),
        ("minimind checkpoint list --keep 1", "--keep"),
        (".venv/bin/minimind plan --gpus 0", "at least 1"),
        ("minimind plan --dims 8", "did you mean --dim"),
        ("OMP_NUM_THREADS=1 bash run_accelerate.sh --model tinny", "tinny"),
        ("bash run_accelerates.sh", "only run_accelerate.sh"),
        ("echo a | minimind generate --stop", "--stop"),
        ("make train && make trian", "trian"),
        ("make check-export CHECKPOIN=out/mine", "CHECKPOIN"),
        ("torchrun --standalon train_pretrain.py", "--standalon"),
        ("torchrun --standalone train_pretrain.py --batch_sise 2", "--batch_sise"),
        ("accelerate launch --num_process 2 examples/four_lines.py", "--num_process"),
        ("accelerate lunch examples/four_lines.py", "lunch"),
        ("deepspeed --num_gpu 2 train_pretrain.py", "--num_gpu"),
        ("python examples/five_lines.py", "five_lines"),
        ("python examples/four_lines.py --split_batch", "--split_batch"),
        ("python -m benchmarks.rotry", "rotry"),
        ("python -m minimind reports out/mine", "reports"),
        ("pip install '.[evil]'", "evil"),
        ("sbatch --nodes 2 scripts/slurm.sbatch --epoch 1", "--epoch"),
        ("vllm serve out/mine", "vllm"),
    ],
)
def test_a_wrong_command_is_found(command: str, fault: str):
    with pytest.raises(UsageError, match=fault):
        check(command)


def test_blocks_are_read_as_they_stand():
    text = (
        "a\n<!-- needs: gpu, hours -->\n```bash\nmake gpu  # one\n\n# two\nmake \\\n  test\n```\n"
    )
    text += "- b\n  ```\n  minimind\n  ```\n"
    first, second = blocks_of(text, "page.md")
    assert (str(first), first.needs, first.language) == ("page.md:3", ("gpu", "hours"), "bash")
    assert first.commands() == ["make gpu  # one", "make test"]
    assert (second.language, second.lines, second.commands()) == ("", ("minimind",), [])
    with pytest.raises(ValueError, match="does not end"):
        list(blocks_of("```bash\nmake\n", "page.md"))


def commands_of(page: str) -> list[str]:
    """What is run of a page; what the README has said already is not run again."""
    own = [command for block in RUNNABLE if block.page == page for command in block.commands()]
    text = commands_of("README.md") if page == "README_zh.md" else []
    known = {bare(command) for command in text}
    return [command for command in own if bare(command) not in known]


def bare(command: str) -> str:
    """The command without what stands behind it."""
    return re.split(r"\s+#", command)[0]


def run(command: str, place: Path) -> str:
    """What is wrong with how a command ends in this folder; empty where nothing is."""
    started = subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", INSTEAD.get(bare(command), command)],
        cwd=place,
        env=environment(place),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = started.communicate(timeout=SECONDS)
    except BaseException:
        os.killpg(started.pid, signal.SIGTERM)  # run_accelerate.sh hands it on
        raise
    status = next((s for part, s in STATUS.items() if command.startswith(part)), 0)
    ended = f"{command}\n  ended with {started.returncode}\n{output[-5000:]}"
    return "" if started.returncode == status else ended


def environment(place: Path) -> dict[str, str]:
    """That of a reader in the project's top folder, its environment active, without a network."""
    path = f"{place / '.venv' / 'bin'}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return {**kept, **offline, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(place / "home")}


def test_what_a_command_writes_is_not_there_before_it():
    commands = ["minimind prepare books/ kjv.jsonl --out data/big  # not poems.jsonl"]
    commands += ["minimind eval --model exported --data_path data/big", "bash r.sh --model hf:DIR"]
    names = ("books/", "kjv/", "kjv.jsonl", "poems.jsonl", "data/big", "exported", "DIR")
    assert needed(commands, names) == ["books/", "kjv.jsonl", "exported", "DIR"]


def test_a_command_that_ends_otherwise_is_reported(tmp_path: Path):
    assert run("echo so; exit 3", tmp_path).endswith("ended with 3\nso\n")
    assert run("false | cat", tmp_path)
    assert run("cat  # nothing is typed", tmp_path) == ""


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize("page", dict.fromkeys(block.page for block in RUNNABLE))
def test_every_command_of_a_page_ends_well(page: str, things: Things, tmp_path: Path):
    commands = commands_of(page)
    files = files_in([block for block in BLOCKS if block.page == page])
    things.put([*"".join(files.values()).splitlines(), *commands], tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert [fault for command in commands if (fault := run(command, tmp_path))] == []
