"""Run datatrove's steps, and count and list what they removed; importing this needs datatrove."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from contextlib import redirect_stderr
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor

from minimind.data.prepare.encode import documents_of, refuse
from minimind.data.prepare.merge import require_few_rejected
from minimind.data.prepare.remote import local_text
from minimind.data.prepare.work_units import Input, Plan, make_plan
from minimind.data.prepare.workers import process_pool, spawning
from minimind.data.quality.request import FilterRequest
from minimind.data.quality.steps import Decontamination, Stage, stages
from minimind.data.shards.manifest import Options
from minimind.data.text.formats import segments_of
from minimind.data.text.inputs import Source, find_files, require_once
from minimind.errors import DataError, RunError, StorageError, UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import canonical_json, read_small, sync_file, write_durably
from minimind.runtime.object_cache import ObjectCache
from minimind.runtime.output_folder import NewFolder
from minimind.runtime.terminal import phase
from minimind.runtime.urls import masked, named

REPORT_NAME = "report.json"
REMOVED_NAME = "removed.ndjson"  # is left out of folders of text by its name
LARGEST_REPORT = 2**28  # bytes: it lists every input
DRAFT_VERSION = 1  # increase when what a draft holds changes
OWN = (REPORT_NAME, REMOVED_NAME, "part-[0-9]*.jsonl.zst")


class Executor(LocalPipelineExecutor):
    """datatrove's, but a task counts as complete when what it wrote is on disk."""

    def mark_rank_as_completed(self, rank: int) -> None:
        """Write the file that stands for a complete task."""
        draft = Path(self.logging_dir.path).parents[1]
        for path in disk.files_below(draft):
            if self.tasks == 1 or f"{rank:05d}" in path.name:  # one task has files for all
                sync_file(path)
        super().mark_rank_as_completed(rank)


Build = Callable[[], list[Stage]]


def run_here(build: Build, stages: Sequence[Stage], processes: int) -> None:
    """Run the tasks that are not complete in processes of this host, which `build` the stages.

    datatrove's own pool waits for ever when one of its processes is killed.
    """
    with process_pool(processes, "filters the text") as pool:
        for number, stage in enumerate(stages):
            executor = Executor(stage.steps, stage.tasks, logging_dir=stage.logging_dir)
            ranks = executor.get_incomplete_ranks()
            if pool is None:
                for rank in ranks:
                    _run_task(build, number, rank)
                continue
            with spawning():
                futures = [pool.submit(_run_task, build, number, rank) for rank in ranks]
            for future in as_completed(futures):
                future.result()


def _run_task(build: Build, number: int, rank: int) -> None:
    """Run a task of a stage, whose log is a file below `logging_dir`."""
    stage = build()[number]
    executor = Executor(stage.steps, stage.tasks, logging_dir=stage.logging_dir)
    with redirect_stderr(StringIO()):
        executor._run_for_rank(rank)


def filter_text(
    request: FilterRequest,
    out: Path,
    cache: ObjectCache,
    force: bool = False,
    run: Callable[[Sequence[Stage], int], None] | None = None,
) -> dict[str, Any]:
    """Write the documents that stay to a new folder `out`; return its report.

    Text at URLs is fetched to `cache`, when all else that can be wrong is checked. The same request
    continues an interrupted one. `run` replaces `run_here` and takes the stages and the number of
    processes. It may return before they are complete: then RunError is raised, and the same request
    finishes the folder later.
    Raise DataError if a document is bad and none may be skipped, too many are, or none stays.
    """
    author = "minimind data filter"
    folder = NewFolder(disk.resolve(out.expanduser()), force, OWN, author, _is_output)
    folder.require_free()
    request.steps.require_usable()
    paths = local_text(request.paths, cache)
    files = find_files(paths)
    require_once(files, "")
    foreign = local_text(request.steps.decontaminate, cache)
    foreign = find_files(foreign) if foreign else []
    inside = [file for file in files + foreign if disk.resolve(file).is_relative_to(folder.path)]
    if inside:
        raise UsageError(
            f"--out {out} holds {inside[0]}, which is read; give another folder, outside of the"
            " text"
        )
    options = Options(
        text_field=request.reading.text_field, max_document_bytes=request.reading.max_document_bytes
    )
    plan = make_plan((Source("data", paths),), options)
    classifier = [Path(request.steps.classifier)] if request.steps.classifier else []
    key = {
        "versions": [DRAFT_VERSION, version("datatrove")],
        "steps": request.steps.given(),
        "skips_bad": request.skips_bad,
        "units": [plan.key_of(unit, "") for unit in plan.units],
        "others": [asdict(Input.of(path, 0)) for path in [*foreign, *classifier]],
    }
    with folder.written_aside(key=canonical_json(key)) as draft:
        if not disk.exists(draft / REPORT_NAME):
            with phase("filtering the text"):
                _index(request, foreign, draft)
                build = partial(_stages, request, plan, foreign, draft)
                todo = build()
                if run is None:
                    run_here(build, todo, request.processes)
                else:
                    run(todo, request.processes)
                report = _report(request, files, plan, todo, draft)
            content = json.dumps(report, indent=1).encode() + b"\n"
            write_durably(draft / REPORT_NAME, content)
        shutil.rmtree(draft / "scratch", ignore_errors=True)
    return json.loads((folder.path / REPORT_NAME).read_bytes())


def _is_output(folder: Path) -> bool:
    """Whether a folder has what every output has, and a report that lists its parts."""
    if not disk.exists(folder / REPORT_NAME) or not disk.exists(folder / REMOVED_NAME):
        return False
    try:
        report = json.loads(read_small(folder / REPORT_NAME, LARGEST_REPORT))
    except (ValueError, RecursionError):
        return False
    return isinstance(report, dict) and report.get("parts") == _parts(folder)


