"""Impossible values in files with valid hashes: reported in one line, never believed.

Whatever a checkpoint claims, memory and time are bounded by the bytes that are there.
"""

from __future__ import annotations

import copy
import json
import math
import random
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from minimind.checkpoint.directory import MANIFEST, published_checkpoints, verify
from minimind.checkpoint.resume import Resumed, TrainState, resume_order
from minimind.checkpoint.validation import shard_name
from minimind.data.rows.order import Order
from minimind.errors import CheckpointError
from tests.faults.tampering import COMMANDS, TOOLS, ending, manifest_of, reseal, seal, trained

SHARD, BUFFERS, STATE, CONFIG = (
    *(shard_name(0, 1), "buffers.safetensors"),
    *("state.json", "config.json"),
)
ROOM = 2 * 2**30  # address space beyond what the process has
PATIENCE = 60  # seconds


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(corpus, tmp_path_factory.mktemp("hostile"), max_steps=1)


@pytest.fixture
def only(run: Path, tmp_path: Path) -> Path:
    """The one checkpoint of a copy of the run, to which nothing can fall back."""
    (found,) = published_checkpoints(Path(shutil.copytree(run, tmp_path / "run")) / "checkpoints")
    return found


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """A MemoryError for what asks for more than ROOM, an assertion for what takes too long."""

    def too_long(*_: Any) -> None:
        raise AssertionError(f"took more than {PATIENCE} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, too_long)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    resource.setrlimit(resource.RLIMIT_AS, before)
    signal.signal(signal.SIGALRM, handler)


def refused(checkpoint: Path, file: str, capsys: pytest.CaptureFixture[str], *by: str) -> None:
    """Every command of `by` ends in one line that names the file."""
    for command in by or COMMANDS:
        status, report = ending(command, checkpoint.parent.parent, capsys)
        assert status == CheckpointError.status, (command, status, report)
        assert file in report, (command, report)
        assert len(report.strip().splitlines()) == 1, (command, report)


# --- JSON ---------------------------------------------------------------------------------------

WRONG: list[Any] = [
    None,
    True,
    -1,
    0,
    2**53 + 1,
    10**30,
    0.5,
    1e308,
    "7",
    "",
    [],
    [[]],
    {},
    "\n\x1b",
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value in a JSON document stands."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in inside:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at one place; with `...` none at all."""
    document = copy.deepcopy(document)
    at = document
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return document


@pytest.mark.parametrize("name", [MANIFEST, STATE, CONFIG])
def test_any_other_value_anywhere_is_accepted_or_reported(
    name: str, only: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
):
    trials = 150 if request.config.getoption("--long") else 30
    document = json.loads((only / name).read_bytes())
    command = {MANIFEST: "resume", STATE: "resume", CONFIG: "generate"}[name]
    cases = [(path, wrong) for path in places(document) for wrong in (..., *WRONG)]
    refusals = 0
    for path, wrong in random.Random(1).sample(cases, trials):
        hostile = changed(document, path, wrong)
        if name == MANIFEST:
            seal(only, hostile)
        else:
            (only / name).write_text(json.dumps(hostile))
            reseal(only)
        # What is only shown may be anything; what is used is refused in one line.
        status, report = ending(command, only.parent.parent, capsys)
        case = (path, wrong, status, report)
        assert status in (0, CheckpointError.status), case
        if status:
            refusals += 1
            assert name in report or only.name in report, case
            assert len(report.strip().splitlines()) == 1, case
            assert "\x1b" not in report, case
        for aside in only.parent.glob("*-step_*"):
            aside.rename(only)
        assert only.is_dir(), case
    assert refusals > trials / 10


READ: dict[str, list[tuple[Any, ...]]] = {
    MANIFEST: [
        *[("format",), ("step",), ("tokens",), ("world_size",), ("identity",), ("files",)],
        *[("identity", "batch"), ("identity", "data"), ("identity", "seed"), ("order",)],
        *[("identity", "batch", "rows_per_step"), ("rows",), ("mixture",)],
        *[("identity", "seed", "seed"), ("order", "step"), ("order", "offset")],
        *[("files", 0, "bytes"), ("files", 0, "sha256")],
    ],
    STATE: [
        *[("parameters",), ("optimizer_step",), ("counters",), ("counters", "global_steps")],
        *[("counters", "skipped_steps"), ("counters", "loss_scaler")],
        *[("counters", "scheduler_iteration"), ("counters", "muon_stack")],
    ],
    CONFIG: [
        *[("vocab_size",), ("hidden_size",), ("intermediate_size",), ("num_hidden_layers",)],
        *[("num_attention_heads",), ("num_key_value_heads",), ("max_position_embeddings",)],
        *[
            ("rms_norm_eps",),
            ("rope_theta",),
            ("use_flash_attn",),
            ("doc_mask",),
            ("tie_word_embeddings",),
        ],
    ],
}


@pytest.mark.sample(36)
@pytest.mark.parametrize(("name", "path"), [(n, p) for n, paths in READ.items() for p in paths])
@pytest.mark.parametrize("wrong", [..., "7", [[]]])
def test_what_is_read_is_refused_when_it_is_missing_or_of_another_kind(
    name: str, path: tuple[Any, ...], wrong: Any, only: Path, capsys: pytest.CaptureFixture[str]
):
    hostile = changed(json.loads((only / name).read_bytes()), path, wrong)
    if name == MANIFEST:
        seal(only, hostile)
        refused(only, MANIFEST, capsys, "resume")
    else:
        (only / name).write_text(json.dumps(hostile))
        reseal(only)
        refused(only, name, capsys, "generate" if name == CONFIG else "resume")


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"a":' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"step": ' + b"9" * 100_000 + b"}",
        b'{"step": 1e999999999}',
        b'{"a": "\\ud800", "sha256": "x"}',
        b"\xff\xfe{}",
        b"null",
        b'"text"',
        b"",
        b" " * 9_000_000,
        b"{" + b'"a":[],' * 2_000_000 + b'"b":1}',
    ],
    ids=range(12),
)
@pytest.mark.parametrize("name", [MANIFEST, STATE, CONFIG])
def test_json_bombs(name: str, content: bytes, only: Path, capsys: pytest.CaptureFixture[str]):
    (only / name).write_bytes(content)
    if name != MANIFEST:
        reseal(only)
    refused(only, name, capsys, "generate")
    if name != CONFIG:
        refused(only, name, capsys, "resume")


