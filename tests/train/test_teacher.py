"""--teacher: a run that is distilled, from its flags to its end, and teachers that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import minimind.train as training
from minimind.cli.main import main as minimind
from minimind.config.parse import parse_flags
from minimind.errors import CheckpointError, UsageError
from minimind.inference.load_model import load_checkpoint
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.train.teacher import Teacher
from tests.conftest import Launcher
from tests.engine.test_eight_bit import most_allocated
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
    for name, more in (("alone", {}), ("taught", {"teacher": str(tmp_path / "big_chat")})):
        assert train({**tuned, **more}, out_dir=str(tmp_path / name)) == 0
        losses.append(val_losses(tmp_path / name)[-1])
    assert losses[1] < losses[0]


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


def test_plan_counts_the_weights_of_a_teacher(given: Flags, capsys: pytest.CaptureFixture[str]):
    words = [f"--{name}={given[name]}" for name in (*SHAPE, "dtype", "device")]
    held = {}
    for teacher in ([], ["--teacher", given["teacher"]]):
        assert minimind(["plan", *words, "--deepspeed_config", "none", *teacher]) == 0
        lines = capsys.readouterr().out.splitlines()
        held[bool(teacher)] = next(line for line in lines if line[:1] == "*").split()[2]
    parameters = sum(p.numel() for p in load_checkpoint(given["teacher"])[0].parameters())
    assert f"of the teacher {parameters:,}" in " ".join(lines)
    more = float(held[True]) - float(held[False])
    assert more == pytest.approx(4 * parameters / 2**20, abs=0.011)


@pytest.mark.long
def test_two_processes_train_as_one_at_any_stage(launch: Launcher, given: Flags, tmp_path: Path):
    """Also where they share every matrix of the student, and where a step has rows of padding."""
    wide = {**given, "teacher": None, "dim": 48, "n_layers": 2, "max_seq_len": 64}
    assert train(wide, out_dir=str(tmp_path / "teacher")) == 0
    flags = f"--dtype float32 --teacher {tmp_path / 'teacher'} --distill_temperature 2"
    cases = {
        "one": (1, "--deepspeed_config none --batch_size 4"),
        "stage_2": (2, ""),
        "stage_3": (2, "--deepspeed_config zero3"),
        "tensor": (2, "--tensor_parallel 2 --batch_size 4"),
        "padded_one": (1, "--deepspeed_config none --global_batch_size 7 --batch_size 7"),
        "padded_two": (2, "--global_batch_size 7 --batch_size 2"),
    }
    losses = {}
    for name, (processes, more) in cases.items():
        done = launch.run(tmp_path / name, f"{flags} {more}", processes)
        assert done.status == 0, done.stderr
        losses[name] = done.losses()
    for name in ("stage_2", "stage_3", "tensor"):
        assert losses[name] == pytest.approx(losses["one"], rel=1e-5), name
    assert losses["padded_two"] == pytest.approx(losses["padded_one"], rel=1e-5)