def _parts(folder: Path) -> list[str]:
    return sorted(path.name for path in disk.matching(folder, "part-*"))


def _decontamination(foreign: Sequence[Path], draft: Path) -> Decontamination:
    return Decontamination(draft / "scratch" / "ngrams", [named(str(path)) for path in foreign])


def _index(request: FilterRequest, foreign: Sequence[Path], draft: Path) -> None:
    """Write the n-grams of --decontaminate; raise DataError for a text without any."""
    reading = replace(request.reading, text_field=request.steps.decontaminate_field or "text")
    for number, path in enumerate(foreign):
        decontamination = _decontamination(foreign, draft)
        documents = documents_of(segments_of(path, sys.maxsize), reading, refuse)
        if not decontamination.write_index(number, (text for text, *_ in documents)):
            raise DataError(
                f"--decontaminate {path}: no text has {decontamination.config.n_grams} words, so it"
                " cannot match anything; give longer texts, or remove --decontaminate"
            )


def _stages(
    request: FilterRequest, plan: Plan, foreign: Sequence[Path], draft: Path
) -> list[Stage]:
    return stages(request, plan, _decontamination(foreign, draft) if foreign else None, draft)


def _report(
    request: FilterRequest, files: Sequence[Path], plan: Plan, todo: Sequence[Stage], draft: Path
) -> dict[str, Any]:
    """Write the list of what was removed, in the order of the text; return report.json's content.

    The bytes read are the sum of the rest.
    """
    for stage in todo:
        executor = Executor(stage.steps, stage.tasks, logging_dir=stage.logging_dir)
        if left := executor.get_incomplete_ranks():
            raise RunError(
                f"data filter: {len(left)} of {stage.tasks} tasks of"
                f" {Path(stage.logging_dir.path).name} are not complete, the first is {left[0]};"
                " when their jobs have ended, give the same command again"
            )
    documents: Counter[str] = Counter()  # by reason
    sizes: Counter[str] = Counter()  # UTF-8 bytes of text; a rejected document has none
    lines: Counter[str] = Counter()  # of files, in the tasks before
    kept: Counter[str] = Counter()
    remarks: list[str] = []
    lost_bytes, first_rejected = 0, ""
    with open(draft / REMOVED_NAME, "wb") as listed:
        for task in range(len(plan.units)):
            for entry in _entries(draft / "scratch" / "removed", task):
                entry["line"] += lines[f"lines {entry['file']}"]
                entry["file"] = named(str(files[entry["file"]]))
                if "remark" in entry:
                    remarks.append(entry["file"] + entry["remark"])
                    continue
                if entry["reason"] == "rejected":
                    documents["rejected"] += entry["documents"]
                    lost_bytes += entry["bytes"]
                    first = f"{entry['file']}:{entry['line']}: {entry['what']}"
                    first_rejected = first_rejected or first
                else:
                    documents[entry["reason"]] += 1
                    sizes[entry["reason"]] += entry.pop("bytes")
                listed.write(canonical_json(entry) + b"\n")
            lines.update(_counted(todo[0], task, 0))
            kept.update(_counted(todo[-1], task, -1))
    sync_file(draft / REMOVED_NAME)

    bad = documents["rejected"]
    good = kept["total"] + documents.total() - bad
    read_bytes = kept["text_bytes"] + kept["cut_bytes"] + sizes.total()
    if lines["text_bytes"] != read_bytes:
        raise StorageError(
            f"{draft}: has {read_bytes:,} of {lines['text_bytes']:,} bytes of text; check the disk,"
            " and delete the folder"
        )
    weight = sum(unit.bytes for unit in plan.units)
    rejected = {"count": bad, "bytes": lost_bytes, "first": first_rejected}
    source = Source("data", tuple(map(masked, request.paths)))
    require_few_rejected(rejected, good, weight, request.max_bad_fraction, [source])
    if not kept["total"]:
        reason, count = documents.most_common(1)[0]
        raise DataError(
            f"{masked(request.paths[0])}: none of {good + bad:,} documents is left, and {count:,}"
            f" were removed by {reason}; change the steps"
        )
    del documents["rejected"]
    return {
        "inputs": [named(str(path)) for path in files],
        "steps": request.steps.given(),
        "read": {"documents": good + bad, "bytes": read_bytes},
        "kept": {"documents": kept["total"], "bytes": kept["text_bytes"]},
        "rejected": {"documents": bad, "bytes": 0},
        "lost_bytes": lost_bytes,
        "removed": {
            reason: {"documents": count, "bytes": sizes[reason]}
            for reason, count in documents.items()
        },
        "cut": {"documents": kept["cut"], "bytes": kept["cut_bytes"]},
        "parts": _parts(draft),
        "remarks": remarks,
    }


def _entries(folder: Path, task: int) -> list[dict[str, Any]]:
    """What the steps of a task have listed, in the order of the text."""
    found: list[dict[str, Any]] = []
    for path in disk.matching(folder, f"{task:05d}-*"):
        with open(path, "rb") as file:
            found += map(json.loads, file)
    return sorted(found, key=lambda entry: (entry["file"], entry["line"]))


def _counted(stage: Stage, task: int, step: int) -> dict[str, Any]:
    """What a step of a task has counted."""
    with stage.logging_dir.open(f"stats/{task:05d}.json") as file:
        stats = json.load(file)[step]["stats"]
    return {name: one["total"] if isinstance(one, dict) else one for name, one in stats.items()}
