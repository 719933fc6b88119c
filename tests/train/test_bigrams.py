"""--embedding_init bigrams: what a new model predicts before its first step."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from minimind.config.parse import parse_flags
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.train import bigrams
from tests.train.starts import read_initial

WIDTH = 64


class Ids:
    """Token ids with the interface of TokenShards."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def stretch(self, start: int, length: int) -> np.ndarray:
        return self.ids[start : start + length]


def text_of(ids: np.ndarray) -> Any:
    return Ids(ids)


def untied(vocabulary: int, dim: int = WIDTH) -> Any:
    torch.manual_seed(0)
    return MiniMindForCausalLM(
        MiniMindConfig(
            vocab_size=vocabulary,
            hidden_size=dim,
            num_hidden_layers=1,
            num_attention_heads=4,
            tie_word_embeddings=False,
        )
    )


def predicted(model: Any) -> np.ndarray:
    """P(y | x) of embedding, final norm and head alone, (vocabulary, vocabulary)."""
    with torch.no_grad():
        logits = model.lm_head(model.model.norm(model.model.embed_tokens.weight)).double()
    return logits.softmax(1).numpy()


def smoothed(ids: np.ndarray, vocabulary: int) -> np.ndarray:
    counts = np.zeros((vocabulary, vocabulary))
    np.add.at(counts, (ids[:-1], ids[1:]), 1)
    shares = counts.sum(0) + 0.5
    shares /= shares.sum()
    prior = bigrams.PRIOR * shares
    return (counts + prior) / (counts + prior).sum(1, keepdims=True)


def chain(length: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    """A random walk in which some tokens follow others far more often."""
    draw = np.random.default_rng(seed)
    after = draw.dirichlet(np.full(vocabulary, 0.2), vocabulary).cumsum(1)
    ids, steps = [0], draw.random(length - 1)
    for step in steps:
        ids.append(min(vocabulary - 1, int(after[ids[-1]].searchsorted(step))))
    return np.array(ids)


def test_of_few_tokens_the_predictions_are_the_smoothed_bigrams():
    """Fewer tokens in use than channels: nothing is lost but at the longest row, which is cut."""
    ids = chain(40_000, 24)
    model = untied(80)
    bigrams.start_as_bigrams(model, text_of(ids))
    expected, found = smoothed(ids, 80), predicted(model)
    error = np.abs(np.log(found / expected))[:, :24].max(1)
    assert np.sort(error)[-2] < 1e-3
    rms = model.model.embed_tokens.weight.detach().square().mean(1).sqrt()
    assert torch.allclose(rms, torch.ones(80), atol=1e-4)


def test_of_many_tokens_most_of_the_bigrams_is_kept():
    ids = chain(200_000, 300)
    model = untied(300)
    bigrams.start_as_bigrams(model, text_of(ids))
    x, y = ids[:-1], ids[1:]
    shares = np.bincount(ids, minlength=300) / len(ids)
    unigram, best = -np.log(shares[y]).mean(), -np.log(smoothed(ids, 300)[x, y]).mean()
    found = -np.log(predicted(model)[x, y]).mean()
    assert best < found < best + 0.45 * (unigram - best)


def test_a_text_of_few_of_the_tokens_gives_finite_weights():
    model = untied(2000)
    bigrams.start_as_bigrams(model, text_of(np.array([5, 6] * 50)))
    found = predicted(model)
    assert np.isfinite(found).all()
    assert found[5, 6] > 4 * found[7, 6]


def test_pairs_of_a_long_text_are_counted_in_parts_and_evenly(monkeypatch):
    ids = chain(1000, 30)
    whole = bigrams.count_pairs(text_of(ids), 30)
    assert whole[1].sum() == 999
    assert (np.diff(whole[0]) > 0).all()
    monkeypatch.setattr(bigrams, "AT_ONCE", 10)
    pairs, counts = bigrams.count_pairs(text_of(ids), 30)
    assert counts.sum() == 900  # the pair across two parts is left out
    monkeypatch.setattr(bigrams, "TOKENS", 250)
    pairs, counts = bigrams.count_pairs(text_of(ids), 30)
    parts = [ids[start : start + 10] for start in range(0, 1000, 40)]
    expected = np.zeros((30, 30), np.int64)
    for part in parts:
        np.add.at(expected, (part[:-1], part[1:]), 1)
    found = np.zeros(900, np.int64)
    found[pairs] = counts
    assert found.reshape(30, 30).tolist() == expected.tolist()


def test_the_same_seed_gives_the_same_weights_and_blocks_are_untouched(tmp_path):
    line = f"--dim 64 --n_layers 1 --n_heads 4 --vocab_size 512 --out_dir {tmp_path}"
    line += " --no-tie_word_embeddings --zero_init_outputs"
    prepared: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(eos_id=0, bos_id=1, pad_id=2, vocab_size=512),
        train=text_of(chain(5000, 24)),
    )
    states = []
    for more in ("", "--embedding_init bigrams", "--embedding_init bigrams"):
        initial = read_initial(parse_flags(f"{line} {more}".split()))
        states.append(initial.build(initial.run, prepared).state_dict())
    plain, first, second = states
    changed = {key for key in plain if not torch.equal(plain[key], first[key])}
    assert changed == {"model.embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(first[key], second[key]) for key in first)
