"""transformers' own common tests (ModelTesterMixin, GenerationTesterMixin) on our decoder.

They are taken from the source distribution of the version that is installed, by pip, into
build/transformers-VERSION. It lacks tests/generation: these are taken from TRANSFORMERS_CHECKOUT, a
checkout of transformers, or else from the tag at GitHub; without either, the tests of generation
are left out, and said to be. Those of exporters are taken from a checkout of the same version only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
import transformers

from tests.conftest import ROOT

pytestmark = pytest.mark.long
VERSION = transformers.__version__
CACHE = ROOT / "build" / f"transformers-{VERSION}"
TAG = f"https://github.com/huggingface/transformers/archive/refs/tags/v{VERSION}.tar.gz"
CHECKOUT = "TRANSFORMERS_CHECKOUT"
MIXIN = "class {name}:\n    pass\n"
STUBS: dict[str, tuple[str, ...]] = {
    "generation/test_utils": ("GenerationTesterMixin",),
    "exporters/test_export": ("ExportTesterMixin", "ExportGenerateTesterMixin"),
}

# Every reason to skip a test, and why it hides nothing that docs/export.md says of an export.
REASONS = {
    r"test requires (multiple )?accelerators?": "another machine",
    r"test requires (MPS|Flash Attention( [34])?|optimum-quanto|ONNXScript|ExecuTorch)": "likewise",
    r"test requires the kernels library": "likewise",
    r"\w+ (class )?has no _keep_in_fp32_modules .*": "no such modules",
    r"No conversion found for <class .*>": "weights have their names in the files",
    r"This model is not composite|Model is not a composite model\.": "one model",
    r"MiniMindModel does not support SDPA": "of test_sdpa_can_dispatch_composite_models only",
    r"No subconfigs so the test does not make sense": "one configuration",
    r"No sequence-to-sequence language modeling head to check": "a decoder",
    r"No MTP keys registered": "no heads for several tokens",
    r".* declares no recurrent layer types": "attention only",
    r"Model does not support sliding window mask": "no windows",
    r"Model does not have position embeddings": "rotary positions",
    r"<class .*> has no axial RoPE layer defined\.": "text",
    r"Model does not support output_attentions": "with SDPA, as others do; eager gives them",
    r"This model does not (support RoPE scaling|have RoPE)": "rope_scaling instead of"
    " rope_parameters: tests/model/test_rope_scaling.py compares it with transformers",
    r"\w+ does not support grouped_mm|This model has no sparse experts\.": "experts of our own",
    r"This model has no `output_router_logits` in its config\.": "likewise",
    r"Model does not have a TP plan\.": "not claimed",
    r"\w+ does not support new attention mask API": "documents by position_ids: not claimed",
}
ONLY_OF = {"MiniMindModel does not support SDPA": "test_sdpa_can_dispatch_composite_models"}


@dataclass(frozen=True)
class Suites:
    """A folder with transformers' tests, and what it lacks."""

    folder: Path
    lacking: tuple[str, ...]


def source_distribution() -> Path:
    """The tests in the source distribution, by pip."""
    tests = CACHE / "tests"
    if not tests.is_dir():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", "transformers", "--no-build-isolation", "--dest", str(CACHE)]
        pip = subprocess.run([*command, f"transformers=={VERSION}"], capture_output=True, text=True)
        if pip.returncode:
            pytest.skip(
                f"the source of transformers cannot be fetched: {pip.stderr.strip()[-200:]}"
            )
        with tarfile.open(next(CACHE.glob("transformers-*.tar.gz"))) as archive:
            archive.extractall(CACHE / "whole", filter="data")
        (CACHE / "whole" / f"transformers-{VERSION}" / "tests").rename(tests)
        shutil.rmtree(CACHE / "whole")
    return tests


def checkout() -> Path | None:
    """A checkout of transformers: that of the variable, or of the tag."""
    if CHECKOUT in os.environ:
        return Path(os.environ[CHECKOUT])
    tagged = CACHE / f"transformers-{VERSION}"
    if not tagged.is_dir():
        try:
            with urllib.request.urlopen(TAG, timeout=20) as answer:
                with tarfile.open(fileobj=answer, mode="r|gz") as archive:
                    archive.extractall(CACHE, filter="data")
        except (urllib.error.URLError, TimeoutError):
            return None
    return tagged


