"""The benchmarks behind the figures of the pages: each has a smallest size, and runs to its end."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks import stages
from minimind.errors import UsageError
from tests import test_benchmarks
from tests.conftest import ROOT
from tests.docs.commands import check
from tests.docs.pages import PAGES, rows

RESULTS = ROOT / "benchmarks" / "results"
READ = {
    **PAGES,
    **{path.name: path.read_text("utf-8") for path in ROOT.glob("*.md")},
    **{
        f"{name}/README.md": (ROOT / name / "README.md").read_text("utf-8")
        for name in ("examples",)
    },
}
OWN = (ROOT / "benchmarks" / "README.md").read_text("utf-8")


@dataclass(frozen=True)
class Small:
    """Arguments of the smallest size, and what of the output the pages quote.

    TEXT.jsonl is the sample's corpus, and so is every NAME=TEXT.jsonl; DIR is an empty folder.
    """

    module: str
    words: str = ""
    columns: tuple[str, ...] = ()
    has_results: bool = True  # written to --out as by benchmarks.record

    def __str__(self) -> str:
        race = re.search(r"--race (\w+)", self.words)
        return f"{self.module}-{race[1]}" if race else self.module


RACE = "--model tiny --rows 2 --rounds 4 --max_seq_len 32 --dtype float32"
LOOPS = [cells[0] for cells in rows(PAGES["measurements.md"], "<!-- benchmarks.table -->")]
SMALLEST = [
    Small(
        "auto_values",
        "kjv=TEXT.jsonl --folder DIR --only 0.3m-kjv-512k-1e",
        ("rule", "best", "above it", "before", "of its time"),
    ),
    Small("block_sums", "--tokens 1000000 --rows 2 --steps 2", ("a step of tiny", "sums")),
    Small("checkpoint_stall", "--model tiny --rounds 2", ("torch.save", "stall", "until durable")),
    Small(
        "compiling",
        "TEXT.jsonl --model tiny --rows 1 --starts 1 --rounds 2 --dtype float32",
        ("cold", "warm", "s/step"),
    ),
    Small("default_rules", "TEXT.jsonl --folder DIR --only text-0.3m-256k-1e-4r"),
    Small(
        "doctor_runs",
        "kjv=TEXT.jsonl poems=TEXT.jsonl python=TEXT.jsonl headers=TEXT.jsonl --folder DIR"
        " --only 'stopped early'",
        has_results=False,
    ),
    Small(
        "dropout",
        "kjv=TEXT.jsonl --folder DIR --passes 2 --rates 0.1 --seeds 1 --tokens 32768",
        (
            ": decay: ",
            ": dropout 0.1: ",
            ": decay and dropout 0.1: ",
            ": label smoothing: ",
            ": z-loss: ",
        ),
    ),
    Small("dropout", "--cost --model tiny --rows 1 --rounds 3", ("keyed", "torch", "of the time")),
    Small("fake_ranks", "--ranks 8", ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")),
    Small(
        "fingerprints",
        "TEXT.jsonl --batch_size 1 --pairs 2",
        ("step_ms", "record_ms", "share", "95 %"),
    ),
    Small("huge_pages", "TEXT.jsonl --steps 2 --rounds 1", ("ratio", "losses equal")),
    Small("launches", "--rounds 2", ("eager", "compiled", "us each")),
    Small(
        "launches",
        "--engines --depths tiny 26m --how eager --processes 1 --rounds 1",
        ("DeepSpeed", "ours", "reads", "ms least", "stage 2, auto", "for each parameter"),
    ),
    Small("loader", "--tokens 1000000 --rounds 2", ("8 rows, mixed", "ms per 4,096 tokens")),
    Small(
        "loss", "--vocab_sizes 600 --rows 2 --rounds 1", ("seconds", "peak_mib", "full", "chunked")
    ),
    Small(
        "many_ranks",
        "--ranks 8 --forked 2 --sums 2 --seconds 1",
        ("'reads'", "'messages'", "'mebibytes'", "'cpu_seconds'", "'ring'", "'pairs'"),
    ),
    Small(
        "mid_training",
        "TEXT.jsonl OTHER.jsonl --work DIR --seeds 1 --steps 20",
        ("better", "even", "decay"),
    ),
    Small(
        "mup_transfer",
        "TEXT.jsonl --work DIR --widths 32 --rates 0.001 0.002 --steps 4",
        ("width", "best"),
    ),
    Small("needle", "--seeds 1", ("32 tokens", "128 tokens", "linear", "yarn", "llama3")),
    Small(
        "newton_schulz",
        "--rounds 2",
        ("polar_express, one by one", "192 x 512", "rank 1", "float32, 64 x 64"),
    ),
    Small(
        "overhead",
        "TEXT.jsonl --model least --batch_size 1 --pairs 6 --guard",
        ("loop_over_engine_ms", "hooks_ms", "profile_ms", "guard_ms", "95 %"),
    ),
    Small(
        "poisoned_text",
        "TEXT.jsonl --work DIR --seeds 1 --documents 60 --steps 60",
        ("without it", "with it", "guarded", "spikes that name it"),
    ),
    Small(
        "preparation",
        "TEXT.jsonl --rounds 1 --vocab_size 600",
        ("prepare / SentencePiece", "prepare / tokenizers", "MB/s"),
    ),
    Small("process_end", "--rounds 1 --processes 1", ("processes: 1, ",)),
    Small(
        "recipe",
        "TEXT.jsonl --folder DIR --shapes 0.3m --steps 4 --share 0.5 --seeds 1",
        ("strong, 4 steps", "rate falls to 0, 2 steps", "of the average over", "above strong in 4"),
    ),
    Small(
        "reference_curves",
        "--folder DIR --seeds 42 --only tiny-default --steps 4",
        ("tiny-default, seed 42",),
        has_results=False,
    ),
    Small("rotary", "--rounds 2", ("complex, compiled", "halves, compiled", "fp32", "bf16")),
    Small("sequence_memory", "--model tiny --sizes 1 2 --lengths 64", ("N = 1, MiB", "N = 2, MiB")),
    Small(
        "serve_attacked",
        "--seconds 2 --senders 2 --slow 4",
        ("none", "bombs", "large", "slow", "median_seconds", "most_seconds", "most_mib"),
    ),
    Small(
        "serve_load",
        "--requests 20 --clients 4 --malformed 20 --cut 4",
        ("requests_per_second", "most_waiting", "seconds_until_idle", "malformed", "strangers"),
    ),
    *(
        Small("stages", f"TEXT.jsonl --race {race} {RACE}", ("tokens/s", "MiB"))
        for race in stages.RACES
        if race != "stages"
    ),
    Small("table", "", ("| loop |", *LOOPS), has_results=False),
    Small(
        "throughput",
        "TEXT.jsonl --model tiny --rows 1 --rounds 2 --warm 1 --dtype float32",
        ("tokens/s", "speed", "by CPU", "MiB", *LOOPS),
    ),
    Small(
        "tune",
        "TEXT.jsonl --work DIR --minutes 3 --rounds 1 --try batch_size=2,4",
        ("tokens_per_second", "best", "chosen", "behind_best"),
    ),
    Small("units", "--model tiny --rounds 2 --rows 1 --dtype float32", ("kept", "again", "time")),
]
# What runs in a test of its own, with checks of its figures.
ELSEWHERE = {
    "gpu": test_benchmarks.test_the_benchmark_for_gpus_runs_whole_on_a_cpu,
    "racers": test_benchmarks.test_the_race_runs_whole_and_does_nothing_twice,
    "stages": test_benchmarks.test_the_benchmark_of_stages_has_each_at_one_process,
    "time_to_loss": test_benchmarks.test_the_race_runs_whole_and_does_nothing_twice,
}


@dataclass(frozen=True)
class Lacking:
    """Arguments that need what is not here, and the end of the command without it."""

    module: str
    words: str
    sentence: str


LACKING = {
    "a GPU": Lacking(
        "gpu", "", "torch sees no GPU here; --device cpu --models tiny tries the command"
    ),
    "litgpt": Lacking(
        "throughput",
        "TEXT.jsonl --only 'litgpt, eager loop'",
        "litgpt, eager loop: litgpt is not installed (docs/measurements.md)",
    ),
    "Triton": Lacking(
        "other_cards", "", "the package triton is missing; --help says how it is installed"
    ),
    "nanochat": Lacking(
        "time_to_loss",
        "TEXT.jsonl --folder DIR --peer nanochat GONE --only nanochat",
        "has no nanochat/gpt.py; check out nanochat 92d63d4",
    ),
    "MiniMind": Lacking(
        "time_to_loss",
        "TEXT.jsonl --folder DIR --peer minimind GONE --only 'MiniMind, packed'",
        "has no model/model_minimind.py; check out MiniMind d65ef2c",
    ),
}


def benchmark_of(result: dict[str, Any]) -> str | None:
    """The benchmark that wrote a file of results; None if none did."""
    found = re.search(r"-m benchmarks\.(\w+)", result.get("command") or "")
    return found[1] if found else None


def recorded() -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Benchmark and content of every file of results."""
    for path in RESULTS.glob("*.json"):
        result = json.loads(path.read_text("utf-8"))
        yield benchmark_of(result), result