@pytest.mark.parametrize(
    "name",
    ["../config.json", "/etc/passwd", "a/b", "..", ".", "", "a\x00b", "x" * 300, MANIFEST + "/", 7],
)
def test_names_that_lead_outside(name: Any, only: Path, capsys: pytest.CaptureFixture[str]):
    manifest = manifest_of(only)
    seal(only, {**manifest, "files": [*manifest["files"], {**manifest["files"][0], "name": name}]})
    refused(only, MANIFEST, capsys)


@pytest.mark.parametrize(
    "counted",
    [
        {"counters": {"global_steps": 2**53}},
        {"counters": {"global_steps": 0}},
        {"counters": {"skipped_steps": 2}},
        {"optimizer_step": 0},
        {"optimizer_step": None},
        {"optimizer_step": 2**53},
    ],
)
def test_counters_that_are_not_those_of_the_step(
    counted: dict[str, Any], only: Path, capsys: pytest.CaptureFixture[str]
):
    """The one checkpoint is of step 1."""
    state = json.loads((only / STATE).read_bytes())
    counters = {**state["counters"], **counted.get("counters", {})}
    (only / STATE).write_text(json.dumps({**state, **counted, "counters": counters}))
    reseal(only)
    refused(only, STATE, capsys, "resume", "generate")
    status = TOOLS["verify"](only.parent.parent)
    assert status == CheckpointError.status
    output = capsys.readouterr().out
    assert f"{only}: DAMAGED: {STATE}: has " in output
    assert "at step 1" in output


