"""Presets against the models they build, on the meta device; recipes against the flags."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from minimind.architecture.select import PLAIN, minimind_config
from minimind.config.deepspeed.backend_choice import read_setup
from minimind.config.launcher_env import read_launch
from minimind.config.parse import parse_flags
from minimind.config.run_config import RECIPES, files_by_name
from minimind.errors import UsageError
from minimind.model.causal_lm import MiniMindForCausalLM

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "models"
PRESETS = sorted(FOLDER.glob("*.yaml"))
PARAMETERS = {
    **{"tiny": 2_361_024, "26m": 25_829_888, "64m": 63_912_192, "104m": 104_030_976},
    "0.4b": 361_038_848,
}
KEYS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "max_seq_len", "vocab_size",
    "rope_theta", "norm_eps", "qk_norm",
}  # fmt: skip


def test_every_preset_has_an_expected_count():
    assert {path.stem for path in PRESETS} == set(PARAMETERS)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_builds_the_number_of_parameters_in_its_first_line(path: Path):
    text = path.read_text(encoding="utf-8")
    shape = yaml.safe_load(text)
    assert set(shape) <= KEYS
    with torch.device("meta"):
        run = parse_flags(["--model", str(path)])
        model = MiniMindForCausalLM(minimind_config(run))
    parameters = sum(weight.numel() for weight in model.parameters())
    assert parameters == PARAMETERS[path.stem]
    assert text.startswith(f"# {parameters:,} parameters")
    for key, value in shape.items():
        assert getattr(model.config, PLAIN[key]) == value


def test_a_number_of_a_preset_may_be_of_what_the_user_turns_off(tmp_path: Path):
    path = tmp_path / "experts.yaml"
    path.write_text("dim: 64\nuse_moe: true\nn_routed_experts: 8\n")
    off = ["--model", str(path), "--no-use_moe"]
    run = parse_flags(off)
    assert (run.use_moe, run.n_routed_experts) == (False, 8)
    with pytest.raises(UsageError, match=r"n_routed_experts = 8 \(--n_routed_experts\) has no eff"):
        parse_flags([*off, "--n_routed_experts", "8"])


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_is_found_by_name_and_gives_way_to_the_command_line(path: Path):
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert path.read_text(encoding="utf-8").startswith("# ")
    run = parse_flags(["--config", path.stem, "--learning_rate", "0.002"])
    assert (run.learning_rate, run.sources["learning_rate"]) == (0.002, "--learning_rate")
    for name in set(values) - {"learning_rate"}:
        assert (getattr(run, name), run.sources[name]) == (values[name], f"--config {path.stem}")


STRONG = RECIPES / "strong.yaml"


def resolve(line: str) -> None:
    read_setup(parse_flags(["--device", "cpu", *line.split()]), read_launch({})).resolve()


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd"])
def test_auto_takes_back_a_value_of_a_recipe(optimizer: str):
    line = f"--config strong --optimizer {optimizer}"
    with pytest.raises(UsageError) as caught:
        resolve(line)
    for name in ("muon_lr", "muon_scaling"):
        assert f"; add --{name} auto, or use --optimizer muon" in str(caught.value)
    resolve(f"{line} --muon_lr auto --muon_scaling auto")


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (
            "--model hf:{folder} --no-zero_init_outputs --no-doc_mask --embedding_init random",
            ("tie_word_embeddings",),
        ),
        ("--deepspeed_config {folder}/ds.json --muon_lr auto --muon_scaling auto", ("optimizer",)),
    ],
)
def test_a_value_of_a_recipe_that_no_flag_takes_back_is_left_out_of_a_copy(
    line: str, names: tuple[str, ...], tmp_path: Path
):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    block = {"type": "AdamW", "params": {"lr": 0.003}}
    stage = {"zero_optimization": {"stage": 1}, "optimizer": block}
    (tmp_path / "ds.json").write_text(json.dumps(stage))
    line = line.format(folder=tmp_path)
    with pytest.raises(UsageError) as caught:
        resolve(f"--config strong {line}")
    text = str(caught.value)
    assert "; remove" not in text
    for name in names:
        assert f"; give --config a copy of {STRONG} without {name}" in text
    if "ds.json" in line:
        assert "says learning_rate = 0.008; add --learning_rate auto, or write" in text
        line += " --learning_rate auto"
    copy = tmp_path / "mine.yaml"
    lines = STRONG.read_text(encoding="utf-8").splitlines()
    copy.write_text("\n".join(one for one in lines if not one.startswith(names)))
    resolve(f"--config {copy} {line}")


def test_a_value_of_a_recipe_that_a_flag_takes_back_names_it(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UsageError) as caught:
        resolve(f"--config strong --model hf:{tmp_path}")
    for flag in ("--no-zero_init_outputs", "--no-doc_mask", "--embedding_init random"):
        assert f"; add {flag}" in str(caught.value)


def test_a_value_of_a_file_of_ones_own_is_dropped_there(tmp_path: Path):
    copy = tmp_path / "strong.yaml"
    copy.write_text(STRONG.read_text(encoding="utf-8"))
    with pytest.raises(
        UsageError, match=r"muon_lr = 0\.008 .*; remove muon_lr from .*/strong\.yaml, or use"
    ):
        resolve(f"--config {copy} --optimizer adamw")


@pytest.mark.parametrize(
    ("line", "message", "ways"),
    [
        (
            "--config strong --tie_word_embeddings",
            "embedding_init = bigrams (--config strong) needs an untied head, and"
            " tie_word_embeddings = true (--tie_word_embeddings) ties it to the embedding; add"
            " --no-tie_word_embeddings, or --embedding_init random",
            ("--no-tie_word_embeddings", "--embedding_init random"),
        ),
        (
            "--config sft --text_field body",
            "text_field = body (--text_field) and task = sft (--config sft) cannot be used"
            " together: conversations have fields of their own; remove --text_field, or add --task"
            " pretrain",
            ("--task pretrain",),
        ),
    ],
)
def test_a_flag_takes_back_a_value_of_a_recipe(line: str, message: str, ways: tuple[str, ...]):
    with pytest.raises(UsageError) as caught:
        parse_flags(line.split())
    assert message in str(caught.value)
    for way in ways:
        parse_flags([*line.replace("--tie_word_embeddings", "").split(), *way.split()])


def test_what_an_editor_leaves_beside_a_shipped_file_has_no_name(tmp_path: Path):
    for name in (
        "sft.yaml",
        "sft.yaml~",
        ".sft.yaml.swp",
        ".#sft.yaml",
        "sft.yaml.orig",
        "zero.json",
    ):
        (tmp_path / name).write_text("")
    own = {"sft": str(tmp_path / "sft.yaml"), "zero": str(tmp_path / "zero.json")}
    assert files_by_name(tmp_path) == own
