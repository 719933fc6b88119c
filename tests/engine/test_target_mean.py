"""Fine-tuning rows: a token t that is no target is stored as ~t; a step's loss is the mean over
the targets of all its micro-batches. Against a float64 reference, in one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.parse import parse_flags
from minimind.data.shards.conversation_shards import PADDING, SOURCE, START
from minimind.engine.build import Engine, build_engine, leave_process_group
from minimind.engine.clocks import PhaseClock
from minimind.engine.engine import token_ids
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.model.distillation import Distillation
from minimind.recovery.corruption import replay
from tools.host_reads import counted

SHAPE: dict[str, Any] = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"use_moe": True, "n_routed_experts": 4, "num_experts_per_tok": 2}
ONCE = 95  # an id that the rows below do not have
IDS = torch.randint(ONCE, (4, 9), generator=torch.Generator().manual_seed(1))
IS_TARGET = torch.tensor(
    [[0, 0, 1, 1, 1, 0, 0, 1, 0], [0] * 9, [0, 1, 1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 1, 0, 0, 0, 0]]
).bool()  # the first token of a row is never a target
ROWS = torch.where(IS_TARGET, IDS, ~IDS)
BuildEngine = Callable[..., Engine]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[BuildEngine]:
    """Builds engines of one process, one after another."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)

    def build(flags: str = "--task sft", **shape: Any) -> Engine:
        leave_process_group()
        os.environ["LOCAL_RANK"] = "0"  # which a process alone removes
        words = f"--dtype float32 --device cpu --grad_clip 0 {flags}"
        torch.manual_seed(1)
        model = MiniMindForCausalLM(MiniMindConfig(**SHAPE, **shape))
        return build_engine(ResolvedConfig(parse_flags(words.split()), "single"), model, "cpu")

    yield build
    leave_process_group()


