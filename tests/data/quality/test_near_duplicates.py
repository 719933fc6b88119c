"""Near-duplicates: the removed texts of datatrove's own pipeline, and of planted copies."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest

from minimind.data.prepare import work_units
from minimind.data.quality import steps
from minimind.data.quality.steps import WORD
from tests.conftest import sentences
from tests.data.quality.test_filter import removed, run, write


def word(rng: random.Random) -> str:
    """Five letters: datatrove takes all numbers for one."""
    return "".join(rng.choices("abcdefghij", k=5))


def copies(count: int, changed: float, seed: int = 0) -> tuple[list[str], set[int]]:
    """Texts of 120 words; every third one a copy with a share of its words changed. The copies."""
    rng = random.Random(seed)
    texts: list[str] = []
    planted = set()
    for number in range(count):
        words = [word(rng) for _ in range(120)]
        if number % 3 == 2:
            words = texts[number - 2].split()
            for at in rng.sample(range(120), round(changed * 120)):
                words[at] = word(rng)
            planted.add(number)
        texts.append(" ".join(words))
    return texts, planted


def plain(texts: list[str], folder: Path, ranks: int) -> set[int]:
    """The texts that a pipeline of datatrove removes, with its executor and its filter."""
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Words(WordTokenizer):
        def word_tokenize(self, text):
            return WORD.findall(text)

        sent_tokenize = span_tokenize = word_tokenize

    share = -(-len(texts) // ranks)
    seen = []

    def read(data, rank, world_size):
        for number in range(rank * share, min((rank + 1) * share, len(texts))):
            yield Document(texts[number], str(number))

    def note(data, rank, world_size):
        for document in data:
            seen.append(int(document.id))
            yield document

    config = MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))
    places = [str(folder / name) for name in ("a", "b", "c")]
    for number, (tasks, pipeline) in enumerate(
        [
            (ranks, [read, MinhashDedupSignature(places[0], config, language=Words())]),  # type: ignore[arg-type] (an iterable is taken too)
            (14, [MinhashDedupBuckets(places[0], places[1], config=config)]),
            (1, [MinhashDedupCluster(places[1], places[2], config)]),
            (ranks, [read, MinhashDedupFilter(places[2]), note]),
        ]
    ):
        LocalPipelineExecutor(
            pipeline, tasks=tasks, workers=1, logging_dir=str(folder / f"log{number}")
        ).run()
    return set(range(len(texts))) - set(seen)


def clusters(texts: list[str], folder: Path, files: int = 1, *words: object) -> list[set[int]]:
    """The numbers of the texts that are removed, by cluster; the texts are cut into files."""
    folder.mkdir()
    share = -(-len(texts) // files)
    for number in range(files):
        write(folder / f"{number}.jsonl", texts[number * share : (number + 1) * share])
    out = folder.with_name("out[1]::b")
    assert run(out, folder, "--minhash", "--force", *words) == 0
    found: dict[int, set[int]] = defaultdict(set)
    for entry in removed(out):
        number = int(Path(entry["file"]).stem) * share + entry["line"] - 1
        found[entry["minhash_cluster_id"]].add(number)
    return [*found.values()]


@pytest.mark.parametrize("files", [1, 2])
def test_the_removed_texts_are_those_of_datatroves_pipeline(files, tmp_path, monkeypatch):
    texts, _ = copies(120, 0.04)
    texts += ["字" * 40, "字" * 41, *sentences(4, 20), "too few words", "too few words"]
    monkeypatch.setattr(work_units, "SMALLEST_UNIT", 60_000)  # more than one file, not two
    monkeypatch.setattr(steps, "BLOCK_SHINGLES", 50)
    found = set().union(*clusters(texts, tmp_path / "own", files))
    assert found == plain(texts, tmp_path / "plain", files)
    assert len(found) > 10


def test_planted_copies_are_found_and_nothing_else(tmp_path):
    texts, planted = copies(300, 0.02)  # about 0.83 of the 5-grams in common
    found = clusters(texts, tmp_path / "text")
    hits = {number + 2 - number % 3 for (number,) in found}
    assert hits <= planted  # precision 1
    assert len(hits) >= 0.9 * len(planted)


def test_texts_with_few_common_words_stay_and_very_short_ones_too(tmp_path):
    texts, _ = copies(90, 0.5)
    assert clusters([*texts, "a b c d", "a b c d"], tmp_path / "a") == []
    assert clusters(["a b c d", "a b c d"], tmp_path / "b") == []
    found = clusters(["a b c d", "a b c d"], tmp_path / "c", 1, "--minhash_ngrams", 2)
    assert found in ([{0}], [{1}])


def test_characters_of_chinese_and_japanese_are_words():
    assert WORD.findall("床前 GPU3明月, カナ ok") == [*"床前", "GPU3", *"明月カナ", "ok"]
