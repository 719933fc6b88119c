"""Losses on the device against those of the CPU in fp32, in one process without DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from minimind.config.flags import ALONE
from tools.gpu.findings import Finding, at_most, check, skipped
from tools.gpu.site import WITHOUT, Site, last_line

# Relative. The order of sums differs between a CPU and a GPU. Two CPU runs, in fp32 and in bf16,
# are 4.8e-4 apart; fp16 has three bits more than bf16.
DISTANCE = {"float32": 1e-5, "bfloat16": 2e-3, "float16": 2e-3}
REFERENCES = {
    "": "",
    "document mask": "--doc_mask --max_seq_len 128",  # shorter rows take no flex attention
    "experts": "--use_moe",
    "gradient checkpointing": "--gradient_checkpointing",
}
FP16_SCALE = '"fp16": { "enabled": "auto", "initial_scale_power": 8 }'  # no step overflows


@dataclass(frozen=True)
class Case:
    """One run: its ZeRO stage, or None, and what differs from the plain model."""

    stage: int | None
    dtype: str
    kind: str = ""  # of REFERENCES

    def __str__(self) -> str:
        who = "no DeepSpeed" if self.stage is None else f"ZeRO-{self.stage}"
        return ", ".join(filter(None, (who, self.dtype, self.kind)))


EAGER = [
    *(
        Case(None, dtype, kind)
        for kind in ("", "document mask", "experts")
        for dtype in ("float32", "bfloat16")
    ),
    *(Case(stage, dtype) for stage in range(4) for dtype in ("float32", "bfloat16")),
]
COMPILED = [
    *(Case(None, dtype, kind) for kind in ("", "document mask") for dtype in ("float32",)),
    Case(None, "bfloat16"),
    Case(None, "bfloat16", "gradient checkpointing"),
    Case(1, "bfloat16"),
    Case(2, "bfloat16"),
]
HALF = Case(2, "float16")


def losses(site: Site) -> Iterator[Finding]:
    """Eager: every ZeRO stage, document mask, experts; fp32, bf16, fp16."""
    cases = [case for case in EAGER if case.stage is None or site.device not in ALONE]
    if site.device == "cuda":  # before stage 3
        cases.insert(cases.index(Case(3, "float32")), HALF)
    else:
        yield skipped(str(HALF), "float16 is for CUDA")
    yield from compared(site, cases, "off")


def compiled(site: Site) -> Iterator[Finding]:
    """Compiled: alone, with document mask, gradient checkpointing, under ZeRO-1 and 2."""
    yield from compared(site, COMPILED, "on")


def compared(site: Site, cases: Sequence[Case], compile: str) -> Iterator[Finding]:
    """The largest relative difference of a loss, of each case."""
    expected = reference(site)
    flags = {
        str(case): f"{config(site, case)} --dtype {case.dtype} {REFERENCES[case.kind]}"
        f" --compile {compile}"
        for case in cases
    }
    runs = site.train(flags)
    for case in cases:
        run = runs[str(case)]
        if run.status:
            yield check(
                str(case), False, f"status {run.status}: {last_line(run.error)}", "status 0"
            )
            continue
        (start,) = run.events("run_start")
        if start["device"] != site.device:
            yield check(str(case), False, f"trained on {start['device']}", site.device)
            continue
        found = [step["loss"] for step in run.events("step")]
        yield at_most(str(case), difference(found, expected[case.kind]), DISTANCE[case.dtype])


def config(site: Site, case: Case) -> str:
    """The flag for the DeepSpeed file of a case."""
    if case.dtype != "float16":
        return site.stage(case.stage)
    shipped = site.stage(case.stage).split()[-1]
    path = site.shared / "fp16.json"
    with open(shipped) as file:
        text = file.read()
    path.write_text(text.replace('"fp16": { "enabled": "auto" }', FP16_SCALE))
    return f"--deepspeed_config {path}"


def reference(site: Site) -> Mapping[str, Sequence[float]]:
    """Losses by kind of model: eager fp32 on the CPU, once for all parts."""
    kept = site.shared / "reference.json"
    if not kept.exists():
        flags = {
            kind: f"{WITHOUT} --dtype float32 --compile off {more}"
            for kind, more in REFERENCES.items()
        }
        runs = site.train(flags, device="cpu")
        curves = {kind: [s["loss"] for s in run.events("step")] for kind, run in runs.items()}
        kept.write_text(json.dumps(curves))
    return json.loads(kept.read_text())


def difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest, relative; infinite where a step is missing."""
    if len(found) != len(expected):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
