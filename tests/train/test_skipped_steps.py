"""Skipped steps: what is dumped, what is counted against the budget, and how a run ends over it."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import minimind
from minimind.config.parse import parse_flags
from minimind.data.rows.order import Order
from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer
from minimind.engine.engine import StepResult
from minimind.errors import NumericError
from minimind.model import loss as model_loss
from minimind.train.failures import MAX_PENDING, MAX_ROWS, SkippedSteps
from tests.conftest import PACE, SHAPE
from tools.runs import events

NAN = float("nan")
train: Any = minimind.train


class Ear:
    """Records what a RunLogger is given."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.events: list[dict[str, Any]] = []

    def print(self, text: str) -> None:
        self.said.append(text)

    def event(self, name: str, **facts: Any) -> None:
        self.events.append({"event": name, **facts})


def alone(out_dir: Path, flags: str, rows: int = 2) -> tuple[SkippedSteps, Ear]:
    """One rank that reads two micro-batches of `rows` rows a step."""
    run, ear = parse_flags([*flags.split(), "--out_dir", str(out_dir)]), Ear()
    ranks: Any = SimpleNamespace(rank=0, world_size=1, gather=lambda value: [value])
    logger: Any = ear
    order, read = Order(4 * rows, 2 * rows, 1), lambda step: micro_batches(rows)
    return SkippedSteps(run, ranks, order, read, repr, logger), ear


def result(values: list[float], skipped_so_far: Any, is_skipped: Any) -> StepResult:
    losses = [torch.tensor(loss) for loss in values]
    return StepResult(tuple(losses), (torch.tensor(3),) * 2, NAN, 1.0, skipped_so_far, is_skipped)


def micro_batches(rows: int = 2) -> list[torch.Tensor]:
    return list(torch.arange(2 * rows * 3).view(2, rows, 3))


