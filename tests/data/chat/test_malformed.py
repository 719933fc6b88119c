"""Hundreds of malformed files of conversations: refused by file, line and turn, or skipped."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minimind.data.chat import sandbox
from minimind.data.prepare.encode import Work, encode_unit
from minimind.data.prepare.prepare import PrepareRequest, prepare_for_run
from minimind.data.prepare.prepared import Prepared
from minimind.data.prepare.work_units import Unit, make_plan
from minimind.data.shards.manifest import Options
from minimind.data.text.formats import segments_of
from minimind.data.text.inputs import Source
from minimind.errors import DataError, UsageError
from tests.data.chat.made import SIMPLE
from tests.data.chat.malformed import Faulty, faulty_files

SEED = 29
TURN = re.compile(r"turn (\d+)")
OPTIONS = Options(val_fraction=0.0, chat_template=SIMPLE, train_on="assistant")
WHOLE = 2**62


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Faulty]:
    """Malformed files by path, in order."""
    place, found = tmp_path_factory.mktemp("malformed"), {}
    for number, one in enumerate(faulty_files(SEED)):
        path = place / f"{number:03d}{one.suffix}"
        path.write_bytes(one.content)
        found[path] = one
    return found


def prepared(paths: list[Path], tokenizer: Path, cache: Path, **more: Any) -> Prepared:
    source = Source("data", tuple(map(str, paths)))
    return prepare_for_run(PrepareRequest((source,), str(tokenizer), 0, OPTIONS, **more), cache)


def test_every_malformed_file_is_refused_by_file_line_and_turn(
    files: dict[Path, Faulty], tokenizer: Any, tmp_path: Path
):
    assert len({one.content for one in files.values()}) >= 300
    assert len({one.kind for one in files.values()}) >= 50
    plan = make_plan([Source("data", tuple(map(str, files)))], OPTIONS)
    work = Work(tmp_path, plan, tokenizer, is_strict=True)
    for number, (path, one) in enumerate(files.items()):
        unit = Unit(number, 0, tuple(segments_of(path, WHOLE)))
        with pytest.raises(DataError) as caught:
            encode_unit(work, unit)
        said = str(caught.value)
        assert said.startswith(f"{path}:{one.lines[0]} (byte "), f"{one.kind}: {said}"
        assert said.endswith(", or skip bad documents with --on_bad_data skip"), said
        assert "\n" not in said
        turns = TURN.findall(said)
        assert turns == ([str(one.turn)] if one.turn else []), f"{one.kind}: {said}"
    assert DataError.status == 3


def test_skipped_they_are_listed_by_line_and_what_is_good_is_read(
    files: dict[Path, Faulty], folder: Path, tmp_path: Path
):
    good = [path.with_name(f"good-{path.name.split('.')[0]}.jsonl") for path in files]
    for path, one in zip(good, files.values(), strict=True):
        path.write_bytes(b"".join(line + b"\n" for line in one.good))
    alone = prepared([path for path in good if path.stat().st_size], folder, tmp_path)
    all_bad = {"skips_bad": True, "max_bad_fraction": 1.0}
    mixed = prepared([*files], folder, tmp_path, **all_bad)
    assert len(alone.train) > 10_000
    shards, expected = (one.manifest["splits"]["train"]["shards"] for one in (mixed, alone))
    assert shards == expected  # with the hashes of ids, of marks of targets, and of ends

    mixed.list_rejected(tmp_path)
    listed = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_bytes().splitlines()]
    assert mixed.manifest["rejected"]["count"] == sum(one["documents"] for one in listed)
    wanted = [(str(path), line, one) for path, one in files.items() for line in one.lines]
    for entry, (path, line, one) in zip(listed, wanted, strict=True):
        assert (entry["file"], entry["line"]) == (path, line), f"{one.kind}: {entry}"
        turns = TURN.findall(entry["what"])
        assert turns == ([str(one.turn)] if one.turn else []), f"{one.kind}: {entry}"


def test_too_many_bad_conversations_end_the_preparation(
    files: dict[Path, Faulty], folder: Path, tmp_path: Path
):
    path = next(path for path, one in files.items() if one.turn and len(one.good) > 2)
    with pytest.raises(DataError, match=r"bad, more than max_bad_fraction = 0.05; the first is"):
        prepared([path], folder, tmp_path, skips_bad=True)


def test_a_template_that_fails_for_one_conversation_names_its_place(folder: Path, tmp_path: Path):
    lines = [{"prompt": ask, "completion": "yes"} for ask in ("one and two", "x7", "three")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fails = "{% if messages[0]['content'] == 'x7' %}{{ nothing.at_all }}{% endif %}"
    options = OPTIONS.model_copy(update={"chat_template": fails + SIMPLE})
    request = PrepareRequest(
        (Source("data", (str(tmp_path / "a.jsonl"),)),), str(folder), 0, options
    )
    with pytest.raises(
        DataError, match=r"a\.jsonl:2 \(byte 47\): the chat template cannot be rend"
    ):
        prepare_for_run(request, tmp_path)
    skipping = replace(request, skips_bad=True, max_bad_fraction=0.5)
    assert prepare_for_run(skipping, tmp_path).manifest["documents"] == 2


def test_a_conversation_that_hangs_the_template_ends_the_preparation(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is not skipped: which conversations are may not depend on the speed of a host."""
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    lines = [{"prompt": ask, "completion": "yes"} for ask in ("one and two", "x7", "three")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    hangs = f"{{% if messages[0]['content'] == 'x7' %}}{loop}{{% endif %}}"
    options = OPTIONS.model_copy(update={"chat_template": hangs + SIMPLE})
    sources = (Source("data", (str(tmp_path / "a.jsonl"),)),)
    request = PrepareRequest(sources, str(folder), 0, options, skips_bad=True, max_bad_fraction=0.5)
    with pytest.raises(UsageError, match=r"takes more than 0\.2 s or 512 MiB for one"):
        prepare_for_run(request, tmp_path)
