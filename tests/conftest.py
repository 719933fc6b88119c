"""A small corpus, and real runs through run_accelerate.sh with two gloo processes."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import random
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tools.runs import PACE as PACE
from tools.runs import ROOT as ROOT
from tools.runs import SHAPE as SHAPE
from tools.runs import Launcher, sentences
from tools.runs import Run as Run

# Fixtures that run two processes at once.
STARTS_RUNS = {"launch", "forked", "nursery"}
# By the session fixtures of tests/distributed/conftest.py.
SHARE_RUNS = {
    f"tests/distributed/test_{name}.py"
    for name in ("launchers", "parallel_runs", "reference", "restarts", "runs")
}

SECONDS = "tests/seconds"  # key of pytest's cache
MANY = 200  # tests of a file

count_frozen = gc.get_freeze_count
taken: defaultdict[str, float] = defaultdict(float)  # seconds of tests that ended, by file


def pytest_configure(config: pytest.Config) -> None:
    """Heed SIGINT and SIGHUP where they are ignored: under nohup, in a script's background.

    The processes that tests start inherit what is ignored, and would not stop. Until the tests are
    collected, no garbage is: there is hardly any, and looking for it takes a quarter of the time.
    xdist's controller collects no tests.
    """
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        gc.disable()
    logging.getLogger().addHandler(logging.NullHandler())  # otherwise warnings go to stderr
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run what takes minutes")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """In every second worker of xdist, import the modules from the last on.

    Workers collect from the first on, so that of a fresh checkout each compiles a half.
    """
    if int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2 == 0:
        return
    places = [Path(argument.partition("::")[0]).resolve() for argument in session.config.args]
    files = [file for place in places for file in sorted(place.rglob("test_*.py"))]
    for file in reversed(files):
        with suppress(Exception, pytest.skip.Exception):  # which the collection will report
            import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Freeze what the tests consist of; a run in this process would collect garbage among it.

    A run asks how many objects are frozen, and counting these takes 0.1 s: they are counted once.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    frozen = gc.get_freeze_count()
    gc.get_freeze_count = lambda: frozen


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """Have files not synced to the disk: no test cuts the power, and a killed process loses none.

    The processes of tests/faults, which look at the calls, do sync.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _floors_once() -> Iterator[None]:
    """Compute the floors of a text once for all runs on it: a quarter of the time of a small run.

    Tests of floors call the function itself.
    """
    module, known = sys.modules.get("minimind.train.floors"), dict[Any, Any]()
    if module is None:  # no test that was collected is about them
        yield
        return
    floors = module.floors

    def of_text(prepared: Any, held_out: Any) -> Any:
        # The fingerprint is of the tokenizer and the tokens of both splits, the held-out ones too.
        key = (
            *(prepared.manifest["fingerprint"], prepared.manifest["splits"]["train"]["documents"]),
            *(held_out.in_force.tobytes(), held_out.row_tokens, held_out.sources),
            *(held_out.weights, held_out.loss_weights),
            b"".join(of_id.tobytes() for of_id in held_out.bytes_per_id),
        )
        if key not in known:
            known[key] = floors(prepared, held_out)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "floors", of_text)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_plotly_js() -> Iterator[None]:
    """Leave plotly.js, 5 MB, out of the page at the end of a run: a tenth of a small run's time.

    `minimind report` and the pages that browsers open have it.
    """
    module = sys.modules.get("minimind.report.page")
    if module is None:  # no test that was collected is about pages
        yield
        return
    write = module.write_report

    def written(run_dirs: Any, out: Path, remedy: str) -> int:
        with pytest.MonkeyPatch.context() as patch:
            if remedy.endswith("--out_dir"):  # of the run itself
                patch.setattr("plotly.offline.get_plotlyjs", str)
            return write(run_dirs, out, remedy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write_report", written)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_browser() -> Iterator[None]:
    """End the browser of this process, which the first test that opens a page starts."""
    yield
    if module := sys.modules.get("tests.browser"):
        module.close()


class Messages(logging.Handler):
    """Keeps `logger: message` of what is logged, with tracebacks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(f"{record.name}: {self.format(record)}")


@pytest.fixture
def messages() -> Iterator[Messages]:
    """What is logged by all loggers that propagate it."""
    handler = Messages()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No objects frozen, as where a run has a process to itself."""
    monkeypatch.setattr(gc, "get_freeze_count", count_frozen)
    gc.unfreeze()
    yield
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if STARTS_RUNS & {*getattr(item, "fixturenames", ())}:
            item.add_marker("launch")
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device here"))
    if not config.getoption("--long"):
        spared = {id(item) for item in items if item.get_closest_marker("long")}
        if not config.option.keyword:  # -k names the cases to run
            spared |= {id(item) for item in outside_samples(items)}
        config.hook.pytest_deselected(items=[item for item in items if id(item) in spared])
        items[:] = [item for item in items if id(item) not in spared]
    if hasattr(config, "workerinput"):  # of xdist
        longest_files_first(items, known_seconds(config))


def longest_files_first(items: list[pytest.Item], known: Mapping[str, float]) -> None:
    """Sort tests by the seconds of their files in the last run, so that workers end together.

    Unknown files come first: those with launches, those with hundreds of tests, those with few.
    """
    files = [item.nodeid.partition("::")[0] for item in items]
    with_launches = {
        file for file, item in zip(files, items, strict=True) if item.get_closest_marker("launch")
    }
    counts = Counter(files)
    ranks = {
        file: (-known.get(file, math.inf), file not in with_launches, counts[file] < MANY, count)
        for file, count in counts.items()
    }
    items.sort(key=lambda item: ranks[item.nodeid.partition("::")[0]])


def known_seconds(config: pytest.Config) -> dict[str, float]:
    """Seconds that the tests of each file took in the last whole run."""
    return config.cache.get(SECONDS, {}) if config.pluginmanager.hasplugin("cacheprovider") else {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    taken[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the times of a run of xdist, of whole files, in pytest's cache."""
    config = session.config
    is_whole = not (config.option.keyword or config.option.markexpr or "::" in str(config.args))
    is_controller = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if is_whole and is_controller and config.pluginmanager.hasplugin("cacheprovider"):
        config.cache.set(SECONDS, known_seconds(config) | taken)


def outside_samples(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases of tests with the marker sample(n) beyond n, in which as many values as fit occur.

    They are the same in every run, and in every worker of one.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("long"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, left in cases.items():
        random.Random(name).shuffle(left)
        values = {id(item): {*map(repr, item.callspec.params.items())} for item in left}  # pyright: ignore[reportAttributeAccessIssue] (of parametrized functions)
        (mark,) = left[0].iter_markers("sample")
        for _ in range(min(mark.args[0], len(left))):
            chosen = max(left, key=lambda item: len(values[id(item)]))
            left.remove(chosen)
            occurs = values.pop(id(chosen))
            for others in values.values():
                others -= occurs
        yield from left


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, the files in which tests look at the same runs are as one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # files are in their order already

    class ByRuns(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "runs" if file in SHARE_RUNS else file

    return ByRuns(config, log)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    lines = (json.dumps({"text": text}, ensure_ascii=False) for text in sentences(1, 400))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def cached(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Flags of the corpus, and of a cache for all runs on it."""
    return {"data_path": str(corpus), "cache_dir": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="session")
def prepared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `minimind prepare` makes of the corpus."""
    from minimind.cli.main import main

    out = tmp_path_factory.mktemp("prepared") / "data"
    assert main(["prepare", str(corpus), "--vocab_size", "600", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The tokenizer of the models of tests/faults/tiny.py."""
    from tests.faults import tiny

    return tiny.tokenizer_bytes(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tiny_run(tiny_tokenizer: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    from tests.faults import tiny

    return tiny.new_run(tmp_path_factory.mktemp("tiny") / "run", tiny_tokenizer)


@pytest.fixture(scope="session")
def launch(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    return Launcher(corpus, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def nursery() -> Iterator[Any]:
    """A tools.forking.Nursery."""
    from tools.forking import Nursery

    found = Nursery()
    yield found
    found.close()


@pytest.fixture(scope="session")
def forked(launch: Launcher, nursery: Any) -> Launcher:
    """Runs without run_accelerate.sh, for what is not about how a run is started."""
    from tools.forking import Forked

    return Forked(launch, nursery)


@dataclass(frozen=True)
class Trained:
    """Text of two sources, raw and prepared, and a small run that was trained on it."""

    texts: dict[str, Path]
    mixed: Path
    cache: Path
    run: Path


POSITIONS = 1024  # of the chat model
# One process, a few seconds.
SMALL: dict[str, Any] = {
    **{"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 64},
    **{"batch_size": 4, "max_steps": 6, "log_interval": 2, "eval_interval": 3},
    **{"device": "cpu", "learning_rate": 5e-3, "eval_rows": 64},
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    import minimind.train as training
    from minimind.cli.main import main

    place = tmp_path_factory.mktemp("trained")
    found = Trained(
        {name: place / f"{name}.jsonl" for name in "ab"},
        place / "mixed",
        place / "cache",
        place / "run",
    )
    for seed, path in enumerate(found.texts.values(), 1):
        lines = (json.dumps({"text": text}) + "\n" for text in sentences(seed, 240 - 99 * seed))
        path.write_text("".join(lines))
    sources = [f"--source={name}={path}" for name, path in found.texts.items()]
    sizes = ["--val_fraction", "0.2", "--vocab_size", "600"]
    assert main(["prepare", *sources, *sizes, "--out", str(found.mixed)]) == 0
    run: Any = training  # a callable module
    places = {"data_path": str(found.mixed), "cache_dir": str(found.cache)}
    assert run({**SMALL, **places}, out_dir=str(found.run)) == 0
    return found


@pytest.fixture(scope="session")
def chat_model(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of random weights, with the default chat template."""
    from minimind.data.chat.template import DEFAULT_TEMPLATE, SPECIAL_TOKENS
    from minimind.data.tokenizer.add_special import with_special_tokens
    from minimind.data.tokenizer.load import load_tokenizer
    from minimind.data.tokenizer.vocabulary import TEMPLATE_NAME
    from tests.cli.test_lm_eval import write_llama

    place, base = tmp_path_factory.mktemp("served"), load_tokenizer(trained.run / "tokenizer")
    extended = with_special_tokens(base, SPECIAL_TOKENS, tmp_path_factory.mktemp("extended"))
    (extended.path.parent / TEMPLATE_NAME).write_text(DEFAULT_TEMPLATE)
    tokenizer = load_tokenizer(extended.path.parent)
    write_llama(place, tokenizer, POSITIONS)
    return place
