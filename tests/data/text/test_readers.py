"""Every format against the documents that were put into it; memory against files that are bombs."""

import gzip
import json
import subprocess
import sys
import zlib

import pytest
import zstandard

from minimind.data.text.documents import ReadOptions, Rejection
from minimind.data.text.formats import in_file, read_segment, segments_of
from minimind.errors import DataError
from tests.data.text.reading import documents_of, read

GOOD = b'{"text": "one"}\n'
MIX = GOOD + b"\n" + GOOD + b'{"text": 1}\n\n{"text": "\xff"}\n' + GOOD
# Without the time of day: tests are named after it, and every worker has to collect the same names.
GZIPPED = gzip.compress(GOOD, mtime=0)


def put(path, content):
    path.write_bytes(content)
    return path


def packed(path, content):
    """The content as the suffix of `path` says."""
    packer = gzip.compress if path.suffix == ".gz" else zstandard.compress
    return put(path, packer(content))


def test_any_number_of_segments_finds_the_same(tmp_path):
    path = put(tmp_path / "a.jsonl", MIX)
    whole = read(path)
    places = [(one.line, one.byte) for one in whole if isinstance(one, Rejection)]
    assert places == [(2, 16), (4, 33), (5, 45), (6, 56)]
    for unit in range(1, len(MIX) + 2):
        assert read(path, unit) == whole


def test_lines_of_many_pieces_are_found_the_same_in_segments(tmp_path, monkeypatch):
    from minimind.data.text import readers

    path = put(tmp_path / "a.jsonl", MIX + b'{"text": "' + b"long" * 20_000 + b'"}\n' + MIX)
    how = {"max_document_bytes": 100}
    whole = read(path, **how)
    assert sum("longer" in str(one) for one in whole) == 1
    monkeypatch.setattr(readers, "PIECE_BYTES", 5)
    for unit in (10**9, 10_000, 977):
        assert read(path, unit, **how) == whole


def test_a_bad_line_is_numbered_from_the_segment_until_its_place_in_the_file_is_requested(tmp_path):
    path = put(tmp_path / "a.jsonl", GOOD * 90 + b"[]\n" + GOOD + b'{"text": "\xff"}\n')
    _, segment = segments_of(path, 85 * len(GOOD))
    bad = [one for one in read_segment(segment, ReadOptions()) if isinstance(one, Rejection)]
    assert [one.line for one in bad] == [6, 8]
    assert [in_file(one).line for one in bad] == [91, 93]
    assert in_file(in_file(bad[0])) == in_file(bad[0])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt"])
def test_progress_goes_up_to_the_weight_of_a_segment(tmp_path, name):
    path = tmp_path / name
    put(path, GOOD * 3000) if path.suffix in (".jsonl", ".txt") else packed(path, GOOD * 3000)
    (segment,) = segments_of(path, 10**9)
    done = [
        one[1] for one in read_segment(segment, ReadOptions()) if not isinstance(one, Rejection)
    ]
    assert done == sorted(done)
    assert done[-1] == segment.weight == path.stat().st_size


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_packed_lines_are_the_same_as_plain_ones(tmp_path, suffix):
    plain = read(put(tmp_path / "a.jsonl", MIX))
    found = read(packed(tmp_path / f"a.jsonl{suffix}", MIX))
    assert [str(one).replace(suffix, "") for one in found] == [str(one) for one in plain]


def test_streams_behind_one_another_are_one_content(tmp_path):
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0 abc"
    for name, one, filler in [
        ("a.jsonl.gz", gzip.compress, b"\0" * 512),
        ("a.jsonl.zst", zstandard.compress, skippable),
    ]:
        content = one(GOOD[:5]) + one(b"") + one(GOOD[5:] + GOOD) + filler
        assert documents_of(put(tmp_path / name, content)) == ["one", "one"]


