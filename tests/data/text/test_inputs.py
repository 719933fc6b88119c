"""Paths, directories and globs against the files they stand for, and files against their parts."""

import gzip
from pathlib import Path

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from minimind.data.prepare.work_units import make_plan
from minimind.data.shards.manifest import Options
from minimind.data.text.documents import ReadOptions, Rejection
from minimind.data.text.formats import format_of, read_segment, segments_of
from minimind.data.text.inputs import Source, find_files
from minimind.errors import DataError
from tests.closed import like_others

GOOD = b'{"text": "one"}\n'


@pytest.fixture
def dataset(tmp_path):
    datasets.disable_progress_bars()
    rows = {"text": [f"document {n}" for n in range(50)], "n": list(range(50))}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def write(directory, *names):
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(GOOD)


def read(path):
    """(texts, rejections as they are printed)."""
    found = [one for part in segments_of(path, 10**9) for one in read_segment(part, ReadOptions())]
    texts = [one[0] for one in found if not isinstance(one, Rejection)]
    return texts, [str(one) for one in found if isinstance(one, Rejection)]


def names_of(found, directory):
    return [path.relative_to(directory).as_posix() for path in found]


def test_a_directory_is_searched_at_every_depth_and_sorted(tmp_path):
    write(tmp_path, "b.txt", "a/z.jsonl", "a/b/c.txt", ".hidden.txt", ".cache/d.txt", "notes.md")
    write(tmp_path, "a/y.jsonl.gz", "a/x.jsonl.zst", "a/w.parquet", "a/v.gz", "a/u.js")
    write(tmp_path, "README.md", "a/dataset_infos.json", "a/removed.ndjson", "a/tokenizer.json")
    names = names_of(find_files([tmp_path / "b.txt", str(tmp_path)]), tmp_path)
    below = ["a/b/c.txt", "a/w.parquet", "a/x.jsonl.zst", "a/y.jsonl.gz", "a/z.jsonl"]
    assert names == ["b.txt", *below, "b.txt", "notes.md"]


def test_a_link_to_a_directory_is_followed_once(tmp_path):
    write(tmp_path, "data/a.txt", "elsewhere/b.txt")
    (tmp_path / "data" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "data")
    found = find_files([tmp_path / "data"])
    assert names_of(found, tmp_path) == ["data/a.txt", "data/more/b.txt"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("data/*.jsonl", ["data/a.jsonl", "data/b.jsonl"]),
        ("data/*", ["data/a.jsonl", "data/b.jsonl", "data/c.txt", "data/deep/d.jsonl"]),
        ("data/**/*.jsonl", ["data/a.jsonl", "data/b.jsonl", "data/deep/d.jsonl"]),
        ("data/**", ["data/a.jsonl", "data/b.jsonl", "data/c.txt", "data/deep/d.jsonl"]),
        ("data/[ab].jsonl", ["data/a.jsonl", "data/b.jsonl"]),
        ("d*/deep", ["data/deep/d.jsonl"]),
    ],
)
def test_a_glob_is_what_it_matches_each_file_once(tmp_path, pattern, names):
    write(tmp_path, "data/b.jsonl", "data/a.jsonl", "data/c.txt", "data/readme.md")
    write(tmp_path, "data/deep/d.jsonl", "data/.hidden.jsonl")
    assert names_of(find_files([tmp_path / pattern]), tmp_path) == names


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("data/**/*.jsonl", ["data/a.jsonl", "data/sub/b.jsonl"]),
        ("data/**/b.jsonl", ["data/sub/b.jsonl"]),
        ("data/**/**/*.jsonl", ["data/a.jsonl", "data/sub/b.jsonl"]),
        ("data/**", ["data/a.jsonl", "data/sub/b.jsonl"]),
        ("**/sub/*.jsonl", ["data/sub/b.jsonl"]),
        ("d*/**/sub/**/*.jsonl", ["data/sub/b.jsonl"]),
    ],
)
def test_any_depth_ends_where_links_lead_back_up(tmp_path, pattern, names, monkeypatch):
    """glob's own `**` follows each of the three again below each other: 3 ** 40 paths."""
    (tmp_path / "data" / "sub").mkdir(parents=True)
    for name in ("data/a.jsonl", "data/sub/b.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    for name in "xyz":
        (tmp_path / "data" / name).symlink_to(tmp_path / "data")
    assert find_files([tmp_path / pattern]) == [tmp_path / name for name in names]
    monkeypatch.chdir(tmp_path)
    assert find_files([pattern]) == [Path(name) for name in names]


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["", "**", "**/*.jsonl"])
def test_directories_may_be_nested_deeper_than_calls(tmp_path, form):
    deepest = tmp_path / "data"
    deepest.mkdir()
    for _ in range(1100):
        deepest /= "d"
        deepest.mkdir()
    (deepest / "a.jsonl").write_text('{"text": "x"}\n')
    try:
        assert find_files([tmp_path / "data" / form]) == [deepest / "a.jsonl"]
    finally:  # pytest's own clean-up is recursive
        (deepest / "a.jsonl").unlink()
        while deepest != tmp_path:
            deepest.rmdir()
            deepest = deepest.parent


