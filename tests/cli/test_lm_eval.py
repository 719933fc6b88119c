"""A model directory in lm-eval-harness, on the repository's own task; and in our commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from minimind.cli.main import main
from minimind.data.tokenizer.load import Tokenizer, load_tokenizer
from tests.conftest import ROOT, Trained

FOLDER = ROOT / "examples" / "lm_eval"
TASK = "python_code"


def questions() -> list[dict[str, Any]]:
    lines = (FOLDER / f"{TASK}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def exported(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of random weights, with the tokenizer of the trained run."""
    place = tmp_path_factory.mktemp("exported")
    write_llama(place, load_tokenizer(trained.run / "tokenizer"))
    return place


def write_llama(place: Path, tokenizer: Tokenizer, positions: int = 64) -> None:
    """Write a small Llama of random weights for this tokenizer."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
    )
    LlamaForCausalLM(config).save_pretrained(place)
    tokenizer.save(place)


def log_likelihoods(place: Path) -> list[list[float]]:
    """Of each question, that of each choice behind it, in float64."""
    model = LlamaForCausalLM.from_pretrained(place, dtype=torch.float32).double().eval()
    tokenizer, found = load_tokenizer(place), []
    for question in questions():
        own = []
        for choice in question["choices"]:
            query = question["query"].rstrip()  # lm-eval moves blanks to the choice
            ids = tokenizer.encode(question["query"] + choice)
            begin = len(tokenizer.encode(query))
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            own.append(sum(float(logits[n - 1, ids[n]]) for n in range(begin, len(ids))))
        found.append(own)
    return found


def test_every_question_of_the_task_has_one_answer_among_its_choices():
    task = yaml.safe_load((FOLDER / f"{TASK}.yaml").read_text(encoding="utf-8"))
    assert (ROOT / task["dataset_kwargs"]["data_files"]["test"]).samefile(FOLDER / f"{TASK}.jsonl")
    assert (task["task"], task["output_type"]) == (TASK, "multiple_choice")
    assert len(questions()) == 20
    for question in questions():
        assert question.keys() == {"query", "choices", "answer"}
        assert len(set(question["choices"])) == 4
        assert question["choices"][question["answer"]]


def test_lm_eval_prints_the_accuracy_that_the_likelihoods_give(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(ROOT)
    import warnings

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other libraries
        import lm_eval
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table

        evaluate: Any = lm_eval.simple_evaluate  # whose decorator hides its parameters
        found: Any = evaluate(
            model="hf",
            model_args={"pretrained": str(exported), "dtype": "float32"},
            tasks=[TASK],
            task_manager=TaskManager(include_path=str(FOLDER), include_defaults=False),
            device="cpu",
            batch_size=4,
            bootstrap_iters=0,
        )
    print(make_table(found))
    own = log_likelihoods(exported)
    right = [
        max(range(4), key=scores.__getitem__) == question["answer"]
        for scores, question in zip(own, questions(), strict=True)
    ]
    assert found["results"][TASK]["acc,none"] == pytest.approx(sum(right) / len(right))
    for sample in found["samples"][TASK]:
        theirs = [float(score) for score, _ in sample["filtered_resps"]]
        assert theirs == pytest.approx(own[sample["doc_id"]], abs=1e-4)


def test_our_commands_read_the_directory_too(
    exported: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
):
    ask = ["--model", str(exported), "--device", "cpu"]
    assert main(["eval", *ask, "--data_path", str(trained.mixed), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == str(exported)
    assert found["tokens"] > 0
    assert found["loss"] > 6.4  # of random weights: worse than log(600)
    assert main(["generate", *ask, "--prompt", "曉處", "--temperature", "0"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("曉處")
    assert str(exported) in output.err


def test_weights_that_do_not_fit_are_reported(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    import shutil

    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert main(["generate", "--model", str(tmp_path), "--prompt", "a"]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}: has no 'model.layers.2." in line
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert main(["generate", "--model", str(tmp_path), "--prompt", "a"]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/model.safetensors: has a header of fewer than 2 or" in line
