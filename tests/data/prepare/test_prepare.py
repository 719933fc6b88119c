"""A prepared directory against the text it was made of, and one build against the next."""

import gzip
import json
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from minimind.data.prepare import encode
from minimind.data.prepare import prepare as module
from minimind.data.prepare.encode import UnitReader, split_of
from minimind.data.prepare.prepare import PrepareRequest, prepare_for_run
from minimind.data.prepare.prepared import Prepared
from minimind.data.prepare.work_units import Unit, make_plan
from minimind.data.shards.manifest import Options, seal
from minimind.data.text import formats
from minimind.data.text.documents import Segment
from minimind.data.text.formats import segments_of
from minimind.data.text.inputs import Source
from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer
from minimind.errors import DataError, StorageError, UsageError

TEXTS = [f"document {i}: " + "the quick brown fox " * (i % 7 + 1) + "春眠\n" for i in range(400)]
ROOT = Path(__file__).resolve().parents[3]


def write_lines(path, texts):
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def make(
    paths, cache, tokenizer_path=None, vocab_size=512, val_fraction=0.1, limit=10_000, **given
) -> Prepared:
    source = Source("data", tuple(map(str, paths)))
    options = Options(max_document_bytes=limit, val_fraction=val_fraction)
    return prepare_for_run(
        PrepareRequest((source,), tokenizer_path, vocab_size, options, **given), cache
    )


@pytest.fixture
def corpus(tmp_path):
    return write_lines(tmp_path / "text.jsonl", TEXTS)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    """A tokenizer to give, so that most tests need not learn one."""
    place = tmp_path_factory.mktemp("given")
    return str(make([write_lines(place / "a.jsonl", TEXTS)], place / "cache").tokenizer.path)


def documents_of(prepared, split):
    shards = getattr(prepared, split)
    ids = shards.read_rows(np.arange(shards.rows(1)), 1).ravel()
    ends = np.flatnonzero(ids == prepared.tokenizer.eos_id)
    assert len(ids) == ends[-1] + 1  # each document is followed by the end
    return [prepared.tokenizer.decode(part[:-1]) for part in np.split(ids, ends[:-1] + 1)]


def names(cache):
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def no_build(*_):
    raise AssertionError("built again")


def test_the_shards_hold_every_document_in_its_split(corpus, tmp_path):
    other = tmp_path / "b.txt"
    other.write_text("a file\nis one document\n")
    prepared = make([corpus, other], tmp_path / "cache")
    texts = [*TEXTS, "a file\nis one document\n"]
    for split in ("train", "val"):
        expected = [
            text for text in texts if split_of(sha256(text.encode()).digest(), 0.1) == split
        ]
        assert documents_of(prepared, split) == expected
        counts = prepared.manifest["splits"][split]
        assert counts["documents"] == len(expected)
        assert counts["tokens"] == len(getattr(prepared, split))
        assert counts["text_bytes"] == sum(len(text.encode()) for text in expected)
    assert 20 < prepared.manifest["splits"]["val"]["documents"] < 60
    manifest = prepared.manifest
    (source,) = manifest["sources"]
    assert [Path(given["path"]).name for given in source["inputs"]] == ["text.jsonl", "b.txt"]
    assert (source["documents"], manifest["documents"]) == (401, 401)
    assert manifest["tokenizer"] == prepared.tokenizer.fingerprint
    assert (manifest["dtype"], manifest["eos_id"], manifest["vocab_size"]) == ("uint16", 2, 512)
    assert prepared.tokenizer.vocab_size == 512


def test_many_short_documents_are_more_than_one_batch(tmp_path):
    """Each takes some 300 bytes of memory, however short, and nine batches wait at a time."""
    texts = [chr(97 + n % 26) for n in range(20_000)]
    path = write_lines(tmp_path / "a.jsonl", texts)
    options = Options()
    (unit,) = make_plan((Source("data", (str(path),)),), options).units
    batches = list(
        UnitReader(
            unit, options.reading, options.val_fraction, True, tmp_path / "rejected", lambda _: None
        ).batches()
    )
    assert [text for batch in batches for text in batch.texts] == texts
    assert max(len(batch.texts) for batch in batches) < 17_000


