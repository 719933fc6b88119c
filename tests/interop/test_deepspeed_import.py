"""minimind import --from deepspeed: the state to the last bit, and the losses that follow."""

from __future__ import annotations

import io
import json
import math
import pickle
import random
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from minimind.checkpoint.reader import Contents
from minimind.checkpoint.resume import resume
from minimind.cli.main import main
from minimind.errors import CheckpointError
from minimind.interop.deepspeed_checkpoint import load_pickle, read_deepspeed
from minimind.interop.tensor_sources import open_tensors
from minimind.interop.weights import read_checkpoint_weights
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.model.rotary import half_to_interleaved
from tests.conftest import ROOT, Launcher
from tests.faults import tiny
from tests.interop.continued import BOUNDS, RATE, STEPS, Engine, cases, run_deepspeed
from tests.interop.hostile import good_folder
from tools.forking import Nursery
from tools.runs import config_of_stage, events

MODEL_FILE, NORM = "mp_rank_00_model_states.pt", "model.norm.weight"
KINDS = ("fp32", "exp_avg", "exp_avg_sq")
Written = Callable[[int, tuple[str, ...]], Path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_folder(tmp_path_factory.mktemp("model") / "source")


@pytest.fixture(scope="module")
def written(source: Path, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Checkpoints that DeepSpeed writes on so many processes, by their cases; each once."""
    made: dict[tuple[int, tuple[str, ...]], Path] = {}

    def write(processes: int, names: tuple[str, ...]) -> Path:
        if (processes, names) in made:
            return made[processes, names]
        out = made[processes, names] = tmp_path_factory.mktemp("deepspeed")
        run_deepspeed(nursery, processes, source, out, names)
        return out

    return write


FEW = ("2f", "3b", "0b", "1f")
ALL = tuple(f"{stage}{dtype}" for stage in range(4) for dtype in "fbm")
BIG = [pytest.param(n, ALL, name, marks=pytest.mark.long) for n in (1, 2, 4) for name in ALL]


def import_run(place: Path, source: Path, out: Path, *more: object) -> int:
    words = ("import", "--from", "deepspeed", place, "--out", out, "--tokenizer", source, *more)
    return main([str(word) for word in words])


def contents_of(out: Path) -> Contents:
    (path,) = (out / "checkpoints").iterdir()
    return Contents(path)


@pytest.mark.launch
@pytest.mark.parametrize(("processes", "names", "name"), [*((2, FEW, name) for name in FEW), *BIG])
def test_a_run_of_deepspeed_goes_on(
    processes: int,
    names: tuple[str, ...],
    name: str,
    written: Written,
    source: Path,
    tmp_path: Path,
):
    require_continued(written(processes, names) / name, source, tmp_path / "run", name)


def require_continued(place: Path, source: Path, out: Path, name: str) -> None:
    """The state is that of DeepSpeed to the last bit, and the next losses are its own."""
    assert import_run(place, source, out) == 0
    contents, after = contents_of(out), torch.load(place / "after.pt")
    ((_, stage, dtype),) = cases(name)
    updates = STEPS + (name == "0b")  # there DeepSpeed allocates the moments by an update
    assert contents.manifest["step"] == STEPS
    assert contents.state["optimizer_step"] == updates
    assert contents.manifest["identity"]["dtype"] == {"dtype": dtype}
    assert contents.kinds == [*KINDS]
    for kind in KINDS if stage else ():  # at stage 0 DeepSpeed has no function that says them
        assert {*after[kind]} == {*contents.shapes}
        for weight, value in after[kind].items():
            if re.search(r"[qk]_(proj|norm)", weight):
                value = half_to_interleaved(value, 8)
            assert torch.equal(contents.read(kind, weight), value), (kind, weight)
    losses = torch.tensor(losses_after(out))
    expected = torch.tensor(after["losses"][STEPS:])
    assert (losses - expected).abs().max() <= BOUNDS[dtype]
    assert expected.std() > 0.1


def losses_after(out: Path) -> list[float]:
    """The losses of the five steps after an import, in this process."""
    contents = contents_of(out)
    identity = contents.manifest["identity"]
    config = read_checkpoint_weights(contents.directory).config
    engine = Engine(config, identity["dtype"]["dtype"])
    found = resume(engine, engine, out / "checkpoints", "auto", identity)  # type: ignore[arg-type] (a stand-in)
    assert (found.state.step, found.state.tokens) == (STEPS, 0)
    return engine.losses(STEPS, STEPS + 5)


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.parametrize("name", ["1f", "2b", "3b"])
def test_a_universal_checkpoint_goes_on(name: str, written: Written, source: Path, tmp_path: Path):
    place, out = written(2, ALL) / name, tmp_path / "universal"
    made = out / "global_step3_universal"
    words = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    words += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    folders = ["--input_folder", str(place / "global_step3"), "--output_folder", str(made)]
    command = [sys.executable, *words, *folders]
    subprocess.run(command, check=True, capture_output=True, timeout=500)
    for file in ("after.pt", "config.json"):
        shutil.copy(place / file, out)
    require_continued(out, source, tmp_path / "run", name)


@pytest.mark.launch
@pytest.mark.long
def test_a_run_of_the_trainer_goes_on(source: Path, tmp_path: Path):
    out, run = tmp_path / "trainer", tmp_path / "run"
    command = [sys.executable, "-m", "tests.interop.trainer_run", str(source), str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=500)
    words = ["import", "--from", "deepspeed", str(out / "checkpoint-3"), "--out", str(run)]
    assert main(words) == 0  # its tokenizer and config.json are there
    expected = torch.tensor(torch.load(out / "after.pt")["losses"][STEPS:])
    assert (torch.tensor(losses_after(run)) - expected).abs().max() <= BOUNDS["float32"]


@pytest.mark.long
@pytest.mark.parametrize(("processes", "stage"), [(1, 0), (2, 2), (2, 3)])
def test_the_command_that_is_printed_goes_on(
    processes: int,
    stage: int,
    written: Written,
    source: Path,
    launch: Launcher,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """On other processes and at other stages than those of the checkpoint."""
    out = tmp_path / "run"
    assert import_run(written(2, ALL) / "1f", source, out) == 0
    said = capsys.readouterr().out
    command = said[said.index("bash run_accelerate.sh") :].replace("\\\n", " ")
    more = f" --cache_dir {launch.cache} --device cpu --batch_size 2 --log_interval 1"
    more += f" --deepspeed_config {config_of_stage(stage, tmp_path)}" if stage else ""
    words = command.replace("TEXT", str(launch.corpus)).replace("STEPS", "6") + more
    done = subprocess.run(
        words.split(), cwd=ROOT, env=launch.environment(processes), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "resuming at step 3" in done.stdout
    steps = [event["step"] for event in events(out, "step")]
    assert steps == [4, 5, 6]


@pytest.mark.launch
def test_files_of_ranks_are_each_there_once_and_used_up(
    written: Written, source: Path, tmp_path: Path
):
    place = written(2, FEW)
    first, second = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))

    def without_a_weight(folder: Path) -> None:
        for file in folder.glob("*model_states.pt"):
            state = torch.load(file, weights_only=False)
            state["param_shapes"][0].popitem()
            torch.save(state, file)

    faults: dict[str, Callable[[Path], object]] = {
        "one is missing": lambda folder: (folder / second).unlink(),
        "both are missing": lambda folder: [file.unlink() for file in folder.glob("*optim*")],
        "the first is missing": lambda folder: (folder / first).unlink(),
        "one is of another rank": lambda folder: (folder / second).rename(
            folder / second.replace("1", "2")
        ),
        "one is there twice": lambda folder: shutil.copy(
            folder / first, (folder / second).rename(folder / f"bf16_{first}")
        ),
        "a vector is longer than its weights": without_a_weight,
    }
    for what, change in faults.items():
        copy = shutil.copytree(place / "2f", tmp_path / what)
        change(copy / "global_step3")
        assert import_run(copy, source, tmp_path / "run") == 4, what
    copy = shutil.copytree(place / "3b", tmp_path / "stage 3")
    without_a_weight(copy / "global_step3")
    assert import_run(copy, source, tmp_path / "run") == 4


@pytest.mark.launch
def test_a_frozen_weight_of_stage_1_is_that_of_the_model(
    written: Written, source: Path, tmp_path: Path
):
    """There DeepSpeed saves it with the model alone."""
    place = shutil.copytree(written(2, FEW) / "1f", tmp_path / "frozen")
    folder, name = place / "global_step3", "model.embed_tokens.weight"
    state = torch.load(folder / MODEL_FILE, weights_only=False)
    size = state["param_shapes"][0].pop(name).numel()
    value = state["module"][name]
    torch.save(state, folder / MODEL_FILE)
    files = sorted(folder.glob("*optim_states.pt"))
    ranks = [torch.load(file, weights_only=False) for file in files]
    optimizers = [rank["optimizer_state_dict"] for rank in ranks]
    holders = [(one["single_partition_of_fp32_groups"], 0) for one in optimizers]
    for kind in ("exp_avg", "exp_avg_sq"):
        holders += [(one["base_optimizer_state"]["state"][0], kind) for one in optimizers]
    for pair in (holders[0:2], holders[2:4], holders[4:6]):
        rest = torch.cat([holder[key] for holder, key in pair])[size:].chunk(2)
        for (holder, key), part in zip(pair, rest, strict=True):
            holder[key] = part.clone()
    for one in optimizers:
        one["param_alignment_paddings"][0].pop(0)
    for file, rank in zip(files, ranks, strict=True):
        torch.save(rank, file)
    assert import_run(place, source, tmp_path / "run") == 0
    contents, after = contents_of(tmp_path / "run"), torch.load(place / "after.pt")
    assert torch.equal(contents.read("fp32", name), value)
    assert not contents.read("exp_avg", name).any()
    assert torch.equal(contents.read("exp_avg", NORM), after["exp_avg"][NORM])
    mlp = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(contents.read("exp_avg_sq", mlp), after["exp_avg_sq"][mlp])


# --- other models and optimizers ----------------------------------------------------------------


def made(folder: Path, source: Path, state: dict[str, Any]) -> Path:
    """A folder of stage 0 with this state, beside the model's config.json."""
    folder.mkdir(parents=True)
    shutil.copy(source / "config.json", folder)
    torch.save(state, folder / MODEL_FILE)
    return folder


def test_our_own_decoder_keeps_its_names_and_its_order(source: Path, tmp_path: Path):
    ours, model = tmp_path / "ours", MiniMindForCausalLM(MiniMindConfig(**tiny.SHAPE))
    ours.mkdir()
    (ours / "config.json").write_text(model.config.to_json_string())
    weights = dict(model.named_parameters())
    state = saved_state({f"module.{name}": value.detach() for name, value in weights.items()})
    assert import_run(made(tmp_path / "step", ours, state), source, tmp_path / "run") == 0
    contents = contents_of(tmp_path / "run")
    assert {*contents.shapes} == {*weights}
    for number, (name, value) in enumerate(weights.items()):
        assert torch.equal(contents.read("fp32", name), value)
        moment = state["optimizer"]["state"][number]["exp_avg"]
        assert torch.equal(contents.read("exp_avg", name), moment)


def test_groups_without_names_are_matrices_and_the_rest(source: Path, tmp_path: Path):
    state = state_of(source)
    names, optimizer = [*state["module"]], state["optimizer"]
    order = sorted(range(len(names)), key=lambda n: state["module"][names[n]].ndim < 2)
    optimizer["state"] = {new: optimizer["state"][old] for new, old in enumerate(order)}
    count = sum(value.ndim > 1 for value in state["module"].values())
    (group,) = optimizer["param_groups"]
    optimizer["param_groups"] = [
        {**group, "params": [*range(count)], "weight_decay": 0.3},
        {**group, "params": [*range(count, len(names))], "weight_decay": 0.0},
    ]
    place = made(tmp_path / "step", source, state)
    assert import_run(place, source, tmp_path / "run") == 0
    contents = contents_of(tmp_path / "run")
    assert contents.manifest["identity"]["lr"]["weight_decay"] == 0.3
    moment = optimizer["state"][order.index(names.index(NORM))]["exp_avg"]
    assert torch.equal(contents.read("exp_avg", NORM), moment)


@pytest.mark.parametrize(
    ("kinds", "name"), [(("exp_avg",), "Lion"), (("momentum_buffer",), "SGD"), (KINDS[1:], "AdamW")]
)
def test_the_optimizer_is_told_by_its_state(
    kinds: tuple[str, ...], name: str, source: Path, tmp_path: Path
):
    state = state_of(source)
    held = state["optimizer"]["state"]
    for number, one in held.items():
        held[number] = {kind: one["exp_avg"] for kind in kinds} | {"step": one["step"]}
    place = made(tmp_path / "step", source, state)
    assert import_run(place, source, tmp_path / "run") == 0
    contents = contents_of(tmp_path / "run")
    assert contents.kinds == ["fp32", *kinds]
    assert contents.manifest["identity"]["lr"]["optimizer"] == name


def test_what_the_files_say_of_precision_rate_and_decay(source: Path, tmp_path: Path):
    state = state_of(source)
    place = made(tmp_path / "step", source, state)
    assert read_deepspeed(place).low_precision is None
    assert read_deepspeed(place).peak == RATE
    assert not read_deepspeed(place).is_coupled
    # A model in bf16 without a block bf16, and so without float32 weights.
    state["module"] = {name: value.bfloat16() for name, value in state["module"].items()}
    state["lr_scheduler"] = {"last_batch_iteration": 0}
    state["ds_config"] = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.5, "adam_w_mode": False}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.25}},
    }
    torch.save(state, place / MODEL_FILE)
    found = read_deepspeed(place)
    assert (found.dtype, found.low_precision) == ("bfloat16", "bfloat16")
    assert (found.peak, found.is_coupled, found.grad_clip) == (0.25, True, 0.0)
    # As at stage 0 in fp16, of which DeepSpeed saves no hysteresis.
    scaler = {"cur_scale": 8.0, "cur_iter": 3, "last_overflow_iter": 1}
    state["optimizer"] = {"optimizer_state_dict": state["optimizer"], **scaler}
    torch.save(state | {"ds_config": "ds.json"}, place / MODEL_FILE)
    found = read_deepspeed(place)
    assert found.scaler == {**scaler, "cur_hysteresis": 1}
    assert (found.grad_clip, found.unknown) == (None, ("lr",))