def gradients_of(engine: Engine, rows: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """Result of one step over rows, and the gradient of its update by name."""
    seen: dict[str, Tensor] = {}
    weights = dict(engine.model.named_parameters())

    def look(*_: Any) -> None:
        for name, p in weights.items():
            assert p.grad is not None
            seen[name] = p.grad.clone()

    handle = engine.backend.optimizer.register_step_pre_hook(look)
    clock = PhaseClock(engine.device)
    clock.begin()
    result = engine.step(rows.chunk(engine.resolved.run.accumulation_steps), 1e-2, clock)
    handle.remove()
    return result, seen


def reference(model: Any, parts: int) -> tuple[float, dict[str, Tensor]]:
    """Mean cross-entropy over the targets of ROWS, and its gradients with the balance loss."""
    model = deepcopy(model).double()
    total: Any = 0.0
    for ids, is_target in zip(IDS.chunk(parts), IS_TARGET.chunk(parts), strict=True):
        out = model(input_ids=ids[:, :-1])
        chosen = is_target[:, 1:]
        sums = F.cross_entropy(out.logits[chosen], ids[:, 1:][chosen], reduction="sum")
        total = total + sums / IS_TARGET[:, 1:].sum()
        if out.aux_loss is not None:
            total = total + out.aux_loss / parts
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("shape", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_step_has_the_gradient_of_the_mean_over_its_targets(built: BuildEngine, parts, shape):
    engine = built(f"--task sft --accumulation_steps {parts}", **shape)
    engine.model.train()
    expected, gradients = reference(engine.model, parts)
    result, found = gradients_of(engine, ROWS)
    assert int(result.tokens) == int(IS_TARGET[:, 1:].sum())
    loss = float(result.loss_sum) / float(result.tokens)
    balance = 0.0 if result.aux_loss is None else float(result.aux_loss)
    assert loss + balance == pytest.approx(expected, rel=1e-6)
    for name, gradient in gradients.items():
        assert (found[name] - gradient).abs().max() <= 2e-6 * gradient.abs().max(), name
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    assert float(result.grad_norm) == pytest.approx(float(norm), rel=2e-6)


@pytest.mark.parametrize("parts", [1, 4])
def test_the_last_token_has_no_effect_unless_it_is_a_target(built: BuildEngine, parts):
    assert not IS_TARGET[0, -1]
    rows = ROWS.clone()
    rows[0, -1] = ~ONCE
    flags = f"--task sft --accumulation_steps {parts}"
    (one, of_one), (other, of_other) = (gradients_of(built(flags), r) for r in (ROWS, rows))
    assert one.loss_sums == other.loss_sums
    for name, gradient in of_one.items():
        assert torch.equal(gradient, of_other[name]), name
    _, untied = gradients_of(built(flags, tie_word_embeddings=False), rows)
    assert not untied["model.embed_tokens.weight"][ONCE].any()
    rows[0, -1] = ONCE
    assert gradients_of(built(flags), rows)[0].loss_sums != one.loss_sums


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_of_targets_alone_are_trained_as_in_pretraining_to_the_bit(built: BuildEngine, parts):
    def course(task: str) -> tuple[list[Tensor], list[Tensor]]:
        flags = f"--task {task} --accumulation_steps {parts}"
        engine = built(flags, doc_mask=True, eos_token_id=ONCE)
        losses = [gradients_of(engine, IDS)[0].loss_sum for _ in range(3)]
        return losses, [p.detach() for p in engine.model.parameters()]

    (losses, weights), (others, other_weights) = course("pretrain"), course("sft")
    assert losses == others
    assert all(map(torch.equal, weights, other_weights))


@pytest.mark.parametrize("flags", ["", "--task sft"])
@pytest.mark.parametrize("filled", [(2, 2, 1), (2, 2, 0), (1, 0, 0)])
def test_rows_of_padding_count_for_nothing(built: BuildEngine, filled: tuple[int, ...], flags: str):
    """Five rows in micro-batches of two: the gradient is that of the rows in one micro-batch."""
    ids = torch.cat([IDS, IDS[:1].flip(1)])[: sum(filled)]
    padding = torch.full((2, 9), PADDING)
    rows = [torch.cat([part, padding])[:2] for part in ids.split(filled)]
    engine = built(f"--global_batch_size 5 --batch_size 2 --accumulation_steps 3 {flags}")
    engine.model.train()
    whole: Any = deepcopy(engine.model).double()
    logits = whole(input_ids=ids[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    result, found = gradients_of(engine, torch.cat(rows))
    assert int(result.tokens) == 8 * len(ids)
    assert float(result.loss_sum / result.tokens) == pytest.approx(loss.item(), rel=1e-6)
    for name, p in whole.named_parameters():
        assert (found[name] - p.grad).abs().max() <= 2e-6 * p.grad.abs().max(), name


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 1.0)])
def test_targets_count_by_the_weight_of_the_source_of_their_row(built: BuildEngine, weights):
    """Four rows of five in micro-batches of two, the last of padding: one plain weighted mean."""
    sources = torch.tensor([0, 1, 1, 0])
    rows = ROWS.clone()
    rows[:, 0] = ~(IDS[:, 0] + START + SOURCE * sources)
    rows = torch.cat([rows, torch.full((2, 9), PADDING)])
    engine = built("--task sft --global_batch_size 5 --batch_size 2 --accumulation_steps 3")
    engine.model.train()
    engine.weigh_sources(weights)
    whole: Any = deepcopy(engine.model).double()
    losses = F.cross_entropy(
        whole(input_ids=IDS[:, :-1]).logits.transpose(1, 2), IDS[:, 1:], reduction="none"
    )
    counts = torch.tensor(weights, dtype=torch.float64)[sources, None] * IS_TARGET[:, 1:]
    loss = (losses * counts).sum() / counts.sum()
    loss.backward()
    result, found = gradients_of(engine, rows)
    assert float(result.tokens) == float(counts.sum())
    assert float(result.loss_sum / result.tokens) == pytest.approx(loss.item(), rel=1e-6)
    for name, p in whole.named_parameters():
        assert (found[name] - p.grad).abs().max() <= 2e-6 * p.grad.abs().max(), name


@pytest.mark.parametrize("flags", ["", "--task sft"])
def test_a_teacher_has_its_share_in_each_target_but_not_of_padding(built: BuildEngine, flags: str):
    """Rows in micro-batches of two, of 4, 1 and 0 real rows; a replay has the same gradient."""
    torch.manual_seed(5)
    teacher: Any = MiniMindForCausalLM(MiniMindConfig(**{**SHAPE, "num_hidden_layers": 2})).eval()
    ids = torch.cat([IDS, IDS[:1].flip(1)])
    marked = torch.where(IS_TARGET, IDS, ~IDS) if flags else IDS
    rows = torch.cat([marked, ids[4:], torch.full((1, 9), PADDING)])
    is_target = rows[:5, 1:] >= 0
    engine = built(f"--global_batch_size 5 --batch_size 2 --accumulation_steps 3 {flags}")
    engine.learn_from(Distillation(teacher, "", 0.4, 2.0, eos_id=None))
    engine.model.train()
    whole, exact = (deepcopy(model).double() for model in (engine.model, teacher))
    logits = whole(input_ids=ids[:, :-1]).logits[is_target]
    with torch.no_grad():
        wanted = exact(input_ids=ids[:, :-1]).logits[is_target] / 2
    kl = F.kl_div((logits / 2).log_softmax(-1), wanted.softmax(-1), reduction="sum")
    entropy = F.cross_entropy(logits, ids[:, 1:][is_target], reduction="sum")
    loss = (0.6 * entropy + 0.4 * 4 * kl) / is_target.sum()
    loss.backward()
    seen = replay(engine, rows, 0, is_whole=True)
    result, found = gradients_of(engine, rows)
    assert int(result.tokens) == int(is_target.sum())
    assert float(result.loss_sum / result.tokens) == pytest.approx(loss.item(), rel=1e-6)
    assert seen.loss == pytest.approx(loss.item(), rel=1e-6)
    for (name, p), norm in zip(whole.named_parameters(), seen.norms, strict=True):
        assert (found[name] - p.grad).abs().max() <= 2e-6 * p.grad.abs().max(), name
        assert norm == pytest.approx(float(p.grad.norm()), rel=1e-5), name
    held_out, count = engine.loss_of(rows)  # the cross-entropy alone
    with torch.no_grad():
        again = deepcopy(engine.model).double()(input_ids=ids[:, :-1]).logits[is_target]
    plain = F.cross_entropy(again, ids[:, 1:][is_target])
    assert float(held_out / count) == pytest.approx(plain.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bf16-mixed"])
def test_a_teacher_that_is_the_student_computes_as_it_does(built: BuildEngine, dtype: str):
    engine = built(f"--task sft --dtype {dtype}")
    torch.manual_seed(1)
    engine.learn_from(
        Distillation(MiniMindForCausalLM(MiniMindConfig(**SHAPE)).eval(), "", 1.0, 1.0, eos_id=None)
    )
    clock = PhaseClock(engine.device)
    clock.begin()
    with counted() as reads:
        result = engine.step([ROWS], 1e-2, clock)
    assert not reads
    assert float(result.loss_sum) == 0.0
    assert float(result.grad_norm or 0.0) < 1e-6


def test_without_any_target_the_gradient_is_0(built: BuildEngine):
    engine = built("--task sft --accumulation_steps 2")
    result, found = gradients_of(engine, torch.where(IDS >= 0, ~IDS, 0))
    assert float(result.loss_sum) == float(result.tokens) == float(result.grad_norm) == 0.0
    assert not result.is_skipped
    assert not any(gradient.any() for gradient in found.values())


@pytest.mark.parametrize(("task", "times"), [("pretrain", 0), ("sft", 1)])
def test_targets_are_counted_without_a_wait_and_only_in_fine_tuning(
    built: BuildEngine, monkeypatch: pytest.MonkeyPatch, task: str, times: int
):
    engine, clock, calls = built(f"--task {task}"), PhaseClock(torch.device("cpu")), []
    true_count = engine._mean_targets

    def count(micro_batches: Sequence[Tensor]) -> Tensor:
        calls.append(len(micro_batches))
        return true_count(micro_batches)

    monkeypatch.setattr(engine, "_mean_targets", count)
    clock.begin()
    with counted() as reads:
        engine.step([IDS], 1e-3, clock)
    assert not reads
    assert calls == [1] * times


def test_a_validation_batch_may_be_padded(built: BuildEngine):
    engine = built()
    loss, count = engine.loss_of(ROWS)
    padded, same = engine.loss_of(torch.cat([ROWS, torch.full((2, 9), PADDING)]))
    assert int(count) == int(same) == int(IS_TARGET[:, 1:].sum())
    assert float(padded) == pytest.approx(float(loss), rel=1e-6)
    expected, _ = reference(engine.model, 1)
    assert float(loss / count) == pytest.approx(expected, rel=1e-6)


def test_conversations_of_a_row_are_those_alone(built: BuildEngine):
    """Whatever ids they have: the second starts at token 4, with an eos and a target before it."""
    row = torch.tensor([[~(7 + START), 8, 9, 2, ~(5 + START), ~6, 2, 11, 12]])
    apart = [torch.tensor([[~7, 8, 9, 2]]), torch.tensor([[~5, ~6, 2, 11, 12]])]
    engine = built(doc_mask=True, eos_token_id=2)
    loss, count = engine.loss_of(row)
    engine.model.config.doc_mask = False
    with torch.no_grad():
        alone = [engine.model(input_ids=token_ids(one)[:, :-1]).logits[0] for one in apart]
    targets = torch.tensor([8, 9, 2]), torch.tensor([-100, 2, 11, 12])
    sums = [F.cross_entropy(*pair, reduction="sum") for pair in zip(alone, targets, strict=True)]
    assert int(count) == 6
    assert float(loss) == pytest.approx(sum(map(float, sums)), rel=1e-6)


def test_a_replay_takes_such_rows_and_those_without_targets(built: BuildEngine):
    engine = built()
    seen = replay(engine, ROWS, 0, is_whole=True)
    expected, gradients = reference(engine.model, 1)
    assert seen.loss == pytest.approx(expected, rel=1e-6)
    norms = [float(gradient.norm()) for gradient in gradients.values()]
    assert seen.norms == pytest.approx(norms, rel=1e-5)
    nothing = replay(engine, ROWS[1:2], 0, is_whole=False)
    assert nothing.loss == 0.0
    assert not any(nothing.norms)


def test_steps_and_ranks_draw_numbers_of_their_own(built: BuildEngine):
    """As dropout draws them, also when a step is taken again for another rank."""
    engine = built()

    def drawn(step: int, data_rank: int | None = None) -> float:
        engine.seed(step, data_rank)
        return float(torch.rand(()))

    assert len({drawn(step, data_rank) for step in (3, 4) for data_rank in (0, 1)}) == 4
    assert drawn(3, 1) == drawn(3, 1)
    assert drawn(3) == drawn(3, 0)