@pytest.mark.parametrize("kind", ["fp32", "exp_avg_sq"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_found_by_verify(
    number: float, kind: str, only: Path, capsys: pytest.CaptureFixture[str]
):
    tensors = load_file(only / SHARD)
    key = next(key for key in sorted(tensors) if key.startswith(f"{kind}|"))
    tensors[key][1] = number
    save_file(tensors, only / SHARD)
    reseal(only)
    assert TOOLS["verify"](only.parent.parent) == CheckpointError.status
    output = f"{kind} of {key.split('|')[1]!r} has numbers that are not finite"
    assert f"{only}: DAMAGED: {output}" in capsys.readouterr().out


@pytest.mark.parametrize("order", [{"step": 2}, {"step": 2**53}, {"offset": 2**53}])
def test_an_order_that_takes_over_where_the_run_has_not_been(
    order: dict[str, int], only: Path, capsys: pytest.CaptureFixture[str]
):
    manifest = manifest_of(only)
    seal(only, {**manifest, "order": {**manifest["order"], **order}})
    refused(only, MANIFEST, capsys, "resume")


def test_rows_that_the_same_text_does_not_make(only: Path):
    """In the resume of a real run nothing else has changed."""
    manifest = manifest_of(only)
    saved = manifest["identity"]
    order = Order(manifest["rows"], saved["batch"]["rows_per_step"], saved["seed"]["seed"])
    at = TrainState(manifest["step"], manifest["tokens"])
    assert resume_order(order, Resumed(at, only, manifest=manifest)) == order
    for rows in (2**53, manifest["rows"] + 1):
        forged = Resumed(at, only, manifest={**manifest, "rows": rows})
        with pytest.raises(CheckpointError, match=rf"manifest\.json: has {rows:,} rows, but the"):
            resume_order(order, forged)


def test_a_name_listed_twice(only: Path, capsys: pytest.CaptureFixture[str]):
    manifest = manifest_of(only)
    seal(only, {**manifest, "files": [*manifest["files"], manifest["files"][0]]})
    refused(only, MANIFEST, capsys)


@pytest.mark.parametrize("name", [SHARD, BUFFERS, STATE, CONFIG, "tokenizer.model"])
def test_a_file_that_is_read_must_be_listed(
    name: str, only: Path, capsys: pytest.CaptureFixture[str]
):
    manifest = manifest_of(only)
    entries = [entry for entry in manifest["files"] if entry["name"] != name]
    seal(only, {**manifest, "files": entries})
    readers = {BUFFERS: ["resume"], CONFIG: ["generate"], "tokenizer.model": ["generate"]}
    refused(only, name, capsys, *readers.get(name, COMMANDS))


@pytest.mark.parametrize(
    "mixture",
    [
        *[{}, {"sizes": [100]}, {"sizes": [50, 50], "weights": [1.0]}],
        *[{"sizes": [50, 51], "weights": [1, 1]}, {"sizes": [100, 0], "weights": [1, 1]}],
        *[{"sizes": [100], "weights": [0]}, {"sizes": [99, 1], "weights": [1e308, 1e-300]}],
        *[{"sizes": [1] * 10**6, "weights": [1] * 10**6}, {"sizes": [2**53], "weights": [1]}],
    ],
)
def test_a_mixture_that_cannot_be(
    mixture: dict[str, Any], only: Path, capsys: pytest.CaptureFixture[str]
):
    seal(only, {**manifest_of(only), "rows": 100, "mixture": mixture})
    refused(only, MANIFEST, capsys, "resume")


def test_epochs_that_no_one_can_have_read(only: Path, capsys: pytest.CaptureFixture[str]):
    manifest = manifest_of(only)
    seal(only, {**manifest, "order": {**manifest["order"], "epoch": 2**53}})
    refused(only, MANIFEST, capsys, "resume")


def test_more_ranks_than_shards(only: Path, capsys: pytest.CaptureFixture[str]):
    seal(only, {**manifest_of(only), "world_size": 10**9})
    refused(only, "does not list shard-0-of-1000000000.safetensors", capsys)


@pytest.mark.parametrize(
    "claim",
    [
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**9},
        {"hidden_size": 2**52, "num_attention_heads": 2},
        {"max_position_embeddings": 10**12},
        {"num_attention_heads": 64, "num_key_value_heads": 64},
        {"num_key_value_heads": 2},
        {"tie_word_embeddings": False},
        {"qk_norm": True},
        {"qk_norm": "yes"},
        {"doc_mask": True, "eos_token_id": None},
    ],
)
def test_a_configuration_that_the_weights_do_not_bear_out(
    claim: dict[str, Any], only: Path, capsys: pytest.CaptureFixture[str]
):
    report = json.loads((only / CONFIG).read_bytes())
    (only / CONFIG).write_text(json.dumps({**report, **claim}))
    reseal(only)
    refused(only, CONFIG, capsys, "generate")


def test_shapes_of_10_to_the_9(only: Path, capsys: pytest.CaptureFixture[str]):
    state = json.loads((only / STATE).read_bytes())
    for shape in ([10**9], [10**9] * 8, [2**53] * 2, [600, 32, 1], [], [0]):
        state["parameters"]["model.norm.weight"] = shape
        (only / STATE).write_text(json.dumps(state))
        reseal(only)
        refused(only, "model.norm.weight", capsys)


# --- safetensors --------------------------------------------------------------------------------


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def with_header(header: Any, data: bytes) -> bytes:
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header)) + header + data


NORM = "fp32|model.norm.weight|0"  # 32 numbers, 128 bytes


def renamed(header: dict[str, Any], key: str) -> dict[str, Any]:
    return {key if k == NORM else k: v for k, v in header.items()}


def as_other(header: dict[str, Any], **facts: Any) -> dict[str, Any]:
    return {**header, NORM: {**header[NORM], **facts}}


def shifted(header: dict[str, Any], by: int) -> dict[str, Any]:
    return as_other(header, data_offsets=[at + by for at in header[NORM]["data_offsets"]])