def test_autocast_is_told(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    state = state_of(source)
    for number, (block, told) in enumerate(
        [
            ({"enabled": True, "dtype": "fp16"}, "products in float16 (torch_autocast)"),
            ({"enabled": True}, "products in low precision (torch_autocast)"),
            ({"enabled": True, "dtype": "bf16"}, ""),  # --dtype bf16-mixed
            ({"enabled": False, "dtype": "bf16"}, ""),
        ]
    ):
        state["ds_config"] = {"torch_autocast": block}
        place = made(tmp_path / f"step {number}", source, state)
        assert import_run(place, source, tmp_path / f"run {number}") == 0
        said = capsys.readouterr().out
        assert told in said
        assert ("torch_autocast" in said) == bool(told)
        assert ("bf16-mixed" in said) == (block == {"enabled": True, "dtype": "bf16"})


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.parametrize("name", ["0h", "1h", "2h", "3h"])
def test_float16_has_its_master_weights_and_its_loss_scale(
    name: str, written: Written, source: Path, tmp_path: Path
):
    place, out = written(2, ("0h", "1h", "2h", "3h")) / name, tmp_path / "run"
    assert import_run(place, source, out) == 0
    contents, after = contents_of(out), torch.load(place / "after.pt")
    assert contents.manifest["identity"]["dtype"] == {"dtype": "float16"}
    scaler = contents.state["counters"]["loss_scaler"]
    assert (scaler["cur_scale"], scaler["cur_iter"]) == (2**16, STEPS)
    for kind in KINDS:
        for weight, value in after[kind].items():
            is_rotated = re.search(r"[qk]_(proj|norm)", weight)
            held = half_to_interleaved(value, 8) if is_rotated else value
            assert torch.equal(contents.read(kind, weight), held), (kind, weight)


def test_a_universal_folder_is_read(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """As ds_to_universal lays it out; a tag of Lightning's, and the line end of Windows."""
    state = state_of(source)
    optimizer, names = state["optimizer"], [*state["module"]]
    state["param_shapes"] = [{name: value.shape for name, value in state["module"].items()}]
    above = tmp_path / "above"
    folder = made(above / "epoch=1-step=3", source, {**state, "optimizer": None})
    (above / "latest_universal").write_bytes(b"epoch=1-step=3\r\n")
    for number, name in enumerate(names):
        (folder / "zero" / name).mkdir(parents=True)
        held = {"fp32": state["module"][name], **optimizer["state"][number]}
        for kind in KINDS:
            torch.save({"param": held[kind]}, folder / "zero" / name / f"{kind}.pt")
        torch.save(held["step"], folder / "zero" / name / "step.pt")
    (group,) = optimizer["param_groups"]
    groups = {"param_groups": [{**group, "params": [0]}]}
    torch.save(groups, folder / "zero" / "optimizer_state.pt")
    assert import_run(above, source, tmp_path / "run") == 0
    contents = contents_of(tmp_path / "run")
    moment = optimizer["state"][names.index(NORM)]["exp_avg"]
    assert torch.equal(contents.read("exp_avg", NORM), moment)
    assert contents.state["optimizer_step"] == 1
    (folder / "zero" / NORM / "exp_avg.pt").unlink()
    capsys.readouterr()
    assert import_run(above, source, tmp_path / "other") == 4
    assert capsys.readouterr().err.count(str(folder)) == 1


def test_a_configuration_of_another_name_is_not_replaced(source: Path, tmp_path: Path):
    place = made(tmp_path / "step", source, state_of(source))
    shutil.copy(source / "config.json", tmp_path)
    for name in ("llama.json", "config.json/config.json"):
        assert import_run(place, source, tmp_path / "run", "--model_config", tmp_path / name) == 2
    assert import_run(place, source, tmp_path / "run", "--model_config", tmp_path) == 0


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_resume_file_of_minimind_goes_on(is_tied: bool, source: Path, tmp_path: Path):
    """As its `lm_checkpoint` writes one: float16 copies, a tied head too, and one group."""
    state, config = state_of(source), json.loads((source / "config.json").read_text())
    if not is_tied:
        head = state["module"]["model.embed_tokens.weight"].flip(0)
        state = saved_state({**state["module"], "lm_head.weight": head})
    half = {name: value.half() for name, value in state["module"].items()}
    if is_tied:
        half["lm_head.weight"] = half["model.embed_tokens.weight"].clone()
    config_file = tmp_path / "model" / "config.json"
    config_file.parent.mkdir()
    config_file.write_text(json.dumps({**config, "tie_word_embeddings": is_tied}))
    saved = {"model": half, "optimizer": state["optimizer"], "epoch": 0, "step": 16}
    file, out = tmp_path / "pretrain_512_resume.pth", tmp_path / "run"
    torch.save({**saved, "world_size": 1, "wandb_id": None, "scaler": {}}, file)
    words = ["import", "--from", "minimind-resume", file, "--out", out, "--tokenizer", source]
    assert main([*map(str, words), "--model_config", str(config_file)]) == 0
    contents = contents_of(out)
    assert (contents.manifest["step"], contents.state["optimizer_step"]) == (1, 1)
    assert torch.equal(contents.read("fp32", NORM), half[NORM].float())
    number = [*half].index(NORM)
    moment = state["optimizer"]["state"][number]["exp_avg_sq"]
    assert torch.equal(contents.read("exp_avg_sq", NORM), moment)


# --- what is refused ----------------------------------------------------------------------------


def state_of(source: Path) -> dict[str, Any]:
    """`saved_state` of the model in a folder."""
    weights = open_tensors(source)
    return saved_state({name: weights.read(name) for name in weights.shapes})


def saved_state(module: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What DeepSpeed saves at stage 0 in float32, after an update by AdamW."""
    params = [torch.nn.Parameter(value.clone()) for value in module.values()]
    optimizer = torch.optim.AdamW(params, lr=RATE)
    for p in params:
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    optimizer.step()
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": optimizer.state_dict(),
        "param_shapes": None,
        "lr_scheduler": None,
        **{"skipped_steps": 0, "global_steps": 1, "global_samples": 4, "dp_world_size": 1},
        "ds_config": {"gradient_clipping": 1.0},
        "ds_version": "0.19.8",
    }


def changed(*path: Any, value: Any = None, is_gone: bool = False) -> Callable[[Any], None]:
    """A change of the state at a path."""

    def change(state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        if is_gone:
            del state[path[-1]]
        else:
            state[path[-1]] = value

    return change


FEWER = torch.zeros(3)
STATES: dict[str, Callable[[Any], None]] = {
    **{f"no {key}": changed(key, is_gone=True) for key in ("global_steps", "optimizer", "module")},
    **{
        f"{key} is {value!r}": changed(key, value=value)
        for key in ("global_steps", "skipped_steps", "dp_world_size")
        for value in (-1, 2**60, "3", None, 1.5, True)
    },
    "no weight": changed("module", NORM, is_gone=True),
    "a weight of another shape": changed("module", NORM, value=FEWER),
    "a weight that is not finite": changed("module", NORM, value=torch.full((32,), float("nan"))),
    "a weight that is a number": changed("module", NORM, value=1.0),
    "a weight of integers": changed("module", NORM, value=torch.zeros(32, dtype=torch.int64)),
    "a weight in fewer bytes": changed("module", NORM, value=torch.zeros(1).expand(32)),
    "a moment that is not finite": changed(
        "optimizer", "state", 0, "exp_avg", value=torch.full((512, 32), float("inf"))
    ),
    "a moment of another shape": changed("optimizer", "state", 0, "exp_avg", value=FEWER),
    "no moment of one": changed("optimizer", "state", 0, "exp_avg", is_gone=True),
    "a third moment": changed("optimizer", "state", 0, "max_exp_avg_sq", value=FEWER),
    "another count of updates": changed("optimizer", "state", 0, "step", value=torch.tensor(9.0)),
    "no moments": changed("optimizer", "state", value={}),
    "no groups": changed("optimizer", "param_groups", value=[]),
    "a group of 2 weights": changed("optimizer", "param_groups", 0, "params", value=[0, 1]),
    **{
        f"a group with {key} = {value!r}": changed("optimizer", "param_groups", 0, key, value=value)
        for key, value in (
            *(("lr", "fast"), ("lr", float("nan")), ("betas", None), ("betas", (0.9,))),
            *(("betas", (0.9, "b")), ("weight_decay", [0.1]), ("eps", 2**80)),
        )
    },
    "a version of two lines": changed("ds_version", value="0.19.8\nrm"),
    "a schedule at a step that is text": changed(
        "lr_scheduler", value={"last_batch_iteration": "9"}
    ),
    "an infinite count of updates": changed("optimizer", "state", 0, "step", value=math.inf),
    "a weight whose name is a number": lambda state: state["module"].update(
        {3: state["module"].pop(NORM)}
    ),
    "weights of float64": lambda state: state["module"].update(
        {name: value.double() for name, value in state["module"].items()}
    ),
    "a count of 2^40 lists": changed(
        "global_steps", value=reduce(lambda a, _: [a, a], range(40), 0)
    ),
    **{
        f"a group with {key}": changed("optimizer", "param_groups", 0, key, value=0.5)
        for key in ("max_coeff", "momentum_decay")
    },
    "a group of RAdam": changed("optimizer", "param_groups", 0, "amsgrad", is_gone=True),
    "groups that are text": changed("optimizer", "param_groups", value="text"),
}
# Names as `module name` of the opcode GLOBAL, each given the argument MARK.
GLOBALS = (
    *("os system", "posix system", "subprocess Popen", "subprocess call", "builtins exec"),
    *("builtins eval", "builtins __import__", "builtins getattr", "builtins open", "shutil rmtree"),
    *("pickle loads", "runpy run_path", "importlib import_module", "functools partial"),
    *("torch load", "torch.hub load", "torch.jit load", "numpy load", "ctypes CDLL", "sys exit"),
    *("deepspeed.runtime.engine DeepSpeedEngine", "deepspeed.utils.logging logger"),
    *("argparse Namespace", "types FunctionType", "operator attrgetter"),
    "deepspeed.runtime.zero.config DeepSpeedZeroConfig",
)
# What is made of a global and an argument.
CALLS = {
    "REDUCE": lambda name, mark: b"c" + name + b"X" + mark + b"\x85R.",
    "NEWOBJ": lambda name, mark: b"c" + name + b"X" + mark + b"\x85\x81.",
    "BUILD": lambda name, mark: b"c" + name + b"X" + mark + b"b.",
    "INST": lambda name, mark: b"(X" + mark + b"i" + name + b".",
    "OBJ": lambda name, mark: b"(c" + name + b"X" + mark + b"o.",
}


def pickled(call: str, name: str, mark: Path) -> bytes:
    """A file of torch.save whose pickle would touch `mark`."""
    text = f"touch {mark}".encode()
    module, _, last = name.partition(" ")
    return packed(
        CALLS[call](f"{module}\n{last}\n".encode(), len(text).to_bytes(4, "little") + text)
    )


def packed(pickle: bytes) -> bytes:
    """The file of torch.save with this pickle."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + pickle)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
    return content.getvalue()


@pytest.mark.parametrize(
    "of_python",
    [
        b"cdeepspeed.runtime.zero.config\nZeroStageEnum\nK\x02\x85R.",
        b"c__builtin__\ngetattr\ncdeepspeed.runtime.zero.config\nZeroStageEnum\n"
        b"X\x09\x00\x00\x00gradients\x86R.",  # before 3.11.4
    ],
    ids=["by value", "by name"],
)
def test_a_stage_is_read_as_each_python_writes_it(of_python: bytes, tmp_path: Path):
    file = tmp_path / "stage.pt"
    file.write_bytes(packed(of_python))
    assert load_pickle(file).args == (2,)


@pytest.mark.parametrize("name", ["__class__", "__init__", "value", "args"])
def test_another_attribute_of_an_enumeration_is_refused(name: str, tmp_path: Path):
    text = name.encode()
    file = tmp_path / "stage.pt"
    enumeration = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
    of_name = b"X" + len(text).to_bytes(4, "little") + text
    file.write_bytes(packed(b"c__builtin__\ngetattr\n" + enumeration + of_name + b"\x86R."))
    with pytest.raises(CheckpointError, match="not a stage of ZeRO"):
        load_pickle(file)


def flipped(content: bytes, seed: int) -> bytes:
    """The file with one bit of a record turned, or without its end."""
    rng = random.Random(seed)
    if seed % 4 == 0:
        return content[: rng.randrange(len(content))]
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entry = rng.choice([one for one in archive.infolist() if one.file_size > 8])
    start = content.index(entry.filename.encode()) + len(entry.filename)
    extra = int.from_bytes(content[entry.header_offset + 28 : entry.header_offset + 30], "little")
    place = start + extra + rng.randrange(entry.file_size)
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def test_damaged_and_hostile_files_are_refused_and_run_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    mark, out, good = tmp_path / "ran", tmp_path / "run", state_of(source)
    folder = made(tmp_path / "global_step1", source, good)
    file = folder / MODEL_FILE
    assert import_run(folder, source, out) == 0
    assert sum(1 for _ in (out / "checkpoints").iterdir()) == 1
    shutil.rmtree(out)
    whole = file.read_bytes()
    contents: dict[str, bytes] = {f"damage {seed}": flipped(whole, seed) for seed in range(40)}
    names = [(call, name) for name in GLOBALS for call in CALLS]
    contents |= {f"{call} of {name}": pickled(call, name, mark) for call, name in names}
    for what, change in STATES.items():
        torch.save(good, file)
        state = torch.load(file)
        change(state)
        torch.save(state, file)
        contents[what] = file.read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        squeezed = io.BytesIO()
        with zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as other:
            for name in archive.namelist():
                other.writestr(name, archive.read(name))
    contents["compressed"] = squeezed.getvalue() + bytes(len(whole))  # as large as it unpacks to
    assert len(contents) > 200
    for what, content in contents.items():
        file.write_bytes(content)
        capsys.readouterr()
        assert import_run(folder, source, out) == 4, what
        told = capsys.readouterr().err
        assert told.count("\n") == 1, (what, told)
        assert str(folder) in told, (what, told)
        assert not mark.exists(), what
        assert not out.exists(), what
        assert len(told) < 500, (what, told)


def test_a_pickle_that_is_run_would_leave_its_mark(tmp_path: Path):
    mark = tmp_path / "ran"
    with zipfile.ZipFile(io.BytesIO(pickled("REDUCE", "os system", mark))) as archive:
        pickle.loads(archive.read("archive/data.pkl"))
    assert mark.exists()
