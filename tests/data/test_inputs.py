"""Paths, directories and globs against the files they stand for, and files against their parts."""

import os

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from minimind.data.inputs import find_files, segments_of
from minimind.errors import DataError

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


def names_of(found, directory):
    return [path.relative_to(directory).as_posix() for path in found]


def test_a_directory_is_searched_at_every_depth_and_sorted(tmp_path):
    write(tmp_path, "b.txt", "a/z.jsonl", "a/b/c.txt", ".hidden.txt", ".cache/d.txt", "notes.md")
    write(tmp_path, "a/y.jsonl.gz", "a/x.jsonl.zst", "a/w.parquet", "a/v.gz", "a/u.json")
    names = names_of(find_files([tmp_path / "b.txt", str(tmp_path)]), tmp_path)
    below = ["a/b/c.txt", "a/w.parquet", "a/x.jsonl.zst", "a/y.jsonl.gz", "a/z.jsonl"]
    assert names == ["b.txt", *below, "b.txt"]


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


def test_a_file_named_like_a_glob_is_a_file(tmp_path):
    write(tmp_path, "[ab].jsonl", "a.jsonl")
    assert names_of(find_files([tmp_path / "[ab].jsonl"]), tmp_path) == ["[ab].jsonl"]


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


def test_what_cannot_be_read_is_refused_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "zero.txt").touch()
    (tmp_path / "a.json").write_bytes(b"{}")
    (tmp_path / "a.gz").write_bytes(b"{}")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone.txt")
    for name, words in [
        ("missing.jsonl", "no such file"),
        ("empty", "holds no .jsonl, .jsonl.gz, .jsonl.zst, .txt or .parquet file"),
        ("zero.txt", "is empty"),
        ("a.json", "suffix '.json' is not .jsonl, .jsonl.gz, .jsonl.zst, .txt or .parquet"),
        ("a.gz", "suffix '.gz'"),
        ("pipe.jsonl", "pipe or a device"),
        ("link.txt", "link to a file that is not there"),
        ("x" * 300 + ".txt", "cannot be read (File name too long)"),
        ("zero.txt/a.jsonl", "no such file"),
        ("*.parquet", "matches no .jsonl"),
        ("*.json", "matches no .jsonl"),
    ]:
        with pytest.raises(DataError) as caught:
            find_files([tmp_path / name])
        assert str(caught.value).startswith(f"{tmp_path / name}: ")
        assert words in str(caught.value)
        assert "; " in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_the_right_to_read_it_is_refused(tmp_path):
    write(tmp_path, "a.txt")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(DataError, match=r"a\.txt: cannot be read \(Permission denied\)"):
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