def quoted() -> Iterator[tuple[str, str]]:
    """Page and name of every benchmark that a page names, or whose results it names."""
    for page, text in READ.items():
        for name in re.findall(r"\bbenchmarks[./](\w+)", text):
            if name not in ("README", "results"):
                yield page, name
        for file in re.findall(r"`(?:benchmarks/results/)?([\w-]+-20[\d-]{8}[\w-]*\.json)", text):
            if name := benchmark_of(json.loads((RESULTS / file).read_text("utf-8"))):
                yield page, name
    for cells in rows(OWN, "# Benchmarks"):
        yield "benchmarks/README.md", cells[0].strip("`").split(" ")[0]


def test_every_benchmark_that_a_page_names_has_a_smallest_size():
    known = {one.module for one in [*SMALLEST, *LACKING.values()]} | {*ELSEWHERE}
    found = [*quoted()]
    assert len(found) > 60
    assert [where for where in found if where[1] not in known] == []
    assert known - {name for _, name in found} == set()
    races = {words[1] for one in SMALLEST if (words := re.search(r"--race (\w+)", one.words))}
    assert {*stages.RACES} == races | {"stages"}
    for test in ELSEWHERE.values():
        assert "long" in {mark.name for mark in test.pytestmark}  # pyright: ignore[reportFunctionMemberAccess] (set by the decorators)