TENSOR_BOMBS: dict[str, Callable[[dict[str, Any], bytes], bytes]] = {
    "claims 100 MB": lambda h, d: struct.pack("<Q", 100_000_000) + json.dumps(h).encode() + d,
    "claims 2**63": lambda h, d: struct.pack("<Q", 2**63) + json.dumps(h).encode() + d,
    "no header": lambda h, d: b"\x00" * 8,
    "seven bytes": lambda h, d: b"\x00" * 7,
    "empty": lambda h, d: b"",
    "not JSON": lambda h, d: with_header(b"\xff" * 64, d),
    "nested": lambda h, d: with_header(b'{"a":' * 50_000, d),
    "a list": lambda h, d: with_header([], d),
    "short of data": lambda h, d: with_header(h, d[:-4]),
    "too much data": lambda h, d: with_header(h, d + b"1234"),
    "overlapping offsets": lambda h, d: with_header(shifted(h, -128), d),
    "offsets behind the end": lambda h, d: with_header(shifted(h, 10**9), d),
    "offsets backwards": lambda h, d: with_header(as_other(h, data_offsets=[128, 0]), d),
    "shape of 10^9": lambda h, d: with_header(as_other(h, shape=[10**9]), d),
    "shape overflows": lambda h, d: with_header(as_other(h, shape=[2**62, 2**62, 2]), d),
    "two dimensions": lambda h, d: with_header(as_other(h, shape=[4, 8]), d),
    "other dtype": lambda h, d: with_header(as_other(h, dtype="I32"), d),
    "unknown dtype": lambda h, d: with_header(as_other(h, dtype="object"), d),
    "no parameter": lambda h, d: with_header(renamed(h, "fp32"), d),
    "no start": lambda h, d: with_header(renamed(h, "fp32|model.norm.weight|"), d),
    "negative start": lambda h, d: with_header(renamed(h, "fp32|model.norm.weight|-1"), d),
    "a start of 10,000 digits": lambda h, d: with_header(
        renamed(h, "fp32|model.norm.weight|1" + "0" * 10_000), d
    ),
    "beyond the end": lambda h, d: with_header(renamed(h, "fp32|model.norm.weight|1"), d),
    "of no parameter": lambda h, d: with_header(renamed(h, "fp32|model.strange|0"), d),
    "an escape in a name": lambda h, d: with_header(renamed(h, "fp32|\x1b[2J\n|0"), d),
    "without weights": lambda h, d: with_header(renamed(h, "fp64|model.norm.weight|0"), d),
}


@pytest.mark.parametrize("kind", TENSOR_BOMBS)
def test_tensor_bombs(kind: str, only: Path, capsys: pytest.CaptureFixture[str]):
    header, data = header_of((only / SHARD).read_bytes())
    assert header[NORM]["shape"] == [32]
    (only / SHARD).write_bytes(TENSOR_BOMBS[kind](header, data))
    reseal(only)
    assert verify(only) is None  # only reading it shows the fault
    refused(only, str(only) if kind == "without weights" else SHARD, capsys)


@pytest.mark.parametrize("break_at", [31, 33])
def test_runs_that_leave_a_gap_or_overlap(
    break_at: int, only: Path, capsys: pytest.CaptureFixture[str]
):
    header, data = header_of((only / SHARD).read_bytes())
    embedding = "fp32|model.embed_tokens.weight|0"
    first, last = header.pop(embedding)["data_offsets"]
    middle = first + 128
    header[embedding] = {"dtype": "F32", "shape": [32], "data_offsets": [first, middle]}
    rest = {"dtype": "F32", "shape": [(last - middle) // 4], "data_offsets": [middle, last]}
    sound = {**header, f"fp32|model.embed_tokens.weight|{32}": rest}
    (only / SHARD).write_bytes(with_header(sound, data))
    reseal(only)
    for command in COMMANDS:
        assert ending(command, only.parent.parent, capsys)[0] == 0
    torn = {**header, f"fp32|model.embed_tokens.weight|{break_at}": rest}
    (only / SHARD).write_bytes(with_header(torn, data))
    reseal(only)
    refused(only, f"{SHARD}: fp32 of 'model.embed_tokens.weight' at {break_at}", capsys)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"strange": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        ({"model.pos_cis": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        (b"{" * 1000, b""),
    ],
)
def test_buffers_that_the_model_has_not(
    header: Any, data: bytes, only: Path, capsys: pytest.CaptureFixture[str]
):
    (only / BUFFERS).write_bytes(with_header(header, data))
    reseal(only)
    refused(only, BUFFERS, capsys, "resume")


def test_weights_that_no_token_can_be_drawn_from(only: Path, capsys: pytest.CaptureFixture[str]):
    header, data = header_of((only / SHARD).read_bytes())
    first, last = header[NORM]["data_offsets"]
    nan = struct.pack("<f", float("nan")) * 32
    (only / SHARD).write_bytes(with_header(header, data[:first] + nan + data[last:]))
    reseal(only)
    status, report = ending("generate", only.parent.parent, capsys)
    assert (status, "model.norm.weight has numbers that are not finite" in report) == (4, True)
    assert len(report.strip().splitlines()) == 1
