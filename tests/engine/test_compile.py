"""A compiled run: each region compiled once, with the losses of an eager run; chunked losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import config as dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import check_node_safe
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor import config as inductor

import minimind.train as training
from minimind.config.deepspeed import backend_choice
from minimind.config.deepspeed.backend_choice import Setup, read_setup, with_compile
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.launcher_env import read_launch
from minimind.config.parse import parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.engine import compile as compiled
from minimind.engine.build import Engine, leave_process_group
from minimind.engine.clocks import PhaseClock
from minimind.engine.compile import CPU_OPTIONS, compile_model, uncompiled
from minimind.engine.engine import mean_loss, text_inputs
from minimind.model import kernels, masks
from minimind.model.causal_lm import MiniMindForCausalLM, enable_checkpointing
from minimind.model.configuration import MiniMindConfig
from tests.conftest import ROOT
from tests.engine.test_backends import engine_of

SHAPE: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 16},
}
COMPILED = parse_flags(["--compile", "on"])
COMPILE = torch.compile
REGIONS = ("a block", "the final norm", "the loss")  # each is one graph
REGIONS_OF_EXPERTS = ("attention", "the choice of experts", "their sum", *REGIONS[1:])
ROWS = torch.randint(96, (4, 17), generator=torch.manual_seed(1))


def built(**changes: Any) -> MiniMindForCausalLM:
    torch.manual_seed(2)
    return MiniMindForCausalLM(MiniMindConfig(**{**SHAPE, **changes}))


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are captured as ever and then run as they are: inductor alone takes 10 s."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def losses_of(engine: Engine, steps: int) -> list[float]:
    clock, losses = PhaseClock(torch.device("cpu")), []
    for step in range(steps):
        engine.seed(step)
        clock.begin()
        result = engine.step(ROWS.split(2), 1e-2, clock)
        losses.append(float(result.loss_sum / result.tokens))
    return losses


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"qk_norm": True}, "--loss chunked"),
        ({"doc_mask": True, "eos_token_id": 2}, ""),
        ({"qkv_bias": True, "head_dim": 12}, ""),
        ({}, "--gradient_checkpointing"),
        ({}, "--dropout 0.2"),
    ],
)
def test_regions_are_compiled_once_for_all_blocks_with_the_losses_of_an_eager_run(
    quickly, monkeypatch, changes, more
):
    flags = f"--dtype float32 --accumulation_steps 2 {more} --compile"
    found = {}
    for compiles in ("off", "on"):
        model = built(**changes)
        if more == "--gradient_checkpointing":
            enable_checkpointing(model)
        engine = engine_of(model, monkeypatch, f"{flags} {compiles}")
        try:
            found[compiles] = losses_of(engine, 3)
            graphs = counters["stats"]["unique_graphs"]
            assert graphs == (len(REGIONS) if compiles == "on" else 0)
            before = engine.loss_of(ROWS)
            assert counters["stats"]["unique_graphs"] == graphs  # what is validated is eager
            found[compiles] += [float(before[0]), *losses_of(engine, 2)]
            assert counters["stats"]["unique_graphs"] == graphs
        finally:
            leave_process_group()
    assert found["on"] == pytest.approx(found["off"], rel=2e-6)
    assert not counters["graph_break"]


@pytest.mark.long  # regions of one kind are above
def test_layers_without_rotation_are_compiled_apart_with_the_losses_of_an_eager_run(
    quickly, monkeypatch
):
    found = {}
    for compiles in ("off", "on"):
        model = built(qkv_bias=True, no_rope_layer_interval=2)
        engine = engine_of(model, monkeypatch, f"--dtype float32 --compile {compiles}")
        try:
            found[compiles] = losses_of(engine, 3)
            graphs = counters["stats"]["unique_graphs"]
            assert graphs == (len(REGIONS) + 1 if compiles == "on" else 0)
        finally:
            leave_process_group()
    assert found["on"] == pytest.approx(found["off"], rel=2e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", ["", "--gradient_checkpointing", "--dropout 0.2"])
def test_of_experts_all_but_the_routed_ones_is_compiled_once(quickly, monkeypatch, more):
    """The tokens of an expert are others in every batch; as shapes they would recompile."""
    batches = torch.randint(96, (6, 2, 2, 17), generator=torch.manual_seed(3))
    found: dict[str, list[Any]] = {}
    for compiles in ("off", "on"):
        model = built(use_moe=True, n_routed_experts=2, num_experts_per_tok=1)
        if more == "--gradient_checkpointing":
            enable_checkpointing(model)
        flags = f"--dtype float32 --accumulation_steps 2 {more} --compile {compiles}"
        engine = engine_of(model, monkeypatch, flags)
        clock = PhaseClock(torch.device("cpu"))
        try:
            for batch in batches:
                clock.begin()
                result = engine.step(list(batch), 1e-2, clock)
                values = [result.loss_sum / result.tokens, result.aux_loss, result.expert_load]
                found.setdefault(compiles, []).append(values)
                graphs = len(REGIONS_OF_EXPERTS) if compiles == "on" else 0
                assert counters["stats"]["unique_graphs"] == graphs
        finally:
            leave_process_group()
    torch.testing.assert_close(found["on"], found["off"], rtol=2e-6, atol=0)
    assert len({tuple(load.flatten().tolist()) for _, _, load in found["on"]}) == len(batches)
    assert not counters["graph_break"]


def test_other_documents_compile_no_block_again(quickly, monkeypatch):
    """A BlockMask is built outside the blocks, anew for every batch, as on a GPU."""
    model = built(doc_mask=True, eos_token_id=2)
    batches = [torch.randint(5, (4, 17), generator=torch.manual_seed(seed)) for seed in range(3)]

    @torch.no_grad()  # flex attention has no backward pass on a CPU
    def loss_sums() -> list[float]:
        outs = [model(**text_inputs(rows), loss_chunk_size=0) for rows in batches]
        return [float(out.loss_sum) for out in outs]

    expected = loss_sums()  # with dense masks
    monkeypatch.setattr(masks, "has_flex_kernel", lambda *_: True)
    compile_model(model, COMPILED, "cpu")
    assert loss_sums() == pytest.approx(expected, rel=1e-5)
    assert counters["stats"]["unique_graphs"] == len(REGIONS)


@pytest.mark.long
def test_a_choice_of_kernels_breaks_no_graph_and_compiling_is_timed(quickly, monkeypatch):
    """As on a GPU, where every layer says which kernels it asks."""

    def as_on_a_gpu(*qkv):
        return kernels._fused(kernels.CAUSAL_KERNELS, *qkv, is_causal=True, enable_gqa=True)

    monkeypatch.setattr(kernels, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(kernels, "blockwise_attention", as_on_a_gpu)
    model = built()
    enable_checkpointing(model)
    engine = engine_of(model, monkeypatch, "--dtype float32 --compile on")
    try:
        began = time.perf_counter()
        losses_of(engine, 1)
        assert 0 < engine.compiling.take() < time.perf_counter() - began
        losses_of(engine, 2)
        assert engine.compiling.take() == 0
    finally:
        leave_process_group()
    assert counters["stats"]["unique_graphs"] == len(REGIONS)
    assert not counters["graph_break"]


def test_torch_caches_a_block_that_chooses_its_attention_kernel(quickly, monkeypatch):
    """As on a GPU; without its mark the choice keeps every block out of the cache."""
    fused = partial(kernels._fused, kernels.CAUSAL_KERNELS, is_causal=True, enable_gqa=True)
    monkeypatch.setattr(kernels, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(kernels, "blockwise_attention", fused)
    nodes: list[Any] = []

    def capture(graph: Any, inputs: Any) -> Any:
        nodes.extend(graph.graph.nodes)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend=capture))
    model = built()
    with inductor.patch(unsafe_marked_cacheable_functions={}):
        compile_model(model, COMPILED, "cuda")  # whose options another backend takes
        model(ROWS[:, :-1], shift_labels=ROWS[:, 1:], loss_chunk_size=0)
        assert any("_sdpa_kernel" in str(node.target) for node in nodes)
        for node in nodes:
            check_node_safe(node)


def test_ddp_splits_no_block(quickly):
    """A graph is split where a bucket of gradients is full, which a block alone need not be."""
    seen = []
    model = built()
    model.register_forward_pre_hook(lambda *_: seen.append(dynamo.optimize_ddp))
    original = type(model).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append(dynamo.optimize_ddp)
        return original(model, *args, **kwargs)

    model.forward = forward
    compile_model(model, COMPILED, "cpu")
    model(ROWS[:, :-1])
    assert seen == [True, False]
    assert dynamo.optimize_ddp


@pytest.mark.long
def test_a_run_reports_how_much_of_its_first_step_was_compiling(quickly, corpus, tmp_path, capsys):
    train: Any = training  # a package that is called like a function
    shape = {"dim": 32, "n_layers": 1, "n_heads": 2, "max_seq_len": 32, "vocab_size": 600}
    pace = {"max_steps": 3, "log_interval": 1, "device": "cpu", "deepspeed_config": "none"}
    for compiles in ("on", "off"):
        out = tmp_path / compiles
        places = {"data_path": [str(corpus)], "cache_dir": str(tmp_path / "cache")}
        assert train(**shape, **pace, **places, out_dir=str(out), compile=compiles) == 0
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        reported = [line for line in lines if line["event"] == "compiled"]
        first = next(line for line in lines if line["event"] == "step")
        if compiles == "off":
            assert not reported
            continue
        (line,) = reported
        assert line["step"] == 1
        assert 0 < line["seconds"] * 1e3 < first["step_ms"]
        assert (
            f"step 1: {line['seconds']:.1f} s of the time since the last line went into compiling"
            in capsys.readouterr().out
        )


def test_deterministic_has_the_compiler_choose_by_no_measurement(monkeypatch):
    """What is picked by its time, here and now, may sum in another order after a resume."""
    given: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda method, **requested: given.append(requested))
    chosen = {"deterministic": True}
    for device, more, options in (
        ("cpu", "", CPU_OPTIONS),
        ("cpu", "--deterministic", CPU_OPTIONS | chosen),
        ("cuda", "", None),
        ("cuda", "--deterministic", chosen),
    ):
        compile_model(built(), parse_flags(f"--compile on {more}".split()), device)
        assert len(given) == SHAPE["num_hidden_layers"] + 2
        assert all(requested["options"] == options for requested in given)
        del given[:]


@pytest.fixture
def graph_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is made and run of graphs, in order; they run as they are."""
    found: list[str] = []

    def graph_of(name: str) -> Any:
        def make(graph: Any, inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                found.append(f"{name} runs")
                return graph(*args)

            found.append(f"{name} made")
            return make_boxed_func(run)

        return make

    backend = aot_autograd(fw_compiler=graph_of("forward"), bw_compiler=graph_of("backward"))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def is_early(events: list[str]) -> bool:
    """Whether every backward graph is made right after its forward graph."""
    return all(
        after == "backward made" for event, after in pairwise(events) if event == "forward made"
    )


def is_at_first_use(events: list[str]) -> bool:
    """Whether every backward graph is made just before it runs."""
    return all(
        after == "backward runs" for event, after in pairwise(events) if event == "backward made"
    )


def test_backward_graphs_are_made_before_any_activation_is_saved(graph_calls):
    model = built()
    compile_model(model, COMPILED, "cpu")
    for _ in range(2):
        model(ROWS[:, :-1], shift_labels=ROWS[:, 1:], loss_chunk_size=0).loss_sum.backward()
    assert is_early(graph_calls)
    assert graph_calls.count("forward made") == graph_calls.count("backward made") == len(REGIONS)
    per_step = SHAPE["num_hidden_layers"] + 2
    assert graph_calls.count("forward runs") == graph_calls.count("backward runs") == 2 * per_step


def test_early_backward_graphs_are_for_an_engine_and_for_no_other_code_of_the_process(
    graph_calls, monkeypatch
):
    engine = engine_of(built(), monkeypatch, "--dtype float32 --accumulation_steps 2 --compile on")
    try:
        losses_of(engine, 1)
    finally:
        leave_process_group()
    assert is_early(graph_calls)
    assert graph_calls.count("backward made") == len(REGIONS)
    del graph_calls[:]
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: (x.sin().exp() * x).tanh().sum())(x).backward(retain_graph=True)
    assert is_at_first_use(graph_calls)


