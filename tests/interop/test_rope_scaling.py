"""Scaled rotary positions in exports and imports: the logits of transformers at long positions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minimind.cli.main import main
from minimind.inference.load_model import load_checkpoint, load_model
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.rotary import LLAMA3, rotary_frequencies
from tests.faults import tiny

pytest.importorskip("gguf")
LENGTH, FACTOR = 32, 4.0
KINDS = ("linear", "ntk", "yarn", "llama3")


def scaling(kind: str) -> dict[str, Any]:
    return {"rope_type": kind, "factor": FACTOR, "original_max_position_embeddings": LENGTH}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind, each with four times the positions."""
    folder = tmp_path_factory.mktemp("runs")
    tokenizer = tiny.tokenizer_bytes(folder)
    found = {}
    for kind in KINDS:
        with pytest.MonkeyPatch.context() as patch:
            more = {"hidden_size": 32, "rope_theta": 100.0, "rope_scaling": scaling(kind)}
            more["max_position_embeddings"] = int(FACTOR * LENGTH)
            patch.setattr(tiny, "SHAPE", {**tiny.SHAPE, **more})
            found[kind] = tiny.new_run(folder / kind, tokenizer, steps=(2,))
    return found


def run(*words: object) -> int:
    return main([*map(str, words)])


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Of 8 rows of random ids at all positions; weights are enlarged, so that positions matter."""
    ids = torch.randint(512, (8, int(FACTOR * LENGTH)), generator=torch.Generator().manual_seed(3))
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.mul_(8)
    return model.eval()(input_ids=ids).logits


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", ["minimind", "llama", "gguf"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_exports_agree_beyond_the_trained_length(kind, form, runs, tmp_path):
    assert run("export", "--checkpoint", runs[kind], "--format", form, "--out", tmp_path / "x") == 0
    options: dict[str, Any] = {}
    face: Any = MiniMindForCausalLM if form == "minimind" else AutoModelForCausalLM
    if form == "gguf":  # transformers reads scaling only from the files of one other model
        options = {"gguf_file": "model.gguf"}
        if kind != "ntk":
            given = {**scaling(kind), "rope_theta": 100.0, **(LLAMA3 if kind == "llama3" else {})}
            options["rope_parameters"] = given
            if kind == "linear":
                del given["original_max_position_embeddings"]
    theirs = logits(face.from_pretrained(tmp_path / "x", **options))
    ours = logits(load_checkpoint(str(runs[kind]))[0])
    assert (theirs - ours).abs().max() <= (0 if form == "minimind" else 1e-5)
    plain = load_checkpoint(str(runs[kind]))[0]
    del plain.config.rope_scaling
    unscaled = logits(plain.to("cpu"))  # the table is rebuilt
    assert (unscaled - ours).abs().max() > 1e-3
    AutoTokenizer.from_pretrained(tmp_path / "x", trust_remote_code=form == "minimind")


@pytest.mark.parametrize("kind", KINDS)
def test_config_and_metadata_spell_the_scaling(kind, runs, tmp_path):
    from gguf import GGUFReader

    for form in ("llama", "gguf"):
        words = ("--format", form, "--out", tmp_path / form)
        assert run("export", "--checkpoint", runs[kind], *words) == 0
    values = json.loads((tmp_path / "llama" / "config.json").read_text())
    file = GGUFReader(tmp_path / "gguf" / "model.gguf")
    fields, tensors = file.fields, {tensor.name: tensor for tensor in file.tensors}
    found = {
        name.removeprefix("llama.rope."): field.contents()
        for name, field in fields.items()
        if name.startswith("llama.rope.") and "dimension" not in name
    }
    assert values["max_position_embeddings"] == 128
    if kind == "ntk":  # of heads of 16 channels
        theta = pytest.approx(100.0 * 4 ** (16 / 14))
        assert values["rope_parameters"] == {"rope_type": "default", "rope_theta": theta}
        assert values["rope_theta"] == theta
        assert "rope_scaling" not in values
        assert found == {"freq_base": theta}
        return
    expected = scaling(kind)
    if kind == "llama3":
        expected |= LLAMA3
        assert found == {"freq_base": 100.0}
        plain, scaled = (rotary_frequencies(16, 100.0, s)[0] for s in (None, expected))
        np.testing.assert_allclose(tensors["rope_freqs.weight"].data, plain / scaled, rtol=1e-6)
    else:
        assert "rope_freqs.weight" not in tensors
        assert found == {
            "freq_base": 100.0,
            "scaling.type": kind,
            "scaling.factor": 4.0,
            "scaling.original_context_length": 32,
        }
    if kind == "linear":
        del expected["original_max_position_embeddings"]
    assert values["rope_scaling"] == expected  # of transformers 4
    assert values["rope_parameters"] == {**expected, "rope_theta": 100.0}


@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_export_has_the_scaling_and_the_logits(kind, runs, tmp_path):
    llama, back = tmp_path / "llama", tmp_path / "back"
    assert run("export", "--checkpoint", runs[kind], "--format", "llama", "--out", llama) == 0
    assert run("import", "--from", "llama", llama, "--out", back) == 0
    model = load_model(None, str(back))[0]
    assert model.config.rope_scaling == (None if kind == "ntk" else scaling(kind))
    ours = logits(load_checkpoint(str(runs[kind]))[0])
    assert (logits(model) - ours).abs().max() <= 1e-5


def test_older_spellings_of_transformers_are_read(runs, tmp_path):
    llama = tmp_path / "llama"
    assert run("export", "--checkpoint", runs["yarn"], "--format", "llama", "--out", llama) == 0
    values = json.loads((llama / "config.json").read_text())
    del values["rope_parameters"]
    values |= {"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 32}}
    (llama / "config.json").write_text(json.dumps(values))
    assert run("import", "--from", "llama", llama, "--out", tmp_path / "back") == 0
    found = load_model(None, str(tmp_path / "back"))[0].config
    assert (found.rope_theta, found.max_position_embeddings) == (100.0, 128)
    length = found.rope_scaling.pop("original_max_position_embeddings")  # as transformers assumes
    assert (found.rope_scaling, length) == ({"rope_type": "yarn", "factor": 2}, 128)


REFUSED = {
    "longrope": ({"rope_type": "longrope", "factor": 4.0}, "'longrope'"),
    "dynamic without a factor": ({"rope_type": "dynamic"}, "rope_scaling.factor = None"),
    "llama3 without low and high": (
        {"rope_type": "llama3", "factor": 8.0},
        "'high_freq_factor' = None",
    ),
    "another llama3": (
        {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4, "low_freq_factor": 2},
        "'low_freq_factor' = 2",
    ),
    "part of the channels": ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' = 0.5"),
    "a list": ([1], "[1]"),
    "a kind of a list": ({"rope_type": ["yarn"]}, "['yarn']"),
    "another beta": ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 16}, "'beta_fast' = 16"),
    "attention": (
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0},
        "'attention_factor' = 1.0",
    ),
    "no factor": ({"rope_type": "linear"}, "rope_scaling.factor = None"),
    "shrinking": ({"rope_type": "linear", "factor": 0.5}, "rope_scaling.factor = 0.5"),
    "no length": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "x"},
        "rope_scaling.original_max_position_embeddings = 'x'",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_other_scaling_is_refused_by_name(why, runs, tmp_path, capsys):
    llama = tmp_path / "llama"
    assert run("export", "--checkpoint", runs["yarn"], "--format", "llama", "--out", llama) == 0
    given, named = REFUSED[why]
    values = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**values, "rope_scaling": given}))
    assert run("import", "--from", "llama", llama, "--out", tmp_path / "back") == 4
    error = capsys.readouterr().err
    assert named in error
    assert str(llama / "config.json") in error
    assert not (tmp_path / "back").exists()


def test_a_scaling_written_into_config_json_extends_an_export(runs, tmp_path, capsys):
    """As for a model of transformers; what the decoder does not have is refused."""
    place = tmp_path / "x"
    words = ("--format", "minimind", "--out", place)
    assert run("export", "--checkpoint", runs["ntk"], *words) == 0
    values = json.loads((place / "config.json").read_text())
    for kind in ("yarn", "longrope"):
        (place / "config.json").write_text(json.dumps({**values, "rope_scaling": scaling(kind)}))
        if kind == "yarn":
            assert load_model(None, str(place))[0].config.rope_scaling == scaling("yarn")
    assert run("generate", "--model", place, "--prompt", "a") == 4
    assert "rope_scaling.rope_type = 'longrope'" in capsys.readouterr().err
    shutil.rmtree(place)
