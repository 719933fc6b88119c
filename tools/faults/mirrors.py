"""--mirror: what it does to what is not the run's, and which checkpoints it goes on from.

In this process, with a text of its own; seconds.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import minimind.train as training
from minimind.checkpoint.directory import published_checkpoints, step_directory, step_of
from minimind.checkpoint.mirror import Uploads, claim
from minimind.checkpoint.remote_run import RemoteRun
from minimind.checkpoint.retention import VALIDATION, Rules, kept_unknown, prune, record_validation
from minimind.checkpoint.run_folder import lock_out_dir
from minimind.checkpoint.tools import SIZES, examine
from minimind.data.shards.token_shards import TokenShards
from minimind.errors import RunError
from minimind.recovery.corruption import CorruptionCheck, Fault
from minimind.recovery.step_rows import read_run
from minimind.runtime.drafts import draft_of
from tests.checkpoint.saves import facts_of, save
from tools.faults.outcomes import Outcome, events
from tools.runs import sentences

train: Any = training  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "device": "cpu", "log_interval": 1, "eval_rows": 0},
    **{"deepspeed_config": "none", "max_steps": 4, "save_minutes": 0, "save_interval": 2},
    **{"dtype": "float32", "keep_last": 4},
}
CHECKED: dict[str, Any] = {"max_steps": 8, "save_interval": 1, "verify_interval": 3}
GUARDED: dict[str, Any] = {  # goes back once, after `poisoned` rows
    **{"max_steps": 40, "save_interval": 3, "spike_guard": True, "spike_window": 16},
    **{"learning_rate": 5e-3, "warmup_steps": 3, "keep_last": 2, "batch_size": 8},
}
BAD_STEPS = range(20, 32)  # counted from 0
TEXT = "="  # begins what a file has, as opposed to a part of the victim's folder
# What may be at the URL, by path there: none of it is a mirror of the run that is started.
FOREIGN: dict[str, dict[str, str]] = {
    "an out_dir": {"": ""},
    "an out_dir in it": {"run": ""},
    "checkpoints": {"checkpoints": "checkpoints"},
    "checkpoints of before": {"checkpoints-before": "checkpoints"},
    "a checkpoints folder": {"": "checkpoints"},
    "one checkpoint": {"": "checkpoints/step_00000002"},
    "metrics": {"metrics.jsonl": "metrics.jsonl"},
    "a configuration": {"config.yaml": "config.yaml"},
    "a tokenizer": {"": "tokenizer"},
    "notes": {"notes.txt": "=mine"},
    "a hidden file": {".gitignore": "=*"},
    "an out_dir with a mirror": {"": "", "mirror.json": '={"run": "0123456789abcdef"}'},
    "a mirror trained in": {"": "", "mirror.json": '={"run": "0123", "identity": {}}'},
    "another's mirror": {
        "checkpoints": "checkpoints",
        "mirror.json": '={"run": "0123", "identity": {"seed": {"seed": 7}}}',
    },
}


class Ground:
    """A place for runs, and one of them that others copy."""

    def __init__(self, root: Path) -> None:
        self.root, corpus = root, root / "text.jsonl"
        lines = (json.dumps({"text": text}, ensure_ascii=False) for text in sentences(1, 400))
        corpus.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._flags = {**FLAGS, "data_path": [str(corpus)], "cache_dir": str(root / "cache")}
        assert self.run("victim") == 0
        self.facts = facts_of(root / "victim")

    def run(self, name: str, **flags: Any) -> int:
        """Train in a folder of that name; return the exit status."""
        try:
            with redirect_stdout(StringIO()):
                return train({**self._flags, **flags}, out_dir=str(self.root / name))
        except RunError as error:
            return error.status

    def lay(self, name: str, layout: dict[str, str]) -> Path:
        """A folder with files of these texts, and copies of these parts of the victim."""
        folder = self.root / name
        for place, part in layout.items():
            source, target = self.root / "victim" / part, folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            if part.startswith(TEXT):
                target.write_text(part.removeprefix(TEXT))
            elif source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            else:
                shutil.copy(source, target)
        return folder

    def clear(self) -> None:
        """Leave the victim alone."""
        for path in self.root.iterdir():
            if path.is_dir() and path.name not in ("victim", "cache"):
                shutil.rmtree(path)


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def steps_at(folder: Path) -> list[int]:
    """Steps of the complete checkpoints of a mirror, highest first."""
    return RemoteRun(f"file://{folder}").published()


def steps_in(out_dir: Path) -> list[int]:
    """Steps of the checkpoints of a run, highest first."""
    return [step_of(path) for path in published_checkpoints(out_dir / "checkpoints")]


def losses(out_dir: Path) -> dict[int, float]:
    """The loss of each step, the last that was logged."""
    return {one["step"]: one["loss"] for one in events(out_dir) if one["event"] == "step"}


def refused(ground: Ground, folder: Path, **flags: Any) -> Iterator[str]:
    """What is wrong unless a start is refused before a byte is written, there and here."""
    before = content(folder)
    status = ground.run("own", mirror=f"file://{folder}", **flags)
    if status != 8:
        yield f"status {status}, not 8"
    if content(folder) != before:
        yield "what is at the URL was changed"
    if (ground.root / "own" / "mirror.json").exists() or steps_in(ground.root / "own"):
        yield "something was fetched from there"


def foreign(ground: Ground, layout: dict[str, str]) -> Iterator[str]:
    """What is not the run's is neither changed nor fetched."""
    for resume in ("auto", "none"):
        yield from refused(ground, ground.lay("foreign", layout), resume=resume)