def test_a_file_named_like_a_glob_is_a_file(tmp_path):
    write(tmp_path, "[ab].jsonl", "a.jsonl")
    assert names_of(find_files([tmp_path / "[ab].jsonl"]), tmp_path) == ["[ab].jsonl"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("run[1]/*.jsonl", ["run[1]/a.jsonl", "run[1]/b.jsonl"]),
        ("run[1]/[b].jsonl", ["run[1]/b.jsonl"]),
        ("run[1]/**/*.jsonl", ["run[1]/a.jsonl", "run[1]/b.jsonl", "run[1]/x [2]/c.jsonl"]),
        ("run[1]/x [2]/*", ["run[1]/x [2]/c.jsonl"]),
        ("run[[]1]/*.jsonl", ["run[1]/a.jsonl", "run[1]/b.jsonl"]),
        ("run[2]/*", []),
        ("all[1]/*.jsonl", ["all1/a.jsonl"]),  # a pattern first, as in a shell
        ("what?/*.jsonl", ["what?/a.jsonl"]),
        ("*[1]/*.jsonl", ["all1/a.jsonl"]),
    ],
)
def test_a_folder_of_a_pattern_may_have_brackets_in_its_name(tmp_path, pattern, names):
    write(tmp_path, "run[1]/a.jsonl", "run[1]/b.jsonl", "run[1]/x [2]/c.jsonl", "what?/a.jsonl")
    write(tmp_path, "all1/a.jsonl", "all[1]/a.jsonl")
    if names:
        assert names_of(find_files([tmp_path / pattern]), tmp_path) == names
    else:
        with pytest.raises(DataError, match=r"pattern, in which \[\[\] is a bracket of a name$"):
            find_files([tmp_path / pattern])


def test_a_dataset_on_disk_is_one_input_wherever_it_lies(dataset, tmp_path):
    write(tmp_path, "z.txt")
    rows = datasets.Dataset.from_dict({"text": ["one"]})
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "splits")
    assert names_of(find_files([dataset, tmp_path]), tmp_path) == [
        "saved",
        "saved",
        "splits",
        "z.txt",
    ]


def test_a_suffix_in_capitals_is_the_same_suffix(tmp_path):
    write(tmp_path, "UP.JSONL", "b.Txt")
    (tmp_path / "c.JSONL.GZ").write_bytes(gzip.compress(GOOD))
    found = find_files([tmp_path])
    assert names_of(found, tmp_path) == ["UP.JSONL", "b.Txt", "c.JSONL.GZ"]
    assert [format_of(path).suffix for path in found] == [".jsonl", ".txt", ".jsonl.gz"]
    assert read(tmp_path / "c.JSONL.GZ") == (["one"], [])


