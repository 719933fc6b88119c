"""The arithmetic of costs.py against the real model, torch's own allocator and numbers by hand.

The state under DeepSpeed is measured in tests/distributed/test_memory.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from minimind.architecture.costs import BYTES, Layout, activation_bytes, bytes_sent, memory, seconds
from minimind.architecture.plan import Machine, alternatives, layout_of, plan, shape_of
from minimind.architecture.shape import Shape, flops_per_token, is_frozen
from minimind.config.parse import PRESETS, parse_flags
from minimind.engine.compile import compute_in
from minimind.model import kernels
from minimind.model.causal_lm import MiniMindForCausalLM, enable_checkpointing
from minimind.model.configuration import MiniMindConfig
from minimind.model.distillation import DistilledLoss, RecordedLoss, in_classes
from minimind.model.dropout import row_keys
from minimind.model.kernels import has_flex_kernel
from minimind.model.loss import next_token_loss
from minimind.model.sizes import LOSS_CHUNK
from tests.allocations import most_allocated

SMALL = Shape(64, 2, 4, 2, 192, 600, 32)
ONE_STEP = Layout(stage=2, world_size=4, dtype="bfloat16", rows=2)


def model_of(shape: Shape) -> MiniMindForCausalLM:
    return MiniMindForCausalLM(
        MiniMindConfig(
            dim=shape.dim,
            n_layers=shape.n_layers,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            hidden_dim=shape.hidden_dim,
            vocab_size=shape.vocab_size,
            max_seq_len=shape.max_seq_len,
            tie_word_embeddings=shape.tie_word_embeddings,
            use_flash_attn=shape.use_flash_attn,
            doc_mask=shape.doc_mask,
            qkv_bias=shape.qkv_bias,
            qk_norm=shape.qk_norm,
            use_moe=shape.use_moe,
            n_routed_experts=shape.n_routed_experts,
            num_experts_per_tok=shape.num_experts_per_tok,
            n_shared_experts=shape.n_shared_experts,
        )
    )


SHAPES = {path.stem: shape_of(parse_flags(["--model", path.stem])) for path in PRESETS.glob("*")}
SHAPES |= {
    "small": SMALL,
    "untied": shape_of(parse_flags("--model tiny --no-tie_word_embeddings".split())),
    "biases": shape_of(parse_flags("--model tiny --qkv_bias --head_dim 40".split())),
    "normed heads": shape_of(parse_flags("--model tiny --qk_norm".split())),
    "wide heads": shape_of(parse_flags("--model tiny --qk_norm --head_dim 256".split())),
    "narrow heads": shape_of(
        parse_flags("--dim 200 --n_heads 9 --n_kv_heads 3 --head_dim 8".split())
    ),
    "experts": shape_of(parse_flags("--model tiny --use_moe --n_shared_experts 2".split())),
    "no sharing": replace(SMALL, n_kv_heads=4, dim=72, hidden_dim=71),
    "default hidden_dim": shape_of(parse_flags("--dim 200 --n_heads 10 --n_layers 3".split())),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_parameters_are_those_of_the_model(shape: Shape):
    with torch.device("meta"):
        model = model_of(shape)
    numbers = {name: weight.numel() for name, weight in model.named_parameters()}
    assert shape.parameters == sum(numbers.values())
    assert shape.named == numbers
    matrices = (n for name, n in numbers.items() if ".layers." in name and "proj.weight" in name)
    gates = (n for name, n in numbers.items() if "mlp.gate.weight" in name)
    assert shape.hidden_matrices == sum(matrices) + sum(gates)
    assert shape.layer == sum(n for name, n in numbers.items() if ".layers.0." in name)
    assert shape.norms == sum(n for name, n in numbers.items() if "norm" in name)
    embedding = sum(n for name, n in numbers.items() if "embed" in name or "lm_head" in name)
    assert shape.embedding == embedding
    assert shape.sizes.largest == max(numbers.values())


def of_dtype(model: Any, dtype: str) -> Any:
    """The model as it is trained in --dtype."""
    compute_in(dtype, model, "cpu")
    return model.to(getattr(torch, "float32" if dtype == "bf16-mixed" else dtype))


def backward(model: MiniMindForCausalLM, rows: torch.Tensor, dropout: float = 0.0) -> None:
    given: Any = {}
    if dropout:
        given = {"dropout": dropout, "dropout_keys": row_keys(0, 0, 0, len(rows), rows.device)}
    loss, count = next_token_loss(model(input_ids=rows[:, :-1], **given).logits, rows[:, 1:])
    (loss / count).backward()


def allocated_at_most(model: MiniMindForCausalLM, rows: torch.Tensor, dropout: float = 0.0) -> int:
    """Peak bytes that torch's CPU allocator gives out in one forward and backward pass."""
    return most_allocated(lambda: backward(model, rows, dropout))


