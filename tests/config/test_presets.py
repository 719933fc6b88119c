"""Presets against the models they build, on the meta device; recipes against the flags."""

from pathlib import Path

import pytest
import torch
import yaml

from minimind.architecture.select import PLAIN, minimind_config
from minimind.config.parse import RECIPES, parse_flags
from minimind.model.decoder import MiniMindForCausalLM

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


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_is_found_by_name_and_gives_way_to_the_command_line(path: Path):
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert path.read_text(encoding="utf-8").startswith("# ")
    run = parse_flags(["--config", path.stem, "--learning_rate", "0.002"])
    assert (run.learning_rate, run.sources["learning_rate"]) == (0.002, "--learning_rate")
    for name in set(values) - {"learning_rate"}:
        assert (getattr(run, name), run.sources[name]) == (values[name], f"--config {path.stem}")