def test_a_link_is_read_by_the_name_it_has_here(tmp_path):
    write(tmp_path, "blobs/5f2a", "y.jsonl")
    (tmp_path / "x.jsonl").symlink_to(tmp_path / "blobs" / "5f2a")
    (tmp_path / "x.txt").symlink_to(tmp_path / "y.jsonl")
    named = Source("data", (str(tmp_path / "x.jsonl"), str(tmp_path / "x.txt")))
    plan = make_plan([named], Options())
    assert [Path(given.path).name for given in plan.inputs] == ["x.jsonl", "x.txt"]
    texts = [read(Path(given.path))[0] for given in plan.inputs]
    assert texts == [["one"], [GOOD.decode()]]


def test_what_a_preparation_wrote_is_no_text(tmp_path):
    write(tmp_path, "all/a.jsonl", "all/made/rejected.jsonl", "all/made/plan.json")
    for given in (tmp_path / "all", tmp_path / "all" / "*", tmp_path / "all" / "**"):
        assert names_of(find_files([given]), tmp_path) == ["all/a.jsonl"]
    with pytest.raises(DataError, match="made: is a folder of `minimind prepare`"):
        find_files([tmp_path / "all" / "made"])


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_file_of_no_bytes_is_rejected_like_a_line(tmp_path, name):
    (tmp_path / name).touch()
    row = "row 1" if name == "a.parquet" else "byte 0"
    texts, report = read(tmp_path / name)
    assert (texts, report) == (
        [],
        [f"{tmp_path / name}:1 ({row}): is empty; fill it or leave it out"],
    )


def test_what_holds_no_line_or_row_is_empty_too(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b""))
    table = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    parquet.write_table(table, tmp_path / "b.parquet")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "c")
    datasets.Dataset.from_dict({"text": ["a"]}).select([]).save_to_disk(tmp_path / "d")
    for name in ("a.jsonl.gz", "b.parquet", "c", "d"):
        texts, (report,) = read(tmp_path / name)
        assert texts == []
        assert "): is empty; fill it or leave it out" in report


def test_a_file_without_the_right_to_read_it_is_refused(tmp_path):
    write(tmp_path, "a.txt")
    (tmp_path / "a.txt").chmod(0)
    refused = pytest.raises(DataError, match=r"a\.txt: cannot be read \(Permission denied\)")
    with like_others(), refused:
        find_files([tmp_path])


@pytest.mark.parametrize("unit", [1, 7, 16, 100, 159, 160, 161, 10**9])
def test_the_segments_of_lines_are_the_bytes_of_the_file(tmp_path, unit):
    (tmp_path / "a.jsonl").write_bytes(GOOD * 10)
    segments = segments_of(tmp_path / "a.jsonl", unit)
    assert [one.start for one in segments] == list(range(0, 160, unit))
    assert [one.stop for one in segments] == [*range(unit, 160, unit), 160]
    assert all(one.weight == one.stop - one.start for one in segments)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "a.jsonl.zst"])
def test_what_cannot_be_cut_is_one_segment(tmp_path, name):
    (tmp_path / name).write_bytes(GOOD * 10)
    (segment,) = segments_of(tmp_path / name, 1)
    assert (segment.start, segment.stop, segment.weight) == (0, 160, 160)


def test_a_parquet_file_is_cut_between_row_groups(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"document {n}" for n in range(95)]
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=10)
    size = path.stat().st_size
    for unit in (1, size // 3, size, 10 * size):
        segments = segments_of(path, unit)
        cuts = [0, *(one.stop for one in segments)]
        assert cuts[-1] == 95
        assert [one.start for one in segments] == cuts[:-1]
        assert all(cut % 10 == 0 for cut in cuts[:-1])
        assert sum(one.weight for one in segments) == pytest.approx(size, abs=len(segments))
    assert len(segments_of(path, 1)) == 10
    assert len(segments_of(path, size)) == 1


def test_a_dataset_is_cut_between_any_rows(dataset):
    size = sum(file.stat().st_size for file in dataset.glob("*.arrow"))
    for unit in (1, size // 7, size, 10 * size):
        segments = segments_of(dataset, unit)
        cuts = [0, *(one.stop for one in segments)]
        assert cuts[-1] == 50
        assert [one.start for one in segments] == cuts[:-1]
    assert len(segments_of(dataset, 1)) == 50
    assert len(segments_of(dataset, size // 5)) in (5, 6)
