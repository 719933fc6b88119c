"""`minimind eval --lm_eval`: tasks of lm-eval, as text and in the model's chat template."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from minimind.cli.main import main
from minimind.data.chat.conversations import Message
from minimind.data.chat.template import DEFAULT_TEMPLATE, ChatTemplate
from minimind.data.tokenizer.load import load_tokenizer
from minimind.inference.load_model import load_model
from tests.cli.test_lm_eval import FOLDER, TASK, questions
from tests.conftest import ROOT, Trained
from tools.runs import MEETING


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))


def evaluated(place: Path, *more: str) -> int:
    words = ["eval", "--model", str(place), "--device", "cpu", "--lm_eval", TASK]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other libraries
        return main([*words, "--include_path", str(FOLDER), *more])


def share_right(place: Path, as_chat: bool) -> float:
    """Of the questions, how many have the most likely choice right."""
    model, tokenizer, _ = load_model(None, str(place))
    model.config.doc_mask = False
    template = ChatTemplate(DEFAULT_TEMPLATE, tokenizer)
    right = 0
    for question in questions():
        scores = []
        for choice in question["choices"]:
            query, text = question["query"], question["query"].rstrip()
            # Blanks at the end of a text belong to the choice behind it.
            ids, begin = tokenizer.encode(query + choice), len(tokenizer.encode(text))
            if as_chat:
                prompt = template.prompt([Message("user", query)])
                ids, begin = [*prompt, *tokenizer.encode(choice)], len(prompt)
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            scores.append(sum(float(logits[n - 1, ids[n]]) for n in range(begin, len(ids))))
        right += max(range(4), key=scores.__getitem__) == question["answer"]
    return right / len(questions())


@pytest.mark.usefixtures("offline")
def test_requests_are_in_the_chat_template_or_plain(
    chat_model: Path, capsys: pytest.CaptureFixture[str]
):
    found: dict[bool, Any] = {}
    for as_chat in (False, True):
        assert evaluated(chat_model, "--json", *(["--chat"] if as_chat else [])) == 0
        found[as_chat] = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found[as_chat]["chat"] is as_chat
        accuracy = found[as_chat]["tasks"][TASK]["acc,none"]
        assert accuracy == pytest.approx(share_right(chat_model, as_chat))
    assert found[True]["tasks"][TASK] != found[False]["tasks"][TASK]
    assert evaluated(chat_model, "--chat", "--limit", "2") == 0
    table = capsys.readouterr().out
    assert table.startswith(str(chat_model))
    assert f"|{TASK}" in table


@pytest.mark.usefixtures("offline")
def test_the_ids_of_a_request_are_those_of_the_template(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
):
    from minimind.inference import shared_lm

    wrapper: Any = shared_lm.SharedLM
    seen: list[tuple[list[int], list[int]]] = []
    score = wrapper._loglikelihood_tokens

    def recorded(self: Any, requests: list[Any], *rest: Any, **more: Any) -> Any:
        seen.extend((context, continuation) for _, context, continuation in requests)
        return score(self, requests, *rest, **more)

    monkeypatch.setattr(wrapper, "_loglikelihood_tokens", recorded)
    assert evaluated(chat_model, "--chat", "--limit", "3") == 0
    tokenizer = load_tokenizer(chat_model)
    template = ChatTemplate(DEFAULT_TEMPLATE, tokenizer)
    assert seen == [
        (template.prompt([Message("user", question["query"])]), tokenizer.encode(choice))
        for question in questions()[:3]
        for choice in question["choices"]
    ]


@pytest.mark.usefixtures("offline")
def test_a_model_without_a_template_is_refused(
    trained: Trained, capsys: pytest.CaptureFixture[str]
):
    words = ["eval", "--checkpoint", str(trained.run), "--lm_eval", TASK, "--chat"]
    assert main([*words, "--include_path", str(FOLDER), "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no chat template beside its tokenizer; ask in plain text, or" in line


@pytest.mark.usefixtures("offline")
def test_a_hub_out_of_reach_is_named(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def evaluate(**_: object) -> None:
        raise ConnectionError("Couldn't reach it")  # as `datasets` does

    monkeypatch.setattr("lm_eval.simple_evaluate", evaluate)
    words = ["eval", "--checkpoint", str(trained.run), "--lm_eval", TASK]
    assert main([*words, "--include_path", str(FOLDER), "--device", "cpu"]) == 2
    message = f"--lm_eval {TASK}: the questions cannot be read (Couldn't reach it); connect"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --data_path TEXT, --tasks TASK, or --lm_eval TASK"),
        (
            ["--data_path", "a", "--lm_eval", "b"],
            "--data_path and --lm_eval cannot be used together",
        ),
        (["--tasks", "cloze", "--lm_eval", "b"], "--tasks takes the tasks of both"),
        (["--tasks", "cloze", "--chat"], "--chat and --tasks cannot be used together"),
        (["--tasks", "cloze"], "needs --data_path with --model; name some text"),
        (["--data_path", "a", "--dtype", "bfloat16"], "--dtype has no effect without --tasks"),
        (["--data_path", "a", "--chat"], "--chat has no effect without --lm_eval"),
        (
            ["--data_path", "a", "--limit", "3"],
            "--limit 3 has no effect without --lm_eval or --tasks",
        ),
        (["--lm_eval", "b", "--split", "val"], "--split and --lm_eval cannot be used together"),
        (
            ["--lm_eval", "b", "--no-doc_mask"],
            "--no-doc_mask and --lm_eval cannot be used together",
        ),
        pytest.param(
            *(
                ["--lm_eval", "nothing"],
                "--lm_eval: nothing is not a task; `lm_eval ls tasks` lists",
            ),
            marks=pytest.mark.long,  # all tasks of lm-eval are listed
        ),
    ],
)
def test_flags_without_effect_and_unknown_tasks_are_refused(
    words: list[str], message: str, chat_model: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["eval", "--model", str(chat_model), "--device", "cpu", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_several_processes_and_a_missing_package_are_refused(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert evaluated(chat_model) == 2
    assert "--lm_eval needs the package lm_eval, which is not" in capsys.readouterr().err
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    for name, value in {**ranks, **MEETING}.items():
        monkeypatch.setenv(name, value)
    assert evaluated(chat_model) == 2
    assert "runs in one process, and 2 were started" in capsys.readouterr().err
