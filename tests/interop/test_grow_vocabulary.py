"""Special tokens for a model that has no rows for them: what changes, and what must not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimind.architecture.select import MiniMind
from minimind.cli.main import main
from minimind.config.origin import Origin, Rank
from minimind.config.parse import parse_flags
from minimind.data.tokenizer.add_special import with_special_tokens
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.sentencepiece import train_tokenizer
from minimind.errors import CheckpointError, UsageError
from minimind.interop.weights import grow_vocabulary, load_weights_from
from minimind.train.initial_weights import InitialModel
from tests.conftest import sentences
from tests.faults import tiny
from tests.train.starts import read_initial

NAMES = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>")
OLD, NEW = 512, 512 + len(NAMES)
PLACES = ("tied", "untied", "tied-llama", "untied-llama", "untied-minimind")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, and exports of them."""
    folder = tmp_path_factory.mktemp("places")
    tokenizer = tiny.tokenizer_bytes(folder)
    for name, is_tied in (("tied", True), ("untied", False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny, "SHAPE", {**tiny.SHAPE, "tie_word_embeddings": is_tied})
            tiny.new_run(folder / name, tokenizer, steps=(1,))
        for form in ("llama", "minimind"):
            words = ["export", "--checkpoint", folder / name, "--format", form]
            assert main([*map(str, words), "--out", str(folder / f"{name}-{form}")]) == 0
    return folder


def read(place: Path) -> InitialModel:
    given = ["--init_from", str(place), "--out_dir", str(place / "none")]
    return read_initial(parse_flags(given))


def both(place: Path, folder: Path) -> tuple[InitialModel, InitialModel, Any]:
    """The initial model, the same with special tokens, and the new tokenizer."""
    initial = read(place)
    assert initial.run.tokenizer
    before = load_tokenizer(initial.run.tokenizer)
    after = with_special_tokens(before, NAMES, folder)
    return initial, initial.with_special_tokens(before, after), after


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(OLD, (4, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize("name", PLACES)
def test_old_rows_and_logits_stay_and_new_ones_are_the_mean(name, places, tmp_path):
    initial, grown, after = both(places / name, tmp_path / "tokenizer")
    assert initial.weights
    assert grown.weights
    before: Any = SimpleNamespace(tokenizer=load_tokenizer(str(initial.run.tokenizer)))
    old = initial.build(initial.run, before)
    new = grown.build(grown.run, cast("Any", SimpleNamespace(tokenizer=after)))
    assert (grown.run.vocab_size, grown.run.tokenizer) == (NEW, str(after.path))
    assert (old.config.vocab_size, new.config.vocab_size) == (OLD, NEW)
    states = old.state_dict(), new.state_dict()
    assert [*states[0]] == [*states[1]]
    changed = {key for key in states[0] if states[0][key].shape != states[1][key].shape}
    for key in states[0]:
        assert torch.equal(states[1][key][: len(states[0][key])], states[0][key]), key
    for key in changed:
        mean = states[0][key].mean(0)
        assert all(torch.equal(row, mean) for row in states[1][key][OLD:]), key
    embedding, head = new.get_input_embeddings().weight, new.get_output_embeddings().weight
    assert len(embedding) == len(head) == NEW
    assert (embedding is head) == name.startswith("tied")
    assert len(changed) == 2
    expected, found = logits(old), logits(new)
    # Equal bit for bit where the BLAS does not divide a larger head otherwise.
    assert (found[..., :OLD] - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert (found[..., OLD:] - expected.mean(-1, keepdim=True)).abs().max() <= 1e-5


def test_the_start_says_what_was_done(places, tmp_path):
    initial, grown, _ = both(places / "tied-llama", tmp_path / "tokenizer")
    line = f"weights  from {places / 'tied-llama'} (llama)"
    assert initial.line() == line
    assert grown.line() == f"{line}, vocabulary 512 -> 517: new rows are the mean of the others"
    assert grown.origin({}) == {"place": str(places / "tied-llama"), "kind": "llama"}


def test_large_vocabularies_are_written_with_commas(places):
    weights = grow_vocabulary(load_weights_from(places / "tied-minimind"), 6405)
    grown = replace(read(places / "tied-minimind"), weights=weights, grown_from=6400)
    assert "vocabulary 6,400 -> 6,405: " in grown.line()


def test_rows_of_half_precision_have_a_mean_in_float32(places, tmp_path):
    source = load_file(places / "untied-minimind" / "model.safetensors")
    half = {name: value.bfloat16() for name, value in source.items()}
    for file in (places / "untied-minimind").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(half, tmp_path / "model.safetensors")
    grown = grow_vocabulary(load_weights_from(tmp_path), NEW)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        value = grown.tensors.read_as(name, torch.float32)
        assert torch.equal(value[:OLD].bfloat16(), half[name])
        assert torch.equal(value[-1], half[name].float().mean(0))
    half["lm_head.weight"][3, 3] = torch.nan
    save_file(half, tmp_path / "model.safetensors")
    grown = grow_vocabulary(load_weights_from(tmp_path), NEW)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has numbers that are not finite"):
        grown.tensors.read_as("lm_head.weight", torch.float32)


# --- what does not fit --------------------------------------------------------------------------


def other_tokenizer(folder: Path, pieces: int) -> Path:
    folder.mkdir()
    train_tokenizer(sentences(3, 60), pieces, folder / "tokenizer.model")
    return folder


def test_without_the_request_another_number_of_rows_is_refused(places, tmp_path):
    _, _, after = both(places / "tied", tmp_path / "tokenizer")
    weights = load_weights_from(places / "tied-minimind")
    with pytest.raises(RuntimeError, match="size"):
        weights.fill(grow_model(places / "tied-minimind", after))


def grow_model(place: Path, tokenizer: Any) -> Any:
    initial = read(place)
    run = initial.run.with_values(Origin("test", Rank.DATA), vocab_size=tokenizer.vocab_size)
    return MiniMind().build(run, tokenizer)


def test_a_tokenizer_of_another_model_is_refused(places, tmp_path):
    """More ids than rows are no special tokens if the model was not trained with the rest."""
    before = load_tokenizer(other_tokenizer(tmp_path / "other", 514))
    after = with_special_tokens(before, NAMES, tmp_path / "new")
    for name in ("tied", "untied-llama"):
        with pytest.raises(CheckpointError, match="has 514 pieces and the embedding 512 rows"):
            read(places / name).with_special_tokens(before, after)


def test_a_model_with_another_table_of_that_size_is_refused(places):
    """A tensor that does not get a row per id would have to be guessed."""
    weights = load_weights_from(places / "tied-minimind")
    weights.config.vocab_size = OLD - 1
    with pytest.raises(UsageError, match=r"embed_tokens\.weight of shape \[512, 16\] would be"):
        grow_vocabulary(weights, NEW)
    values = json.loads((places / "tied-minimind" / "config.json").read_text())
    assert values["vocab_size"] == OLD