def lines_of(out_dir: Path) -> list[dict[str, Any]]:
    text = (out_dir / "nonfinite_rows.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_a_step_that_was_taken_is_passed_over(tmp_path):
    steps, ear = alone(tmp_path, "")
    steps.check(1, result([1.0, 2.0], 0, False))
    assert (ear.said, ear.events, list(tmp_path.iterdir())) == ([], [], [])


def test_a_skipped_step_is_one_line_one_event_and_its_rows(tmp_path):
    steps, ear = alone(tmp_path, "--max_skipped 3")
    steps.check(2, result([1.0, NAN], 1, True))
    assert ear.events == [{"event": "step_skipped", "step": 2, "reason": "loss", "ranks": [0]}]
    (text,) = ear.said
    assert text == (
        "step 2 is skipped: the loss is not finite on rank 0 (micro-batch 1); 1 in all, 3 are"
        " allowed (--max_skipped)"
    )
    rows = steps.order.rows_for(1, 0, 1).tolist()
    known = {"step": 2, "reason": "loss", "rank": 0, "micro_batch": 1, "loss": None}
    assert lines_of(tmp_path) == [
        {**known, "position": 6, "row": rows[2], "tokens": [6, 7, 8], "text": "[6, 7, 8]"},
        {**known, "position": 7, "row": rows[3], "tokens": [9, 10, 11], "text": "[9, 10, 11]"},
    ]


def test_rows_of_padding_are_not_dumped(tmp_path):
    """Three rows and one of padding, then two rows and two of padding."""
    for rows, places in ((3, [5]), (2, [])):
        steps, _ = alone(tmp_path / str(rows), "")
        steps.path.parent.mkdir()
        steps.order = Order(4 * rows, rows, 1)
        steps.check(2, result([1.0, NAN], 1, True))
        numbers = steps.order.rows_for(1, 0, 1).tolist()
        known = {"step": 2, "reason": "loss", "rank": 0, "micro_batch": 1, "loss": None}
        expected = {**known, "row": numbers[-1], "tokens": [6, 7, 8], "text": "[6, 7, 8]"}
        found = lines_of(tmp_path / str(rows))
        assert found == [{**expected, "position": place} for place in places]


def test_tokens_that_are_no_targets_are_dumped_as_ids(tmp_path):
    steps, _ = alone(tmp_path, "")
    steps.batches_at = lambda step: [~rows for rows in micro_batches()]
    steps.check(2, result([1.0, NAN], 1, True))
    assert [row["tokens"] for row in lines_of(tmp_path)] == [[6, 7, 8], [9, 10, 11]]


def test_of_a_gradient_alone_the_range_of_rows_is_reported(tmp_path):
    steps, ear = alone(tmp_path, "")
    steps.check(2, result([1.0, 2.0], 1, True))
    assert lines_of(tmp_path) == [{"step": 2, "reason": "gradient", "positions": [4, 8]}]
    assert ear.events == [{"event": "step_skipped", "step": 2, "reason": "gradient", "ranks": []}]
    assert "the gradient is not finite, though every loss is" in ear.said[0]


def test_no_more_than_so_many_rows_of_a_step_are_dumped_and_that_is_reported(tmp_path):
    steps, _ = alone(tmp_path, "", rows=MAX_ROWS)
    steps.check(1, result([NAN, NAN], 1, True))
    *rows, last = lines_of(tmp_path)
    assert [row["position"] for row in rows] == list(range(MAX_ROWS))
    assert last == {"step": 1, "rank": 0, "rows_left_out": MAX_ROWS}


@pytest.mark.parametrize("flag", ["sequence_parallel", "tensor_parallel"])
def test_rows_that_a_group_shares_are_dumped_and_counted_once(tmp_path, flag):
    """Of two groups of two ranks the first has an infinite loss, in other parts of its rows."""
    flags = f"--{flag} 2 --max_skipped 1 --out_dir {tmp_path}"
    losses = [[1.0, NAN, 1.0], [NAN, NAN, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    order, ear = Order(12 * MAX_ROWS, 6 * MAX_ROWS, 1), Ear()
    rows = list(torch.arange(3 * MAX_ROWS * 2).view(3, MAX_ROWS, 2))
    meeting, shares = Barrier(4), [None] * 4

    def check(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            shares[rank] = value
            meeting.wait(60)
            every = list(shares)
            meeting.wait(60)
            return every

        ranks: Any = SimpleNamespace(rank=rank, world_size=4, gather=gather)
        logger: Any = ear if rank == 0 else Ear()
        run = parse_flags(flags.split())
        steps = SkippedSteps(run, ranks, order, lambda step: rows, repr, logger)
        values = [torch.tensor(loss) for loss in losses[rank]]
        steps.check(1, StepResult(tuple(values), (torch.tensor(3),) * 3, NAN, 1.0, 1, True))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(check, range(4)))
    *dumped, last = lines_of(tmp_path)
    assert [row["position"] for row in dumped] == list(range(MAX_ROWS))
    assert last == {"step": 1, "rank": 0, "rows_left_out": MAX_ROWS}
    assert ear.events[0]["ranks"] == [0, 1]
    assert "rank 0 (micro-batch 1), rank 1 (micro-batch 0, 1)" in ear.said[0]


def test_what_only_the_device_knows_is_requested_when_due_or_of_many_steps(tmp_path):
    steps, ear = alone(tmp_path, "--max_skipped 3")
    for step in range(1, MAX_PENDING):
        so_far, is_skipped = torch.tensor(int(step >= 2)), torch.tensor(step == 2)
        steps.check(step, result([1.0, NAN], so_far, is_skipped), is_due=False)
    assert not ear.events
    steps.check(MAX_PENDING, result([1.0, 2.0], torch.tensor(1), torch.tensor(False)), is_due=False)
    assert [event["step"] for event in ear.events] == [2]
    assert "; 1 in all" in ear.said[0]
    assert {line["position"] for line in lines_of(tmp_path)} == {6, 7}  # of that step's rows
    steps.check(65, result([NAN, 2.0], torch.tensor(2), torch.tensor(True)))
    assert [event["step"] for event in ear.events] == [2, 65]


@pytest.mark.parametrize(
    ("dtype", "course", "ends_at"),
    [
        ("bfloat16", "1010101", 5),  # skipped, taken, ...: the third is one too many
        ("float32", "1110", 3),
        ("float16", "110110110111", 12),
    ],
)
def test_the_budget_is_of_all_steps_but_in_float16_of_those_in_a_row(
    tmp_path, dtype, course, ends_at
):
    steps, _ = alone(tmp_path, f"--max_skipped 2 --dtype {dtype}")
    so_far = 0
    for step, is_skipped in enumerate(map(int, course), 1):
        so_far += is_skipped
        if step == ends_at:
            with pytest.raises(NumericError, match=r"max_skipped = 2 \(--max_skipped\)") as caught:
                steps.check(step, result([1.0, NAN], so_far, True))
            assert (caught.value.status, caught.value.cause_rank) == (6, 0)
            assert ("initial_scale_power" in str(caught.value)) is (dtype == "float16")
            break
        steps.check(step, result([1.0, NAN], so_far, bool(is_skipped)))
    assert lines_of(tmp_path)[-1]["step"] == ends_at  # dumped before the end


@pytest.fixture
def spoilt_losses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The loss of these forward passes, counted from 0, is infinite; its gradient is not."""
    calls, spoilt = iter(range(10**6)), []
    true_loss = model_loss.next_token_loss

    def loss(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        value, count = true_loss(*given, **named)
        return (value + math.inf if next(calls) in spoilt else value), count

    monkeypatch.setattr(model_loss, "next_token_loss", loss)
    return spoilt


def test_a_run_over_its_budget_ends_with_6_and_resumed_still_knows_its_count(
    corpus, tmp_path, spoilt_losses
):
    flags = parse_flags(f"{SHAPE} {PACE}".split())
    given = {n: getattr(flags, n) for n in flags.sources if flags.sources[n].startswith("--")}
    places = {"data_path": [str(corpus)], "out_dir": str(tmp_path), "cache_dir": str(tmp_path)}
    given |= {**places, "deepspeed_config": "none", "save_interval": 3, "max_skipped": 1}
    spoilt_losses += [2, 9]  # two micro-batches a step: of steps 2 and 5
    with pytest.raises(
        NumericError, match=r"step 5 is skipped: .* 2 in all, more than max_skipped"
    ):
        train(given)
    assert [e["step"] for e in events(tmp_path, "step_skipped")] == [2, 5]
    report = [(e["step"], e["skipped"], e["loss"]) for e in events(tmp_path, "step")]
    assert [(step, skipped) for step, skipped, _ in report] == [(1, 0), (2, 1), (3, 1), (4, 1)]
    assert report[1][2] is None
    tokenizer = SentencePieceTokenizer(tmp_path / "tokenizer")
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [2, 2, 5, 5]
    for line in lines:
        assert line["text"] == tokenizer.decode(line["tokens"])
        assert len(line["tokens"]) == 65
        assert line["text"].strip()
    spoilt_losses.clear()
    assert train(given, stop_at_step=6) == 75
    resumed = [(e["step"], e["skipped"]) for e in events(tmp_path, "step")][len(report) :]
    assert resumed == [(4, 1), (5, 1), (6, 1)]
