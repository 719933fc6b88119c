"""The stages of `data filter` with other executors of datatrove, without a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from minimind.data.prepare import work_units
from minimind.data.quality.filter import filter_text
from minimind.data.quality.request import FilterRequest, Steps
from minimind.data.quality.steps import Stage
from minimind.errors import RunError
from minimind.runtime.object_cache import open_cache
from tests.conftest import ROOT, sentences
from tests.data.quality.test_filter import report_of, run, write
from tests.data.quality.test_processes import bytes_of

# Runs the tasks of an array at once, each as `srun` would.
SBATCH = r"""#!/bin/bash
file="${@: -1}"
echo "$*" >>"$CALLS"
last=$(sed -n 's/^#SBATCH --array=0-//p' "$file")
for n in $(seq 0 "${last:-0}"); do
  SLURM_ARRAY_TASK_ID=$n SLURM_NODELIST=here bash "$file" >>"$CALLS.out" 2>&1 || exit 1
done
echo "Submitted batch job 7"
"""


@pytest.mark.long  # test_processes.py runs the same stages in local processes
@pytest.mark.launch
def test_jobs_of_slurm_write_the_folder_of_one_process(tmp_path: Path, monkeypatch):
    from datatrove.executor import SlurmPipelineExecutor

    for name, content in {"sbatch": SBATCH, "scontrol": "#!/bin/bash\necho here\n"}.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    path = [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(work_units, "SMALLEST_UNIT", 30_000)  # two tasks, a process each
    texts = sentences(3, 100)
    text = write(tmp_path / "t.jsonl", [*texts, "short", *texts[:20]])
    given: dict[str, Any] = {"time": "1:00:00", "partition": "cpu", "with_srun": False}
    given["slurm_logs_folder"] = str(tmp_path / "slurm")
    is_up = False

    def submit(stages: Sequence[Stage], processes: int) -> None:
        job = None
        for stage in stages if is_up else ():
            job = SlurmPipelineExecutor(
                stage.steps, stage.tasks, logging_dir=stage.logging_dir, depends=job, **given
            )
        if job:
            job.run()

    request = FilterRequest((str(text),), Steps(min_chars=9, exact_dedup=True))
    with open_cache(tmp_path / "cache") as cache:
        with pytest.raises(RunError, match="when their jobs have ended"):
            filter_text(request, tmp_path / "out", cache, run=submit)
        is_up = True
        filter_text(request, tmp_path / "out", cache, run=submit)
    report = report_of(tmp_path / "out")
    assert len(report["parts"]) == 2
    assert report["removed"]["exact_duplicate"]["documents"] >= 20
    assert run(tmp_path / "here", text, "--min_chars", 9, "--exact_dedup") == 0
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "here")
    assert (tmp_path / "calls").read_text().count("--export=ALL") == 3