def locked(ground: Ground) -> Iterator[str]:
    """Nor is the out_dir of a run that has only begun."""
    with lock_out_dir(ground.root / "foreign"):
        yield from refused(ground, ground.root / "foreign")


def trained_in(ground: Ground) -> Iterator[str]:
    """Nor the run's own mirror, while a run has it as its out_dir."""
    folder = ground.root / "mirror"
    assert ground.run("own", mirror=f"file://{folder}", stop_at_step=2) == 75
    with lock_out_dir(folder):
        before = content(folder)
        status = ground.run("own", mirror=f"file://{folder}")
        if status != 8 or content(folder) != before:
            yield f"status {status}, not 8, or the mirror was changed"
    status = ground.run("own", mirror=f"file://{folder}")
    if status or steps_at(folder) != [4, 2]:
        yield f"afterwards status {status}, with {steps_at(folder)} there"


def left_by_a_kill(ground: Ground) -> Iterator[str]:
    """The files that a killed start leaves at an empty URL do not count."""
    left = (draft_of(Path(name)).name for name in (".probe", "mirror.json"))
    folder = ground.lay("mirror", dict.fromkeys(left, "={"))
    status = ground.run("own", mirror=f"file://{folder}")
    if status or steps_at(folder) != [4, 2]:
        yield f"status {status}, with {steps_at(folder)} there"


def corrupted(ground: Ground) -> Iterator[str]:
    """After --on_corruption stop neither place has a checkpoint from after the last good step."""
    folder, real = ground.root / "mirror", CorruptionCheck.check

    def check(self: CorruptionCheck, step: int, batches: Any) -> list[Fault]:
        passed = self.last_passed
        found = real(self, step, batches)
        if step != 6:
            return found
        deadline = time.monotonic() + 60
        while 4 not in steps_at(folder) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.last_passed = passed
        return [Fault("weights", [0], "holds other weights")]

    assert ground.run("clean", **CHECKED) == 0
    with mock.patch.object(CorruptionCheck, "check", check):
        status = ground.run("own", mirror=f"file://{folder}", on_corruption="stop", **CHECKED)
    here, there = steps_in(ground.root / "own"), steps_at(folder)
    if status != 11 or max(here) != 3 or max(there) != 3:
        yield f"status {status}, {here} here, {there} there"
    if not any((folder / "checkpoints" / "step_00000004").iterdir()):
        yield "nothing was uploaded after the last good step"
    status = ground.run("other", mirror=f"file://{folder}", **CHECKED)
    clean = {step: loss for step, loss in losses(ground.root / "clean").items() if step > 3}
    if status or losses(ground.root / "other") != clean:
        yield f"on another disk status {status}, with other losses than of a clean run"


@contextmanager
def poisoned(run: Path) -> Iterator[None]:
    """In the block, the rows that `run` reads at BAD_STEPS are the same token over and over."""
    order, read = read_run(run).at(1).order, TokenShards.read_rows
    bad = order.rows_for(BAD_STEPS.start, 0, 1, len(BAD_STEPS))

    def read_rows(self: TokenShards, places: np.ndarray, row_tokens: int) -> np.ndarray:
        rows = read(self, places, row_tokens).copy()
        rows[np.isin(places, bad)] = FLAGS["vocab_size"] - 1
        return rows

    with mock.patch.object(TokenShards, "read_rows", read_rows):
        yield


def guarded(ground: Ground) -> Iterator[str]:
    """On an emptied disk a rollback goes back to the very checkpoint, which the mirror keeps."""
    assert ground.run("without spikes", **GUARDED) == 0
    url = f"file://{ground.root / 'mirror'}"
    with poisoned(ground.root / "without spikes"):
        assert ground.run("clean", **GUARDED) == 0
        assert ground.run("own", mirror=url, stop_at_step=BAD_STEPS.start + 4, **GUARDED) == 75
        shutil.rmtree(ground.root / "own")
        status = ground.run("own", mirror=url, **GUARDED)
    clean, own = (
        [(one["step"], one["to"]) for one in events(ground.root / name) if "to" in one]
        for name in ("clean", "own")
    )
    if status or not clean or own != clean:
        yield f"status {status}, went back {own}, without a fault {clean}"
    whole = losses(ground.root / "clean")
    if any(whole[step] != loss for step, loss in losses(ground.root / "own").items()):
        yield "other losses than of a run without a fault"


