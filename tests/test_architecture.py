"""The import graph of minimind/ against the direction the folders promise.

    config, errors, files -> {data, model} -> engine -> checkpoint, evaluate -> loop -> script

data does not know model, model does not know train, only engine.py knows Accelerate and DeepSpeed,
and there are no cycles. Imports inside functions count too.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A module may import modules of its own layer and of those before it. First match by prefix wins.
LAYERS = [
    {
        "minimind.errors",
        "minimind.terminal",
        "minimind.arguments",
        "minimind.flag_groups",
        "minimind.report_flags",
        "minimind.model_flags",
        "minimind.config",
        "minimind.foreign_flags",
        "minimind.yaml_files",
        "minimind.files",
        "minimind.folder_locks",
        "minimind.read_locks",
        "minimind.new_folder",
        "minimind.process",
        "minimind.environment",
        "minimind.phases",
        "minimind.workers",
        "minimind.peers",
        "minimind.ending",
        "minimind.metrics",
    },
    {"minimind.checks", "minimind.flags", "minimind.launch"},
    {"minimind.data", "minimind.model"},
    {
        "minimind.train.schedule",
        "minimind.train.optimizer",
        "minimind.train.deepspeed_config",
        "minimind.train.deepspeed_schema",
        "minimind.train.deepspeed_keys",
        "minimind.train.deepspeed_values",
        "minimind.train.deepspeed_effects",
        "minimind.train.literals",
        "minimind.train.autos",
        "minimind.train.combinations",
        "minimind.train.engine_rules",
        "minimind.train.setup",
        "minimind.train.columns",
        "minimind.train.settings",
        "minimind.train.shape",
        "minimind.train.costs",
        "minimind.train.ranks",
        "minimind.train.objective",
        "minimind.train.backends",
        "minimind.train.deepspeed_backend",
        "minimind.train.build_lock",
        "minimind.train.profile",
        "minimind.train.communication",
        "minimind.train.deepspeed_logs",
        "minimind.train.compiled",
        "minimind.train.stepping",
        "minimind.train.trace",
        "minimind.train.state",
        "minimind.train.zero_state",
        "minimind.train.adapters",
        "minimind.train.claims",
        "minimind.train.foreign_config",
        "minimind.train.architecture",
        "minimind.train.tensor_files",
        "minimind.train.checkpoint",
        "minimind.train.choosing",
        "minimind.train.contents",
        "minimind.train.out_dir",
    },
    {"minimind.train.engine", "minimind.sampling", "minimind.writing", "minimind.prompts"},
    {"minimind.train.trackers"},
    {"minimind.train.progress_bar"},
    {"minimind.train.report"},
    {
        "minimind.train.saver",
        "minimind.train.resume",
        "minimind.train.evaluate",
        "minimind.writing",
        "minimind.train.score",
        "minimind.train.identity",
        "minimind.train.numerics",
        "minimind.train.samples",
    },
    {
        "minimind.tensor_sources",
        "minimind.foreign_shapes",
        "minimind.foreign_weights",
        "minimind.weights",
        "minimind.foreign_folder",
        "minimind.whole_files",
        "minimind.gguf_file",
    },
    {
        "minimind.export",
        "minimind.generate",
        "minimind.load_model",
        "minimind.plan",
        "minimind.checkpoint_tools",
        "minimind.consolidate",
        "minimind.compare",
        "minimind.tokenizer_tables",
        "minimind.report",
    },
    {
        "minimind.checkpoint_commands",
        "minimind.tokenizer_commands",
        "minimind.data_commands",
        "minimind.eval_commands",
        "minimind.generate_commands",
        "minimind.weight_commands",
        "minimind.report_commands",
    },
    {"minimind.train.desk", "minimind.train.build"},
    {"minimind.train.initial"},
    {"minimind.train.loop"},
    {"minimind.train.dry_run", "minimind.train.peaks", "minimind.train.memory_report"},
    {"minimind.train.opening"},
    {"minimind.train.pretrain"},
    {"minimind.cli"},
    {"minimind.__main__"},
]
STRANGERS = [("minimind.data", "minimind.model"), ("minimind.model", "minimind.data")]
SEAM = "minimind.train.engine"


def layer_of(module: str) -> int:
    for depth, names in enumerate(LAYERS):
        if any(module == name or module.startswith(name + ".") for name in names):
            return depth
    raise AssertionError(f"{module} has no layer; give it one in LAYERS")


def imports_of(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules() -> dict[str, str]:
    found = {}
    for path in sorted((ROOT / "minimind").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not name.endswith("__init__"):
            found[name] = path.read_text(encoding="utf-8")
    return found


def faults(sources: dict[str, str]) -> list[str]:
    told = []
    graph = {}
    for module, source in sources.items():
        inside = {name for name in imports_of(source) if name in sources}
        graph[module] = inside
        for name in inside:
            if layer_of(name) > layer_of(module):
                told.append(f"{module} imports {name}, which comes after it")
            for one, other in STRANGERS:
                if module.startswith(one) and name.startswith(other):
                    told.append(f"{module} imports {name}; they are strangers")
        outside = {name.split(".")[0] for name in imports_of(source)}
        if module != SEAM and outside & {"accelerate", "deepspeed"}:
            told.append(f"{module} imports Accelerate or DeepSpeed; only {SEAM} may")
    return told + [f"cycle: {' -> '.join(c)}" for c in cycles(graph)]


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
            return
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    return found


def test_imports_go_one_way():
    assert faults(modules()) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("minimind.data.order", "from minimind.model.decoder import MiniMindConfig"),
        ("minimind.model.loss", "from minimind.train.loop import train"),
        ("minimind.config", "import minimind.flags"),
        ("minimind.train.loop", "import deepspeed"),
        ("minimind.cli", "from accelerate import Accelerator"),
        ("minimind.train.engine", "from minimind.train.saver import Saver"),
        ("minimind.errors", "from minimind.config import RunConfig"),
    ],
)
def test_an_import_against_the_direction_is_found(module, line):
    sources = modules()
    sources[module] += f"\n{line}\n"
    assert any(module in fault for fault in faults(sources))


def test_modules_and_functions_fit_a_screen():
    for name, source in modules().items():
        assert source.count("\n") <= 300, f"{name} is longer than 300 lines"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                assert size <= 60, f"{name}.{node.name} has {size} lines"
    assert modules()["minimind.train.loop"].count("\n") < 120


def test_no_module_is_called_after_nothing():
    names = {name.rsplit(".", 1)[-1] for name in modules()}
    assert not names & {"utils", "common", "helpers", "misc"}
