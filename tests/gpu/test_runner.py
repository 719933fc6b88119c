"""The command around the parts: what fails, what is written and when, what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from minimind.runtime.device import KINDS
from tools.gpu import losses, parts
from tools.gpu.findings import Finding, PartError, at_most, check, figure, skipped
from tools.gpu.runner import NO_TIME, Part
from tools.gpu.site import Site, Trained

command = import_module("tools.gpu.__main__").main

pytestmark = pytest.mark.long  # of the command, which is no part of the package


def good(site: Site) -> Iterator[Finding]:
    """Has a figure."""
    yield figure("speed", 3.5, "3.5 tokens/s")
    yield at_most("distance", 1e-6, 1e-5)


def wrong(site: Site) -> Iterator[Finding]:
    """Does not hold."""
    yield check("a kernel", False, "math", "fused")


def raising(site: Site) -> Iterator[Finding]:
    """Raises after its first finding."""
    yield skipped("fp16", "not for a CPU")
    raise PartError("a run ended with 70", "line one\nline | two")


def exiting(site: Site) -> Iterator[Finding]:
    """Ends as a script does."""
    yield from ()
    raise SystemExit("ours ended: out of memory")


def ran(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str, **finds: Any) -> tuple[int, Any]:
    """(exit status, results.json) of the command with these parts."""
    made = {name: Part(find, 1) for name, find in finds.items()}
    monkeypatch.setattr(parts, "PARTS", made)
    status = command(["--device", "cpu", "--out", str(out), *words])
    return status, json.loads((out / "results.json").read_text())


def test_what_a_part_raises_is_its_failure_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    status, found = ran(
        monkeypatch, tmp_path, raising=raising, exiting=exiting, wrong=wrong, good=good
    )
    assert status == 1
    assert found["passed"] is False
    statuses = {name: part["status"] for name, part in found["parts"].items()}
    assert statuses == dict.fromkeys(("raising", "exiting", "wrong"), "failed") | {"good": "passed"}
    assert found["parts"]["raising"]["error"] == "PartError: a run ended with 70"
    assert found["parts"]["raising"]["not_run"] == {"fp16": "not for a CPU"}
    assert found["parts"]["exiting"]["error"] == "SystemExit: ours ended: out of memory"
    assert found["parts"]["good"]["findings"][0]["value"] == 3.5
    output = capsys.readouterr().out
    assert "== raising: failed" in output
    assert "| line | two" in output
    assert "these do not hold: raising, exiting, wrong; " in output
    text = (tmp_path / "results.md").read_text()
    assert text.startswith("# Not everything holds: raising, exiting, wrong.")
    assert "| a kernel | math | fused | WRONG |" in text
    assert "PartError: a run ended with 70" in text


def test_when_all_hold_the_status_is_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    status, found = ran(monkeypatch, tmp_path, good=good)
    assert (status, found["passed"]) == (0, True)
    assert {"torch", "deepspeed", "cuda", "gpus", "cpu"} <= {*found["machine"]}
    assert found["commit"]
    assert (tmp_path / "results.md").read_text().startswith("# Everything that was run holds.")


def test_a_part_that_finds_nothing_or_nan_has_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def empty(site: Site) -> Iterator[Finding]:
        """Finds nothing."""
        yield from ()

    def nan(site: Site) -> Iterator[Finding]:
        """Finds a NaN."""
        yield at_most("loss", float("nan"), 1.0)

    status, found = ran(monkeypatch, tmp_path, empty=empty, nan=nan)
    assert status == 1
    assert [part["status"] for part in found["parts"].values()] == ["failed"] * 2


def test_the_results_are_there_after_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[list[str]] = []

    def looking(site: Site) -> Iterator[Finding]:
        """Reads what was written before it."""
        seen.append([*json.loads((tmp_path / "results.json").read_text())["parts"]])
        page = (tmp_path / "results.md").read_text()
        assert page.startswith(f"# Not finished: {len(seen[-1])} of 3 parts have ended.")
        assert "## first: passed" in page
        assert json.loads((tmp_path / "results.json").read_text())["passed"] is False
        yield from good(site)

    ran(monkeypatch, tmp_path, first=good, second=looking, third=looking)
    assert seen == [["first"], ["first", "second"]]


def test_a_part_without_time_is_not_run_and_that_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    status, found = ran(monkeypatch, tmp_path, "--minutes", "0", good=good)
    assert status == 1
    part = found["parts"]["good"]
    assert (part["status"], part["error"]) == ("not run", NO_TIME)


def test_half_of_the_time_is_kept_for_the_parts_that_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given: list[float] = []

    def noting(site: Site) -> Iterator[Finding]:
        """Notes its time."""
        given.append(site.seconds_left)
        yield from good(site)

    ran(monkeypatch, tmp_path, "--minutes", "4", one=noting, two=noting, three=noting)
    assert given == pytest.approx([160, 200, 240], abs=5)


def test_a_process_that_hangs_is_ended_when_its_part_is_over(tmp_path: Path):
    site = Site("cpu", tmp_path, tmp_path, time.monotonic() + 0.5)
    with pytest.raises(PartError, match=r"time of this part ran out in python -m http\.server"):
        site.python("http.server", "0")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--device cpu --parts loses kernels", "--parts loses: the parts are losses, kernels"),
        (
            "--device cuda",
            "--device cuda: torch sees no such GPU here; --device cpu tries the command",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(
    words: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command([*words.split(), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert not (tmp_path / "out").exists()


def test_an_interpreter_without_a_library_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    module = import_module("tools.gpu.__main__")
    monkeypatch.setattr(module, "BESIDES", ("absent_library",))
    assert command(["--device", "cpu"]) == 2
    assert "absent_library is missing; install with " in capsys.readouterr().err


def test_an_apple_gpu_has_the_parts_of_one_process_without_deepspeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(KINDS["mps"], "is_available", lambda: True)
    monkeypatch.setattr(KINDS["mps"], "count", lambda: 1)
    seen: list[Site] = []

    def noting(site: Site) -> Iterator[Finding]:
        """Notes where it runs."""
        seen.append(site)
        yield from good(site)

    made = {"here": Part(noting, 1), "there": Part(wrong, 1, "DeepSpeed does not run on it")}
    monkeypatch.setattr(parts, "PARTS", made)
    assert command(["--device", "mps", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["parts"]["there"]["not_run"] == {"there": "DeepSpeed does not run on it"}
    assert found["machine"]["device"] == "mps"
    (site,) = seen
    assert site.gpus == 1
    assert site.seconds_left < 600
    assert site.stage(2) == site.stage(None) == "--deepspeed_config none"


@pytest.mark.parametrize("device", ["xpu", "npu"])
def test_another_accelerator_has_all_parts_but_those_for_cuda(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(KINDS[device], "is_available", lambda: True)
    monkeypatch.setattr(KINDS[device], "count", lambda: 1)
    made = {"here": Part(good, 1, "no DeepSpeed"), "there": Part(wrong, 1, is_for_cuda=True)}
    monkeypatch.setattr(parts, "PARTS", made)
    assert command(["--device", device, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["parts"]["there"]["not_run"] == {"there": "it is for CUDA"}
    assert (found["machine"]["device"], found["parts"]["here"]["not_run"]) == (device, {})


def test_the_losses_of_an_apple_gpu_are_without_deepspeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []

    def train(site: Site, runs: dict[str, str], device: str = "", **_: Any) -> dict[str, Trained]:
        asked.extend(f"{device or site.device} {flags}" for flags in runs.values())
        return {name: Trained(tmp_path, 1, "ended", []) for name in runs}

    monkeypatch.setattr(Site, "train", train)
    monkeypatch.setattr(losses, "reference", lambda site: {})
    site = Site("mps", tmp_path, tmp_path, time.monotonic() + 60)
    found = [*losses.losses(site)]
    assert [finding.is_right for finding in found] == [None, *[False] * 6]
    assert all(flags.startswith("mps --deepspeed_config none") for flags in asked)


def test_every_part_says_what_it_is_about():
    assert all(part.about.endswith(".") and part.weight > 0 for part in parts.PARTS.values())