def test_the_second_call_builds_nothing(corpus, tmp_path, monkeypatch):
    first = make([corpus], tmp_path / "cache")
    monkeypatch.setattr(module, "encode_plan", no_build)
    monkeypatch.setattr(module, "train_tokenizer", no_build)
    moved = corpus.rename(tmp_path / "moved.jsonl")  # content is what counts
    second = make([moved], tmp_path / "cache")
    assert second.manifest == first.manifest
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint


def test_what_decides_the_tokens_is_in_the_key(corpus, tmp_path, tokenizer_path):
    def directory(paths=(corpus,), tokenizer=tokenizer_path, **options):
        return make(paths, tmp_path / "cache", tokenizer, **options).directory

    seen = [directory(), directory(val_fraction=0.2), directory(limit=9_999)]
    twin = shutil.copy(corpus, tmp_path / "twin.jsonl")
    seen += [directory([corpus, twin]), directory(tokenizer=None, vocab_size=513)]
    write_lines(corpus, [*TEXTS, "one more"])
    seen.append(directory())
    assert len(set(seen)) == len(seen)
    assert {path.name for path in seen} <= set(names(tmp_path / "cache"))


def test_held_out_documents_stay_when_others_are_added(corpus, tmp_path, tokenizer_path):
    before = make([corpus], tmp_path / "cache", tokenizer_path)
    write_lines(corpus, ["a new first one", *TEXTS[:200], "another", *TEXTS[200:]])
    after = make([corpus], tmp_path / "cache", tokenizer_path)
    new = {"a new first one", "another"}
    for split in ("train", "val"):
        kept = [text for text in documents_of(after, split) if text not in new]
        assert kept == documents_of(before, split)


