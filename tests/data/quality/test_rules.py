"""Rule sets: counts, texts and reasons of datatrove's own filters, run over the same documents."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minimind.data.quality.steps import WORD_OR_MARK, PlainWords
from tests.data.quality.test_filter import kept, removed, report_of, run, write

REASONS = {
    "gopher": {
        *("dup_para_frac", "dup_para_char_frac", "dup_line_frac", "dup_line_char_frac"),
        *("top_2_gram", "top_3_gram", "top_4_gram", "duplicated_5_n_grams"),
        *("short_doc", "long_doc", "below_avg_threshold", "above_avg_threshold"),
        *("too_many_hashes", "too_many_ellipsis", "too_many_bullets", "too_many_end_ellipsis"),
        *("below_alpha_threshold", "enough_stop_words"),
    },
    "c4": {"lorem_ipsum", "curly_bracket", "too_few_sentences"},
    "fineweb": {"line_punct_ratio", "short_line_ratio", "char_dup_ratio", "list_ratio"},
}


def words(rng: random.Random, count: int, least: int = 2, most: int = 9) -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    found = ["".join(rng.choices(letters, k=rng.randint(least, most))) for _ in range(count)]
    found[::4] = rng.choices(["the", "of", "and", "to", "that"], k=len(found[::4]))
    return found


def line(rng: random.Random, end: str = ".") -> str:
    return " ".join(words(rng, rng.randint(8, 20))) + end


def lines(rng: random.Random, end: str = ".", start: str = "") -> str:
    return "\n".join(start + line(rng, end) for _ in range(rng.randint(6, 14)))


def faulty(rng: random.Random) -> list[str]:
    """Texts that each break another rule, with a share of chance, and one that breaks none."""
    one, text, many = line(rng), lines(rng), words(rng, 90)
    spread = [word for pair in zip(many, many[:45] * 2, strict=True) for word in pair]
    return [
        text,
        "\n\n".join([one] * 2 + [line(rng)]),
        "\n\n".join([line(rng) + line(rng)] * 2 + [line(rng)[:5] for _ in range(6)]),
        "\n".join([one] * 4 + [line(rng) for _ in range(4)]),
        "\n".join([line(rng) * 3] * 2 + [line(rng)[:9] for _ in range(6)]),
        " ".join(["two again" if at % 3 else word for at, word in enumerate(many)]),
        " ".join("now three again" if at % 5 == 0 else word for at, word in enumerate(many)),
        " ".join("now four words again" if at % 8 == 0 else word for at, word in enumerate(many)),
        " ".join(many[:30] + many[:15] + words(rng, 40)),
        " ".join(spread),
        " ".join(words(rng, 20)),
        " ".join(words(rng, 80, 1, 2)),
        " ".join(words(rng, 80, 14, 20)),
        " #".join(many),
        " … ".join(many),
        lines(rng, start="- "),
        lines(rng, "..."),
        " 12 ".join(many),
        " ".join(word for word in words(rng, 200) if len(word) > 4),
        f"{text}\nLorem ipsum dolor sit.",
        f"{text}\nThis has a {{ bracket in it.",
        f"Read [1] of it.\n{text}\nPlease turn Javascript on.\nThis site uses cookies.\nMenu",
        text + "\n" + "x" * 1001 + " is a long word.",
        text.replace(".", ""),
        "\n".join(" ".join(words(rng, 4)) + "." for _ in range(30)),
        "\n".join([*(line(rng) for _ in range(9)), one, one]),
        "\n\n\n\n\n".join(" ".join(words(rng, 9)) + "." for _ in range(9)),
        "床前明月光，疑是地上霜。" * rng.randint(1, 9),
        rng.choice(["", " \n", "\x1c", "_", "{"]) + "?",
    ]


def documents(seed: int, rounds: int) -> list[str]:
    rng = random.Random(seed)
    texts = [text for _ in range(rounds) for text in faulty(rng)]
    texts.append(" ".join(words(rng, 100_002)))
    rng.shuffle(texts)
    return texts


def datatrove(texts: list[str], rules: list[str]) -> tuple[list[str], Counter[str]]:
    """The texts that pass datatrove's pipeline, and how many are dropped by reason."""
    from datatrove.data import Document
    from datatrove.pipeline import filters

    classes: dict[str, list[Any]] = {
        "gopher": [filters.GopherRepetitionFilter, filters.GopherQualityFilter],
        "c4": [filters.C4QualityFilter],
        "fineweb": [filters.FineWebQualityFilter],
    }
    words: Any = PlainWords(WORD_OR_MARK)
    steps = [(rule, one(language=words)) for rule in rules for one in classes[rule]]
    passing: Any = (Document(text, str(number)) for number, text in enumerate(texts))
    for _, step in steps:
        passing = step.run(passing)
    left = [document.text for document in passing]
    dropped: Counter[str] = Counter()
    for rule, step in steps:
        for name, counts in step.stats.stats.items():
            if name.startswith("dropped_"):
                reason = name.removeprefix("dropped_").removeprefix(f"{rule}_")
                dropped[f"{rule}.{reason}"] += int(counts.total)
    return left, dropped


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "rules", [["gopher"], ["c4"], ["fineweb"], ["gopher", "c4", "fineweb"], ["c4", "gopher"]]
)
def test_counts_and_texts_are_those_of_datatroves_pipeline(tmp_path: Path, rules: list[str]):
    texts = documents(1, 20)
    text = write(tmp_path / "t.jsonl", texts)
    assert run(tmp_path / "out", text, "--rules", ",".join(rules), "--rules_words", "plain") == 0
    left, dropped = datatrove(texts, rules)
    assert kept(tmp_path / "out") == left
    report = report_of(tmp_path / "out")
    found = {reason: counts["documents"] for reason, counts in report["removed"].items()}
    assert found == dropped
    assert report["steps"] == {"rules": rules, "rules_words": "plain"}
    assert Counter(entry["reason"] for entry in removed(tmp_path / "out")) == dropped
    if len(rules) == 1:
        expected = {f"{rules[0]}.{reason}" for reason in REASONS[rules[0]]}
        assert found.keys() >= expected


