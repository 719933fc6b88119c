"""Imports go down the list of packages, and only one module is the seam."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import ROOT, loaded_by, modules, table, violations


def test_imports_go_down():
    assert violations(modules()) == []


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("minimind.data.rows.order", "from minimind.model.decoder import MiniMindConfig"),
        ("minimind.model.decoder", "from minimind.train.loop import train"),
        ("minimind.model.decoder", "from minimind.data.prepare.prepare import Prepared"),
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
    assert any(module in violation for violation in violations(sources))


def test_a_module_outside_every_package_is_found():
    assert violations({"minimind.stray": ""}) == ["minimind.stray is in no package of PACKAGES"]


def test_the_loop_is_one_screen():
    (train,) = [
        node
        for node in ast.parse(modules()["minimind.train.loop"]).body
        if isinstance(node, ast.FunctionDef) and node.name == "train"
    ]
    assert train.end_lineno
    assert train.end_lineno - train.lineno < 60


def test_the_table_counts_every_module():
    assert f"{'in all':<18}{len(modules()):>8}" in table(modules())


def test_no_module_has_a_name_without_meaning():
    names = {name.rsplit(".", 1)[-1] for name in modules()}
    assert not names & {"utils", "common", "helpers", "misc"}


# A mistake in a flag is told before torch is imported, and reports and plans need none.
WITHOUT_TORCH = """
    cli.main cli.train cli.report launch.plan launch.restart launch.train_pretrain train.inputs
    config.parse config.flags config.checks config.launcher_env config.deepspeed.resolve
    architecture.plan architecture.costs architecture.shape checkpoint.directory checkpoint.tools
    checkpoint.retention report.page report.figures report.history report.slowness report.findings
    report.placement inference.prompts data.tokenizer.vocabulary runtime.filesystem runtime.exit
    runtime.process runtime.durable_files runtime.locks runtime.urls model.sizes
    config.stages config.tasks data.rows.stages data.prepare.mixed
""".split()
HEAVY = {"torch", "transformers", "accelerate", "deepspeed", "plotly", "datatrove", "ray"}
HEAVY |= {"starlette", "uvicorn", "bitsandbytes"}


def test_what_needs_no_torch_imports_none():
    """Each in the same process: what one imports would be seen at the next."""
    program = "import importlib, sys\n"
    program += f"for name in {WITHOUT_TORCH}:\n"
    program += "    importlib.import_module(f'minimind.{name}')\n"
    program += f"    assert not (found := sorted({HEAVY} & {{*sys.modules}})), (name, found)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_start_on_raw_text_loads_no_chat(tmp_path: Path):
    text = Path(__file__).read_text() + (ROOT / "README.md").read_text()
    (tmp_path / "t.txt").write_text(text)
    flags = {"data_path": [str(tmp_path / "t.txt")], "out_dir": str(tmp_path / "out")}
    flags |= {"cache_dir": str(tmp_path / "cache"), "dim": 16, "n_layers": 1, "n_heads": 2}
    flags |= {"vocab_size": 520, "max_seq_len": 16, "max_steps": 1, "device": "cpu"}
    program = f"import sys, minimind; status = minimind.train({flags}, deepspeed_config='none')\n"
    program += "print(status, [n for n in sys.modules if n.startswith('minimind.data.chat.')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith("\n0 []\n"), done.stdout + done.stderr


# What a flag, a URL, a kind of data or the end of a run turns on, and the libraries of these.
OFF = """
    checkpoint.mirror checkpoint.remote_run recovery.corruption recovery.spikes recovery.step_rows
    recovery.documents recovery.fingerprints recovery.compare
    report.trace report.trackers report.page report.figures interop data.chat
    data.text data.prepare.prepare data.prepare.encode data.prepare.remote data.tokenizer.hf_export
    data.tokenizer.hf_tokenizer data.tokenizer.sentencepiece inference.engine inference.prompts
    architecture.plan architecture.costs engine.deepspeed_backend engine.op_build_lock
    engine.eight_bit
    runtime.filesystem runtime.download runtime.object_cache cli sweep config.stages
    data.rows.stages data.prepare.mixed config.tasks train.patience train.rollback train.scores
    inference.scores inference.own_tasks inference.questions inference.lm_eval_tasks
    inference.shared_lm train.teacher train.teacher_folder train.record_teacher model.distillation
    data.shards.teacher_rows
""".split()
OF_OFF = {
    "bitsandbytes",
    "lm_eval",
    "plotly",
    "wandb",
    "ray",
    "fsspec",
    "jinja2",
    "tokenizers",
    "sentencepiece",
    "pyarrow",
    "starlette",
    "uvicorn",
}


@pytest.mark.parametrize(
    ("start", "is_on"),
    [("train.pretrain", set()), ("launch.train_pretrain", {"minimind.data.text"})],
)
def test_a_plain_start_loads_nothing_that_is_off(start: str, is_on: set[str]):
    loaded = loaded_by(f"minimind.{start}", modules())
    off = {f"minimind.{name}" for name in OFF} - is_on
    assert not {name for name in loaded for part in off if f"{name}.".startswith(f"{part}.")}
    assert not loaded & OF_OFF
    names = {*modules()}
    assert not {part for part in off if not any(f"{n}.".startswith(f"{part}.") for n in names)}


def test_an_import_of_what_is_off_is_found():
    sources = modules()
    sources["minimind.train.loop"] += "\nfrom minimind.checkpoint.mirror import Mirror\n"
    sources["minimind.engine.build"] += "\nimport plotly.express\n"
    loaded = loaded_by("minimind.train.pretrain", sources)
    assert loaded >= {"minimind.checkpoint.mirror", "minimind.checkpoint.remote_run", "plotly"}
