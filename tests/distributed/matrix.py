"""Every ZeRO stage x dtype x accumulation x world size against one run each in fp32 and bf16.

    python -m tests.distributed.matrix          (`make matrix`; 56 runs, about 9 minutes on 2 cores)

Each run takes 20 steps over the same 8 rows a step, however they are shared out, so that the loss
curves have to agree: in fp32 within 2e-6 relative, in bf16 within 2e-3 absolute. The learning rate
of every step has to be equal. Also without DeepSpeed, as ddp (2 processes) and single; and the loss
in two chunks per micro-batch against the whole, and two tensor-parallel ranks (x 2). Exit 1 when
one of them does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.model.sizes import LOSS_CHUNK
from tests.conftest import PACE, ROOT, SHAPE, sentences
from tests.forking import free_port

ROWS = 8
WITHIN = {"float32": 2e-6, "bfloat16": 2e-3}  # relative, absolute


def train(
    root: Path,
    stage: int | None,
    dtype: str,
    accumulation: int,
    world: int,
    device: str = "cpu",
    more: str = "",
    tensor: int = 1,
) -> list[Any]:
    """The `step` events of one run; stage None is without DeepSpeed."""
    out = root / f"{stage}-{dtype}-{accumulation}-{world}-{tensor}{more.replace(' ', '')}"
    flags = [*(more or SHAPE).split(), *PACE.split(), "--data_path", str(root / "text.jsonl")]
    flags += ["--cache_dir", str(root / "cache"), "--out_dir", str(out), "--dtype", dtype]
    flags += ["--batch_size", str(ROWS // accumulation // (world // tensor))]
    flags += ["--tensor_parallel", str(tensor)]
    flags += ["--accumulation_steps", str(accumulation), "--device", device]
    if stage is not None:
        config = root / f"stage{stage}.json"
        shipped = DEFAULT_DEEPSPEED_CONFIG.read_text()
        config.write_text(shipped.replace('"stage": 2', f'"stage": {stage}'))
        flags += ["--deepspeed_config", str(config)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world)]
    met = ["--master_port", str(free_port())]
    command = [*torchrun, *met, str(ROOT / "train_pretrain.py"), *flags]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{out.name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    (start,) = [e for e in events if e["event"] == "run_start"]
    backend = "deepspeed" if stage is not None else "ddp" if world > 1 else "single"
    assert (start["backend"], start["zero_stage"]) == (backend, stage), start
    return [e for e in events if e["event"] == "step"]


def difference(dtype: str, steps: list[Any], reference: list[Any]) -> float:
    """The largest over the curve: relative in float32, absolute in bfloat16."""
    pairs = [(a["loss"], b["loss"]) for a, b in zip(steps, reference, strict=True)]
    return max(abs(a - b) / (abs(b) if dtype == "float32" else 1.0) for a, b in pairs)


def main() -> int:
    """Print one line per run; 1 if any disagrees."""
    failed = 0
    print(f"{'backend':<12}{'dtype':<10}{'accumulation':>12}{'world':>7}{'difference':>13}  rates")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        lines = (json.dumps({"text": text}, ensure_ascii=False) for text in sentences(1, 400))
        (root / "text.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        for dtype in WITHIN:
            reference = train(root, 2, dtype, 2, 2)
            for stage, accumulation, world in product((0, 1, 2, 3, None), (1, 4), (1, 2)):
                steps = train(root, stage, dtype, accumulation, world)
                found = difference(dtype, steps, reference)
                same = [s["lr"] for s in steps] == [s["lr"] for s in reference]
                agrees = found < WITHIN[dtype] and same and len(steps) == 20
                failed += not agrees
                without = "ddp" if world > 1 else "single"
                shown = without if stage is None else f"ZeRO-{stage}"
                print(
                    f"{shown:<12}{dtype:<10}{accumulation:>12}{world:>7}{found:>13.1e}"
                    f"  {'equal' if same else 'DIFFER'}{'' if agrees else '  DISAGREES'}",
                    flush=True,
                )
            for stage, world in product((0, 1, 2), (2, 4)):
                if (stage, dtype) == (0, "bfloat16"):  # refused
                    continue
                found = difference(dtype, train(root, stage, dtype, 2, world, tensor=2), reference)
                agrees = found < WITHIN[dtype]
                failed += not agrees
                shown = f"ZeRO-{stage} x 2"  # tensor-parallel ranks
                print(f"{shown:<12}{dtype:<10}{2:>12}{world:>7}{found:>13.1e}", flush=True)
        for stage in (2, 3, None):
            long_rows = SHAPE.replace("--max_seq_len 64", f"--max_seq_len {LOSS_CHUNK // 2}")
            whole, chunked = (
                train(root, stage, "float32", 1, 2, more=f"{long_rows} --loss {loss}")
                for loss in ("full", "chunked")
            )
            found = difference("float32", chunked, whole)
            agrees = found < WITHIN["float32"] and len(chunked) == 20
            failed += not agrees
            shown = "ddp" if stage is None else f"ZeRO-{stage}"
            print(f"{shown:<12}--loss chunked against full {found:>14.1e}", flush=True)
    print("all agree" if not failed else f"{failed} disagree")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