MENU = "Home\nThis site uses cookies.\n"
STORY = "\n".join(f"This is sentence {number} [1] of the story." for number in range(6))
CLEAN = STORY.replace(" [1]", " ")


def test_c4_drops_lines_and_later_steps_see_what_is_left(tmp_path, capsys):
    text = write(tmp_path / "t.jsonl", [MENU + STORY, STORY + "\n\nBack", CLEAN + "\nNew it is."])
    assert (
        run(tmp_path / "out", text, "--rules", "c4", "--rules_words", "plain", "--exact_dedup") == 0
    )
    assert kept(tmp_path / "out") == [CLEAN, CLEAN + "\nNew it is."]
    report = report_of(tmp_path / "out")
    assert report["cut"] == {"documents": 1, "bytes": len(MENU + STORY) - len(CLEAN)}
    assert report["removed"]["exact_duplicate"] == {
        "documents": 1,
        "bytes": len(STORY + "\n\nBack"),
    }
    assert removed(tmp_path / "out") == [
        {"file": str(text), "line": 2, "reason": "exact_duplicate"}
    ]
    assert "\ncut                           1   33.33%" in capsys.readouterr().out


def test_bytes_add_up_where_near_duplicates_were_cut(tmp_path):
    text = write(tmp_path / "t.jsonl", [MENU + STORY, STORY, "It is short."])
    assert run(tmp_path / "out", text, "--rules", "c4", "--rules_words", "plain", "--minhash") == 0
    assert kept(tmp_path / "out") == [CLEAN]
    report = report_of(tmp_path / "out")
    repeated, cut = report["removed"]["near_duplicate"]["bytes"], report["cut"]["bytes"]
    assert repeated + cut == len(MENU + STORY) + len(STORY) - len(CLEAN)


def test_words_are_datatroves_english_unless_plain(tmp_path, monkeypatch):
    from datatrove.utils import word_tokenizers

    asked = []

    def load(language: Any) -> Any:
        asked.append(language)
        return PlainWords(WORD_OR_MARK)

    monkeypatch.setitem(sys.modules, "spacy", ModuleType("spacy"))
    monkeypatch.setattr(word_tokenizers, "load_word_tokenizer", load)
    text = write(tmp_path / "t.jsonl", [STORY])
    assert run(tmp_path / "out", text, "--rules", "c4, fineweb") == 0
    assert {*asked} == {"en"}
    assert report_of(tmp_path / "out")["steps"]["rules_words"] == "spacy"


def test_the_default_needs_nothing_but_the_extra(tmp_path: Path):
    """spaCy's rules for English are in the package: nothing is downloaded."""
    pytest.importorskip("spacy", reason="extra: quality")
    text = write(tmp_path / "t.jsonl", [STORY, "It is short."])
    assert run(tmp_path / "out", text, "--rules", "c4") == 0
    assert kept(tmp_path / "out") == [CLEAN]
    assert removed(tmp_path / "out")[0]["reason"] == "c4.too_few_sentences"


def test_plain_words_are_words_marks_and_single_characters_of_chinese():
    assert WORD_OR_MARK.findall("It isn't $5… 床前: GPU3") == [
        *("It", "isn", "'", "t", "$", "5", "…"),
        *("床", "前", ":", "GPU3"),
    ]


@pytest.mark.parametrize(
    ("flags", "missing", "said"),
    [
        ("--rules c4", "spacy", "[quality]', or give --rules_words plain"),
        ("--rules c4", "datatrove", "data filter needs datatrove, which is not installed"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path, monkeypatch, capsys, flags, missing, said):
    monkeypatch.setitem(sys.modules, missing, None)
    text = write(tmp_path / "t.jsonl", ["a text"])
    assert run(tmp_path / "out", text, *flags.split()) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
