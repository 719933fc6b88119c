"""The import graph of minimind/ against the direction the folders promise.

    config, errors, files -> {data, model} -> engine -> checkpoint, evaluate -> loop -> script

data does not know model, model does not know train, only engine.py knows Accelerate and DeepSpeed,
and there are no cycles. Imports inside functions count too.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A module may import modules of its own layer and of those before it. First match by prefix wins.
LAYERS = [
    {
        "minimind.errors",
        "minimind.terminal",
        "minimind.config.arguments",
        "minimind.config.training_flags",
        "minimind.config.report_flags",
        "minimind.config.model_flags",
        "minimind.config.run_config",
        "minimind.config.foreign_flags",
        "minimind.config.yaml_files",
        "minimind.runtime.durable_files",
        "minimind.runtime.locks",
        "minimind.runtime.read_locks",
        "minimind.runtime.output_folder",
        "minimind.runtime.process",
        "minimind.runtime.environment",
        "minimind.runtime.phases",
        "minimind.runtime.local_workers",
        "minimind.runtime.heartbeat",
        "minimind.runtime.exit",
        "minimind.runtime.metrics_file",
    },
    {"minimind.config.checks", "minimind.config.parse", "minimind.config.launcher_env"},
    {"minimind.data", "minimind.model"},
    {
        "minimind.config.schedule",
        "minimind.engine.optimizer",
        "minimind.config.deepspeed.resolve",
        "minimind.config.deepspeed.schema",
        "minimind.config.deepspeed.keys",
        "minimind.config.deepspeed.normalize",
        "minimind.config.deepspeed.effects",
        "minimind.config.deepspeed.literals",
        "minimind.config.deepspeed.auto_values",
        "minimind.config.deepspeed.incompatible",
        "minimind.config.deepspeed.engine_rules",
        "minimind.config.deepspeed.backend_choice",
        "minimind.train.columns",
        "minimind.train.settings",
        "minimind.estimate.shape",
        "minimind.estimate.costs",
        "minimind.runtime.collectives",
        "minimind.engine.loss_of_batch",
        "minimind.engine.plain_backend",
        "minimind.engine.deepspeed_backend",
        "minimind.engine.op_build_lock",
        "minimind.engine.phase_clock",
        "minimind.engine.collective_clock",
        "minimind.engine.deepspeed_logs",
        "minimind.engine.compile",
        "minimind.engine.engine",
        "minimind.telemetry.trace",
        "minimind.checkpoint.train_state",
        "minimind.engine.optimizer_state",
        "minimind.engine.optimizer_state_adapters",
        "minimind.checkpoint.validation",
        "minimind.architecture.hf_config",
        "minimind.architecture.select",
        "minimind.checkpoint.tensor_files",
        "minimind.checkpoint.directory",
        "minimind.checkpoint.choose",
        "minimind.checkpoint.reader",
        "minimind.checkpoint.run_folder",
    },
    {"minimind.engine.build", "minimind.inference.sampling", "minimind.inference.generate", "minimind.inference.prompts"},
    {"minimind.telemetry.trackers"},
    {"minimind.telemetry.progress_bar"},
    {"minimind.telemetry.progress"},
    {
        "minimind.checkpoint.saver",
        "minimind.checkpoint.resume",
        "minimind.train.evaluate",
        "minimind.inference.generate",
        "minimind.train.evaluate_texts",
        "minimind.checkpoint.identity",
        "minimind.train.skipped_steps",
        "minimind.train.sample_text",
    },
    {
        "minimind.interop.tensor_sources",
        "minimind.interop.foreign_config",
        "minimind.interop.hf_weights",
        "minimind.interop.weights",
        "minimind.interop.hf_folder",
        "minimind.interop.write_folder",
        "minimind.interop.gguf",
    },
    {
        "minimind.interop.export",
        "minimind.inference.from_checkpoint",
        "minimind.inference.load_model",
        "minimind.estimate.plan",
        "minimind.checkpoint.tools",
        "minimind.interop.consolidate",
        "minimind.checkpoint.compare",
        "minimind.cli.tokenizer_tables",
        "minimind.report",
    },
    {
        "minimind.cli.checkpoint",
        "minimind.cli.tokenizer",
        "minimind.cli.data",
        "minimind.cli.evaluate",
        "minimind.cli.generate",
        "minimind.cli.export",
        "minimind.cli.report",
    },
    {"minimind.train.loop_actions", "minimind.train.build"},
    {"minimind.train.initial_weights"},
    {"minimind.train.loop"},
    {"minimind.train.dry_run", "minimind.telemetry.mfu", "minimind.train.memory_report"},
    {"minimind.train.start_summary"},
    {"minimind.train.pretrain"},
    {"minimind.cli.main"},
    {"minimind.__main__"},
]
STRANGERS = [("minimind.data", "minimind.model"), ("minimind.model", "minimind.data")]
SEAM = "minimind.engine.build"


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
        ("minimind.data.loader.row_order", "from minimind.model.decoder import MiniMindConfig"),
        ("minimind.model.loss", "from minimind.train.loop import train"),
        ("minimind.config.run_config", "import minimind.config.parse"),
        ("minimind.train.loop", "import deepspeed"),
        ("minimind.cli.main", "from accelerate import Accelerator"),
        ("minimind.engine.build", "from minimind.checkpoint.saver import Saver"),
        ("minimind.errors", "from minimind.config.run_config import RunConfig"),
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