def test_two_processes_at_once_build_once(corpus, tmp_path):
    code = f"""
import time
from pathlib import Path
from minimind.data.prepare import prepare as module
encode_plan = module.encode_plan
def announced(*arguments, **named):
    print("built", flush=True)
    time.sleep(0.5)  # the other one has to wait
    return encode_plan(*arguments, **named)
module.encode_plan = announced
source = module.Source("data", ({str(corpus)!r},))
options = module.Options(max_document_bytes=10_000, val_fraction=0.1)
request = module.PrepareRequest((source,), vocab_size=512, options=options)
made = module.prepare_for_run(request, Path({str(tmp_path / "cache")!r}))
print(len(made.train), made.directory, made.tokenizer.fingerprint)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    started = [subprocess.Popen(command, **pipes) for _ in range(2)]
    ended = [process.communicate(timeout=120) for process in started]
    assert [error for _, error in ended] == ["", ""]
    text = sorted(out.splitlines() for out, _ in ended)
    assert [len(lines) for lines in text] in ([1, 2], [2, 1])
    assert text[0][-1] == text[1][-1]
    assert len(names(tmp_path / "cache")) == 2


def test_a_build_that_is_cut_is_resumed(corpus, tmp_path, tokenizer_path, monkeypatch):
    cache = tmp_path / "cache"
    options = {"tokenizer_path": tokenizer_path, "unit_bytes": 4096}
    written = []
    encode_unit = encode.encode_unit

    def cut(work, unit):
        if len(written) == 3:
            raise KeyboardInterrupt
        encode_unit(work, unit)
        written.append(unit.number)

    with monkeypatch.context() as patch:
        patch.setattr(encode, "encode_unit", cut)
        with pytest.raises(KeyboardInterrupt):
            make([corpus], cache, **options)
        (draft,) = cache.glob("*.part")
        (draft / "train-00003.bin").write_bytes(b"half of the next")
        written.clear()
        written += [-1] * 4  # never cut again
        prepared = make([corpus], cache, **options)
    units = json.loads((prepared.directory / "plan.json").read_bytes())["units"]
    assert written[4:] == [unit["number"] for unit in units][3:]
    other = make([corpus], tmp_path / "other", **options)
    assert files_of(prepared.directory) == files_of(other.directory)


def files_of(directory):
    return {
        path.relative_to(directory): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_a_mistake_in_the_text_leaves_nothing(corpus, tmp_path, tokenizer_path):
    with open(corpus, "a") as file:
        file.write('{"text": 3}\n')
    for tokenizer in (None, tokenizer_path):
        with pytest.raises(DataError, match=r"text\.jsonl:401 "):
            make([corpus], tmp_path / "cache", tokenizer, unit_bytes=4096)
    assert names(tmp_path / "cache") == []


def test_a_file_that_changes_while_it_is_read_is_reported(
    corpus, tmp_path, tokenizer_path, monkeypatch
):
    def growing(segment, reading):
        write_lines(segment.path, [*TEXTS, "more"])
        return ((text, 1, number, None) for number, text in enumerate(TEXTS, 1))

    monkeypatch.setattr(encode, "read_segment", growing)
    with pytest.raises(DataError, match="changed since its preparation started"):
        make([corpus], tmp_path / "cache", tokenizer_path)
    assert names(tmp_path / "cache") == []


def test_bad_documents_are_passed_over_listed_and_limited(corpus, tmp_path, tokenizer_path):
    good = documents_of(make([corpus], tmp_path / "cache", tokenizer_path), "train")
    lines = corpus.read_text().splitlines(keepends=True)
    lines[7:7] = ["\n", '{"text": ""}\n']
    lines.append('{"text": "cut of')
    corpus.write_text("".join(lines))
    skipping = {"skips_bad": True, "unit_bytes": 4096}
    prepared = make([corpus], tmp_path / "cache", tokenizer_path, **skipping)
    assert documents_of(prepared, "train") == good
    report = (prepared.directory / "rejected.jsonl").read_text().splitlines()
    listed = [json.loads(line) for line in report]
    assert [(Path(bad["file"]), bad["line"]) for bad in listed] == [
        (corpus, 8),
        (corpus, 9),
        (corpus, 403),
    ]
    content = corpus.read_bytes()
    assert all(content[: bad["byte"]].count(b"\n") == bad["line"] - 1 for bad in listed)
    with pytest.raises(DataError, match=r"text\.jsonl:8 .*--on_bad_data skip"):  # also when found
        make([corpus], tmp_path / "cache", tokenizer_path, unit_bytes=4096)
    with pytest.raises(DataError, match=r"3 of 403 documents are bad, more than max_bad_fraction"):
        make([corpus], tmp_path / "cache", tokenizer_path, max_bad_fraction=0.005, **skipping)


def rows_with_an_open_quote(path, *closed):
    """1,000 rows, of which the 901st has a quote without its end."""
    rows = ["id,text", *(f"{n},row number {n} of the file says hello" for n in range(1000))]
    rows[901] = '900,"row number 900 of the file says hello'
    for n in closed:
        rows[n + 1] += '"'
    path.write_text("\n".join(rows) + "\n")
    return path


def test_rows_behind_an_open_quote_are_bad_too(tmp_path, tokenizer_path):
    path, given = rows_with_an_open_quote(tmp_path / "a.csv"), {"skips_bad": True}
    told = (
        r"a\.csv: 100 of 1,000 documents are bad, more than max_bad_fraction = 0\.05; the first is"
        r" .*a\.csv:902 \(byte \d+\): is not CSV \(unexpected end of data\), and the 100 lines up"
        r" to 1001 are not read; end the quotes of a cell, and write those within it twice; correct"
    )
    with pytest.raises(DataError, match=told):
        make([path], tmp_path / "cache", tokenizer_path, **given)
    prepared = make([path], tmp_path / "cache", tokenizer_path, max_bad_fraction=0.11, **given)
    rejected = prepared.manifest["rejected"]
    assert (prepared.manifest["documents"], rejected["count"], rejected["listed"]) == (
        900,
        100,
        100,
    )
    prepared.list_rejected(tmp_path)
    (entry,) = map(json.loads, (tmp_path / "rejected.jsonl").read_text().splitlines())
    assert (entry["line"], entry["documents"], entry["bytes"]) == (902, 100, 0)


def test_a_record_that_may_hold_others_is_told_at_every_use(tmp_path, tokenizer_path):
    path = rows_with_an_open_quote(tmp_path / "a.csv", 999)
    for name in ("a.csv", "b.csv"):
        prepared = make([path.rename(tmp_path / name)], tmp_path / "cache", tokenizer_path)
        path = tmp_path / name
        (remark,) = prepared.remarks
        assert remark.startswith(f"{path}:902: one document is read from the 100 lines up to 1001;")
    assert prepared.manifest["documents"] == 901


def test_what_is_not_read_of_a_file_counts_by_its_bytes(tmp_path, tokenizer_path):
    good = [json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS]
    path, given = tmp_path / "a.json", {"skips_bad": True, "unit_bytes": 4096}
    for at, fraction in [(330, 0.15), (390, 0.02)]:
        path.write_text("[" + ",\n".join([*good[:at], good[at] + "}", *good[at + 1 :]]) + "]")
        with pytest.raises(
            DataError, match=r"documents are bad, and [\d.]+% of the bytes are lost"
        ):
            make([path], tmp_path / "cache", tokenizer_path, max_bad_fraction=fraction, **given)
        prepared = make(
            [path], tmp_path / "cache", tokenizer_path, max_bad_fraction=fraction + 0.1, **given
        )
        assert prepared.manifest["documents"] == at
        assert len(prepared.remarks) == 1


def test_no_line_is_read_again_to_number_what_is_passed_over(tmp_path, tokenizer_path, monkeypatch):
    """By as many units as there are, the same list: what each read of a file is added up."""
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl.gz", "d.txt", "e.parquet")]
    for path, bad in zip(paths[:2], (97, 5), strict=True):
        write_lines(path, TEXTS)
        lines = path.read_text().splitlines(keepends=True)
        path.write_text(
            "".join("[]\n" + line if n % bad == 0 < n else line for n, line in enumerate(lines))
        )
    paths[2].write_bytes(gzip.compress(paths[0].read_bytes()))
    paths[3].write_bytes(b"one\ntwo\nthree\0")
    rows = [None if n % 97 == 0 < n else text for n, text in enumerate(TEXTS)]
    parquet.write_table(pyarrow.table({"text": rows}), paths[4], row_group_size=50)
    given = {"skips_bad": True, "max_bad_fraction": 0.5, "val_fraction": 0.0}
    monkeypatch.setattr(formats, "newlines", no_build)
    made = [
        make(paths, tmp_path / f"{unit}", tokenizer_path, unit_bytes=unit, **given)
        for unit in (10**9, 30_000, 4096)
    ]
    shards = [len(one.manifest["splits"]["train"]["shards"]) for one in made]
    assert shards[0] == 1 < 3 < shards[1] < 15 < shards[2]
    listed = [(one.directory / "rejected.jsonl").read_bytes() for one in made]
    assert listed[0] == listed[1] == listed[2]
    assert (
        made[0].manifest["rejected"] == made[1].manifest["rejected"] == made[2].manifest["rejected"]
    )
    report = [json.loads(line) for line in listed[0].splitlines()]
    contents = {str(path): path.read_bytes() for path in (*paths[:2], paths[3])}
    contents[str(paths[2])] = contents[str(paths[0])]
    assert len(report) == 4 + 79 + 4 + 1 + 4
    for bad in report[:-5]:
        assert contents[bad["file"]][: bad["byte"]].count(b"\n") == bad["line"] - 1
    assert (report[-5]["file"], report[-5]["line"]) == (str(paths[3]), 3)
    assert [bad["line"] for bad in report[-4:]] == [98, 195, 292, 389]


def test_parts_of_one_file_in_one_unit_number_its_lines_as_one(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n[]\n' * 20)
    listed = []
    for size in (10**9, 100):
        unit, rejected = Unit(0, 0, tuple(segments_of(path, size))), tmp_path / f"{size}"
        reader = UnitReader(unit, Options().reading, 0.01, False, rejected, lambda _: None)
        assert sum(len(batch.texts) for batch in reader.batches()) == 20
        reader.close()
        assert reader.lines == {str(path): 40}
        listed.append([json.loads(line)["line"] for line in rejected.read_bytes().splitlines()])
    assert listed == [list(range(2, 41, 2))] * 2


def test_a_document_keeps_its_place_however_the_text_is_cut(corpus, tmp_path, tokenizer_path):
    whole = make([corpus], tmp_path / "whole", tokenizer_path)
    cut = make([corpus], tmp_path / "cut", tokenizer_path, unit_bytes=1000)
    assert len(cut.manifest["splits"]["train"]["shards"]) > 20
    for split in ("train", "val"):
        assert documents_of(cut, split) == documents_of(whole, split)


def test_nothing_left_to_train_on_is_reported(corpus, tmp_path, tokenizer_path):
    for tokenizer in (None, tokenizer_path):
        with pytest.raises(DataError, match="no document is left to train on"):
            make([corpus], tmp_path / "cache", tokenizer, val_fraction=1.0)
    prepared = make([corpus], tmp_path / "cache", tokenizer_path, val_fraction=0.0)
    assert len(prepared.val) == 0


def test_a_given_tokenizer_is_the_one_in_force(corpus, tmp_path, tokenizer_path):
    for path in (tokenizer_path, str(Path(tokenizer_path).parent)):
        prepared = make([corpus], tmp_path / "cache", path, vocab_size=6400)
        assert prepared.tokenizer.fingerprint == SentencePieceTokenizer(tokenizer_path).fingerprint
        assert prepared.manifest["vocab_size"] == 512


def test_a_trained_tokenizer_without_its_sum_is_refused(corpus, tmp_path):
    cache = tmp_path / "cache"
    make([corpus], cache, vocab_size=512)
    (recorded,) = cache.glob("tokenizer-*/*.sha256")
    recorded.unlink()
    with pytest.raises(DataError, match=r"tokenizer\.model: was changed"):
        make([corpus], cache, vocab_size=512)


def test_too_few_pieces_are_refused_before_anything_is_read(tmp_path):
    with pytest.raises(UsageError, match="vocab_size = 100"):
        make([tmp_path / "missing.jsonl"], tmp_path / "cache", vocab_size=100)


def test_a_cache_that_cannot_be_written_is_reported_but_can_be_read(
    corpus, tmp_path, tokenizer_path, monkeypatch
):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="--cache_dir"):
        make([corpus], tmp_path / "file" / "cache", tokenizer_path)
    make([corpus], tmp_path / "cache", tokenizer_path)
    monkeypatch.setattr("fcntl.flock", no_build)  # no lock is needed for what is complete
    make([corpus], tmp_path / "cache", tokenizer_path)


def test_a_full_disk_is_named_and_leaves_nothing(corpus, tmp_path, tokenizer_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        make([corpus], tmp_path / "cache", tokenizer_path)
    assert names(tmp_path / "cache") == []


def test_a_text_that_moved_is_named_as_it_is_called_now(corpus, tmp_path, tokenizer_path):
    with open(corpus, "a") as file:
        file.write("[]\n")
    make([corpus], tmp_path / "cache", tokenizer_path, skips_bad=True)
    moved = corpus.rename(tmp_path / "moved.jsonl")
    prepared = make([moved], tmp_path / "cache", tokenizer_path, skips_bad=True)
    prepared.list_rejected(tmp_path)
    assert json.loads((tmp_path / "rejected.jsonl").read_text())["file"] == str(moved)
    with pytest.raises(DataError, match=r"moved\.jsonl:401 "):
        make([moved], tmp_path / "cache", tokenizer_path)


def test_a_held_out_document_teaches_the_tokenizer_nothing(tmp_path):
    texts = [f"{i} {'zq' * 20}\n" for i in range(60)] + ["abc " * 20] * 5
    split = {text: split_of(sha256(text.encode()).digest(), 0.5) for text in texts}
    kept = [t for t in texts if ("zq" in t) == (split[t] == "val")]
    path = write_lines(tmp_path / "t.jsonl", kept)
    tokenizer = make([path], tmp_path / "cache", val_fraction=0.5).tokenizer
    assert any("zq" in text for text in kept)
    assert len(tokenizer.encode("zq")) > 1


def test_a_tokenizer_is_learnt_from_a_bounded_part_of_all_units(monkeypatch):
    units = [Unit(n, 0, (Segment(Path("x.jsonl"), 10 * n, 10 * n + 10, 10),)) for n in range(100)]
    assert module._sampled(units) == units
    monkeypatch.setattr(module, "SAMPLED_BYTES", 205)
    drawn = [unit.number for unit in module._sampled(units)]
    assert len(drawn) == 20
    assert drawn == sorted(drawn)
    assert drawn[0] < 30
    assert drawn[-1] > 70
    monkeypatch.setattr(module, "SAMPLED_BYTES", 3)
    assert len(module._sampled(units)) == 1  # one at least, however large


def test_shards_that_were_written_to_after_their_manifest_are_hashed(
    corpus, tmp_path, tokenizer_path
):
    directory = make([corpus], tmp_path / "cache", tokenizer_path).directory
    shard = directory / "train-00000.bin"
    content = shard.read_bytes()
    shard.write_bytes(content)  # the same: newer, but not other text
    module.open_prepared(directory)
    shard.write_bytes(content[:100] + b"\x07" + content[101:])
    with pytest.raises(DataError, match=r"train-00000\.bin: was changed after it was prepared"):
        module.open_prepared(directory)


@pytest.mark.parametrize("change", [{"vocab_size": 9}, {"format_version": 1}, {"splits": []}])
def test_a_manifest_that_was_edited_is_refused(change, corpus, tmp_path, tokenizer_path):
    directory = make([corpus], tmp_path / "cache", tokenizer_path).directory
    path = directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}))
    with pytest.raises(DataError, match=r"manifest\.json: cannot be read \(it "):
        module.open_prepared(directory)


HOSTILE = {
    "a dtype": {"dtype": "float16"},
    "no split": {"splits": {}},
    "another flag": {"options": {"text_field": "text", "seed": 3, "val_fraction": 0.1}},
    "no list": {"sources": {}},
    "a number": {"vocab_size": -1},
    "no lost bytes": {"rejected": {"count": 0, "listed": 0, "first": ""}},
    "a file elsewhere": {"files": {"../../x.json": ""}},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_manifest_that_is_sealed_but_makes_no_sense_is_refused(
    case, corpus, tmp_path, tokenizer_path
):
    directory = make([corpus], tmp_path / "cache", tokenizer_path).directory
    path = directory / "manifest.json"
    report = {**json.loads(path.read_bytes()), **HOSTILE[case]}
    report.pop("sha256")
    path.write_text(json.dumps(seal(report)))
    with pytest.raises(DataError, match=r"manifest\.json: cannot be read \("):
        module.open_prepared(directory)


@pytest.mark.parametrize(
    "wrong", [{"name": "/etc/hostname"}, {"source": 9}, {"tokens": "3"}, {"bytes": 1}]
)
def test_a_shard_that_cannot_be_is_refused(wrong, corpus, tmp_path, tokenizer_path):
    directory = make([corpus], tmp_path / "cache", tokenizer_path).directory
    path = directory / "manifest.json"
    report = json.loads(path.read_bytes())
    report["splits"]["train"]["shards"][0] |= wrong
    report.pop("sha256")
    path.write_text(json.dumps(seal(report)))
    with pytest.raises(
        DataError, match=r"manifest\.json: cannot be read \((shard|has splits\.train\.shards\.0\.)"
    ):
        module.open_prepared(directory)


def test_another_tokenizer_than_the_shards_have_is_refused(corpus, tmp_path, tokenizer_path):
    prepared = make([corpus], tmp_path / "cache", tokenizer_path)
    other = make([corpus], tmp_path / "other", vocab_size=513).tokenizer
    other.save(tmp_path / "tok")
    with pytest.raises(DataError, match=r"is not the tokenizer of "):
        module.open_prepared(prepared.directory, str(tmp_path / "tok"))
    other.save(prepared.directory / "tokenizer")
    with pytest.raises(DataError, match=r"is not the tokenizer of "):
        module.open_prepared(prepared.directory)