def version_of(place: Path) -> str:
    """The version of a checkout; empty where it is a part of one."""
    init = place / "src" / "transformers" / "__init__.py"
    found = re.search(r'__version__ = "(.*)"', init.read_text()) if init.is_file() else None
    return found[1] if found else ""


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> Suites:
    folder = tmp_path_factory.mktemp("suites")
    shutil.copytree(source_distribution(), folder / "tests")
    (folder / "tests" / "__init__.py").touch()
    place, lacking = checkout(), []
    for name, mixins in STUBS.items():
        package = folder / "tests" / Path(name).parent
        source = place / "tests" / Path(name).parent if place else Path("none")
        is_same = place is not None and version_of(place) == VERSION
        if source.is_dir() and (is_same or package.name == "generation"):
            shutil.copytree(source, package)
        else:
            package.mkdir()
            stubs = "\n".join(MIXIN.format(name=mixin) for mixin in mixins)
            (folder / "tests" / f"{name}.py").write_text(stubs)
            lacking.append(package.name)
        (package / "__init__.py").touch()
    shutil.copy(
        Path(__file__).with_name("transformers_suite.py"), folder / "tests" / "test_ours.py"
    )
    site = CACHE / "site"
    if not site.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*command, str(site), "parameterized"], check=True)
    (folder / "minimind").symlink_to(ROOT / "minimind")
    return Suites(folder, tuple(lacking))


@dataclass(frozen=True)
class Outcome:
    """What one class of the harness gave."""

    counts: Counter[str]
    skipped: dict[str, set[str]]  # names of tests by reason
    failed: list[str]
    text: str


def outcome_of(suites: Suites, name: str) -> Outcome:
    """Run all tests of a class of transformers_suite.py."""
    path = [str(suites.folder), str(CACHE / "site")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "RUN_SLOW": "1"}
    environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(suites.folder / "home")}
    report = suites.folder / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider"]
    command += ["--rootdir", str(suites.folder), f"--junitxml={report}", "-W", "ignore"]
    done = subprocess.run(
        [*command, "--tb=short", f"tests/test_ours.py::{name}"],
        cwd=suites.folder,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert report.is_file(), done.stdout[-2000:] + done.stderr[-2000:]
    counts, skipped, failed = Counter[str](), dict[str, set[str]](), list[str]()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        test = case.get("name", "")
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            failed.append(test)
        elif (skip := case.find("skipped")) is not None:
            counts["skipped"] += 1
            skipped.setdefault(skip.get("message", ""), set()).add(test)
        else:
            counts["passed"] += 1
    return Outcome(counts, skipped, failed, done.stdout)


def unexpected(skipped: dict[str, set[str]]) -> dict[str, set[str]]:
    """Skips for a reason that is not known, or of another test than the reason is known for."""
    return {
        reason: tests
        for reason, tests in skipped.items()
        if not any(re.fullmatch(known, reason) for known in REASONS)
        or (tests != {ONLY_OF.get(reason)} and reason in ONLY_OF)
    }


@pytest.mark.parametrize(
    ("name", "alone", "generating"),
    [("DenseTest", 101, 36), ("ExpertsTest", 101, 36), ("NormedTest", 101, 36)],
)
def test_the_common_suites_pass(name: str, alone: int, generating: int, suites: Suites):
    outcome = outcome_of(suites, name)
    lacking = ", ".join(suites.lacking)
    print(f"{name}: {dict(outcome.counts)}" + (f"; not at hand: {lacking}" if lacking else ""))
    assert outcome.failed == [], outcome.text[-4000:]
    assert unexpected(outcome.skipped) == {}
    assert outcome.counts["passed"] >= alone + generating * ("generation" not in suites.lacking)


def test_a_skip_that_hides_something_is_found():
    hidden = {"MiniMindForCausalLM does not support sdpa": {"test_sdpa"}}
    assert unexpected(hidden) == hidden
    for_another = {"MiniMindModel does not support SDPA": {"test_eager_matches_sdpa_inference"}}
    assert unexpected(for_another) == for_another
    known = {"MiniMindModel does not support SDPA": {"test_sdpa_can_dispatch_composite_models"}}
    assert unexpected(known | {"test requires MPS": {"a", "b"}}) == {}


def test_what_is_not_at_hand_is_told(suites: Suites):
    if suites.lacking:
        pytest.skip(f"no tests of {', '.join(suites.lacking)}: give a checkout as {CHECKOUT}")