def test_frees_of_earlier_blocks_do_not_count():
    """Not even at addresses that an earlier measurement saw."""
    kept: list[torch.Tensor] = []

    def work() -> torch.Tensor:
        kept.clear()
        return torch.empty(50_000)

    most_allocated(lambda: kept.extend(torch.empty(10_000) for _ in range(20)))
    kept.clear()
    kept.extend(torch.empty(10_000) for _ in range(20))
    assert most_allocated(work) == 200_000


@pytest.mark.sample(4)
@pytest.mark.parametrize("attention", ["flash", "reference", "flash, masked", "masked"])
@pytest.mark.parametrize("dtype", ["bfloat16", "bf16-mixed", "float32"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(replace(SMALL, max_seq_len=128, vocab_size=2000), id="mostly loss"),
        pytest.param(replace(SMALL, max_seq_len=128, n_layers=6, n_heads=8), id="mostly blocks"),
        pytest.param(
            replace(SMALL, max_seq_len=128, n_layers=6, n_heads=8, qk_norm=True, head_dim=24),
            id="wide heads",
        ),
    ],
)
def test_activations_are_what_the_allocator_gives_out(shape: Shape, dtype: str, attention: str):
    is_masked, is_fused = "masked" in attention, "flash" in attention
    shape = replace(shape, use_flash_attn=is_fused, doc_mask=is_masked)
    model = of_dtype(model_of(shape), dtype)
    layout = Layout(2, 1, dtype, rows=4, device="cpu")
    rows = torch.randint(shape.vocab_size, (4, shape.max_seq_len + 1))
    assert allocated_at_most(model, rows) == pytest.approx(
        activation_bytes(shape, layout), rel=0.02
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("attention", ["flash", "reference", "flash, masked", "masked"])
@pytest.mark.parametrize("dtype", ["bfloat16", "bf16-mixed", "float32"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_activations_of_normed_heads_and_of_recomputed_blocks_likewise(
    recomputes: bool, dtype: str, attention: str
):
    is_masked, is_fused = "masked" in attention, "flash" in attention
    shape = replace(SMALL, max_seq_len=128, n_layers=6, n_heads=8, qk_norm=True)
    shape = replace(shape, use_flash_attn=is_fused, doc_mask=is_masked)
    model = of_dtype(model_of(shape), dtype).train()
    if recomputes:
        enable_checkpointing(model)
    layout = Layout(2, 1, dtype, rows=4, device="cpu", recomputes=recomputes)
    rows = torch.randint(shape.vocab_size, (4, shape.max_seq_len + 1))
    assert allocated_at_most(model, rows) == pytest.approx(
        activation_bytes(shape, layout), rel=0.02
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "bf16-mixed", "float32"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_dropout_keeps_a_byte_for_each_element(recomputes: bool, dtype: str):
    shape = replace(SMALL, max_seq_len=128, n_layers=6, n_heads=8, hidden_dim=64)
    model = of_dtype(model_of(shape), dtype).train()
    if recomputes:
        enable_checkpointing(model)
    rows = torch.randint(shape.vocab_size, (4, shape.max_seq_len + 1))
    layout = Layout(2, 1, dtype, rows=4, device="cpu", recomputes=recomputes)
    dropping = replace(layout, drops=True)
    counted = activation_bytes(shape, dropping)
    extra = (counted - activation_bytes(shape, layout)) / (rows[:, 1:].numel() * shape.dim)
    assert extra == (1 if recomputes else 1 + 2 * shape.n_layers)  # recomputed after the peak
    assert allocated_at_most(model, rows, 0.1) == pytest.approx(counted, rel=0.02)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "bf16-mixed", "float32"])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("use_flash_attn", [False, True])
def test_activations_of_experts_likewise(use_flash_attn: bool, recomputes: bool, dtype: str):
    shape = replace(SMALL, max_seq_len=128, n_layers=3, use_flash_attn=use_flash_attn)
    shape = replace(shape, use_moe=True, n_routed_experts=6, n_shared_experts=2)
    model = of_dtype(model_of(shape), dtype)
    if recomputes:
        enable_checkpointing(model)
    layout = Layout(2, 1, dtype, rows=4, device="cpu", recomputes=recomputes)
    rows = torch.randint(shape.vocab_size, (4, shape.max_seq_len + 1))
    backward(model, rows)  # the gradients of the weights, which are counted elsewhere
    # The estimate for the gradients of a block under recomputation is up to one dim per token too
    # high.
    assert allocated_at_most(model, rows) == pytest.approx(
        activation_bytes(shape, layout), rel=0.04 if recomputes else 0.02
    )


@pytest.mark.long  # small models have the same arithmetic above
@pytest.mark.parametrize(
    ("preset", "dtype"), [("26m", "bfloat16"), ("104m", "float32"), ("0.4b", "bfloat16")]
)
@pytest.mark.parametrize("recomputes", [False, True])
def test_activations_of_presets_are_those_of_torchs_tracker(
    preset: str, dtype: str, recomputes: bool
):
    """Sixteen rows without memory: a tensor has a size and no values.

    Of the second pass, which has all gradients of the first.
    """
    shape, layout = SHAPES[preset], Layout(2, 1, dtype, 16, device="cpu", recomputes=recomputes)
    with FakeTensorMode():
        model = model_of(shape).train()
        for module in model.modules():  # `to` cannot replace fake weights
            for name, weight in list(module.named_parameters(recurse=False)):
                low = torch.nn.Parameter(weight.detach().to(getattr(torch, dtype)))
                setattr(module, name, low)
        model.tie_weights()
        if recomputes:
            enable_checkpointing(model)
        rows = torch.zeros((layout.rows, shape.max_seq_len + 1), dtype=torch.int64)
        backward(model, rows)
        with MemTracker() as tracker:
            tracker.track_external(model)
            backward(model, rows)
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    held = sum(peak[kind] for kind in peak if kind in ("Activation", "Temp"))
    assert held == pytest.approx(activation_bytes(shape, layout), rel=0.01)


def test_plan_counts_recomputed_blocks_and_advises_them_where_nothing_fits():
    flags = "--dim 64 --n_layers 8 --n_heads 4 --max_seq_len 65536 --no-use_flash_attn".split()
    flags += ["--dtype", "bfloat16"]
    machine = Machine(1, 2**30)
    assert "give --gradient_checkpointing" in plan([*flags, "--batch_size", "1"], machine)
    flags.append("--gradient_checkpointing")
    assert "give --gradient_checkpointing" not in plan(flags, machine)
    run, spare = parse_flags(flags), parse_flags(flags[:-1])
    held, whole = (
        memory(shape_of(one), layout_of(one, 1, {}, "cuda")).activations for one in (run, spare)
    )
    assert held < whole / 3


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16-mixed", "float32"])
def test_one_mask_over_long_rows_is_counted_for_all_blocks(dtype: str):
    long = replace(SMALL, max_seq_len=1024, hidden_dim=64, doc_mask=True)
    layout = Layout(2, 1, dtype, rows=4, device="cpu")
    rows = torch.randint(long.vocab_size, (4, long.max_seq_len + 1))
    model = of_dtype(model_of(long), dtype)
    assert allocated_at_most(model, rows) == pytest.approx(activation_bytes(long, layout), rel=0.02)


@pytest.mark.parametrize("n_heads", [4, 8])  # of 16 and 8 channels
def test_on_a_gpu_documents_need_no_mask_and_no_repeated_keys_where_blocks_are_fast(
    n_heads: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kernels, "_gpu_compiler_fault", lambda *_: "")
    shape = replace(SMALL, dim=64, n_heads=n_heads, n_kv_heads=2, max_seq_len=512, doc_mask=True)
    layout = Layout(2, 1, "bfloat16", rows=4)
    apart = activation_bytes(replace(shape, doc_mask=False), layout)
    extra = (activation_bytes(shape, layout) - apart) / (4 * 512)  # bytes of a token
    rotations = 4 * 64 // n_heads
    dense = 2 * 512 + shape.n_layers * 2 * 2 * (64 - shape.kv_dim)
    by_blocks = has_flex_kernel(torch.device("cuda"), 64 // n_heads, 512, torch.bfloat16)
    assert by_blocks == (n_heads == 4)
    assert extra == rotations + (4 if by_blocks else dense)


@pytest.mark.parametrize("doc_mask", [False, True])
def test_on_a_gpu_fp32_repeats_the_keys_that_flex_attention_does_not(doc_mask: bool):
    shape = replace(SMALL, doc_mask=doc_mask, max_seq_len=128)
    repeated, own = (
        activation_bytes(replace(shape, n_kv_heads=heads), Layout(2, 1, "float32", rows=4))
        for heads in (2, 4)
    )
    assert (repeated == own) == (not doc_mask)


def test_flops_of_wide_heads_by_hand():
    shape = Shape(64, 2, 4, 2, 192, 600, 32, head_dim=32)
    matrices = 2 * (64 * 128 + 2 * 64 * 64 + 128 * 64 + 3 * 64 * 192) + 600 * 64
    assert flops_per_token(shape) == 6 * matrices + 12 * 2 * 128 * 32
    assert shape.sizes.largest == 600 * 64


def test_flops_of_a_token_by_hand():
    """Six FLOPs per multiplying weight; 12 x layers x dim x T for the attention's products."""
    block = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192
    assert flops_per_token(SMALL) == 6 * (2 * block + 64 * 600) + 12 * 2 * 64 * 32
    assert flops_per_token(replace(SMALL, tie_word_embeddings=False)) == flops_per_token(SMALL)
    experts = replace(SMALL, use_moe=True, n_routed_experts=8)  # of which a token visits 2, and 1
    visited = block + 2 * 3 * 64 * 192 + 8 * 64
    assert flops_per_token(experts) == 6 * (2 * visited + 64 * 600) + 12 * 2 * 64 * 32
    frozen = replace(experts, freeze=("*.experts.*",))  # of which 2 x 2 are visited
    assert flops_per_token(experts) - flops_per_token(frozen) == 2 * 4 * 3 * 64 * 192
    assert flops_per_token(SHAPES["0.4b"]) == pytest.approx(2569e6, rel=1e-3)


def counted_flops(shape: Shape) -> int:
    """FLOPs of a token in one forward and backward pass of the model, as torch counts products."""
    torch.manual_seed(0)
    model, rows = model_of(shape), torch.randint(shape.vocab_size, (2, shape.max_seq_len + 1))
    for name, p in model.named_parameters():
        p.requires_grad_(not is_frozen(name, shape.freeze))
    with FlopCounterMode(display=False) as counter:
        backward(model, rows)
    return counter.get_total_flops() // (2 * shape.max_seq_len)


@pytest.mark.parametrize(
    "patterns",
    [
        ["model.layers.1.*"],
        ["*embed*", "model.layers.[01].*"],
        ["model.layers.*"],
        ["*.mlp.down_proj.*", "lm_head*", "model.embed*"],
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_flops_and_sizes_without_frozen_parameters(patterns: list[str], tied: bool):
    shape = replace(SMALL, n_layers=3, use_flash_attn=False, tie_word_embeddings=tied)
    if tied:
        patterns = [pattern for pattern in patterns if "head" not in pattern]
    frozen = replace(shape, freeze=tuple(patterns))
    assert counted_flops(shape) == flops_per_token(shape)
    assert counted_flops(frozen) == flops_per_token(frozen)
    model = model_of(shape)
    trained = {n: p for n, p in model.named_parameters() if not is_frozen(n, frozen.freeze)}
    assert frozen.parameters == shape.parameters
    assert frozen.trained.parameters == sum(p.numel() for p in trained.values())
    assert frozen.trained.largest == max(p.numel() for p in trained.values())
    vectors = [p.numel() for p in trained.values() if p.ndim < 2]
    assert sorted(frozen.trained.vectors) == sorted(vectors)


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_frozen_weights_have_no_state_and_no_gradients(stage: int | None, dtype: str):
    """Of a model whose embedding alone is frozen: as much as all less that of the embedding."""
    shape = replace(SMALL, tie_word_embeddings=False, freeze=("*embed*",))
    layout, table = Layout(stage, 1, dtype, rows=2), shape.vocab_size * shape.dim
    whole, needed = memory(replace(shape, freeze=None), layout), memory(shape, layout)
    b = 2 if dtype == "bfloat16" else 4
    masters = b < 4 or stage in (1, 2, 3)
    assert whole.weights == needed.weights
    assert whole.optimizer - needed.optimizer == (8 + 4 * masters) * table
    assert whole.gradients - needed.gradients == b * table
    assert whole.activations == needed.activations


def test_seconds_are_flops_over_the_speed_reached():
    per_second = 2 * 1e12 * 0.5
    assert seconds(SMALL, 1e6, 2, 1.0, 0.5) == 1e6 * flops_per_token(SMALL) / per_second


@pytest.mark.parametrize(
    ("stage", "micro_batches", "passes"),
    [(0, 4, 2), (1, 4, 3), (2, 1, 3), (2, 4, 9), (3, 1, 2), (3, 4, 8)],
)
def test_bytes_sent_in_passes_over_the_weights(stage: int, micro_batches: int, passes: int):
    layout = replace(ONE_STEP, stage=stage, accumulation_steps=micro_batches)
    layout = replace(layout, param_persistence_threshold=0)  # all weights are released
    assert bytes_sent(SMALL, layout) == 2 * passes * SMALL.parameters * 3 // 4
    assert bytes_sent(SMALL, replace(layout, world_size=1)) == 0


def test_ddp_sends_its_gradients_once():
    layout = replace(ONE_STEP, stage=None, accumulation_steps=4)
    assert bytes_sent(SMALL, layout) == 2 * 2 * SMALL.parameters * 3 // 4


def test_stage_3_gathers_the_small_weights_once_a_step():
    layout = replace(ONE_STEP, stage=3, accumulation_steps=4, param_persistence_threshold=64)
    gains = (2 * 2 + 1) * 64
    passes = 4 * (2 * SMALL.parameters - gains) + gains
    assert bytes_sent(SMALL, layout) == 2 * passes * 3 // 4


def test_states_are_those_of_the_zero_paper():
    """Table 1 of Rajbhandari et al.: 16 P at stage 0, and what is left as N grows."""
    p = SMALL.parameters
    whole = memory(SMALL, replace(ONE_STEP, stage=0))
    assert whole.weights + whole.gradients + whole.optimizer == 16 * p
    for stage, left in ((1, 2), (2, 2), (3, 0)):
        held = memory(SMALL, replace(ONE_STEP, stage=stage, world_size=10**9, overlap=True))
        rest = 16 * 20 if stage == 3 else 14 * 4  # an element of each weight, or two of each group
        assert held.weights + held.optimizer + held.gradients == left * p + rest


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_of_a_process_has_the_padding_of_its_parts(stage: int):
    """Groups of matrices and of gains end at two elements per process, or each weight by itself."""
    layout = replace(ONE_STEP, stage=stage, world_size=1000)
    if stage == 3:
        part = 39 + 2 * (2 * 5 + 2 * 3 + 3 * 13) + 5  # of 38,400, 4,096, 2,048, 12,288 and 64
    else:
        part = 2 * (69 + 1)  # of 136,704 and 320
    assert memory(SMALL, layout).optimizer == 12 * part
    passes = 2 * part if stage == 3 else part
    sent = passes * 1000 + (0 if stage == 3 else 2 * SMALL.parameters)
    assert bytes_sent(SMALL, layout) == 2 * sent * 999 // 1000


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloading_moves_the_optimizer_to_the_host(stage: int):
    here = replace(ONE_STEP, stage=stage)
    held, off = memory(SMALL, here), memory(SMALL, replace(here, offload_optimizer=True))
    assert (held.host, off.optimizer) == (0, 0)
    assert off.host > held.optimizer
    assert off.total < held.total


@pytest.mark.parametrize(("stage", "shards"), [(None, 1), (0, 1), (1, 4), (3, 4)])
def test_an_average_is_four_bytes_per_weight_and_shard(stage: int | None, shards: int):
    here = replace(ONE_STEP, stage=stage)
    without, average = (memory(SMALL, replace(here, averages=has)) for has in (False, True))
    assert average.optimizer - without.optimizer == 4 * SMALL.parameters // shards
    assert average.host == without.host == 0
    if stage:
        here = replace(here, offload_optimizer=True)
        off, averaged = (memory(SMALL, replace(here, averages=has)) for has in (False, True))
        assert averaged.host - off.host == 4 * SMALL.parameters // shards


def test_offloading_the_weights_leaves_none_on_the_device():
    here = replace(ONE_STEP, stage=3, offload_optimizer=True)
    held, off = memory(SMALL, here), memory(SMALL, replace(here, offload_param=True))
    assert off.weights == 0
    assert off.host - held.host == held.weights


def test_the_peak_is_the_larger_of_backward_and_update():
    held = memory(SMALL, ONE_STEP)
    backward = held.gradients + held.buffers + held.activations
    assert held.total == held.weights + held.optimizer + backward
    alone = replace(held, activations=0, update=backward)
    assert alone.total == held.weights + held.optimizer + backward


@pytest.mark.parametrize(
    ("compiles", "stage", "loss", "positions", "per_logit"),
    [
        (True, 2, "auto", 4 * 512, 2 * 2),  # logits and gradient, as test_launches.py finds them
        (True, 2, "chunked", LOSS_CHUNK, 2 * 2),
        (True, 3, "auto", LOSS_CHUNK, 3 * 4),  # stage 3 is eager
        (False, 2, "auto", LOSS_CHUNK, 3 * 4),
        (False, 2, "full", 4 * 512, 3 * 4),
    ],
)
def test_on_a_gpu_the_loss_takes_what_its_kernels_store(
    compiles: bool, stage: int, loss: str, positions: int, per_logit: int
):
    shape = shape_of(parse_flags(["--model", "26m"]))
    layout = Layout(stage, 1, "bfloat16", rows=4, compiles=compiles, loss=loss)
    without = replace(shape, vocab_size=0)
    taken = activation_bytes(shape, layout) - activation_bytes(without, layout)
    assert taken == positions * shape.vocab_size * per_logit
    on_cpu = replace(layout, device="cpu", loss="auto")
    assert activation_bytes(shape, on_cpu) - activation_bytes(without, on_cpu) == (
        4 * 512 * shape.vocab_size * 3 * 4
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_teacher_takes_its_weights_at_any_stage_and_logits_as_torchs_tracker_has(dtype: str):
    shape = replace(SMALL, max_seq_len=64, vocab_size=2000)
    for stage in (None, 0, 1, 2, 3):
        alone = Layout(stage, 2, dtype, rows=2, device="cpu", offload_optimizer=stage == 2)
        taught = replace(alone, teacher=1000)
        weights = [memory(shape, layout).weights for layout in (alone, taught)]
        assert weights[1] - weights[0] == 1000 * BYTES[dtype], stage
    student, teacher = torch.randn(2, 2, 64, 2000, dtype=getattr(torch, dtype)).unbind()
    leaf, targets = student.requires_grad_(), torch.zeros(2, 64, dtype=torch.int64)
    ids = teacher.float().topk(8).indices
    records = in_classes(teacher.float(), ids)
    recorded = replace(taught, teacher=0)
    assert memory(shape, recorded).weights == weights[0]
    for layout in (taught, recorded):
        with MemTracker() as tracker:
            logits = leaf * 1
            loss = DistilledLoss(teacher * 1, 0.5, 2.0)
            if layout is recorded:
                loss = RecordedLoss(records * 1, 0.5, 2.0, ids * 1, 2000)
            loss(logits, targets).sum().backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
        held = sum(peak[kind] for kind in peak if kind in ("Activation", "Temp"))
        without = activation_bytes(replace(shape, vocab_size=0), layout)
        assert held == pytest.approx(activation_bytes(shape, layout) - without, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "per_weight", "per_matrix"),
    [
        ("", 8, 0),
        ("--optimizer lion", 4, 0),
        ("--optimizer sgd", 4, 0),
        ("--optimizer sgd --sgd_momentum 0", 0, 0),
        ("--optimizer muon", 8, -4),
    ],
)
@pytest.mark.parametrize("world_size", [1, 4])
def test_the_state_is_that_of_the_optimizer_in_force(
    flags: str, per_weight: int, per_matrix: int, world_size: int
):
    run = parse_flags(["--model", "tiny", "--dtype", "bfloat16", *flags.split()])
    shape, layout = shape_of(run), layout_of(run, world_size, {}, "cuda")
    bytes_of_all = (4 + per_weight) * shape.parameters + per_matrix * shape.hidden_matrices
    assert memory(shape, layout).optimizer == bytes_of_all
    sharded = replace(layout, stage=2, reduce_bucket=0)
    assert memory(shape, sharded).optimizer == pytest.approx(bytes_of_all / world_size, abs=4)


def test_muon_gathers_its_updates_under_zero_in_the_dtype_of_the_iteration():
    for stage, device, b in ((2, "cuda", 2), (3, "cpu", 4), (None, "cuda", 0)):
        here = replace(ONE_STEP, stage=stage, device=device)
        muon = replace(here, optimizer="muon")
        sent = bytes_sent(SMALL, muon) - bytes_sent(SMALL, here)
        assert sent == b * SMALL.hidden_matrices * 3 // 4
        if stage:  # the shard and its fp32 gradient, and what is gathered
            least = b * SMALL.hidden_matrices * 5 // 4 + SMALL.hidden_matrices
            assert memory(SMALL, muon).update > least


def test_nothing_is_offloaded_with_muon():
    here = replace(ONE_STEP, optimizer="muon")
    assert [way.stage for way in alternatives(here)] == [0, 1, 2, 3]
    assert not any(way.offload_optimizer for way in alternatives(here))
