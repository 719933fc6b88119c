"""Nothing in the package or its scripts can run code out of a file that it reads.

By the syntax tree. `dist.all_gather_object` pickles too, but between the live ranks of one run,
which run the same code as it is and read no file by it; it is not looked for.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "runpy"}
CALLS = {"eval", "exec", "compile", "__import__"}
YAML = {"unsafe_load", "unsafe_load_all", "full_load", "full_load_all", "load_all"}
# Runs the script that the user names on the command line, as Python does.
OF_THE_USER = {"minimind/launch/own_script.py": ["line 10: imports runpy"]}
# Keywords that open a door, with the one value that leaves it shut.
KEYWORDS = {"trust_remote_code": False, "allow_pickle": False, "weights_only": True}


def faults(source: str) -> list[str]:
    """What in a module could run code out of a file, with its line."""
    tree = ast.parse(source)
    safe = {"yaml.SafeLoader", "yaml.CSafeLoader"}
    for node in ast.walk(tree):  # in the order of the file: a subclass follows its base
        if isinstance(node, ast.ClassDef) and any(ast.unparse(b) in safe for b in node.bases):
            safe.add(node.name)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        report = [f"imports {n}" for n in names if n.split(".")[0] in MODULES]
        report += [f"imports {n}" for n in names if n in ("torch.load", "yaml.load", "numpy.load")]
        if isinstance(node, ast.Attribute) and node.attr in YAML:
            report.append(node.attr)
        if isinstance(node, ast.Call):
            report += call_faults(node, safe)
        found += [f"line {getattr(node, 'lineno', 0)}: {text}" for text in report]
    return found


def call_faults(call: ast.Call, safe_loaders: set[str]) -> list[str]:
    name = ast.unparse(call.func)
    keywords = {k.arg: k.value for k in call.keywords}
    calls = []
    if name in CALLS or name.startswith("builtins."):
        calls.append(name)
    if name == "torch.load" and "weights_only" not in keywords:
        calls.append("torch.load without weights_only=True")
    if name == "yaml.load":
        given = [*call.args[1:], *(v for k, v in keywords.items() if k == "Loader")]
        if not given or ast.unparse(given[0]) not in safe_loaders:
            calls.append("yaml.load without a SafeLoader")
    for keyword, shut in KEYWORDS.items():
        value = keywords.get(keyword)
        if value is not None and getattr(value, "value", None) is not shut:
            calls.append(f"{keyword}={ast.unparse(value)}")
    if None in keywords and name in ("torch.load", "np.load", "numpy.load"):
        calls.append(f"{name} with keywords that cannot be read here")
    return calls


def sources() -> list[Path]:
    found = [*(ROOT / "minimind").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    return [*found, ROOT / "train_pretrain.py"]


def test_no_module_can_unpickle_or_run_what_it_reads():
    paths = sources()
    assert len(paths) > 40
    report = {str(p.relative_to(ROOT)): faults(p.read_text(encoding="utf-8")) for p in paths}
    assert {path: found for path, found in report.items() if found} == OF_THE_USER


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "def f():\n    import marshal",
        "import shelve",
        "from runpy import run_path",
        "from joblib import load",
        "from torch import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "torch.load(path, **options)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "yaml.load(text)",
        "yaml.load(text, yaml.Loader)",
        "yaml.load(text, Loader=yaml.FullLoader)",
        "class L(yaml.Loader):\n    pass\nyaml.load(text, L)",
        "yaml.unsafe_load(text)",
        "yaml.full_load(text)",
        "eval(text)",
        "exec(text)",
        "builtins.eval(text)",
        "__import__(name)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_a_door_is_found(line: str):
    assert faults(line)


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "class L(yaml.SafeLoader):\n    pass\nyaml.load(text, L)",
        "yaml.safe_load(text)",
        "re.compile(text)",
        "model.eval()",
        "dist.all_gather_object(values, value)",
    ],
)
def test_what_is_shut_is_no_fault(line: str):
    assert faults(line) == []
