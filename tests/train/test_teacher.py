"""--teacher: a run that is distilled, from its flags to its end, and teachers that are refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import minimind.train as training
from minimind.cli.main import main as minimind
from minimind.config.launcher_env import read_launch
from minimind.config.parse import build_config, parse_flags
from minimind.config.run_config import MARGIN, PATIENCE, RunConfig
from minimind.data.shards.teacher_rows import TeacherRows
from minimind.data.shards.token_shards import TokenShards
from minimind.errors import CheckpointError, DataError, UsageError
from minimind.inference.load_model import load_checkpoint
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.model.distillation import Distillation
from minimind.recovery import corruption
from minimind.train.start import decide, rehearse
from minimind.train.teacher import Teacher
from tests.allocations import most_allocated
from tests.conftest import Launcher
from tests.train.test_fine_tuning import conversations
from tests.train.test_fine_tuning_transformers import CONFIGS, folder_of
from tools.runs import events

train: Any = training  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "device": "cpu", "eval_rows": 8, "dtype": "float32"},
    **{"max_steps": 6, "val_fraction": 0.1, "log_interval": 1, "deepspeed_config": "none"},
    **{"learning_rate": 5e-3, "save_minutes": 0},
}
SHAPE = ("dim", "n_layers", "n_heads", "n_kv_heads", "max_seq_len", "vocab_size")
Flags = dict[str, Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("teachers")


@pytest.fixture(scope="module")
def given(cached: Flags, place: Path) -> Flags:
    """Flags of a student, and a teacher of three times its width."""
    flags = {**FLAGS, **cached}
    wide = {"dim": 48, "n_layers": 2, "max_steps": 60}
    assert train({**flags, **wide}, out_dir=str(place / "teacher")) == 0
    return {**flags, "teacher": str(place / "teacher")}


@pytest.fixture(scope="module")
def student(given: Flags, place: Path) -> Path:
    assert train(given, distill_temperature=2.0, out_dir=str(place / "student")) == 0
    return place / "student"


def words(flags: Flags) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def record(flags: Flags, out: Path, top_k: int, status: int = 0) -> Path:
    """The folder that `minimind data logits` writes for a run with these flags."""
    command = ["data", "logits", "--top_k", str(top_k), "--out", str(out), "--", *words(flags)]
    assert minimind(command) == status
    return out


def test_interrupted_it_goes_on_with_the_rows_that_are_on_the_disk(
    given: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    whole, out = record(given, tmp_path / "whole", 8), tmp_path / "out"
    of_all = re.compile(r"8 of .* of the probability")
    shares = of_all.findall(capsys.readouterr().out)
    asked, ask = list[int](), Distillation.recorded

    def recorded(self: Distillation, inputs: Any, *sizes: int) -> Any:
        if len(asked) == 4:
            raise KeyboardInterrupt
        asked.append(len(inputs["input_ids"]))
        return ask(self, inputs, *sizes)

    monkeypatch.setattr(Distillation, "recorded", recorded)
    record(given, out, 8, status=130)
    assert "run the same command again" in capsys.readouterr().err
    assert not out.exists()
    rows = tmp_path / ".out.draft" / "rows.bin"
    with rows.open("ab") as file:
        file.write(bytes(100))  # of a micro-batch that a power cut lost
    needed = (whole / "rows.bin").stat().st_size
    there = [path.stat().st_size for path in rows.parent.rglob("*") if path.is_file()]
    n_rows = json.loads((whole / "teacher.json").read_text())["rows"]
    done, before = sum(asked), rows.read_bytes()
    free = "minimind.runtime.output_folder.free_bytes"
    monkeypatch.setattr(free, lambda path: needed - sum(there) - 1)
    record(given, out, 8, status=5)
    monkeypatch.setattr(free, lambda path: needed - sum(there))
    asked[:] = [0] * 5
    record({**given, "batch_size": 3}, out, 8)
    assert sum(asked) == n_rows - done
    shown = capsys.readouterr().out
    assert f".out.draft has {done:,} of {n_rows:,} rows; the others follow" in shown
    assert of_all.findall(shown) == shares != []
    assert (out / "rows.bin").read_bytes().startswith(before[:-100])
    assert {p.name for p in out.iterdir()} == {p.name for p in whole.iterdir()}
    taught = [TeacherRows.of(folder).read(np.arange(n_rows)) for folder in (out, whole)]
    unpacked = [TeacherRows.of(out).unpacked(torch.from_numpy(one))[0] for one in taught]
    torch.testing.assert_close(*unpacked)


@pytest.fixture(scope="module")
def records(given: Flags, place: Path) -> Flags:
    """The flags with records of 8 ids, at temperature 2, in place of the teacher."""
    flags = {**given, "distill_temperature": 2.0}
    return {**flags, "teacher": str(record(flags, place / "records", 8))}


def curve(out_dir: Path) -> list[list[float]]:
    return [[line["loss"], line["grad_norm"]] for line in events(out_dir, "step")]


def val_losses(out_dir: Path) -> list[float]:
    return [event["val_loss"] for event in events(out_dir, "eval")]


def test_a_student_learns_faster_than_alone_and_has_no_part_of_its_teacher(
    given: Flags, student: Path, tmp_path: Path
):
    plain = {name: given[name] for name in given if name != "teacher"}
    alone, unweighted = tmp_path / "alone", tmp_path / "unweighted"
    assert train(plain, out_dir=str(alone)) == 0
    assert train(given, distill_weight=0.0, out_dir=str(unweighted)) == 0
    for one, other in zip(curve(unweighted), curve(alone), strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    assert val_losses(unweighted) == pytest.approx(val_losses(alone), rel=1e-6)
    assert val_losses(student)[-1] < val_losses(alone)[-1] - 0.1
    names = [{*load_checkpoint(str(out))[0].state_dict()} for out in (student, alone)]
    assert names[0] == names[1]
    sizes = [
        sum(file.stat().st_size for file in (out / "checkpoints").rglob("*.safetensors"))
        for out in (student, alone)
    ]
    assert sizes[0] == sizes[1]


def test_stopped_and_resumed_it_is_the_same_run_of_the_same_teacher(
    given: Flags, student: Path, tmp_path: Path
):
    half = {**given, "distill_temperature": 2.0, "out_dir": str(tmp_path / "half")}
    assert train(half, stop_at_step=3) == 75
    for change in ({"teacher": str(student)}, {"distill_weight": 0.4}, {"distill_weight": 0.0}):
        with pytest.raises(CheckpointError, match=r"model\.loss: .*allow_change model"):
            train({**half, **change})
    # It is the same teacher at another place, in another format, and without a tokenizer.
    export = tmp_path / "export"
    words = ["export", "--checkpoint", given["teacher"], "--format", "minimind"]
    assert minimind([*words, "--out", str(export)]) == 0
    for file in export.glob("tokenizer*"):
        file.unlink()
    assert train({**half, "teacher": str(export)}) == 0
    assert curve(tmp_path / "half") == curve(student)
    assert val_losses(tmp_path / "half") == val_losses(student)


def test_a_fine_tuned_teacher_of_a_fine_tuned_student(given: Flags, tmp_path: Path):
    talk = tmp_path / "talk.jsonl"
    talk.write_text("\n".join(map(json.dumps, conversations(80))))
    plain = {name: given[name] for name in given if name != "teacher"}
    assert train(plain, out_dir=str(tmp_path / "small")) == 0
    tuned = {name: plain[name] for name in plain if name not in SHAPE}
    tuned |= {"task": "sft", "data_path": str(talk)}
    more = {"init_from": given["teacher"], "out_dir": str(tmp_path / "big_chat"), "max_steps": 60}
    assert train(tuned, **more) == 0
    tuned |= {"init_from": str(tmp_path / "small")}
    # The base model has no tokens of the chat template.
    with pytest.raises(UsageError, match="another tokenizer"):
        train(tuned, teacher=given["teacher"], out_dir=str(tmp_path / "refused"))
    losses = []
    teacher = {"teacher": str(tmp_path / "big_chat")}
    vocab_size = load_checkpoint(teacher["teacher"])[0].config.vocab_size
    folder = record({**tuned, **teacher}, tmp_path / "records", vocab_size)
    runs = {"alone": {}, "taught": teacher, "recorded": {"teacher": str(folder)}}
    for name, more in runs.items():
        assert train({**tuned, **more}, out_dir=str(tmp_path / name)) == 0
        losses.append(val_losses(tmp_path / name)[-1])
    assert losses[1] < losses[0]
    assert losses[2] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"max_seq_len": 64}, "has 32 positions"), ({"data_path": "OTHER"}, "has another tokenizer")],
)
def test_a_teacher_that_cannot_read_the_rows_is_refused(
    given: Flags, tmp_path: Path, change: Flags, words: str
):
    if "data_path" in change:
        text, out = tmp_path / "other.jsonl", str(tmp_path / "prepared")
        text.write_text("\n".join(json.dumps({"text": f"{n} other text {n}"}) for n in range(900)))
        prepare = ["prepare", str(text), "--vocab_size", "560", "--val_fraction", "0.1"]
        assert minimind([*prepare, "--out", out]) == 0
        change = {"data_path": out, "vocab_size": 560}
    with pytest.raises(UsageError, match=words):
        train({**given, **change}, out_dir=str(tmp_path / "refused"))
    assert not (tmp_path / "refused").exists()


def test_a_student_of_transformers_without_a_tokenizer_takes_that_of_the_teacher(
    given: Flags, tmp_path: Path
):
    flags = {name: given[name] for name in given if name not in SHAPE} | {"max_seq_len": 32}
    runs = list[RunConfig]()
    for rows in (600, 599):
        config = AutoConfig.for_model("llama", vocab_size=rows, **CONFIGS["llama"])
        config.save_pretrained(place := tmp_path / str(rows))
        runs.append(build_config({**flags, "model": f"hf:{place}"}, "test"))
    run = rehearse(runs[0]).run
    assert run.tokenizer == str(Teacher.of(run).tokenizer_path)
    assert run.sources["tokenizer"] == f"--teacher {given['teacher']}"
    with pytest.raises(UsageError, match=r"^--teacher .* 600 pieces, more"):
        rehearse(runs[1])


def test_records_of_every_id_train_as_the_teacher_does(given: Flags, student: Path, tmp_path: Path):
    """Another batch, seed and order need no other records."""
    flags = {**given, "distill_temperature": 2.0}
    folder = record({**flags, "batch_size": 7, "seed": 3}, tmp_path / "records", 600)
    assert train({**flags, "teacher": str(folder)}, out_dir=str(tmp_path / "run")) == 0
    for one, other in zip(curve(tmp_path / "run"), curve(student), strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    assert val_losses(tmp_path / "run") == pytest.approx(val_losses(student), rel=1e-6)
    shutil.rmtree(folder)  # 98 MB


def test_a_step_from_records_is_that_of_float64(
    given: Flags, records: Flags, student: Path, tmp_path: Path
):
    """Rows, probabilities of 8 ids and of the rest, and their loss, all computed anew."""
    flags = {name: records[name] for name in records if name not in SHAPE}
    flags |= {"init_from": str(student), "max_seq_len": 32, "distill_weight": 0.7, "max_steps": 1}
    assert train(flags, out_dir=str(tmp_path / "run")) == 0
    run = build_config({**flags, "resume": "none"}, "test")
    with ExitStack() as cleanup:
        prepared, order, _ = decide(run, read_launch(os.environ), cleanup, tokenize=True).rows()
    rows = torch.from_numpy(prepared.train.read_rows(order.rows_for(0, 0, 1), 33))
    with torch.no_grad():
        of_student, of_teacher = (
            load_checkpoint(str(place))[0].double()(input_ids=rows[:, :-1]).logits
            for place in (student, given["teacher"])
        )
    losses = []
    for s, t, target in zip(
        of_student.flatten(0, 1), of_teacher.flatten(0, 1), rows[:, 1:].flatten(), strict=True
    ):
        q, p = (s / 2).softmax(-1), (t / 2).softmax(-1)
        ids = p.argsort(descending=True)[:8]
        kl = (p[ids] * (p[ids] / q[ids]).log()).sum()
        rest = [1 - float(one[ids].sum()) for one in (p, q)]
        kl += rest[0] * torch.tensor(rest[0] / rest[1]).log()
        losses.append(-0.3 * s.log_softmax(-1)[target] + 0.7 * 4 * kl)
    ((loss, _),) = curve(tmp_path / "run")
    assert loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-6)


def test_a_run_from_records_resumes_bit_for_bit_also_when_they_have_moved(
    given: Flags, records: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With a check for corruption, which reads rows of its own, and rows of padding."""
    flags = {**records, "verify_interval": 2, "spike_guard": True, "batch_size": 4}
    flags |= {"global_batch_size": 7, "num_workers": 0}
    whole, half = str(tmp_path / "whole"), {**flags, "out_dir": str(tmp_path / "half")}
    assert train(flags, out_dir=whole) == 0
    assert [one["passed"] for one in events(tmp_path / "whole", "verified")] == [True] * 3
    assert train(half, stop_at_step=3) == 75
    for change in ({"teacher": given["teacher"]}, {"distill_weight": 0.4}):
        with pytest.raises(CheckpointError, match=r"model\.loss: .*allow_change model"):
            train({**half, **change})
    moved = shutil.copytree(records["teacher"], tmp_path / "moved")
    # As at stage 3 it then computes the validation loss of its rows.
    monkeypatch.setattr(corruption, "is_sharded", lambda engine: True)
    assert train({**half, "teacher": str(moved), "num_workers": 1}) == 0
    assert curve(tmp_path / "half") == curve(tmp_path / "whole")
    assert val_losses(tmp_path / "half") == val_losses(tmp_path / "whole")


