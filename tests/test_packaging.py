"""A wheel works where there is no checkout: presets and DeepSpeed files are inside the package."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from minimind.config.run_config import TEMPLATES, files_by_name
from minimind.data.chat.template import DEFAULT_TEMPLATE
from minimind.data.prepare.chat_tokenizer import read_template
from minimind.errors import UsageError
from tests.conftest import ROOT, sentences

# What a wheel is built from.
SOURCES = ("minimind", "configs", "pyproject.toml", "README.md", "LICENSE")
PRODUCT_EXTRAS = (
    "bitsandbytes",
    "data",
    "eval",
    "trackers",
    "gguf",
    "sweep",
    "ray",
    "remote",
    "quality",
    "serve",
)  # the others are for developers
TRAIN = """
import minimind
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
print(minimind.__file__)
print(DEFAULT_DEEPSPEED_CONFIG)
assert minimind.train({"model": "tiny", "vocab_size": 600, "max_seq_len": 32}, max_steps=1,
    data_path=["text.txt"], batch_size=2, device="cpu", eval_rows=0, out_dir="run") == 0
"""
# In one process, as each would import torch anew.
COMMANDS = """
import minimind
from minimind.cli.main import main
assert minimind.train(config="sft", chat_template="thoughts_and_tools", init_from="run",
    data_path=["talk.jsonl"], max_steps=1, batch_size=2, device="cpu", out_dir="tuned") == 0
few = ["--max_new_tokens", "4", "--seed", "0"]
for words in (
    ["generate", "--checkpoint", "run", "--prompt", "Once", *few],
    ["chat", "--checkpoint", "tuned", "--once", "Hello", *few],
    *(["export", "--checkpoint", "run", "--format", form, "--out", form] for form in FORMS),
    ["generate", "--model", "minimind", "--prompt", "Once", *few],
    ["export", "--checkpoint", "minimind", "--format", "llama", "--out", "again"],
):
    assert main(words) == 0, words
"""
READ = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
texts = set()
for form in (*FORMS, "again"):
    options = {"trust_remote_code": form == "minimind"}
    model = AutoModelForCausalLM.from_pretrained(form, **options)
    tokenizer = AutoTokenizer.from_pretrained(form, **options)
    given = tokenizer("Once", return_tensors="pt")
    ids = model.generate(**given, max_new_tokens=4, do_sample=False)
    texts.add(tokenizer.decode(ids[0]))
assert len(texts) == 1, texts
assert "minimind" not in sys.modules
"""
FORMS = ("minimind", "llama")
SHAPE = "--model tiny --vocab_size 600 --max_seq_len 32 --max_steps 1 --batch_size 2 --eval_rows 0"
FLAGS = [*SHAPE.split(), "--device", "cpu", "--data_path", "text.txt"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as building writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / "copy" / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / "copy" / name)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)],
        cwd=folder / "copy",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = folder.glob("minimind_deepspeed-*.whl")
    return found


def test_a_wheel_has_every_module_and_configuration_file(wheel):
    there = {name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name}
    tracked = subprocess.check_output(
        ["git", "ls-files", "minimind", "configs"], cwd=ROOT, text=True
    ).splitlines()
    inside = {f"minimind/{n}" if n.startswith("configs/") else n for n in tracked}
    assert there == inside
    assert "minimind/py.typed" in there


def test_every_package_of_the_checkout_is_listed():
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^packages = (\[.*?\])", text, re.DOTALL | re.MULTILINE)
    files = [*(ROOT / "minimind").rglob("*.py"), *(ROOT / "configs").rglob("*.*")]
    found = {file.parent.relative_to(ROOT) for file in files if file.is_file()}
    inside = {Path("minimind") / path if path.parts[0] == "configs" else path for path in found}
    assert sorted(".".join(path.parts) for path in inside) == ast.literal_eval(listed)