def test_a_torch_without_the_option_compiles_backward_graphs_at_their_first_use(
    graph_calls, monkeypatch
):
    model = built()
    monkeypatch.setattr(compiled, "EAGER_BACKWARD", "a_name_that_is_gone")
    compile_model(model, COMPILED, "cpu")
    model(ROWS[:, :-1], shift_labels=ROWS[:, 1:], loss_chunk_size=0).loss_sum.backward()
    assert is_at_first_use(graph_calls)
    assert graph_calls.count("backward made") == len(REGIONS)


def test_only_what_is_compiled_for_a_cpu_computes_again(monkeypatch):
    """On GPUs it was not measured, and eager code would pay for nothing."""

    @kernels.recomputed
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    calls: list[torch.Tensor] = []
    monkeypatch.setattr(kernels, "recompute", lambda _, x: calls.append(x) or x)
    assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
    assert not calls
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    doubled(torch.ones(2, device="meta"))
    assert not calls
    doubled(torch.ones(2))
    assert len(calls) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, ""),
        ({}, "--deterministic"),  # of which torch refuses unknown options
        ({"use_moe": True, "n_routed_experts": 2}, ""),
        ({}, "--dropout 0.2 --dtype float32"),
    ],
)
def test_inductor_gives_the_losses_of_an_eager_run(monkeypatch, changes, more):
    found = {}
    for compiles in ("off", "on"):
        flags = f"--dtype bfloat16 {more} --compile {compiles}"
        engine = engine_of(built(**changes), monkeypatch, flags)
        try:
            found[compiles] = losses_of(engine, 8)
        finally:
            leave_process_group()
            torch.use_deterministic_algorithms(False)
    assert found["on"] == pytest.approx(found["off"], rel=5e-3)
    assert found["on"][-1] < found["on"][0]


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("experts", ["", "--use_moe"])
def test_auto_compiles_on_a_gpu_where_the_model_is_one_graph(
    stage, device, experts, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backend_choice, "compiler_fault", lambda *_: "")
    run = parse_flags(experts.split())
    config = {} if stage is None else {"zero_optimization": {"stage": stage}}
    settled = with_compile(ResolvedConfig(run, "single", config), device).run
    assert settled.compile == ("on" if device == "cuda" and stage != 3 and not experts else "off")
    assert settled.sources["compile"].startswith("derived: ")
    for requested in ("on", "off"):
        run = parse_flags([*experts.split(), "--compile", requested])
        assert with_compile(ResolvedConfig(run, "single", config), device).run.compile == requested