def _text(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def _replaced(path: Path) -> None:
    path.unlink()
    path.mkdir()


# What may become of the validation.json of the best checkpoint, whose loss is 3.125.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "another digit": _text(lambda text: text.replace(b"3.125", b"7.125")),
    "another sign": _text(lambda text: text.replace(b"3.125", b"-3.125")),
    "no loss": _text(lambda text: text.replace(b"3.125", b"null")),
    "another step": _text(lambda text: text.replace(b'"step": 3', b'"step": 6')),
    "another checksum": _text(
        lambda text: text.replace(b'"sha256": "', b'"sha256": "0')[:-2] + b'"}'
    ),
    "no checksum": lambda path: path.write_text('{"step": 3, "by": "val_loss", "value": 3.125}'),
    "a cut": _text(lambda text: text[: len(text) // 2]),
    "nothing in it": _text(lambda text: b""),
    "zeros": _text(lambda text: bytes(len(text))),
    "a list": _text(lambda text: b"[]"),
    "a word for a number": _text(lambda text: text.replace(b"3.125", b'"low"')),
    "100,000 lists": _text(lambda text: b"[" * 100_000),
    "9 MB": _text(lambda text: text + b" " * 9_000_000),
    "a folder of its name": _replaced,
}


def _four(ground: Ground, name: str) -> Path:
    """The checkpoints folder of a run whose best of four checkpoints is the oldest."""
    root = ground.root / name / "checkpoints"
    for step, loss in ((3, 3.125), (6, 3.5), (9, 3.375), (12, 3.25)):
        record_validation(save(root, step, ground.facts), loss)
    return root


def doubtful_here(ground: Ground, damage: Callable[[Path], object]) -> Iterator[str]:
    """A checkpoint whose loss is in doubt stays, which pruning, `verify` and `list` say."""
    root = _four(ground, "own")
    path = step_directory(root, 3)
    damage(path / VALIDATION)
    told = kept_unknown(root, Rules(1, keep_best=1))
    prune(root, Rules(1, keep_best=1))
    if steps_in(root.parent) != [12, 3]:
        yield f"{steps_in(root.parent)} stay"
    if len(told) != 1 or not told[0].startswith(f"{path / VALIDATION} "):
        yield f"a start says {told}"
    found = examine(path, SIZES)
    if found is None or VALIDATION not in "".join(found.faults):
        yield f"list says {found}"
    prune(root, Rules(1))
    if steps_in(root.parent) != [12]:
        yield "it stays although no rule compares losses"


def started(ground: Ground, root: Path, rules: Rules, stack: ExitStack) -> Uploads:
    """The uploads of a start at step 12, once the mirror has what it lacked."""
    remote = RemoteRun(f"file://{ground.root / 'mirror'}")
    claimed = claim(remote, root.parent, "auto", {}, frozenset())
    uploads = Uploads(remote, claimed, root.parent, rules)
    stack.callback(uploads.close)
    uploads.begin(12)
    uploads.look()
    assert uploads.wait(60)
    return uploads


def doubtful_there(ground: Ground, damage: Callable[[Path], object]) -> Iterator[str]:
    """So it is at the mirror, unless the validation is whole here, from which it is mended."""
    for is_here in (False, True):
        ground.clear()
        root, rules = _four(ground, "own"), Rules(1, keep_best=1)
        with ExitStack() as stack:
            started(ground, root, rules, stack)
            there = ground.root / "mirror" / "checkpoints" / "step_00000003" / VALIDATION
            damage(there)
            if not is_here:
                shutil.rmtree(root)
            uploads = started(ground, root, rules, stack)
            for step in (15, 18):
                save(root, step, ground.facts)
                uploads.offer(step, None)
                assert uploads.wait(60)
        if steps_at(ground.root / "mirror") != ([18, 3] if is_here else [18, 12, 3]):
            yield f"{steps_at(ground.root / 'mirror')} stay there"
        said = [name for name, fields in uploads.events if name == "mirror_kept"]
        if said != ([] if is_here else ["mirror_kept"]):
            yield f"said {list(uploads.events)}"


CASES: dict[str, Callable[[Ground], Iterator[str]]] = {
    **{
        f"at the URL: {name}": lambda ground, layout=layout: foreign(ground, layout)
        for name, layout in FOREIGN.items()
    },
    "at the URL: a run that begins": locked,
    "at the URL: a run in the own mirror": trained_in,
    "at the URL: what a kill left": left_by_a_kill,
    "corruption, then another disk": corrupted,
    "a rollback on an emptied disk": guarded,
    **{
        f"validation.json: {name}": lambda ground, damage=damage: doubtful_here(ground, damage)
        for name, damage in DAMAGES.items()
    },
    **{
        f"validation.json there: {name}": lambda ground, damage=damage: doubtful_there(
            ground, damage
        )
        for name, damage in DAMAGES.items()
        if damage is not _replaced
    },
}


def mirrors(root: Path) -> Iterator[Outcome]:
    """Every case, each on a ground that the others have left."""
    root.mkdir(parents=True, exist_ok=True)
    ground = Ground(root)
    for name, case in CASES.items():
        started = time.monotonic()
        wrong = list(case(ground))
        yield Outcome(name, "", time.monotonic() - started, wrong=wrong)
        ground.clear()