def test_messages_name_shipped_files_as_the_flags_do():
    """A wheel has no configs/ where its commands run."""
    for path in (ROOT / "minimind").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        holders = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = {
            ast.get_docstring(node, clean=False)
            for node in ast.walk(tree)
            if isinstance(node, holders)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert "configs/" not in node.value or node.value in docstrings, path


def test_a_shipped_template_is_read_by_its_name_whatever_lies_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shipped = files_by_name(TEMPLATES)
    assert shipped.keys() == {"thoughts_and_tools"}
    monkeypatch.chdir(tmp_path)
    Path("thoughts_and_tools").write_text("{{ messages[0].content }}")
    source, name = read_template("thoughts_and_tools")
    assert source == Path(shipped["thoughts_and_tools"]).read_text(encoding="utf-8")
    assert source == DEFAULT_TEMPLATE
    assert name == "--chat_template thoughts_and_tools"
    assert read_template("./thoughts_and_tools")[0] == "{{ messages[0].content }}"
    with pytest.raises(UsageError, match=r"did you mean thoughts_and_tools\?"):
        read_template("thoughts")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin/ of a fresh environment with the wheel; its dependencies are this environment's."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    python = venv / "bin" / "python"
    install = f"pip --python {python} install --quiet --no-deps --no-index {wheel}"
    for command in (f"venv --without-pip {venv}", install):
        words = [sys.executable, "-m", *command.split()]
        subprocess.run(words, check=True, capture_output=True, timeout=120)
    (site,) = venv.glob("lib/python*/site-packages")
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    (site / "dependencies.pth").write_text(str(Path(torch.origin).parents[1]))
    return venv / "bin"


def run_installed(installed: Path, folder: Path, *command: str) -> str:
    """Standard output of a command of the fresh environment, run where there is no checkout.

    Nothing that it calls is deprecated in the libraries, but for what setuptools says of distutils
    where its hook is not installed, as here.
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(installed / command[0]), *command[1:]],
        cwd=folder,
        env={**environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stderr.splitlines()
    assert [one for one in lines if "deprecated" in one and "distutils" not in one] == []
    return done.stdout


@pytest.mark.long  # above, the wheel has every module and file
def test_an_installed_wheel_plans_trains_and_exports(installed: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("\n\n".join(sentences(3, 80)))
    site = installed.parent / "lib"
    out = run_installed(installed, tmp_path, "python", "-c", TRAIN)
    assert out.startswith(str(site))
    assert f"{Path('minimind', 'configs', 'ds_config.json')}\n" in out
    assert (tmp_path / "run" / "checkpoints" / "step_00000001").is_dir()
    assert run_installed(installed, tmp_path, "minimind", "--version").startswith("minimind-deep")
    words = ("minimind", "plan", "--model", "104m", "--memory", "24GiB")
    plan = run_installed(installed, tmp_path, *words)
    assert f"NUM_PROCESSES=1 {installed / 'minimind'} launch \\\n" in plan
    assert "run_accelerate.sh" not in plan
    for command in ("train", "launch"):
        shown = run_installed(installed, tmp_path, "minimind", command, "--help")
        assert shown.startswith(f"usage: minimind {command} [--flag value ...]")
    out = run_installed(installed, tmp_path, "minimind", "train", *FLAGS, "--out_dir", "train")
    assert (tmp_path / "train" / "checkpoints" / "step_00000001").is_dir()
    _, _, advice = out.partition("; next\n")
    for line in filter(lambda line: "minimind" in line, advice.splitlines()):
        assert f" {installed / 'minimind'} " in line
    assert f"{installed / 'minimind'} launch --config sft" in advice
    given = f"FORMS = {FORMS}"
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Once"}]
    (tmp_path / "talk.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 20)
    run_installed(installed, tmp_path, "python", "-c", given + COMMANDS)
    run_installed(installed, tmp_path, "python", "-c", given + READ)


@pytest.mark.long
@pytest.mark.launch
def test_an_installed_wheel_launches_two_processes(installed: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("\n\n".join(sentences(3, 80)))
    words = ("launch", *FLAGS, "--config", "strong", "--out_dir", "launch")
    out = run_installed(installed, tmp_path, "minimind", *words)
    assert "optimizer muon by --config strong, in place of " in " ".join(out.split())
    assert "ZeRO stage 2" in out
    assert "2 processes" in out
    assert (tmp_path / "launch" / "checkpoints" / "step_00000001").is_dir()


def pins(name: str) -> dict[str, Version]:
    """The versions of a constraints file by normalized name."""
    lines = (ROOT / name).read_text().splitlines()
    return {
        canonicalize_name(package): Version(version)
        for package, version in (line.split("==") for line in lines if not line.startswith("#"))
    }


def bounds(operator: str) -> dict[str, Version]:
    """The bounds of this kind in pyproject.toml, of a run and of what users install besides."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = table["optional-dependencies"]
    parts = (table["dependencies"], *(extras[name] for name in PRODUCT_EXTRAS))
    requirements = [Requirement(text) for part in parts for text in part]
    return {
        canonicalize_name(one.name): Version(bound.version)
        for one in requirements
        for bound in one.specifier
        if bound.operator == operator
    }


def test_every_lower_bound_is_a_version_that_make_versions_runs():
    oldest, lower = pins("constraints-oldest.txt"), bounds(">=")
    # Libraries of s3fs, of which pip would try every release.
    assert oldest.keys() - lower.keys() == {"aiobotocore", "botocore", "boto3"}
    assert lower == {name: oldest[name] for name in lower}


def test_every_upper_bound_is_the_release_after_the_newest_that_make_versions_runs():
    newest, upper = pins("constraints-newest.txt"), bounds("<")
    assert upper.keys() == bounds(">=").keys()
    assert {**pins("constraints.txt"), **newest}.keys() == newest.keys()
    for name, bound in upper.items():
        *series, last = newest[name].release[: len(bound.release)]
        assert (*series, last + 1) == bound.release, name
    assert all(newest[name] == version for name, version in bounds("==").items())
    # The build for CPUs is installed first, and stays only if the bounds have it.
    first = pins("constraints.txt")["torch"]
    assert bounds(">=")["torch"] <= first < upper["torch"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert f"pip install 'torch=={first}' -i" in page


@pytest.mark.parametrize("name", ["oldest", "newest"])
def test_make_versions_installs_each_set_once_and_runs_the_tests_in_process(name: str):
    words = ["make", "--dry-run", "--always-make", "versions"]
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # of a make that runs the tests
    env = {key: value for key, value in os.environ.items() if key not in outer}
    shown = subprocess.check_output(words, cwd=ROOT, text=True, env=env)
    install = f"build/{name}/bin/python -m pip install --quiet --constraint constraints-{name}.txt"
    assert shown.count(f"{install} --editable '.[dev]'\n") == 1
    assert (
        shown.count(f'build/{name}/bin/python -m pytest -n 2 --dist loadfile -m "not launch') == 1
    )