def test_the_settled_value_is_what_a_run_is_given():
    path = str(DEFAULT_DEEPSPEED_CONFIG)
    for given in ("none", path):
        run = parse_flags(["--device", "cpu", "--deepspeed_config", given])
        setup: Setup = read_setup(run, read_launch({}))
        assert setup.resolve().run.compile == "off"


@pytest.mark.parametrize("changes", [{}, {"use_moe": True}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("positions", [16, 5])  # of 64: evenly, and with a rest
def test_a_loss_in_parts_is_the_whole_one_with_its_gradients(changes, positions):
    found = []
    for loss_chunk_size in (0, positions):
        model = built(**changes).train()
        goal = model(**text_inputs(ROWS), loss_chunk_size=loss_chunk_size)
        mean_loss(goal).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append((goal.loss_sum.detach(), goal.targets, gradients))
    (loss, tokens, gradients), (loss_by_parts, tokens_by_parts, by_parts) = found
    assert tokens == tokens_by_parts == ROWS[:, 1:].numel()
    torch.testing.assert_close(loss_by_parts, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(by_parts, gradients, rtol=1e-5, atol=1e-7)


def test_logits_made_in_parts_are_not_kept_for_the_backward_pass():
    largest = {}
    for loss_chunk_size in (0, 8):
        kept: list[int] = []

        def keep(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            if tensor.shape[-1:] == (SHAPE["vocab_size"],):
                kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            goal = built()(**text_inputs(ROWS), loss_chunk_size=loss_chunk_size)
        assert goal.loss_sum.requires_grad
        largest[loss_chunk_size] = max(kept, default=0)
    assert largest[0] == ROWS[:, 1:].numel() * SHAPE["vocab_size"]
    assert largest[8] == 0


@pytest.mark.long
def test_only_the_model_is_uncompiled_where_it_is_requested_to_be(quickly):
    model = built()
    compile_model(model, COMPILED, "cpu")
    doubled = torch.compile(lambda x: x * 2)
    with uncompiled(model):
        model(ROWS[:, :-1])
        assert counters["stats"]["unique_graphs"] == 0
        doubled(torch.ones(2))
        assert counters["stats"]["unique_graphs"] == 1
    model(ROWS[:, :-1])
    assert counters["stats"]["unique_graphs"] == 3  # of a block and the norm; there is no loss


def test_what_hangs_on_the_model_is_not_compiled_with_it(quickly):
    """DeepSpeed's timers do, and on a GPU they wait for it: torch 2.13 fails over that."""
    seen = []
    model = built()
    model.register_forward_pre_hook(lambda *_: seen.append(torch.compiler.is_compiling()))
    compile_model(model, COMPILED, "cpu")
    model.register_forward_hook(lambda *_: seen.append(torch.compiler.is_compiling()))
    for _ in range(2):
        model(ROWS[:, :-1])
    assert seen == [False] * 4
    assert counters["stats"]["unique_graphs"] == 2  # of a block and the norm


@pytest.mark.long
@pytest.mark.launch
def test_under_every_backend_of_two_processes_regions_are_compiled_once(tmp_path: Path):
    out = tmp_path / "found.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launcher, "-m", "tests.distributed.graphs", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    stages = ["ddp", "stage 0", "stage 1", "stage 2"]
    assert [*found] == [*stages, "experts, ddp", "experts, stage 2"]
    for name, seen in found.items():
        regions = REGIONS_OF_EXPERTS if "experts" in name else REGIONS
        assert (seen["graphs"], seen["breaks"]) == (len(regions), {}), name
        assert seen["ahead"], name
        assert all(seen["ahead"]), name
        assert seen["compiled"] == pytest.approx(seen["eager"], rel=1e-4), name