def test_records_serve_any_weights_of_the_sources(given: Flags, tmp_path: Path):
    flags: Flags = {name: given[name] for name in given if name != "data_path"}
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name} text {n} of {name}"}) for n in range(120)]
        (text := tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        own = ["--tokenizer", f"{given['teacher']}/tokenizer", "--val_fraction", "0.1"]
        assert minimind(["prepare", str(text), *own, "--out", str(tmp_path / name)]) == 0

    def mixed(*weights: int) -> list[str]:
        pairs = zip("ab", weights, strict=True)
        return [f"{name}={tmp_path / name}:{weight}" for name, weight in pairs]

    folder, command = tmp_path / "records", ["data", "logits", "--top_k", "600", "--out"]
    sources = [f"--source={one}" for one in mixed(1, 3)]
    assert minimind([*command, str(folder), "--", *sources, *words(flags)]) == 0
    for name, teacher in (("taught", given["teacher"]), ("recorded", str(folder))):
        run = {**flags, "teacher": teacher, "source": mixed(2, 1), "out_dir": str(tmp_path / name)}
        assert train(run) == 0
    for one, other in zip(curve(tmp_path / "taught"), curve(tmp_path / "recorded"), strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def test_a_spike_has_its_rows_and_a_rollback_the_records_of_those_after_it(
    records: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flags = {**records, "max_steps": 40, "spike_guard": True, "spike_window": 16}
    flags |= {"save_interval": 10, "distill_weight": 0.1, "resume": "none"}
    with ExitStack() as cleanup:
        run = build_config(flags, "test")
        _, order, _ = decide(run, read_launch(os.environ), cleanup, tokenize=True).rows()
    bad, read = order.rows_for(30, 0, 1, PATIENCE), TokenShards.read_rows

    def read_rows(self: TokenShards, places: np.ndarray, row_tokens: int) -> np.ndarray:
        rows = read(self, places, row_tokens)
        if self._paths[0].name.startswith("train"):
            rows[np.isin(places, bad)] = 599
        return rows

    monkeypatch.setattr(TokenShards, "read_rows", read_rows)
    assert train(flags, out_dir=str(tmp_path / "run")) == 0
    (rolled,) = events(tmp_path / "run", "rolled_back")
    assert rolled["steps"] == [31 - MARGIN, 30 + PATIENCE]
    spikes = events(tmp_path / "run", "spike_skipped")
    assert [event["step"] for event in spikes] == [*range(31, 31 + PATIENCE)]
    for event in spikes:
        assert event["rows"]
        assert {row["row"] for row in event["rows"]} <= {*bad.tolist()}
    # The rows after those that were left out have their own records.
    steps = {line["step"]: line["loss"] for line in events(tmp_path / "run", "step")}
    assert max(steps[step] for step in range(31, 41)) < steps[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_seq_len": 16}, "records for max_seq_len = 32, and the run has 16; "),
        ({"doc_mask": True}, "records for doc_mask = False, and the run has True; "),
        ({"distill_temperature": 1.0}, r"distill_temperature = 2\.0, and the run has 1\.0; "),
        ({"data_path": "OTHER", "vocab_size": 560}, "records for tokenizer = "),
        ({"data_path": "OTHER", "tokenizer": "OF RECORDS"}, "records for text = "),
    ],
)
def test_records_of_another_run_are_refused(
    records: Flags, tmp_path: Path, change: Flags, words: str
):
    if "data_path" in change:
        other = tmp_path / "other.jsonl"
        other.write_text("\n".join(json.dumps({"text": f"{n} other text {n}"}) for n in range(900)))
        prepare = ["prepare", str(other), "--val_fraction", "0.1", "--out", str(tmp_path / "data")]
        own = change.pop("tokenizer", None) and f"{records['teacher']}/tokenizer"
        more = ["--tokenizer", own] if own else ["--vocab_size", "560"]
        assert minimind([*prepare, *more]) == 0
        change = {**change, "data_path": str(tmp_path / "data")}
    with pytest.raises(UsageError, match=words):
        train({**records, **change}, out_dir=str(tmp_path / "refused"))
    assert not (tmp_path / "refused").exists()


def test_damaged_records_end_the_run(records: Flags, tmp_path: Path):
    folder = shutil.copytree(records["teacher"], tmp_path / "records")
    flags = {**records, "teacher": str(folder)}
    content = bytearray((folder / "rows.bin").read_bytes())
    content[::1000] = bytes(len(content[::1000]))
    (folder / "rows.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.bin: was changed after it was prepared"):
        train(flags, out_dir=str(tmp_path / "damaged"))
    (folder / "rows.bin").write_bytes(content[:-8])
    with pytest.raises(DataError, match=r"rows\.bin: .* bytes are not the"):
        train(flags, out_dir=str(tmp_path / "cut"))
    (folder / "rows.bin").unlink()
    with pytest.raises(DataError, match=r"rows\.bin: .* 0 bytes are not the"):
        train(flags, out_dir=str(tmp_path / "gone"))
    (folder / "teacher.json").unlink()  # which is written last
    with pytest.raises(CheckpointError, match="records: "):
        train(flags, out_dir=str(tmp_path / "none"))


def test_records_are_of_a_model_and_of_ids_that_there_are(
    given: Flags,
    records: Flags,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    plain = {name: given[name] for name in given if name != "teacher"}
    export = tmp_path / "export"
    command = ["export", "--checkpoint", given["teacher"], "--format", "minimind"]
    assert minimind([*command, "--out", str(export)]) == 0
    (file,) = export.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"].fill_(1e38)
    weights["model.embed_tokens.weight"] *= 100
    save_file(weights, file)
    for status, flags, top_k, told in (
        (6, {**given, "teacher": str(export)}, "8", "are not finite in rows 0 to 1; "),
        (2, records, "8", "has records already"),
        (2, given, "601", "--top_k 601: the tokenizer has 600 ids"),
        (2, plain, "8", "no teacher was named"),
    ):
        command = ["data", "logits", "--top_k", top_k, "--out", str(tmp_path / "out")]
        assert minimind([*command, "--", *words(flags)]) == status
        assert told in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert minimind([*command[:2], *command[4:], "--", *words(given)]) == 5
    assert "needed, 1,000 free" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# The config.json of GPT-2 has dropout, which is the student's alone.
@pytest.mark.parametrize(("kind", "within"), [("llama", 1e-6), ("mistral", 1e-6), ("gpt2", 1e-3)])
def test_a_teacher_of_transformers(
    given: Flags, kind: str, within: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A Llama is run in our decoder; a GPT-2, and a window, in the code of transformers."""
    monkeypatch.setitem(CONFIGS, "mistral", {**CONFIGS["mistral"], "sliding_window": 16})
    folder = folder_of(tmp_path / kind, kind, template=None)
    flags = {name: given[name] for name in given if name != "vocab_size"}
    more = {"teacher": f"hf:{folder}", "doc_mask": True, "distill_weight": 1.0}
    assert train({**flags, **more}, out_dir=str(tmp_path / "run")) == 0
    (start,) = events(tmp_path / "run", "run_start")
    assert start["identity"]["model"]["loss"].startswith("0 cross-entropy + 1 KL from teacher ")
    assert all(0 < loss < 1 for loss, _ in curve(tmp_path / "run"))  # both are nearly uniform
    # A student of transformers that has the weights of its teacher has a loss of 0.
    more = {"model": f"hf:{folder}", "init_from": str(folder), "doc_mask": False}
    plain = {name: flags[name] for name in flags if name not in SHAPE}
    same = {**plain, **more, "teacher": str(folder), "distill_weight": 1.0, "max_steps": 2}
    assert train({**same, "max_seq_len": 32}, out_dir=str(tmp_path / "same")) == 0
    assert curve(tmp_path / "same")[0][0] == pytest.approx(0.0, abs=within)


def test_a_teacher_that_sees_later_tokens_is_refused(
    given: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setitem(CONFIGS, "bert", {**sizes, "max_position_embeddings": 32})
    folder = folder_of(tmp_path / "bert", "bert", template=None)
    flags = {name: given[name] for name in given if name != "vocab_size"}
    with pytest.raises(UsageError, match=r"^teacher = .*attends to later tokens"):
        train({**flags, "teacher": str(folder)}, out_dir=str(tmp_path / "run"))


def test_weights_are_read_in_the_dtype_of_products(tmp_path: Path):
    """The largest is beside them in fp32 while it is read; the digest is that of fp32."""
    shape = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
    model = MiniMindForCausalLM(MiniMindConfig(**shape, max_position_embeddings=64)).eval()
    model.save_pretrained(tmp_path)
    weights = [p.numel() for p in model.parameters()]
    digests, ids = set(), torch.arange(20).reshape(2, 10)
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        run = parse_flags(["--teacher", str(tmp_path), "--dtype", dtype])
        teacher = Teacher.of(run)
        most = most_allocated(lambda teacher=teacher, run=run: teacher.distillation(run, 0))
        assert size * sum(weights) < most < size * sum(weights) + 8 * max(weights), dtype
        digests.add(teacher.digest)
        own = Teacher.of(run).distillation(run, 0).teacher
        expected = model.to(getattr(torch, dtype))(ids).logits
        assert torch.equal(own(ids).logits, expected)
    assert len(digests) == 1


def test_a_teacher_that_transformers_cannot_build_is_refused(tmp_path: Path):
    config = folder_of(tmp_path / "llama", "llama", template=None) / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "hidden_act": "nope"}))
    with pytest.raises(CheckpointError, match=r"config\.json: is refused by transformers .*nope"):
        Teacher.of(parse_flags(["--teacher", str(tmp_path / "llama")]))


def test_plan_counts_the_weights_of_a_teacher(
    given: Flags, records: Flags, capsys: pytest.CaptureFixture[str]
):
    words = [f"--{name}={given[name]}" for name in (*SHAPE, "dtype", "device")]
    held = {}
    for teacher in ("", records["teacher"], given["teacher"]):
        more = ["--teacher", teacher] if teacher else []
        assert minimind(["plan", *words, "--deepspeed_config", "none", *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        held[teacher] = float(next(line for line in lines if line[:1] == "*").split()[2])
    parameters = sum(p.numel() for p in load_checkpoint(given["teacher"])[0].parameters())
    assert f"of the teacher {parameters:,}" in " ".join(lines)
    assert held[records["teacher"]] == held[""]
    more = held[given["teacher"]] - held[""]
    assert more == pytest.approx(4 * parameters / 2**20, abs=0.011)


@pytest.mark.long
def test_two_processes_train_as_one_at_any_stage(launch: Launcher, given: Flags, tmp_path: Path):
    """Also where they share every matrix of the student, and where a step has rows of padding."""
    wide = {**given, "teacher": None, "dim": 48, "n_layers": 2, "max_seq_len": 64}
    assert train(wide, out_dir=str(tmp_path / "teacher")) == 0
    flags, losses = "--dtype float32 --distill_temperature 2 --teacher", {}
    folder, alone = tmp_path / "records", f"{flags} {tmp_path / 'teacher'} --deepspeed_config none"
    words = launch.command(tmp_path / "none", alone)[2:]
    assert minimind(["data", "logits", "--top_k", "8", "--out", str(folder), "--", *words]) == 0
    cases = {
        "one": (1, "--deepspeed_config none --batch_size 4"),
        "stage_2": (2, ""),
        "stage_3": (2, "--deepspeed_config zero3 --verify_interval 2"),
        "tensor": (2, "--tensor_parallel 2 --batch_size 4"),
        "padded_one": (1, "--deepspeed_config none --global_batch_size 7 --batch_size 7"),
        "padded_two": (2, "--global_batch_size 7 --batch_size 2"),
    }
    for teacher in ("teacher", "records"):
        for name, (processes, more) in cases.items():
            out = tmp_path / f"{teacher}_{name}"
            done = launch.run(out, f"{flags} {tmp_path / teacher} {more}", processes)
            assert done.status == 0, done.stderr
            losses[name] = done.losses()
        for name in ("stage_2", "stage_3", "tensor"):
            assert losses[name] == pytest.approx(losses["one"], rel=1e-5), (teacher, name)
        assert losses["padded_two"] == pytest.approx(losses["padded_one"], rel=1e-5), teacher
