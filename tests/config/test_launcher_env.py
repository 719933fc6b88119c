"""What the launcher's environment says, and which backend it puts in force."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minimind.config.deepspeed.backend_choice import advice, choose_device, read_setup
from minimind.config.launcher_env import (
    Launch,
    parent_command,
    read_launch,
    set_allocator_defaults,
    set_rendezvous_defaults,
    with_dropped_config,
)
from minimind.config.parse import parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.errors import RendezvousError, UsageError
from minimind.runtime.device import Host
from tests.config.notices import notices_of
from tests.conftest import ROOT
from tools.runs import MEETING

GIVEN = "accelerate launch (YAML or flag)"
SHIPPED = str(DEFAULT_DEEPSPEED_CONFIG)
TWO = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **MEETING}
ENGAGED = {**TWO, "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "no"}
FROM_YAML = {**ENGAGED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "configs/ds_config.json"}


@pytest.fixture
def setup_for(monkeypatch: pytest.MonkeyPatch):
    """The setup of flags under a launcher's environment, started by a shell."""
    monkeypatch.setattr("minimind.config.deepspeed.backend_choice.parent_command", lambda: ["bash"])

    def of(line: str, environ: dict[str, str]):
        return read_setup(parse_flags(f"--device cpu {line}".split()), read_launch(environ))

    return of


def test_a_process_started_by_hand_is_rank_0_of_1():
    assert read_launch({}) == Launch()


def test_every_launchers_variables_are_read():
    assert (read_launch(TWO).rank, read_launch(TWO).world_size) == (1, 2)
    ranks = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"}
    deepspeed = {**ranks, **MEETING}
    assert read_launch(deepspeed).local_world_size == 2
    del deepspeed["LOCAL_SIZE"]
    assert read_launch(deepspeed).local_world_size == 4
    with pytest.raises(RendezvousError, match="RANK is 'one' in"):
        read_launch({"RANK": "one"})


