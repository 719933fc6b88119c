"""Secrets of configurations are in no output and no file, and the library gets them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from minimind.checkpoint.resume import TrainState
from minimind.checkpoint.run_folder import write_reference
from minimind.checkpoint.saver import sidecar_files
from minimind.cli.main import main
from minimind.config.deepspeed.document import leaves
from minimind.config.deepspeed.resolve import ResolvedConfig, resolve
from minimind.config.launcher_env import configure_libraries
from minimind.config.origin import Origin, Rank
from minimind.config.parse import build_config, parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.config.template_variables import template_variables
from minimind.engine.build import format_model_fault, require_accepted
from minimind.engine.deepspeed_backend import configuration
from minimind.errors import RunError, UsageError
from minimind.report.history import read_configuration
from minimind.report.page import write_report
from minimind.runtime.agreement import Told
from minimind.runtime.exit import Ending
from minimind.runtime.process import Progress
from minimind.train.loop import manifest_of
from minimind.train.run_start import changed_settings, settings_tables
from tests.conftest import Launcher, Messages
from tests.report.made import run_start
from tests.runtime.canaries import SECRET

CANARY = "c4n4ry"


def with_canaries(resolved: ResolvedConfig) -> ResolvedConfig:
    """A secret under every name, at several depths of a configuration."""
    config = resolved.config | {
        "monitor": {name: f"{CANARY}{n}" for n, name in enumerate(SECRET)},
        "list": [{name: [f"{CANARY}{n}", {"inner": CANARY}]} for n, name in enumerate(SECRET)],
        "deep": {"er": {name: {"value": CANARY, "is_on": True} for name in SECRET}},
    }
    return replace(
        resolved,
        config=config,
        sources=dict.fromkeys(leaves(config), Origin("ds.json", Rank.DEEPSPEED)),
    )


def shipped(out_dir: Path, *words: str) -> ResolvedConfig:
    document = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
    document["comet"] = {"enabled": False, "api_key": CANARY}
    run = parse_flags(["--out_dir", str(out_dir), "--device", "cpu", *words])
    return resolve(document, "ds.json", run, 1, "cpu")


def test_canaries_of_a_configuration_are_in_no_table_file_or_record(tmp_path: Path):
    resolved = with_canaries(shipped(tmp_path))
    assert str(configuration(resolved)).count(CANARY) > 3 * len(SECRET)  # DeepSpeed gets them
    write_reference(tmp_path, resolved)
    engine: Any = SimpleNamespace(
        resolved=resolved,
        world_size=1,
        parallel=resolved.run.parallel(1),
        model=SimpleNamespace(
            config=SimpleNamespace(to_json_string=lambda: json.dumps(dict.fromkeys(SECRET, CANARY)))
        ),
    )
    prepared: Any = SimpleNamespace(tokenizer=SimpleNamespace(files=dict))
    order = SimpleNamespace(n_rows=1, mixture_json=lambda: None, start_json=dict)
    context: Any = SimpleNamespace(
        **{"run": resolved.run, "engine": engine, "batches": SimpleNamespace(order=order)},
        **{
            "identity": {},
            "init_from": None,
            "spikes": None,
            "patience": None,
            "held_out": SimpleNamespace(reads=8),
        },
    )
    (tmp_path / "metrics.jsonl").write_text(json.dumps(run_start()) + "\n")
    write_report([tmp_path], tmp_path / "report.html", "x")
    shown = [
        *(path.read_text() for path in tmp_path.iterdir()),
        *(content.decode() for content in sidecar_files(prepared, engine).values()),
        resolved.table(),
        *settings_tables(resolved),
        changed_settings(resolved),
        str(manifest_of(context, TrainState())),
        *(Told(CANARY).shown(f"monitor.{name} for DeepSpeed") for name in SECRET),
    ]
    assert not [text[:200] for text in shown if CANARY in text]
    assert '"api_key": "***"' in (tmp_path / "ds_config.resolved.json").read_text()


def test_a_report_masks_what_another_program_wrote(tmp_path: Path):
    (tmp_path / "ds_config.resolved.json").write_text(json.dumps(dict.fromkeys(SECRET, CANARY)))
    (tmp_path / "config.yaml").write_text("".join(f"{name}: {CANARY}\n" for name in SECRET))
    assert CANARY not in str(read_configuration(tmp_path))


def said(error: Exception, capsys: pytest.CaptureFixture[str]) -> str:
    """What a run prints of an error, with its traceback."""
    Ending(Progress(rank=0), debug=True).report(error)
    return capsys.readouterr().err


@pytest.mark.parametrize("name", SECRET)
def test_no_message_about_a_wrong_place_has_the_value(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "flags.yaml"
    path.write_text(yaml.safe_dump({name: CANARY}))
    document = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
    run = parse_flags(["--device", "cpu"])

    def start(more: dict[str, Any]) -> None:
        require_accepted(resolve(document | more, "ds.json", run, 1, "cpu"), "cpu")

    attempts = [
        lambda: parse_flags(["--config", str(path)]),
        lambda: parse_flags([f"--{name}", CANARY]),
        lambda: parse_flags([f"--{name}={CANARY}"]),
        lambda: build_config({name: CANARY}, "train()"),
        *(
            partial(start, more)
            for more in (
                {name: CANARY},
                {"comet": {name: {"a": CANARY}}},
                {"wandb": [{name: CANARY}]},
                {"zero_optimization": {"stage": 1, name: CANARY}},
            )
        ),
    ]
    for attempt in attempts:
        with pytest.raises(RunError) as caught:
            attempt()
        assert CANARY not in said(caught.value, capsys)
    fault = {"loc": (name,), "type": "string_type", "input": CANARY, "msg": "is no text"}
    assert CANARY not in format_model_fault("comet", fault)


def test_what_deepspeed_logs_is_masked(messages: Messages):
    configure_libraries("cpu")
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(messages)
    logger.error("json = %s", json.dumps(dict.fromkeys(SECRET, CANARY), indent=4))
    logger.error(f"comet_config ... enabled=False api_key='{CANARY}' workspace=None")
    logger.removeHandler(messages)
    assert len({*messages.found}) == 2
    assert CANARY not in "".join(messages.found)


def test_variables_of_a_template_are_recorded_without_their_secrets(tmp_path: Path):
    text = json.dumps({"api_key": CANARY, "enable_thinking": False})
    resolved = shipped(tmp_path, "--task", "sft", "--chat_template_kwargs", text)
    write_reference(tmp_path, resolved)
    recorded = yaml.safe_load((tmp_path / "config.yaml").read_text())["chat_template_kwargs"]
    assert json.loads(recorded) == {"api_key": "***", "enable_thinking": False}
    with pytest.raises(ValueError, match=r"has \*\*\* for a value that is secret"):
        template_variables(recorded)
    assert template_variables(text)["api_key"] == CANARY


def test_a_file_that_a_run_wrote_is_refused_where_its_secret_is_missing(tmp_path: Path):
    resolved = shipped(tmp_path)
    assert configuration(resolved)["comet"]["api_key"] == CANARY
    write_reference(tmp_path, resolved)
    document = json.loads((tmp_path / "ds_config.resolved.json").read_text())
    with pytest.raises(UsageError, match=r'comet.api_key is "\*\*\*", which a run writes'):
        resolve(document, "ds.json", resolved.run, 1, "cpu")
    del document["comet"]
    resolve(document, "ds.json", resolved.run, 1, "cpu")


@pytest.mark.long
def test_a_run_leaves_no_secret_and_resumes_with_another(
    forked: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out_dir, printed = tmp_path / "out", ""
    document = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
    document |= {"log_level": "info", "dump_state": True}
    flags = f"--mirror file://{tmp_path}/mirror --save_interval 10 --verbose --debug"
    flags += f" --deepspeed_config {tmp_path}/ds.json"
    for key, more in ((1, "--dry_run"), (1, "--stop_at_step 10"), (2, "")):
        document["comet"] = {"enabled": False, "api_key": f"{CANARY}{key}"}
        (tmp_path / "ds.json").write_text(json.dumps(document))
        run = forked.run(out_dir, f"{flags} {more}", processes=1)
        assert run.status == (75 if "stop" in more else 0), run.stderr
        printed += run.stdout + run.stderr
    (start,) = [event for event in run.events("run_start") if event["step"]]
    assert start["step"] == 10
    (tmp_path / "ds.json").unlink()
    for command in (
        ["report", str(out_dir), "--out", str(tmp_path / "report.html")],
        ["doctor", str(out_dir)],
        ["checkpoint", "list", str(out_dir)],
        ["export", "--checkpoint", str(out_dir), "--format", "llama", "--out", str(tmp_path / "e")],
    ):
        main(command)
    printed += "".join(capsys.readouterr())
    assert "api_key" in printed
    assert CANARY not in printed
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]