@pytest.mark.parametrize("first", [1, 5, 30])
def test_the_kind_of_a_file_is_known_behind_a_short_stream(tmp_path, first):
    content = b"\xff\xfe{'text': 'a'}" + b"\0" * 40
    (plain,) = read(put(tmp_path / "a.jsonl", content))
    assert isinstance(plain, Rejection)
    assert plain.what == "the file is UTF-16"
    for name, one in (("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.compress)):
        (found,) = read(put(tmp_path / name, one(content[:first]) + one(content[first:])))
        assert isinstance(found, Rejection)
        assert found.what == plain.what


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_packed_file_that_is_cut_off_is_reported_at_the_line_where_it_ends(tmp_path, suffix):
    lines = b"".join(b'{"text": "%x"}\n' % (n**9 + 1) for n in range(20_000))
    content = packed(tmp_path / f"a.jsonl{suffix}", lines).read_bytes()
    for size in (1, len(content) // 2, len(content) - 1):
        path = put(tmp_path / f"a.jsonl{suffix}", content[:size])
        *documents, report = read(path)
        complete = "".join(f'{{"text": "{one}"}}\n' for one in documents).encode()
        assert lines.startswith(complete)
        assert str(report).startswith(f"{path}:{len(documents) + 1} (byte {len(complete)}): ")
        assert "is cut off, and " in str(report)
        if suffix == ".zst" and size > 1:  # its header says how much it had
            lacking = int(str(report).partition("it lacks ")[2].partition(" ")[0].replace(",", ""))
            assert len(lines) - len(complete) - 60 <= lacking <= len(lines) - len(complete)
        else:
            assert "what it lacks is unknown" in str(report)
        assert str(report).endswith("; copy the file again")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", GZIPPED[:-5] + b"\0" * 5),
        ("a.jsonl.gz", b"\0" * 600),
        ("a.jsonl.gz", GZIPPED + b"trailing"),
        ("a.jsonl.zst", zstandard.ZstdCompressor(write_checksum=True).compress(GOOD)[:-1] + b"?"),
        ("a.jsonl.zst", zstandard.compress(GOOD) + b"trailing"),
    ],
)
def test_a_damaged_packed_file_is_reported(tmp_path, name, content):
    *_, report = read(put(tmp_path / name, content))
    assert isinstance(report, Rejection)
    assert "the compressed stream is damaged (" in report.what


def test_a_window_that_is_too_large_is_no_damage(tmp_path):
    window = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=window).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(packer.compress(GOOD) + packer.flush())
    (report,) = map(str, read(tmp_path / "a.jsonl.zst"))
    assert "a.jsonl.zst:1 (byte 0): the compressed stream looks further back than 128 MiB" in report
    assert report.endswith("; compress it again without --long, or with --long=27 at most")


def test_zstandard_that_is_not_installed_is_reported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DataError, match=r"zstandard, .* install -e '\.\[data\]'"):
        read(packed(tmp_path / "a.jsonl.zst", GOOD))


def test_a_file_that_is_gone_is_reported(tmp_path):
    path = put(tmp_path / "a.jsonl", GOOD)
    (segment,) = segments_of(path, 100)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read \(No such file"):
        list(read_segment(segment, ReadOptions()))


# Reads argv[1] in segments and prints what was found, shortened, and the highest memory in MiB.
MEASURED_READ = r"""
import json, sys
from pathlib import Path
from minimind.runtime.environment import peak_bytes
from tests.data.text.reading import read
limit = 2**20
found = [str(one)[-120:] for one in read(Path(sys.argv[1]), 2**26, max_document_bytes=limit)]
print(json.dumps([found, peak_bytes() / 2**20]))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt"])
def test_half_a_gibibyte_without_a_newline_is_never_held(tmp_path, name):
    path = tmp_path / name
    if path.suffix == ".gz":
        packer = zlib.compressobj(1, wbits=31)
        packed = [packer.compress(bytes(2**22)) for _ in range(128)]
        path.write_bytes(b"".join([*packed, packer.flush()]))
    elif path.suffix == ".zst":
        packer = zstandard.ZstdCompressor().compressobj()
        packed = [packer.compress(bytes(2**22)) for _ in range(128)]
        path.write_bytes(b"".join([*packed, packer.flush()]))
    else:
        with open(path, "wb") as file:
            file.write(b'{"text": "')
            file.seek(2**29)  # a hole
            file.write(b"x")
    command = [sys.executable, "-c", MEASURED_READ, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (output,), peak = json.loads(done.stdout)
    assert "--max_document_bytes" in output or "NUL byte" in output
    assert peak < 300