def test_the_file_given_to_the_script_is_the_source():
    assert read_launch(TWO).source == GIVEN
    launch = read_launch({**TWO, "MINIMIND_CONFIG_FILE": "a.yaml", "MINIMIND_CPU_BY": "use_cpu"})
    assert (launch.source, launch.flags) == ("a.yaml", {"device": ("cpu", "use_cpu")})
    with pytest.raises(UsageError, match=r"^a.yaml: dynamo_backend = INDUCTOR"):
        read_launch({"MINIMIND_CONFIG_FILE": "a.yaml", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"})


@pytest.mark.parametrize(
    ("line", "environ", "backend"),
    [
        ("", {}, "single"),
        ("", TWO, "ddp"),
        (f"--deepspeed_config {SHIPPED}", {}, "deepspeed"),
        (f"--deepspeed_config {SHIPPED}", TWO, "deepspeed"),
        ("", ENGAGED, "deepspeed"),
        ("", FROM_YAML, "deepspeed"),
        ("--deepspeed_config none", FROM_YAML, "ddp"),
    ],
)
def test_deepspeed_is_in_force_when_a_file_is_named_or_the_launcher_reports_it(
    setup_for, line, environ, backend
):
    assert setup_for(line, environ).backend == backend
    assert setup_for(line, environ).resolve().backend == backend


def test_the_yamls_path_is_found_from_any_directory_and_the_flag_wins(
    setup_for, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    found = setup_for("", FROM_YAML)
    assert found.path == SHIPPED
    assert found.resolve().run.sources["deepspeed_config"] == f"{GIVEN}: deepspeed_config_file"
    mine = tmp_path / "mine.json"
    mine.write_text('{"zero_optimization": {"stage": 3}}')
    assert setup_for(f"--deepspeed_config {mine}", FROM_YAML).resolve().zero_stage == 3


def test_zero_fields_of_the_yaml_alone_fill_the_shipped_file(setup_for):
    fields = {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_MIXED_PRECISION": "no",
    }
    found = setup_for("", {**ENGAGED, **fields}).resolve()
    assert found.zero_stage == 3
    assert found.config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert found.config["gradient_accumulation_steps"] == 4
    assert found.config["gradient_clipping"] == 0.5
    assert found.sources["zero_optimization.stage"] == f"{GIVEN}: zero_stage"
    assert "gradient_clipping" in found.run.sources["grad_clip"]
    assert setup_for("", ENGAGED).resolve().zero_stage == 2  # Accelerate's own default


def test_the_seed_layout_mixed_precision_beside_a_deepspeed_file_works(setup_for):
    found = setup_for("", {**FROM_YAML, "ACCELERATE_MIXED_PRECISION": "bf16"}).resolve()
    assert found.run.dtype == "bfloat16"
    assert found.run.sources["dtype"] == f"{GIVEN}: mixed_precision"
    assert found.config["bf16"]["enabled"] is True


def test_the_command_line_of_the_parent_is_read_and_empty_once_it_is_gone(monkeypatch):
    words = ["sh", "-c", "echo begun; read line"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()  # a process that just begins has no command line yet
        monkeypatch.setattr(os, "getppid", lambda: parent.pid)
        assert parent_command() == words
        parent.kill()
    assert parent_command() == []


MULTI_GPU = "python /bin/accelerate launch --multi_gpu --num_processes=2"


@pytest.mark.parametrize("form", ["--deepspeed_config_file {}", "--deepspeed-config-file={}"])
@pytest.mark.parametrize("name", [SHIPPED, "configs/ds_config.json", "ds_config.json"])
def test_a_deepspeed_file_that_accelerate_launch_drops_engages_deepspeed(
    setup_for, monkeypatch, tmp_path: Path, form: str, name: str
):
    monkeypatch.chdir(tmp_path)
    words = f"{MULTI_GPU} {form.format(name)} train_pretrain.py --dim 8".split()
    monkeypatch.setattr("minimind.config.deepspeed.backend_choice.parent_command", lambda: words)
    found = setup_for("", TWO)
    assert (found.backend, Path(found.path)) == ("deepspeed", DEFAULT_DEEPSPEED_CONFIG)
    resolved = found.resolve()
    assert resolved.run.sources["deepspeed_config"] == f"{GIVEN}: deepspeed_config_file"
    (report,) = [one for one in advice(found, resolved) if "drops" in one]
    assert report.startswith(f"`accelerate launch` drops --deepspeed_config_file {name}")
    assert setup_for(f"--deepspeed_config {SHIPPED}", TWO).launch.dropped_config is None
    assert setup_for("--deepspeed_config none", TWO).backend == "ddp"
    mine = tmp_path / "mine.json"
    mine.write_text("{}")
    with pytest.raises(UsageError, match=r"--deepspeed_config is .*mine.json but .*; remove one"):
        setup_for(f"--deepspeed_config {mine}", TWO)


def test_other_deepspeed_flags_that_accelerate_launch_drops_are_refused():
    words = f"{MULTI_GPU} --zero_stage=3 t.py".split()
    with pytest.raises(
        UsageError, match=r"--zero_stage was passed .*, which drops it without --use_deepspeed; add"
    ):
        with_dropped_config(Launch(world_size=2), None, words)
    engaged = Launch(uses_deepspeed=True)
    assert with_dropped_config(engaged, None, words) == engaged
    for line in ("bash run.sh --deepspeed_config_file x", f"{MULTI_GPU} t.py --zero_stage 3"):
        assert with_dropped_config(Launch(), None, line.split()) == Launch()


def test_too_few_gpus_are_refused_and_too_many_are_reported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    run = parse_flags([])
    assert choose_device(run, Launch(world_size=8, local_world_size=4)) == "cuda"
    two, four = (Launch(world_size=8, local_world_size=n) for n in (2, 4))
    assert "NUM_PROCESSES=4" in notices_of(run, "cuda", two)
    assert "NUM_PROCESSES" not in notices_of(run, "cuda", four) + notices_of(run, "cpu")
    with pytest.raises(UsageError, match="8 processes were started here and 4 GPUs are visible"):
        choose_device(run, Launch(world_size=8, local_world_size=8))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as `srun --gpus-per-task 1` sets it
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"visible \(CUDA_VISIBLE_DEVICES = 3\); .*every process"):
        choose_device(run, Launch(world_size=8, local_world_size=8))
    assert choose_device(parse_flags(["--device", "cpu"]), Launch(local_world_size=8)) == "cpu"


def test_a_process_forked_after_cuda_was_used_is_refused(monkeypatch):
    """With a stand-in for torch, which then counts no GPU."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(UsageError, match=r"^device = auto .*was forked; .* restart the kernel"):
        choose_device(parse_flags([]), Launch())
    assert choose_device(parse_flags(["--device", "cpu"]), Launch()) == "cpu"


def test_one_process_alone_gets_a_port_and_several_keep_theirs():
    alone: dict[str, str] = {}
    set_rendezvous_defaults(alone)
    assert (alone["RANK"], alone["WORLD_SIZE"], alone["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    given = dict(TWO)
    set_rendezvous_defaults(given)
    assert given == TWO


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", *MEETING])
def test_one_of_several_processes_needs_every_variable_before_anything_is_read(name: str):
    partly = {key: value for key, value in TWO.items() if key != name}
    with pytest.raises(RendezvousError, match=f"without {name}; set"):
        read_launch(partly)


def test_device_auto_is_no_contradiction_of_a_yaml_that_states_cpu():
    launch = read_launch({"MINIMIND_CPU_BY": "use_cpu"})
    found = read_setup(parse_flags(["--device", "auto"]), launch).resolve()
    assert (found.run.device, found.run.sources["device"].split(": ")[1]) == ("cpu", "use_cpu")


def test_zero_at_one_process_is_stated_to_buy_nothing(setup_for):
    def report(line: str, environ: dict[str, str]) -> str:
        setup = setup_for(line, environ)
        return "\n".join(advice(setup, setup.resolve()))

    shipped = f"--deepspeed_config {SHIPPED}"
    assert "ZeRO stage 2 has nothing to divide" in report(shipped, {})
    assert "--deepspeed_config none" in report(shipped, {})
    assert report(shipped, TWO) == report("", {}) == report("", TWO) == ""
    beside = DEFAULT_DEEPSPEED_CONFIG.parent / "deepspeed"
    assert "stage 0" in report(f"--deepspeed_config {beside / 'zero0.json'}", {})
    assert report(f"--deepspeed_config {beside / 'zero2_offload.json'}", {}) == ""
    assert report(f"--deepspeed_config {beside / 'warmup_cosine.json'} --max_steps 9", {}) == ""


def test_bf16_that_a_cpu_emulates_is_warned_of_in_one_line(setup_for, monkeypatch):
    def report(line: str, device: str = "cpu") -> str:
        setup = replace(setup_for(f"--deepspeed_config none {line}", {}), device=device)
        return "\n".join(advice(setup, setup.resolve()))

    for has, start in ((False, "warning  dtype = bfloat16 (--dtype)"), (True, "")):
        monkeypatch.setattr(Host, "has_bf16", has)
        found = report("--dtype bfloat16")
        assert found.startswith(start)
        assert "\n" not in found
        assert bool(found) is not has
        assert report("--dtype float32") == report("") == ""
        assert "bf16" not in report("--dtype bfloat16", "cuda")


def test_allocators_are_set_unless_the_user_set_them():
    fresh: dict[str, str] = {}
    set_allocator_defaults(fresh)
    pages = {"THP_MEM_ALLOC_ENABLE": "1"}
    assert fresh == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **pages}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        kept = {name: "max_split_size_mb:128"}
        set_allocator_defaults(kept)
        assert kept == {name: "max_split_size_mb:128", **pages}
    kept = {"THP_MEM_ALLOC_ENABLE": "0"}
    set_allocator_defaults(kept)
    assert kept["THP_MEM_ALLOC_ENABLE"] == "0"


def test_allocators_are_set_before_torch_is_imported():
    """torch reads the variables once; `train_pretrain.py` imports torch after the flags."""
    code = (
        "import os, sys; from minimind.launch.train_pretrain import main;"
        " status = main(['--dim', '0']);"
        " assert 'torch' not in sys.modules; assert status == 2;"
        " print(os.environ['PYTORCH_ALLOC_CONF'], os.environ['THP_MEM_ALLOC_ENABLE'],"
        " os.environ['TORCH_CPP_LOG_LEVEL'])"
    )
    environ = {k: v for k, v in os.environ.items() if "ALLOC" not in k}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.strip().endswith("expandable_segments:True 1 ERROR"), done.stderr


GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
SAVE = "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"
SAVED = {SAVE: "true", "MINIMIND_CONFIG_FILE": "a.yaml"}


@pytest.mark.parametrize(
    ("written", "environ", "value", "source"),
    [
        ("auto", {}, False, "derived: DeepSpeed saves nothing"),
        ("auto", SAVED, True, "a.yaml: zero3_save_16bit_model"),
        ("auto", {**SAVED, SAVE: "false"}, False, "derived: DeepSpeed saves nothing"),
        (True, SAVED, True, "FILE"),
        (False, {}, False, "FILE"),
    ],
)
def test_whether_deepspeed_gathers_weights_is_accelerates_answer(
    setup_for, tmp_path: Path, written, environ, value, source
):
    path = tmp_path / "ds.json"
    key = GATHER.partition(".")[2]
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, key: written}}))
    found = setup_for(f"--deepspeed_config {path}", {**ENGAGED, **environ}).resolve()
    assert found.config["zero_optimization"][key] is value
    assert found.sources[GATHER] == source.replace("FILE", str(path))