def test_the_flags_that_pages_give_a_benchmark_are_its_own():
    faults, seen = [], 0
    for page, text in READ.items():
        for span in re.findall(r"`([^`]*python\s+-m\s+benchmarks\.\w+\s[^`]*)`", text):
            seen += 1
            try:
                check(" ".join(span.split()))
            except UsageError as fault:
                faults.append(f"{page}: {span}: {fault}")
    assert seen > 8
    assert faults == []


@pytest.mark.parametrize("what", LACKING)
def test_a_benchmark_without_what_it_needs_says_so(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    one = LACKING[what]
    module = import_module(f"benchmarks.{one.module}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("throughput", "other_cards"):
        monkeypatch.setattr(f"benchmarks.{name}.find_spec", lambda package: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [one.module, *shlex.split(one.words)])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert str(ended.value).endswith(one.sentence)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        ("auto_values", "kjv=a.jsonl --folder DIR --only 0.3m-kjv", "0.3m-kjv is no case or text"),
        ("auto_values", "kvj=a.jsonl --folder DIR", "kvj is no case or text"),
        ("dropout", "a=a.jsonl", "give texts and --folder, or --cost"),
        ("default_rules", "a.jsonl --folder DIR --only b-1m", "--only b-1m is no sweep of these"),
        ("recipe", "a.jsonl --folder DIR --steps 4", "--share 0.97 of --steps 4 is no smaller"),
        ("sequence_memory", "--model tiny", "--sizes 4 does not divide the 6 heads of tiny"),
        ("serve_attacked", "--roots GONE", "--roots GONE is no checkout: it has no minimind/serve"),
    ],
)
def test_a_benchmark_of_nothing_is_refused(
    module: str, words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(sys, "argv", [module, *words.split()])
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{module}").main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of `make train`."""
    path = tmp_path_factory.mktemp("text") / "TEXT.jsonl"
    script = ROOT / "examples" / "stdlib_corpus.py"
    subprocess.run([sys.executable, str(script), str(path)], check=True, capture_output=True)
    return path


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize("one", SMALLEST, ids=str)
def test_a_benchmark_runs_to_its_end_and_prints_what_pages_quote(
    one: Small, text: Path, tmp_path: Path
):
    for name in ("text.jsonl", "OTHER.jsonl"):
        shutil.copy(text, tmp_path / name)  # two files, not two names of one
    places = {"DIR": tmp_path / "work", "OTHER": tmp_path / "OTHER", "TEXT": tmp_path / "text"}
    words = [
        re.sub(r"\b(DIR|OTHER|TEXT)\b", lambda m: str(places[m[1]]), w)
        for w in shlex.split(one.words)
    ]
    out = tmp_path / "out.json"
    words += ["--out", str(out)] * one.has_results
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{one.module}", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,  # seconds; a contender that waits for ever ends the test
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    for column in one.columns:
        assert column in done.stdout
    if one.has_results:
        written = json.loads(out.read_text("utf-8"))
        kept = [{*found} - {"note"} for name, found in recorded() if name == one.module]
        assert not kept or {*written} in kept  # read by the same names; a note is written by hand
