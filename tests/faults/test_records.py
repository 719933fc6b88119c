"""Damaged lines of metrics.jsonl and a damaged config.yaml: left out and named, or harmless.

Each damage is one line, one bit or one cut, as crashes, disks and copies make them.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import minimind.train as training
from minimind.checkpoint.directory import published_checkpoints, step_of
from minimind.checkpoint.resume import newest_acknowledged
from minimind.checkpoint.retention import good_step, record_validation
from minimind.cli.main import main
from minimind.config.flags import FLAGS
from minimind.config.run_record import ALWAYS, HEAD, with_sum
from minimind.errors import UsageError
from minimind.recovery.step_rows import read_run
from minimind.report.figures import Summary
from minimind.report.findings import diagnose
from minimind.report.history import Run, read_configuration
from minimind.report.page import render_parts
from minimind.report.placement import placement
from minimind.runtime.checked_json import MAX_BYTES
from minimind.runtime.event_log import EventLog
from minimind.sweep.trial import Progress
from tests.conftest import SMALL, Trained
from tests.faults import tiny

train: Any = training  # a package that is called like a function
Damage = Callable[[bytes, random.Random], bytes]
NAMES = ("run_start", "checkpoint_saved", "verified", "rolled_back", "floors", "scores", "eval")


def _value(key: str, value: Any) -> Damage:
    """The value of a key of one line replaced."""

    def damage(line: bytes, _: random.Random) -> bytes:
        return json.dumps({**json.loads(line), key: value}).encode() + b"\n"

    return damage


LINES: dict[str, Damage] = {  # what becomes of one line
    **{
        f"{key} is {str(value)[:12]}": _value(key, value)
        for key in ("step", "to", "event", "time", "passed", "resume_from", "val_loss")
        for value in ("7", [], {}, -1, 2**70, 1e300, float("nan"), True, None, "\ud800")
    },
    "a list": lambda line, _: b"[" + line.strip() + b"]\n",
    "a list in a list": lambda line, _: b"[" * 20_000 + b"]" * 20_000 + b"\n",
    "deep": lambda line, _: line[:-2] + b', "x": ' + b"[" * 400 + b"]" * 400 + b"}\n",
    "too deep": lambda line, _: line[:-2] + b', "x": ' + b"[" * 20_000 + b"]" * 20_000 + b"}\n",
    "a number": lambda *_: b"7\n",
    "a long number": lambda line, _: line.replace(b'"time": ', b'"time": ' + b"9" * 5000),
    "a word": lambda *_: b'"run_start"\n',
    "without a name": lambda line, _: line.replace(b'"event"', b'"evemt"'),
    "zeros": lambda line, _: bytes(len(line)),
    "zeros before": lambda line, _: bytes(100) + line,
    "no UTF-8": lambda line, _: line[:-2] + b', "x": "\xff"}\n',
    "twice in a line": lambda line, _: line.strip() + line,
    "torn": lambda line, draw: line[: draw.randrange(1, len(line) - 2)] + b"\n",
    "joined with the next": lambda line, draw: line[: draw.randrange(1, len(line))].rstrip(),
    "a key twice": lambda line, _: line[:-2] + b', "step": "x"}\n',
    "gone": lambda *_: b"",
    "empty": lambda *_: b"\n",
}


@pytest.fixture(scope="module")
def whole(trained: Trained) -> bytes:
    """metrics.jsonl of a real run, with the events that this run does not have."""
    content = (trained.run / "metrics.jsonl").read_bytes()
    found = {json.loads(line)["event"] for line in content.splitlines()}
    more = {
        "verified": {"step": 4, "passed": True},
        "rolled_back": {"step": 6, "to": 4},
        "floors": {"step": 0, "text": "x", "rows": 8},
        "scores": {"step": 6, "average": 0.5, "tasks": {}},
        "token_balance": {"step": 0, "sources": []},
    }
    lines = [
        json.dumps({"event": name, "time": 1.0, **fields}).encode() + b"\n"
        for name, fields in more.items()
        if name not in found
    ]
    return b"".join([*content.splitlines(keepends=True)[:-1], *lines, content.splitlines()[-1]])


def damaged(whole: bytes, seed: int) -> tuple[str, bytes]:
    """A name of the damage and the file that it leaves."""
    draw = random.Random(seed)
    lines = whole.splitlines(keepends=True)
    at, kind = draw.randrange(len(lines)), draw.choice([*LINES, *["bit", "cut"] * 20])
    if kind == "bit":
        content = bytearray(whole)
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        return kind, bytes(content)
    if kind == "cut":
        return kind, whole[: draw.randrange(len(whole))]
    lines[at] = LINES[kind](lines[at].rstrip() + b"\n", draw)
    return f"line {at + 1} {kind}", b"".join(lines)


def readers(run_dir: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    log = run_dir / "metrics.jsonl"
    yield "resume", lambda: newest_acknowledged(EventLog(log))
    yield "floors, scores", lambda: [*EventLog(log).events(*NAMES, "step", "token_balance")]
    yield "prune", lambda: good_step(EventLog(log), 6)
    yield "sweep", lambda: Progress(run_dir, "val_loss")
    yield "data at", lambda: read_run(run_dir)

    def report() -> None:
        run = Run(run_dir)
        run.read()
        Summary(run, 2e9).as_text()
        placement(run)
        diagnose(run, 2e9)
        render_parts([run], [read_configuration(run_dir)], 2e9)

    yield "report", report


def test_readers_survive_every_damage(
    whole: bytes, trained: Trained, tmp_path: Path, request: pytest.FixtureRequest
):
    shutil.copy(trained.run / "config.yaml", tmp_path)
    for seed in range(400 if request.config.getoption("--long") else 20):
        kind, content = damaged(whole, seed)
        (tmp_path / "metrics.jsonl").write_bytes(content)
        for name, read in readers(tmp_path):
            try:
                read()
            except UsageError as error:  # `data at` needs the order of rows that a start logs
                if "metrics.jsonl: " not in str(error):
                    raise
            except Exception as error:  # any: a reader must have none; says what was damaged
                raise AssertionError(f"seed {seed}, {kind}, {name}") from error


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "kind", ["step is 7", "step is []", "a list", "too deep", "without a name"]
)
def test_what_cannot_be_read_is_counted(whole: bytes, name: str, kind: str, tmp_path: Path):
    lines = whole.splitlines(keepends=True)
    at = next((n for n, line in enumerate(lines) if f'"{name}"'.encode() in line[:30]), None)
    if at is None:  # an event that this run does not log
        at = len(lines)
        lines.append(json.dumps({"event": name, "step": 3, "time": 1.0}).encode() + b"\n")
    lines[at] = LINES[kind](lines[at], random.Random(1))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(lines))
    log = EventLog(path)
    assert len([*log.events(*NAMES)]) == sum(
        any(f'"{one}"'.encode() in line[:30] for one in NAMES)
        for line in lines[:at] + lines[at + 1 :]
    )
    assert log.warning() == f"1 line of {path} cannot be read and is left out"


def test_a_line_of_any_length_is_read_in_bounded_memory(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    good = b'{"event": "eval", "step": 1}\n'
    path.write_bytes(good + b"[" * (3 * MAX_BYTES) + b"\n" + good + b"7" * MAX_BYTES)
    log = EventLog(path)
    assert [event["step"] for event in log.events("eval")] == [1, 1]
    assert (log.unread, log.is_torn) == (1, True)


@pytest.mark.parametrize("event", ["floors", "run_start", "checkpoint_saved"])
def test_a_resume_leaves_a_damaged_line_out_and_says_so(
    event: str, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    flags = {**SMALL, "data_path": [str(trained.mixed)], "cache_dir": str(trained.cache)}
    flags |= {"out_dir": str(tmp_path / "out"), "deepspeed_config": "none"}
    assert train({**flags, "stop_at_step": 3}) == 75
    path = tmp_path / "out" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    at = max(n for n, line in enumerate(lines) if f'"event": "{event}"' in line)
    lines[at] = json.dumps({**json.loads(lines[at]), "step": "3"}) + "\n"
    path.write_text("".join(lines))
    capsys.readouterr()
    assert train(flags) == 0
    assert capsys.readouterr().out.count("metrics.jsonl cannot be read") == 1


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: bytes) -> Path:
    """Checkpoints of steps 2, 4, 6, 8: 8 is the last, 2 the best, 4 the one known to be good."""
    out_dir = tiny.new_run(
        tmp_path_factory.mktemp("kept") / "run", tiny_tokenizer, steps=(2, 4, 6, 8)
    )
    for step, loss in ((2, 3.0), (4, 3.5), (6, 3.75), (8, 3.25)):
        record_validation(out_dir / "checkpoints" / f"step_{step:08d}", loss)
    values = {name: FLAGS[name].default for name in ALWAYS}
    values |= {"keep_last": 1, "keep_best": 1, "save_interval": 2, "eval_interval": 2}
    values |= {"verify_interval": 4}
    lines = [HEAD, *(f"{name}: {value}  # --{name}" for name, value in values.items())]
    (out_dir / "config.yaml").write_bytes(with_sum("\n".join([*lines, "wsd: 1  # x"]) + "\n"))
    events = [{"event": "run_start", "step": 0}, {"event": "verified", "step": 5, "passed": True}]
    events += [{"event": "checkpoint_saved", "step": 8}, {"event": "exit", "step": 8}]
    text = "".join(json.dumps({**event, "time": 1.0}) + "\n" for event in events)
    (out_dir / "metrics.jsonl").write_text(text)
    return out_dir


def steps(out_dir: Path) -> list[int]:
    return [step_of(path) for path in published_checkpoints(out_dir / "checkpoints")]


def pruned(kept_run: Path, name: str, content: bytes, place: Path, *words: str) -> int:
    """Status of `prune` in a copy with one file replaced."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(kept_run, place)
    (place / name).write_bytes(content)
    return main(["checkpoint", "prune", str(place), *words])


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_prune_deletes_nothing_where_a_rule_is_in_doubt(
    name: str, kept_run: Path, tmp_path: Path, request: pytest.FixtureRequest, capsys: Any
):
    whole, draw = (kept_run / name).read_bytes(), random.Random(4)
    ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    cuts = [whole[:end] for end in [0, *ends]] + [whole[:end].rstrip() for end in ends]
    count = 200 if request.config.getoption("--long") else 8
    if name == "config.yaml":  # a bit of metrics.jsonl may leave another number
        for _ in range(count):
            content = bytearray(whole)
            content[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            cuts.append(bytes(content))
    cuts += [whole[: draw.randrange(len(whole))] for _ in range(count)]
    for content in cuts:
        status = pruned(kept_run, name, content, tmp_path / "run")
        said = capsys.readouterr()
        assert {8, 4, 2} <= {*steps(tmp_path / "run")}, content
        if content != whole and status == 0:
            assert content.rstrip() == whole.rstrip() or name == "metrics.jsonl", content
        elif status:
            assert status == 4, (content, said)
            assert name in said.err
            assert "nothing is deleted" in said.err
            assert steps(tmp_path / "run") == [8, 6, 4, 2]


def test_rules_that_are_all_given_need_no_config(kept_run: Path, tmp_path: Path, capsys: Any):
    words = ["--keep_last", "1", "--keep_every", "0"]
    assert pruned(kept_run, "config.yaml", b"", tmp_path / "run", *words) == 4
    assert "--keep_last, --keep_every and --keep_best" in capsys.readouterr().err
    assert pruned(kept_run, "config.yaml", b"", tmp_path / "run", *words, "--keep_best", "1") == 0
    assert steps(tmp_path / "run") == [8, 2]


@pytest.mark.parametrize("kind", ["gone", "of another rule"])
def test_a_checkpoint_whose_value_is_unknown_stays(
    kind: str, kept_run: Path, tmp_path: Path, capsys: Any
):
    place = tmp_path / "run"
    shutil.copytree(kept_run, place)
    folder = place / "checkpoints" / "step_00000006"
    (folder / "validation.json").unlink()
    if kind != "gone":
        record_validation(folder, 0.5, "average")
    assert main(["checkpoint", "prune", str(place)]) == 0
    assert "step_00000006 stays, but it may be among the best" in capsys.readouterr().out
    assert steps(place) == [8, 6, 4, 2]
    assert main(["checkpoint", "list", str(place)]) == 0
    (line,) = (one for one in capsys.readouterr().out.splitlines() if "step_00000006" in one)
    assert line.endswith("unproven")


def test_list_doctor_and_report_name_the_damage(kept_run: Path, tmp_path: Path, capsys: Any):
    place = tmp_path / "run"
    shutil.copytree(kept_run, place)
    config = place / "config.yaml"
    config.write_bytes(config.read_bytes()[:-80])
    with open(place / "metrics.jsonl", "ab") as file:
        file.write(b"\0\0\n")
    for words in (["checkpoint", "list"], ["doctor"], ["report"]):
        main([*words, str(place)])
        said = capsys.readouterr()
        assert "config.yaml is cut, damaged or edited" in said.out + said.err, words
        if words != ["checkpoint", "list"]:
            assert "1 line of" in said.out + said.err, words


FAULT = "is cut, damaged or edited: its last line is not the sha256 of the others"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("whole", ""),
        ("edited", f"{FAULT}; flags that it lacks are defaults"),
        ("cut", f"{FAULT}; it has no keep_best, which every run writes: restore it, give --keep_"),
        ("cut, and given", f"{FAULT}; flags that it lacks are defaults"),
        ("of another hand", ""),
    ],
)
def test_a_start_with_a_config_that_is_not_as_its_run_wrote_it(
    kind: str, said: str, trained: Trained, tmp_path: Path, capsys: Any
):
    """By defaults in place of what is missing, a run that goes on would delete what it kept."""
    place = tmp_path / "run"
    shutil.copytree(trained.run, place)
    config = place / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if line.startswith("keep_best:"))
    changed = {
        "edited": [*lines[:1], "# mine\n", *lines[1:]],
        "cut": lines[:at],
        "cut, and given": lines[:at],
        "of another hand": lines[1:-1],
    }
    config.write_text("".join(changed.get(kind, lines)))
    flags = {**SMALL, "data_path": [str(trained.mixed)], "out_dir": str(place)}
    if kind == "cut, and given":
        flags |= dict.fromkeys(("keep_best", "verify_interval", "eval_tasks_interval"), 0)
        flags |= {"keep_best_by": "val_loss"}
    if "it has no" in said:
        with pytest.raises(UsageError) as caught:
            train({**flags, "config": str(config)})
        assert said in str(caught.value)
        assert config.read_text() == "".join(changed[kind])
        return
    # It is done already, and replaces its config.yaml.
    assert train({**flags, "config": str(config)}) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert said in told if said else FAULT not in told
