"""What the parts ask for on a GPU, with a stand-in that trains nothing: flags that are accepted.

The parts that run alike on a CPU are run there by test_command.py.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from minimind.architecture import costs
from minimind.architecture.plan import GIB, layout_of
from minimind.architecture.shape import shape_of
from minimind.config.deepspeed.document import read_deepspeed_json
from minimind.config.deepspeed.resolve import ResolvedConfig, resolve
from minimind.config.parse import parse_flags
from minimind.runtime.hardware import GPU
from minimind.train.memory import remedy
from minimind.train.start import traced_steps
from tests.conftest import PACE, SHAPE
from tools.gpu import losses, memory, ranks, speed, waits
from tools.gpu.findings import Finding
from tools.gpu.site import Site, Trained

H100 = GPU("NVIDIA H100 80GB HBM3", "580.65.06", 81559, (9, 0))
CURVE = [6.4, 6.3]


class StandIn(Site):
    """Accepts what train_pretrain.py would on a GPU, and answers as if it had trained.

    Runs above the memory of an H100 end with what the program says there; others are at `share` of
    the estimate.
    """

    share = 1.0

    def train(
        self,
        runs: Mapping[str, str],
        device: str = "",
        base: str = f"{SHAPE} {PACE}",
        keeps: bool = False,
    ) -> dict[str, Trained]:
        answers = {}
        for number, (name, flags) in enumerate(runs.items()):
            out = self.folder / f"{time.monotonic_ns()}-{number}"
            out.mkdir()
            words = [
                "--dtype",
                "bfloat16",
                *base.split(),
                "--device",
                device or self.device,
                *flags.split(),
            ]
            answers[name] = self.answer(words, out)
        return answers

    def answer(self, words: list[str], out: Path) -> Trained:
        run = parse_flags(words)
        resolved = ResolvedConfig(run, "single")
        if run.deepspeed_config != "none":
            assert run.deepspeed_config
            written = read_deepspeed_json(run.deepspeed_config)
            resolved = resolve(written, run.deepspeed_config, run, 1, run.device)
            (out / "ds_config.resolved.json").write_text(json.dumps(dict(resolved.config)))
        layout = layout_of(resolved.run, 1, resolved.config, run.device)
        needed = costs.memory(shape_of(run), layout).total
        assert H100.memory_mib
        total = H100.memory_mib * 2**20
        if needed > total:
            advice = remedy(resolved.run, resolved, 1, "cuda", total)
            return Trained(out, 10, f"train_pretrain: error[E_MEMORY] rank=0: {advice}\n", words)
        self.write(run, out)
        return Trained(out, 0, "", words, GIB, GIB + int(self.share * needed))

    @staticmethod
    def write(run: Any, out: Path) -> None:
        events: list[dict[str, Any]] = [{"event": "run_start", "device": run.device}]
        events += [{"event": "step", "loss": loss} for loss in CURVE]
        events.append({"event": "exit", "status": 0})
        (out / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
        if traced_steps(run):
            names = ("nvjet_tst", "triton_poi_fused_mul")
            kernels = [
                {"ph": "X", "cat": "kernel", "name": name, "ts": 10 * at, "dur": 5}
                for at, name in enumerate(names)
            ]
            (out / "traces").mkdir()
            with gzip.open(out / "traces" / "steps_8-11-rank_0.json.gz", "wt") as file:
                json.dump({"traceEvents": kernels}, file)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """On an H100, with the larger text in place."""
    (tmp_path / "stdlib.jsonl").write_text("")
    monkeypatch.setattr(memory, "list_gpus", lambda: [H100])
    return StandIn("cuda", tmp_path, tmp_path, time.monotonic() + 600, gpus=1)


def wrong(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.is_right is False]


@pytest.mark.parametrize("part", [losses.losses, losses.compiled])
def test_losses_of_every_case_are_compared(site: StandIn, part: Any):
    found = [*part(site)]
    assert wrong(found) == []
    assert not [finding for finding in found if finding.skipped]
    assert "ZeRO-2, float16" in {finding.what for finding in found} or part is losses.compiled


def test_another_loss_is_wrong(site: StandIn):
    (site.shared / "reference.json").write_text(
        json.dumps({kind: [6.4, 6.3 * (1 + 5e-5)] for kind in losses.REFERENCES})
    )
    found = wrong([*losses.losses(site)])
    assert {finding.what.split(", ")[1] for finding in found} == {"float32"}


@pytest.mark.parametrize(("share", "is_right"), [(1.08, True), (1.12, False)])
def test_memory_is_compared_with_the_estimate(site: StandIn, share: float, is_right: bool):
    site.share = share
    found = [*memory.memory(site)]
    assert len(found) == 9
    assert {finding.is_right for finding in found} == {is_right}


def test_less_than_the_estimate_is_wrong_of_an_eager_run_only(site: StandIn):
    site.share = 0.85
    assert all(finding.what.endswith("off") for finding in wrong([*memory.memory(site)]))
    assert wrong([*memory.memory(site)])


def test_a_run_out_of_memory_is_provoked_and_its_advice_trained(site: StandIn):
    found = [*memory.out_of_memory(site)]
    assert wrong(found) == []
    assert [finding.what.split(" with")[0] for finding in found] == [
        "status 10, one line",
        "names a micro-batch",
        "trained",
    ]


def test_each_model_is_traced(site: StandIn):
    found = [*speed.profile(site)]
    assert wrong(found) == []
    assert [finding.what for finding in found] == ["26m: trace", "104m: trace", "0.4b: trace"]


@pytest.mark.parametrize(("ours", "is_right"), [({}, True), ({"minimind: step (waits)": 1}, False)])
def test_a_wait_of_ours_is_wrong_and_a_read_is_not_counted_twice(
    site: StandIn, monkeypatch: pytest.MonkeyPatch, ours: dict[str, float], is_right: bool
):
    norm, update = "deepspeed: is_invalid_grad_norm", "minimind: update"
    reads = {
        "stage 0, float32": {update: 1.0, f"{update} (waits)": 1.0},
        "stage 2, bfloat16": {norm: 3.0, f"{norm} (waits)": 3.0, **ours},
    }

    def python(module: str, out: str, *words: str, **environ: str) -> str:
        assert (module, words) == ("tools.host_reads", ("cuda",))
        assert environ["DS_ACCELERATOR"] == "cuda"
        Path(out).write_text(json.dumps(reads))
        return ""

    monkeypatch.setattr(site, "python", python)
    found = [finding for finding in waits.waits(site) if finding.limit]
    assert [finding.is_right for finding in found] == [True, is_right]
    assert found[1].found.startswith("3 of DeepSpeed, ")


def test_one_gpu_is_not_two(site: StandIn):
    (found,) = ranks.ranks(site)
    assert found.skipped == "1 GPU here, 2 are needed"
