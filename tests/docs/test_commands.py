"""Every command that the READMEs and docs/ show: it parses, and it runs or says why it cannot."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
STATUS = {"minimind checkpoint diff": 1, "stops and saves": 75}  # checkpoints differ
# A comment behind a command: the line of output at which a reader presses Ctrl-C.
PRESSED = re.compile(r'# Ctrl-C at "(.+)"')
# Pages that show what their commands print, in blocks without a tag.
SHOWN = ("docs/tutorial.md",)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
# What depends on the machine and the hour.
ITS_OWN = re.compile(r"[\d,]+ tokens/s(  ETA [\d:]+)?|[\d,]+ more fit|\d+ min \d+ s")


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
def test_every_command_of_the_cheat_sheet_names_what_is_there():
    text = (ROOT / "docs" / "cheat_sheet.md").read_text(encoding="utf-8")
    commands = re.findall(r"\| `([^`]+ [^`]+)` \|", text)
    assert len(commands) >= 20
    Path("run.yaml").write_text("model: tiny\n")
    assert list(faults("cheat_sheet.md", commands)) == []


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
    """What is run of a page; what a Chinese page shares with the English one is not run again."""
    own = [command for block in RUNNABLE if block.page == page for command in block.commands()]
    english = page.replace("_zh.md", ".md")
    known = {bare(command) for command in commands_of(english)} if english != page else set()
    return [command for command in own if bare(command) not in known]


@pytest.mark.parametrize("name", ["install", "tutorial", "faq", "troubleshooting"])
def test_a_chinese_page_has_the_blocks_of_the_english_one(name: str):
    pairs = [
        [(block.language, block.needs, block.lines) for block in BLOCKS if block.page == page]
        for page in (f"docs/{name}.md", f"docs/{name}_zh.md")
    ]
    assert pairs[0] == pairs[1] != []
    assert commands_of(f"docs/{name}_zh.md") == []


def bare(command: str) -> str:
    """The command without what stands behind it."""
    return re.split(r"\s+#", command)[0]


@dataclass(frozen=True)
class Ended:
    """What a command printed, and what is wrong with how it ended; empty where nothing is."""

    output: str
    fault: str


def run(command: str, place: Path) -> Ended:
    """Run a command in this folder, with a Ctrl-C where it says so."""
    pressed = PRESSED.search(command)
    lines: list[str] = []
    with subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", INSTEAD.get(bare(command), command)],
        cwd=place,
        env=environment(place),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as started:
        assert started.stdout
        late = threading.Timer(SECONDS, os.killpg, (started.pid, signal.SIGTERM))
        late.start()
        try:
            for line in started.stdout:
                lines.append(line)
                if pressed and pressed[1] in line:
                    os.killpg(started.pid, signal.SIGINT)
                    pressed = None
        except BaseException:  # Ctrl-C, too: the run has a session of its own
            os.killpg(started.pid, signal.SIGTERM)  # run_accelerate.sh hands it on
            raise
        finally:
            late.cancel()
    output = "".join(lines)
    status = next((s for part, s in STATUS.items() if part in command), 0)
    ended = f"{command}\n  ended with {started.returncode}\n{output[-5000:]}"
    return Ended(output, "" if started.returncode == status else ended)


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
    assert run("echo so; exit 3", tmp_path).fault.endswith("ended with 3\nso\n")
    assert run("false | cat", tmp_path).fault
    assert run("cat  # nothing is typed", tmp_path) == Ended("", "")


def test_ctrl_c_is_pressed_where_a_command_says_so(tmp_path: Path):
    asked = "trap 'echo saved; exit 75' INT; echo so; while :; do sleep 0.1; done"
    ended = run(f'{asked}  # Ctrl-C at "so", stops and saves', tmp_path)
    assert ended == Ended("so\nsaved\n", "")


def unlike(shown: Sequence[str], printed: str) -> str | None:
    """The first line of a page that was not printed, in order and with numbers within 5 %."""
    lines = iter([ITS_OWN.sub("", line.rstrip()) for line in printed.splitlines()])
    for line in shown:
        wanted = ITS_OWN.sub("", line.rstrip())
        if wanted != "..." and not any(near(wanted, found) for found in lines):
            return line
    return None


def near(wanted: str, found: str) -> bool:
    """Whether two lines have the same words, and numbers that differ by 5 % at most."""
    if NUMBER.sub("", wanted) != NUMBER.sub("", found):
        return False
    pairs = zip(NUMBER.findall(wanted), NUMBER.findall(found), strict=True)
    values = [(float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs]
    return all(math.isclose(a, b, rel_tol=0.05) for a, b in values)


@pytest.mark.parametrize(
    ("shown", "line"),
    [
        (["a 1,000", "c 0.99 of 3  9 tokens/s  ETA 1:31"], None),
        (["a 1,000", "...", "b"], None),
        (["a 1,100"], "a 1,100"),
        (["b", "a 1,000"], "a 1,000"),  # in another order
        (["a"], "a"),
    ],
)
def test_a_line_that_is_not_printed_is_found(shown: list[str], line: str | None):
    assert unlike(shown, "a 1,001\nb\nc 1.00 of 3  5,000 tokens/s  ETA 0:10\nb\n") == line


def shown_below(page: str) -> Iterator[tuple[Block, Block | None]]:
    """The blocks of commands of a page, each with the block of output that follows it, if any."""
    blocks = [block for block in BLOCKS if block.page == page]
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block.commands() and not block.needs:
            yield block, after if after and not after.language else None


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize("page", [*filter(commands_of, dict.fromkeys(b.page for b in RUNNABLE))])
def test_every_command_of_a_page_ends_well(page: str, things: Things, tmp_path: Path):
    commands = commands_of(page)
    files = files_in([block for block in BLOCKS if block.page == page])
    things.put([*"".join(files.values()).splitlines(), *commands], tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ended = {command: run(command, tmp_path) for command in commands}
    assert [one.fault for one in ended.values() if one.fault] == []
    if page in SHOWN:
        assert_shown(page, ended)


def assert_shown(page: str, ended: Mapping[str, Ended]) -> None:
    faults = []
    for block, shown in shown_below(page):
        printed = "".join(ended[command].output for command in block.commands())
        if shown and (line := unlike(shown.lines, printed)) is not None:
            faults.append(f"{shown}: {line!r} is not in\n{printed[-5000:]}")
    assert faults == []
