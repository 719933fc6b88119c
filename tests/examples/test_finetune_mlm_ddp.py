"""examples/finetune_mlm_ddp.py: two processes train as one does on the same rows; what is saved."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DataParallel, scatter_gather

from tests.examples.conftest import EXAMPLES, Start, by_every_launcher, promised, shape

NAME = "finetune_mlm_ddp.py"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is without a GPU")


@pytest.fixture(scope="module")
def example() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(EXAMPLES)
        return importlib.import_module("finetune_mlm_ddp")


@pytest.fixture(scope="module")
def learnt(example: Any) -> Any:
    return example.tokenizer_and_rows()


def losses(report: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\S+)", report)]


def weights(place: Path) -> dict[str, torch.Tensor]:
    return torch.load(place / "weights.pt", weights_only=True)


def test_every_rank_has_its_own_rows_and_together_they_are_those_of_one_process(example, learnt):
    tokenizer, rows = learnt
    masking = example.Masking(tokenizer, len(rows), 1)
    masking.epoch = 2

    def batches(batch_size: int, rank: int, world: int) -> list[dict[str, torch.Tensor]]:
        loader, sampler = example.loader_of(rows, masking, batch_size, 1, rank, world)
        sampler.set_epoch(2)
        return [batch for _, batch in zip(range(3), loader, strict=False)]

    for whole, *shares in zip(batches(8, 0, 1), batches(4, 0, 2), batches(4, 1, 2), strict=True):
        order = whole["row"].argsort()
        joined = {name: torch.cat([share[name] for share in shares]) for name in whole}
        mixed = joined["row"].argsort()
        assert len(set(whole["row"].tolist())) == 8
        for name in whole:  # the tokens that are hidden, too
            assert torch.equal(whole[name][order], joined[name][mixed]), name


def test_set_epoch_gives_another_order_and_without_it_there_is_one_for_all(example, learnt):
    tokenizer, rows = learnt
    masking = example.Masking(tokenizer, len(rows), 1)
    _, sampler = example.loader_of(rows, masking, 4, 1, 0, 2)
    first, again = list(sampler), list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert first == again
    assert first != second
    assert len(second) == len(rows) // 2


def test_about_one_token_in_seven_is_hidden_and_other_ones_in_another_epoch(example, learnt):
    tokenizer, rows = learnt
    masking = example.Masking(tokenizer, len(rows), 1)
    numbered = list(enumerate(rows))[:100]
    batch = masking(numbered)
    hidden = batch["labels"] != -100
    assert 0.13 < hidden.float().mean() < 0.16  # 0.15 of all but the first and last of each row
    assert not hidden[:, 0].any()
    assert not hidden[:, -1].any()
    assert torch.equal(batch["labels"][hidden], torch.tensor([r for _, r in numbered])[hidden])
    masking.epoch = 1
    assert not torch.equal(masking(numbered)["labels"], batch["labels"])


@without_gpu
def test_without_gpus_data_parallel_calls_the_module_and_gathers_nothing():
    module = torch.nn.Linear(2, 1)
    wrapped = DataParallel(module)
    rows = torch.ones(4, 2)
    assert wrapped.device_ids == []
    assert torch.equal(wrapped(rows), module(rows))
    with pytest.raises(AssertionError, match="not implemented for CPU tensors"):
        scatter_gather.gather([torch.ones(()), torch.ones(())], torch.device("cpu"))
    assert list(wrapped.state_dict()) == [f"module.{name}" for name in module.state_dict()]


def test_the_mean_of_shares_is_not_the_mean_of_all_where_they_have_other_counts(example, learnt):
    """What `.mean()` makes of the vector that several GPUs would give; the shares are cut here."""
    tokenizer, rows = learnt
    torch.manual_seed(0)
    model = example.AlbertForMaskedLM(
        example.AlbertConfig(
            vocab_size=len(tokenizer), embedding_size=8, hidden_size=8, num_hidden_layers=1,
            num_attention_heads=1, intermediate_size=8, max_position_embeddings=example.LENGTH,
        )
    )  # fmt: skip
    batch = example.Masking(tokenizer, len(rows), 1)(list(enumerate(rows))[:6])
    batch.pop("row")
    with torch.no_grad():
        whole = model(**batch).loss
        shares = [{name: value[at : at + 2] for name, value in batch.items()} for at in (0, 2, 4)]
        vector = torch.stack([model(**share).loss for share in shares])
    counts = torch.stack([(share["labels"] != -100).sum() for share in shares])
    assert len(set(counts.tolist())) > 1
    assert vector.mean().item() != pytest.approx(whole.item(), rel=1e-6)
    assert (vector * counts).sum() / counts.sum() == pytest.approx(whole.item(), rel=1e-6)


@pytest.mark.long
@pytest.mark.launch
@by_every_launcher
def test_it_prints_what_it_promises_by_every_launcher(
    start: Start, launcher: str, processes: int, tmp_path: Path
):
    report = start(NAME, "", launcher, processes)
    assert shape(report) == promised(NAME)
    rows = 8 * processes
    assert report.startswith(f"{processes} processes x 8 rows = {rows} rows a step, {480 // rows} ")
    assert report.endswith("the same in a bare model: True\n")
    assert losses(report)[-1] < losses(report)[0] - 0.2
    assert len(set(re.findall(r"begins with row (\d+)", report))) == 3  # set_epoch was called
    assert not any(name.startswith("module.") for name in weights(tmp_path / "out" / "mlm"))


@pytest.mark.long
@pytest.mark.launch
def test_two_processes_and_data_parallel_train_as_one_process_does(start: Start, tmp_path: Path):
    both = start(NAME, "--batch_size 8 --epochs 2 --out both", processes=2)
    alone = start(NAME, "--batch_size 16 --epochs 2 --out alone")
    without = start(NAME, "--batch_size 16 --epochs 2 --out without --data_parallel")
    assert losses(both) == pytest.approx(losses(alone), rel=1e-5)
    assert losses(without) == pytest.approx(losses(alone), rel=1e-5)
    held = weights(tmp_path / "alone")
    for other in ("both", "without"):
        found = weights(tmp_path / other)
        assert list(found) == list(held)
        for name, value in held.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4, msg=name)


@pytest.mark.long
@pytest.mark.launch
def test_a_second_run_continues_from_the_weights_of_the_first(start: Start):
    first = start(NAME, "--epochs 2", processes=2)
    second = start(NAME, "--epochs 1 --weights out/mlm/weights.pt --out more", processes=2)
    assert losses(second)[0] < losses(first)[0] - 0.2


@pytest.mark.long
@pytest.mark.launch
def test_data_parallel_in_several_processes_is_refused(start: Start):
    with pytest.raises(AssertionError, match="one process for all GPUs"):
        start(NAME, "--data_parallel", processes=2)


@pytest.mark.long
@pytest.mark.launch
def test_a_seed_gives_the_same_run_and_another_one_another(start: Start):
    first, again, other = (start(NAME, f"--epochs 1 --seed {seed}") for seed in (1, 1, 2))
    assert first == again
    assert losses(first) != losses(other)
