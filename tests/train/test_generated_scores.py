"""Scores of tasks whose answers are generated: as in `minimind eval --tasks`, on any ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import minimind.train as training
from minimind.checkpoint.directory import published_checkpoints, step_of
from minimind.cli.main import main
from minimind.config.tasks import read_tasks
from minimind.errors import UsageError
from minimind.inference.load_model import load_model
from minimind.inference.questions import Questions
from minimind.inference.scores import Shares, StoppedError
from minimind.inference.shared_lm import SharedLM
from tests.conftest import SMALL, Trained, sentences
from tests.train.test_scores import events, flags_of

train: Any = training  # a package that is called like a function
QUESTIONS = 20
# Right is an answer with the first letter of the target.
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{letter}}}}"
generation_kwargs: {{until: ["x"], max_gen_toks: {most}, {sampling}}}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    regexes_to_ignore: ["(?s)(?<=[a-z]).*", "^[^a-z]+"]
"""
GREEDY, SAMPLED = "do_sample: false", "do_sample: true, temperature: 1.0"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the tasks `greedy` and `sampled`, and those that are refused."""
    place = tmp_path_factory.mktemp("tasks")
    words = " ".join(sentences(1, 20)).split()
    questions = [
        {"text": " ".join(words[n : n + 1 + n % 7]), "letter": "aeiotnsrhl"[n % 10]}
        for n in range(QUESTIONS)
    ]
    (place / "q.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    for name, sampling, most in (
        ("greedy", GREEDY, 8),
        ("sampled", SAMPLED, 8),
        ("long", GREEDY, SMALL["max_seq_len"]),
        ("undecided", "do_sample: true", 8),
        ("misspelt", "do_sample: false, temprature: 1.0", 8),
        ("many", "num_return_sequences: 2", 8),
    ):
        task = TASK.format(name=name, data=place / "q.jsonl", sampling=sampling, most=most)
        (place / f"{name}.yaml").write_text(task)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
            patch.setenv(name, "1")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hf")))
        yield place


def scored(place: Path, *names: str) -> dict[str, Any]:
    tasks = ",".join(str(place / name) for name in names)
    scores = {"eval_tasks": tasks, "eval_tasks_interval": 3, "eval_tasks_limit": QUESTIONS}
    return {**scores, "save_interval": 3, "keep_last": 9}


def test_they_are_those_of_the_checkpoint(
    trained: Trained, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    assert train(flags_of(trained, **scored(tasks, "greedy", "sampled")), out_dir=str(out)) == 0
    found = {event["step"]: event["tasks"] for event in events(out, "scores")}
    assert [*found] == [3, 6]
    for path in published_checkpoints(out / "checkpoints"):
        capsys.readouterr()
        words = ["--device", "cpu", "--limit", str(QUESTIONS), "--json"]
        names = [str(tasks / name) for name in ("greedy", "sampled")]
        assert main(["eval", "--checkpoint", str(path), *words, "--tasks", *names]) == 0
        assert json.loads(capsys.readouterr().out)["tasks"] == found[step_of(path)]
    values = {one["value"] for step in found.values() for one in step.values()}
    assert len(values) > 1
    assert found[6]["greedy"]["chance"] == 0
    assert found[6]["greedy"]["questions"] == QUESTIONS


@pytest.fixture(scope="module")
def asked(trained: Trained, tasks: Path) -> Callable[..., Any]:
    """The scores of a trained model by these shares."""
    model, tokenizer, _ = load_model(str(trained.run), None)

    def ask(shares: Shares, *names: str) -> Any:
        wanted = read_tasks([str(tasks / name) for name in names], "by")
        positions = model.config.max_position_embeddings
        questions = Questions.of(wanted, pytest.fail, tokenizer, positions, QUESTIONS, "by")
        return questions.scores(model.eval(), shares)

    return ask


@pytest.mark.parametrize("name", ["greedy", "sampled"])
@pytest.mark.parametrize("is_collective", [False, True])
def test_two_shares_have_the_scores_of_one(
    asked: Callable[..., Any], name: str, is_collective: bool
):
    kept: list[Any] = []

    def keep(texts: Any) -> Any:
        kept.append(texts)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        asked(Shares(1, 2, is_collective=is_collective, gather=keep), name)
    shares = Shares(0, 2, is_collective=is_collective, gather=lambda texts: [texts, *kept])
    assert asked(shares, name) == asked(Shares(), name)
    assert [*kept[0]] == ([0, 1, 2] if is_collective else [1])


def test_a_task_has_the_same_score_beside_others(asked: Callable[..., Any]):
    together = asked(Shares(), "greedy", "sampled")
    for name in ("greedy", "sampled"):
        assert asked(Shares(), name) == {name: together[name]}


def test_a_stop_ends_them_after_a_batch(asked: Callable[..., Any], monkeypatch):
    counted = []
    generate = SharedLM._model_generate

    def counting(self: Any, *given: Any, **more: Any) -> Any:
        counted.append(1)
        return generate(self, *given, **more)

    monkeypatch.setattr(SharedLM, "_model_generate", counting)
    with pytest.raises(StoppedError):
        asked(Shares(is_stopping=lambda: len(counted) == 2), "greedy")
    assert len(counted) == 2


def test_a_text_does_not_depend_on_its_neighbours(trained: Trained, tasks: Path, monkeypatch):
    """Texts of a batch are padded on the left."""
    texts = []
    generate = SharedLM.generate_until

    def recorded(self: Any, *given: Any, **more: Any) -> Any:
        texts.append(generate(self, *given, **more))
        return texts[-1]

    monkeypatch.setattr(SharedLM, "generate_until", recorded)
    words = ["--checkpoint", str(trained.run), "--device", "cpu", "--include_path", str(tasks)]
    for size in ("1", "3"):
        assert main(["eval", *words, "--lm_eval", "greedy", "--batch_size", size]) == 0
    assert texts[0] == texts[1]
    assert len({*texts[0]}) > 1


def test_texts_that_do_not_fit_the_model_are_refused(
    trained: Trained, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    reason = "long generates up to 64 tokens, and the model has 64 positions; lower max_gen_toks"
    with pytest.raises(UsageError, match=f"eval_tasks.*{reason}"):
        train(flags_of(trained, **scored(tasks, "long")), out_dir=str(tmp_path / "out"))
    words = ["--checkpoint", str(trained.run), "--device", "cpu", "--include_path", str(tasks)]
    assert main(["eval", *words, "--lm_eval", "long"]) == 2
    assert f"--lm_eval {reason}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("undecided", "has do_sample, but no temperature above 0"),
        ("misspelt", "has temprature in the generation_kwargs"),
        ("many", "has num_return_sequences in the generation_kwargs"),
    ],
)
def test_settings_that_generate_no_answer_are_refused(
    asked: Callable[..., Any], name: str, reason: str
):
    with pytest.raises(UsageError, match=f"by: {name} {reason}"):
        asked(Shares(), name)
