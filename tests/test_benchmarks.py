"""Benchmarks that nobody runs for months: that they run, and that their figures belong together."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import (
    contenders,
    engine_launches,
    gpu,
    mup_transfer,
    overhead,
    peers,
    race_page,
    racers,
    record,
    rows,
    table,
    throughput,
    time_to_loss,
)
from benchmarks.gpu import NAMES
from benchmarks.overhead import KINDS, interval
from benchmarks.stages import PHASES, STAGES
from minimind.cli.main import main as minimind
from minimind.config.parse import parse_flags
from minimind.data.rows.batches import Batches
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.runtime.device import Host
from tests.conftest import ROOT

PLACE: dict[str, Any] = {
    "env": {**os.environ, "OMP_NUM_THREADS": "1"},
    "cwd": ROOT,
    "capture_output": True,
    "text": True,
}


@pytest.mark.long
@pytest.mark.launch
def test_the_benchmark_of_stages_has_each_at_one_process(tmp_path: Path):
    out, text = tmp_path / "stages.json", tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{i} is a number"}) + "\n" for i in range(3000)))
    small = "--model tiny --rows 2 --rounds 3 --processes 1 --max_seq_len 64"
    command = [sys.executable, "-m", "benchmarks.stages", str(text), *small.split()]
    done = subprocess.run([*command, "--out", str(out)], **PLACE)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    table = json.loads(out.read_text())["table"]
    assert [*table] == [f"1 x 2 rows, {name}" for name in STAGES]
    for name, row in table.items():
        assert name in done.stdout
        assert row["tokens_per_second"] == pytest.approx(2 * 64 * 1e3 / row["ms"])
        assert all(row[phase] > 0 for phase in PHASES)


@pytest.mark.long
@pytest.mark.launch
def test_the_benchmark_for_gpus_runs_whole_on_a_cpu(tmp_path: Path):
    out, small = tmp_path / "gpu.json", "--models tiny --rows 3 --max_seq_len 64"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", *small.split()),
            *("--steps", "2", "--rounds", "3", "--out", str(out)),
        ],
        **PLACE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    output = json.loads(out.read_text())
    peak = output["device"]["peak_tflops"]
    assert peak["vendor"] is None
    assert peak["measured"] > 0
    (found,) = output["found"].values()
    assert [*found["table"]] == [*found["turns"]] == list(NAMES)
    for name, row in found["table"].items():
        assert name in done.stdout
        assert len(found["turns"][name]) == 3
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(3 * 64)
        assert row["mfu"]["vendor"] is None
        per_token = row["mfu"]["measured"] * peak["measured"] * 1e12 / row["tokens_per_second"]
        # Six for each weight that multiplies, and attention's 12 x layers x dim x T.
        assert per_token == pytest.approx(6 * 2_361_024 + 12 * 4 * 192 * 64, rel=2e-3)
        assert row["peak_mib"] > 100


def test_a_model_whose_process_ends_costs_the_others_no_figures(tmp_path, monkeypatch, capsys):
    out, minutes = tmp_path / "gpu.json", []

    def of_model(model: str, rows: int, given: Any, folder: Path, peaks: Any, share: float) -> Any:
        minutes.append(share)
        if model == "104m":
            raise SystemExit("ours, ZeRO-2, compiled ended: out of memory")
        row = {"seconds": 1.0, "tokens_per_second": 2.0, "speed": 1.0, "peak_mib": 3.0}
        return {"rows": rows, "table": {NAMES[0]: {**row, "mfu": dict.fromkeys(peaks)}}}

    monkeypatch.setattr(gpu, "of_model", of_model)
    monkeypatch.setattr(gpu, "write_corpus", lambda words: None)
    monkeypatch.setattr(gpu, "measured_peak", lambda device: 1.0)
    monkeypatch.setattr(
        sys, "argv", ["gpu", "--device", "cpu", "--minutes", "6", "--out", str(out)]
    )
    with pytest.raises(SystemExit, match=r"^no figures of 104m; out of memory, --rows"):
        gpu.main()
    assert [*json.loads(out.read_text())["found"]] == ["26m", "0.4b"]
    assert "104m: ours, ZeRO-2, compiled ended: out of memory" in capsys.readouterr().out
    assert minutes == pytest.approx([2, 3, 6], abs=0.5)


@pytest.mark.parametrize("steps", [0, 5, 6, 8])
def test_no_figures_are_reported_of_a_race_that_was_stopped(
    steps: int, tmp_path, monkeypatch, capsys
):
    """A signal ends the run as any other, saved and without an error, wherever it is."""
    out = tmp_path / "overhead.json"

    def stopped(race: Any, given: Any, folder: Path) -> None:
        race.pairs = [
            {"bare": 1.0, "loop": 2.0, "kind": KINDS[step % len(KINDS)]} for step in range(steps)
        ]

    monkeypatch.setattr(overhead, "run", stopped)
    monkeypatch.setattr(sys, "argv", ["overhead", "text.jsonl", "--pairs", "3", "--out", str(out)])
    with pytest.raises(
        SystemExit, match=rf"^the run ended after {steps} of 9 steps: there are no figures"
    ):
        overhead.main()
    assert not out.exists()
    assert not capsys.readouterr().out


def test_a_race_that_was_not_stopped_has_its_figures(tmp_path, monkeypatch):
    out, took = tmp_path / "overhead.json", {"as ever": 2.5, "hooks": 2.2, "neither": 2.0}

    def whole(race: Any, given: Any, folder: Path) -> None:
        race.pairs = [
            {"bare": 1.0, "loop": took[kind] + more, "kind": kind}
            for more in (-1e-3, 0.0, 1e-3)
            for kind in race.kinds
        ]

    monkeypatch.setattr(overhead, "run", whole)
    requested = ["overhead", "text.jsonl", "--pairs", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", requested)
    overhead.main()
    report = json.loads(out.read_text())
    found = report["found"]
    assert found["loop_over_engine_ms"] == pytest.approx(1500)
    assert found["loop_over_engine_ms, 95 %"] == pytest.approx([1499, 1501])
    assert found["hooks_ms"] == pytest.approx(200)
    assert found["hooks_ms, 95 %"] == pytest.approx([200, 200])
    assert found["hooks_share"] == pytest.approx(0.1)
    assert found["profile_ms"] == pytest.approx(-300)
    assert report["microseconds_of_pairs"]["hooks"][1] == [1_000_000, 2_200_000]

    monkeypatch.setattr(sys, "argv", [*requested, "--hooks_only"])
    overhead.main()
    report = json.loads(out.read_text())
    assert report["found"]["hooks_share"] == pytest.approx(0.1)
    assert not {"bare_ms", "profile_ms", "loop_over_engine_ms"} & {*report["found"]}
    assert report["microseconds_of_pairs"]["neither"][1] == [2_000_000]


def test_an_operator_belongs_to_who_issued_it():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    sgd = torch.optim.SGD([weight], 0.1, foreach=True)
    weight.register_post_accumulate_grad_hook(lambda _: sgd.step())  # within the backward pass
    loss = (weight * weight).T.sum()
    with engine_launches.Operators() as seen:
        loss.backward()
        loss.item()
    found = {name.partition(".")[0]: origin for origin, name in seen.found}
    assert found["mul"] == "model"
    assert found["_foreach_add_"] == "optimizer"
    assert "_local_scalar_dense" not in found


@pytest.mark.parametrize(
    ("place", "origin"),
    [
        ("site-packages/deepspeed/runtime/zero/stage3.py", "DeepSpeed"),
        ("site-packages/deepspeed/runtime/zero/linear.py", "model"),
        ("checkout/minimind/engine/flat_partitions.py", "ours"),
        ("checkout/minimind/engine/optimizers.py", "optimizer"),
        ("checkout/minimind/model/decoder.py", "model"),
        ("site-packages/torch/optim/adamw.py", "optimizer"),
        ("site-packages/torch/nn/modules/linear.py", None),
        ("checkout/minimind/train/loop.py", None),
    ],
)
def test_the_origin_is_that_of_the_file(place: str, origin: str | None):
    assert engine_launches.origin_of(f"/some/{place}") == origin


def test_a_slope_is_what_further_parameters_add_above_the_base():
    def table(parameters: int, least: float, operators: int) -> dict[str, Any]:
        base = {"operators": {"model": 7 * parameters}, "least_ms": 0.5 * parameters}
        ours = {"operators": {"model": 7 * parameters, "ours": operators}, "least_ms": least}
        return {engine_launches.BASE: base | {"parameters": parameters}, "stage 2": ours}

    found = engine_launches.above_base(table(100, 60.0, 300), table(300, 170.0, 1300))
    assert found["stage 2"] == {"operators": 5.0, "us": pytest.approx(50.0)}
    assert found[engine_launches.BASE] == {"operators": 0.0, "us": 0.0}


def test_the_interval_holds_the_median_as_often_as_promised():
    draws = random.Random(5)
    held = 0
    for _ in range(2000):
        low, high = interval([draws.expovariate(1.0) for _ in range(60)])
        held += low <= math.log(2) <= high
    assert 0.94 <= held / 2000 <= 0.985  # ranks are whole: a little more than asked for


def test_results_state_whether_the_cpu_multiplies_bf16(tmp_path, monkeypatch):
    for has in (True, False):
        monkeypatch.setattr(Host, "has_bf16", has)
        record.record(tmp_path / "of.json", "of", None)
        assert json.loads((tmp_path / "of.json").read_text())["machine"]["bf16"] is has


def test_every_contender_of_a_race_compiles_again(tmp_path, monkeypatch):
    """A cache of the race before hides what compiling takes: 120 to 240 MiB of ours."""
    caches, text = [], tmp_path / "text.jsonl"
    text.write_text("{}")

    def started(command: list[str], env: dict[str, str], **more: Any) -> Any:
        caches.append(Path(env["TORCHINDUCTOR_CACHE_DIR"]))
        folder = Path(command[8])
        assert (folder / "text.jsonl").exists()
        assert caches[-1].is_relative_to(folder)  # which lasts as long as the race
        assert " " not in str(caches[-1])
        return SimpleNamespace(wait=lambda: 0)

    def race(starts: Any, *more: Any) -> Any:
        for start in starts.values():
            start().close()
        raise SystemExit("seen")

    monkeypatch.setattr(throughput.subprocess, "Popen", started)
    monkeypatch.setattr(throughput, "race", race)
    monkeypatch.setattr(sys, "argv", ["throughput", str(text)])
    with pytest.raises(SystemExit, match="seen"):
        throughput.main()
    assert len({*caches}) == len(caches) >= 6


def test_our_contender_trains_with_the_numbers_of_the_others(tmp_path, monkeypatch):
    """The Trainer refuses a DeepSpeed file whose numbers are not its own."""
    argv: list[str] = []
    monkeypatch.setattr("minimind.launch.train_pretrain.main", argv.extend)
    monkeypatch.setattr(contenders.os, "_exit", lambda code: None)
    monkeypatch.setattr(Batches, "at", Batches.at)
    gate: Any = None  # no step is taken
    contenders.this_project(gate, "tiny", 1, tmp_path)
    run = parse_flags(argv)
    # What is not given is a rule's, by the text and the model.
    assert run.is_explicit("learning_rate")
    assert run.is_explicit("weight_decay")
    assert run.learning_rate == contenders.LEARNING_RATE
    assert run.weight_decay == contenders.DECAY
    assert run.grad_clip == contenders.CLIP
    assert (run.beta1, run.beta2) == contenders.BETAS


def test_the_trainer_compiles_nothing_that_training_does_not_use(tmp_path, monkeypatch):
    """A build that was killed leaves a lock, on which the Trainer would wait without a word."""
    for name in ("ACCELERATE_TORCH_DEVICE", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # set by the Trainer's loop, and forgotten after the test
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **more: None)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    ops = import_module("deepspeed").ops
    monkeypatch.setitem(vars(ops), "__compatible_ops__", {"deepspeed_shm_comm": True})
    gate: Any = None  # no step is taken
    with pytest.raises(SystemExit, match="needs the resolved file of our ZeRO-2 run"):
        contenders.trainer(gate, "tiny", 1, tmp_path)
    assert vars(ops)["__compatible_ops__"] == {"deepspeed_shm_comm": False}


@pytest.mark.parametrize("bf16", [True, False])
def test_the_table_states_whose_figures_they_are(bf16: bool, tmp_path, monkeypatch):
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    newest = max((ROOT / "benchmarks" / "results").glob("throughput-*.json"))
    report = json.loads(newest.read_text())
    report["machine"] = {"cpus": 3, "processor": "Abacus", "bf16": bf16}
    report["load"] = {"before": [0.25, 0, 0], "after": [2.5, 0, 0]}
    report["command"] = "python -m benchmarks.throughput kjv.jsonl --rounds 9 --out of.json"
    (results / newest.name).write_text(json.dumps(report))
    monkeypatch.setattr(table, "ROOT", tmp_path)
    last = table.table().splitlines()[-1]
    assert f"(Abacus, {'with' if bf16 else 'without'} instructions for bf16)" in last
    assert "load 0.2 before and 2.5 after" in last
    assert "rounds, `python -m benchmarks.throughput kjv.jsonl` (`benchmarks/results/" in last


def raced_run(name: str, bits: list[float], rate: float = 1e-3) -> dict[str, Any]:
    """Ten minutes with a point after every second one."""
    curve = [
        {"step": 10 * n, "tokens": 1000 * n, "seconds": 120.0 * n, "cpu_seconds": 60.0 * n}
        | {"bits": value}
        for n, value in enumerate(bits, 1)
    ]
    return {"name": name, "rate": rate, "seed": 0, "wall": 600.0, "curve": curve}


def test_the_race_interpolates_between_its_points_and_takes_medians(tmp_path: Path):
    slow = [raced_run("slow", [3.0, 2.5, 2.2, 2.1, 2.0 + seed / 100]) for seed in range(3)]
    fast = [raced_run("fast", [2.21 - seed / 100, 2.0, 1.9, 1.8, 1.7]) for seed in range(3)]
    assert time_to_loss.bits_at(slow[0], 180) == pytest.approx(2.75)
    assert time_to_loss.needed(slow[0], 2.35) == pytest.approx(300)
    assert time_to_loss.needed(slow[0], 3.5) == 120  # nothing is known before the first point
    assert time_to_loss.needed(slow[0], 1.9) == math.inf
    found = time_to_loss.summary({"slow": slow, "fast": fast}, 10)
    assert found["slow"]["bits"]["10"] == {"median": 2.01, "range": [2.0, 2.02]}
    assert found["slow"]["bits"]["5"]["median"] == pytest.approx(2.35)
    # 2.01, the median at the end, is crossed by the fast one of seed 1 at 120 + 120 * 19 / 20 s.
    both = {"seconds": pytest.approx(600 / 234), "tokens": pytest.approx(5000 / 1950)}
    assert found["fast"]["sooner"]["slow"] == both
    assert found["slow"]["sooner"]["fast"] == {"seconds": 0, "tokens": 0}
    text = time_to_loss.shown({"ours, Muon": found["fast"], "slow": found["slow"]}, ["slow"])
    assert "2.56 times sooner at the final value of slow" in text
    reached = time_to_loss.until({"slow": slow, "fast": fast}, "slow")
    assert reached[0][0] == "until 2.0100, of slow"
    assert reached[1] == ["slow", "600", "588 to inf", "300", "294 to inf"]
    assert reached[2] == ["fast", "234", "234 to 234", "117", "117 to 117"]
    page = tmp_path / "race.html"
    race_page.write_page(page, {"slow": slow, "fast": fast}, found, reached, "Two of them.")
    shown = page.read_text()
    assert "2.0000 to 2.0200" in shown
    assert "Seconds until 2.0100, of slow" in shown
    assert "<td>588 to inf</td>" in shown


def test_pieces_are_cut_at_white_space_and_lose_nothing_else(tmp_path: Path):
    texts = ["a few words\nand a second line", "床前明月光，疑是地上霜", "short"]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pieces = time_to_loss.in_pieces(path, tmp_path / "pieces", 9).read_text().splitlines()
    found = [json.loads(line)["text"] for line in pieces]
    assert found == ["a few", "words\nand", "a second", "line", texts[1], "short"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    data = tmp_path_factory.mktemp("prepared") / "data"
    words = f"prepare {corpus} --out {data} --vocab_size 600 --val_fraction 0.1"
    assert minimind(words.split()) == 0
    return data


def test_rows_of_the_race_hold_the_documents(prepared: Path):
    tokens, eos = rows.all_tokens(prepared)
    inputs, targets = rows.padded_rows(prepared, 16)
    assert len(inputs) == (tokens == eos).sum()
    assert (inputs[:, 0] == eos).all()
    first = tokens[: tokens.tolist().index(eos) + 1][:16]
    assert targets[0, : len(first)].tolist() == first.tolist()
    assert inputs[0, 1 : len(first)].tolist() == first[:-1].tolist()
    assert ((targets == -100) | (targets < 600)).all()
    inputs, targets = rows.packed_rows(prepared, 16)
    joined = torch.cat([inputs[:, :1], targets], 1).flatten()
    assert joined.tolist() == tokens[: len(joined)].tolist()


@pytest.mark.parametrize("seed", range(3))
def test_best_fit_rows_lose_only_the_ends_of_cut_documents(seed: int):
    draw, length, held = random.Random(seed), 24, 5
    ids = iter(range(1, 10_000))
    texts = [np.array([0, *(next(ids) for _ in range(draw.randint(1, 40)))]) for _ in range(90)]
    found = [*rows.best_fit_rows(texts, length, held)]
    waiting, later = texts[:held], texts[held:]
    for row in found:
        assert row[0] == 0
        assert len(row) == length
        starts = [*np.flatnonzero(row == 0), length]
        for start, end in pairwise(starts):
            room = length - start
            fitting = [text for text in waiting if len(text) <= room]
            best = max(fitting, key=len) if fitting else min(waiting, key=len)
            assert row[start:end].tolist() == best[:room].tolist()
            waiting = [text for text in waiting if text is not best] + later[:1]
            later = later[1:]
    assert sum(map(len, waiting + later)) < length  # no row more


def test_a_peer_is_judged_as_minimind_eval_does(tmp_path: Path, prepared: Path):
    torch.manual_seed(0)
    model = MiniMindForCausalLM(
        MiniMindConfig(
            vocab_size=600, hidden_size=32, num_hidden_layers=2, max_position_embeddings=16
        )
    )
    model.save_pretrained(tmp_path / "model")
    expected = racers.judge(tmp_path / "model", prepared)
    assert peers.bits_per_byte(model, prepared, 16) == pytest.approx(expected, abs=1e-4)


FAKES = {
    "nanochat/gpt.py": """
import torch
from dataclasses import dataclass

given = {}

@dataclass
class GPTConfig:
    sequence_len: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    window_pattern: str

class Optimizer(torch.optim.SGD):
    def step(self):
        given.setdefault("rates", []).append([group["lr"] for group in self.param_groups])
        super().step()

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = torch.nn.Embedding(config.vocab_size, 8)
        self.head = torch.nn.Linear(8, config.vocab_size)
        self.layers = config.n_layer

    def init_weights(self):
        for weight in self.parameters():
            torch.nn.init.normal_(weight, std=0.02)

    def num_scaling_params(self):
        return {"transformer_matrices": self.layers, "lm_head": 0}

    def setup_optimizer(self, unembedding_lr, embedding_lr, scalar_lr, matrix_lr, weight_decay):
        given.update(matrix_lr=matrix_lr, weight_decay=weight_decay)
        groups = [("adamw", self.embed, embedding_lr), ("muon", self.head, matrix_lr)]
        return Optimizer(
            dict(kind=kind, params=[*part.parameters()], lr=lr, initial_lr=lr)
            for kind, part, lr in groups
        )

    def forward(self, idx, targets=None):
        logits = self.head(self.embed(idx))
        if targets is None:
            return logits
        assert (idx[:, 1:] == targets[:, :-1]).all()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
""",
    "nanochat/optim.py": "",
    "nanochat/common.py": "",
    "scripts/base_train.py": """
parser.add_argument("--aspect-ratio", type=int, default=64)
parser.add_argument("--head-dim", type=int, default=128)
parser.add_argument("--weight-decay", type=float, default=0.28)
parser.add_argument("--unembedding-lr", type=float, default=0.008)
parser.add_argument("--embedding-lr", type=float, default=0.3)
parser.add_argument("--scalar-lr", type=float, default=0.5)
parser.add_argument("--matrix-lr", type=float, default=0.02)
parser.add_argument("--warmup-steps", type=int, default=-1 + 5)
parser.add_argument("--warmdown-ratio", type=float, default=0.65)
parser.add_argument("--final-lr-frac", type=float, default=0.05)
B_REF = 2**19

def get_lr_multiplier(it):
    return (it + 1) / args.warmup_steps

def get_muon_momentum(it):
    return 0.9

def get_weight_decay(it):
    return weight_decay_scaled * 0.5 * (1 + math.cos(math.pi * it / num_iterations))
""",
    "model/model_minimind.py": """
import torch
from types import SimpleNamespace as MiniMindConfig

class MiniMindForCausalLM(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, input_ids, labels=None, use_cache=False):
        logits = self.embed(input_ids) @ self.embed.weight.T
        if labels is None:
            return MiniMindConfig(logits=logits)
        found = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(*found, ignore_index=-100)
        return MiniMindConfig(loss=loss, aux_loss=0.0)
""",
    "trainer/trainer_utils.py": """
def get_lr(current_step, total_steps, lr):
    return lr
""",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A checkout with the names that are called, of both projects."""
    for name, text in FAKES.items():
        file = tmp_path / "checkout" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: model)
    for name in ("NANOCHAT_DTYPE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    yield tmp_path / "checkout"
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("nanochat", "model", "trainer"):
            del sys.modules[name]


def race_peer(name: str, data: Path, checkout: Path, monkeypatch) -> list[dict[str, float]]:
    out = checkout / name
    line = f"--steps 4 --points 2 --rows 2 --lr 0.5 --judge --peer {checkout}"
    monkeypatch.setattr(sys, "argv", ["racers", name, str(data), str(out), *line.split()])
    racers.main()
    return json.loads((out / "points.json").read_text())


def test_nanochat_runs_by_the_rules_of_its_script(prepared: Path, checkout: Path, monkeypatch):
    points = race_peer("nanochat", prepared, checkout, monkeypatch)
    assert [point["tokens"] for point in points] == [1024, 2048]
    assert 0 < points[0]["cpu_seconds"] < points[1]["cpu_seconds"]
    assert points[1]["bits"] < points[0]["bits"]
    given = sys.modules["nanochat.gpt"].given
    scale = math.sqrt(2 * 256 / 2**19)
    assert given["matrix_lr"] == pytest.approx(0.02 * 0.5 * scale)
    assert given["weight_decay"] == pytest.approx(0.28 * scale * 12 / 4)  # layers of d12 and tiny
    rates = [[0.3 * 0.5 * scale * n / 4, 0.02 * 0.5 * scale * n / 4] for n in (1, 2, 3, 4)]
    assert [*map(pytest.approx, rates)] == given["rates"]


@pytest.mark.parametrize("name", ["MiniMind, padded", "MiniMind, packed"])
def test_minimind_runs_from_a_checkout(name: str, prepared: Path, checkout: Path, monkeypatch):
    points = race_peer(name, prepared, checkout, monkeypatch)
    if "packed" in name:
        assert [point["tokens"] for point in points] == [2 * 2 * 255, 4 * 2 * 255]
    assert points[1]["bits"] < points[0]["bits"]


def test_rows_of_minimind_end_with_the_end_of_the_document(prepared: Path):
    labels = peers.shipped_rows(prepared, 12)
    for row, text in zip(labels.tolist(), rows.documents(prepared), strict=True):
        kept = [token for token in row if token != -100]
        assert kept == [*text.tolist()[: len(kept) - 1], text[-1]]
        assert len(kept) == min(len(text), 12)


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "message"),
    [
        ("nanochat", "scripts/base_train.py", None, None, "has no scripts/base_train.py; check"),
        ("nanochat", "scripts/base_train.py", "B_REF", "B", "base_train.py has no B_REF; check"),
        ("nanochat", "scripts/base_train.py", "--head-dim", "--h", "has no head_dim; check out"),
        ("nanochat", "nanochat/gpt.py", "scalar_lr", "lr", "nanochat/gpt.py has no scalar_lr;"),
        ("nanochat", "nanochat/gpt.py", "import torch", "import no_such", "'no_such'; install it"),
        ("MiniMind, packed", "model/model_minimind.py", None, None, "check out MiniMind d65ef2c"),
        ("MiniMind, packed", "trainer/trainer_utils.py", "get_lr", "lr", "has no get_lr; check"),
    ],
)
def test_a_checkout_of_another_version_ends_with_what_it_lacks(
    name: str,
    file: str,
    old: str | None,
    new: str | None,
    message: str,
    prepared: Path,
    checkout: Path,
    monkeypatch,
):
    place = checkout / file
    if old and new:
        place.write_text(place.read_text().replace(old, new))
    else:
        place.unlink()
    with pytest.raises(SystemExit, match=re.escape(message)) as ended:
        race_peer(name, prepared, checkout, monkeypatch)
    assert "\n" not in str(ended.value)
    assert f"--peer {checkout}: " in str(ended.value)


def test_a_race_is_run_again_for_another_checkout(prepared: Path, checkout: Path):
    race = time_to_loss.Race(prepared.parent, "tiny", 2, {}, {"nanochat": checkout}, {})
    first, other = race.key("nanochat"), race.key(racers.MUON)
    assert race.command("nanochat")[-2:] == ["--peer", str(checkout)]
    assert "--peer" not in race.command(racers.MUON)
    (checkout / "nanochat/optim.py").write_text("more = 1")
    assert race.key("nanochat") != first
    assert race.key(racers.MUON) == other


def test_the_clock_leaves_out_saving(tmp_path: Path, monkeypatch):
    times = iter([(100.0, 10.0), (105.0, 14.0), (107.0, 15.0), (110.0, 18.0), (111.0, 19.0)])
    monkeypatch.setattr(racers, "now", lambda: np.array(next(times)))
    clock, saved = racers.Clock(tmp_path, 4, 2), []
    clock.start()
    for step in range(1, 5):
        clock.after(step, 10 * step, saved.append)
    assert clock.found == {
        2: {"seconds": 5.0, "cpu_seconds": 4.0, "tokens": 20},
        4: {"seconds": 8.0, "cpu_seconds": 7.0, "tokens": 40},
    }
    assert saved == [clock.weights(2), clock.weights(4)]


def test_what_a_race_found_is_of_one_command_and_data(tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "manifest.json").write_text("{}")

    def keys(rows: int = 2, flags: str = "--qk_norm", of_muon: int | None = None) -> list[str]:
        variants, rows_of = {"a b": flags, "a-b": ""}, {racers.MUON: of_muon or rows}
        race = time_to_loss.Race(tmp_path, "tiny", rows, variants, {}, rows_of)
        rates = [race.key(racers.DEFAULT, "--lr", str(rate)) for rate in (5e-4, 8e-4)]
        return [*rates, race.key(racers.MUON), race.key("a b"), race.key("a-b")]

    first = keys()
    assert len({*first}) == 5
    assert keys() == first
    assert not {*keys(rows=4)} & {*first}
    assert keys(of_muon=4)[2] == keys(rows=4)[2]
    assert keys(of_muon=4)[:2] == first[:2]
    assert [a == b for a, b in zip(keys(flags=""), first, strict=True)][3] is False
    (data / "manifest.json").write_text('{"documents": 2}')
    assert not {*keys()} & {*first}


@pytest.mark.long
@pytest.mark.launch
def test_the_race_runs_whole_and_does_nothing_twice(tmp_path: Path, corpus: Path, checkout: Path):
    out, folder = tmp_path / "race.json", tmp_path / "race"
    names = [racers.PACKED, racers.TRAINER, racers.MUON, "MiniMind, packed"]
    line = f"{corpus} --folder {folder} --minutes 0.3 --search_minutes 0.03 --seeds 1 --rows 2"
    more = ["--rates", "1e-3", "2e-3", "--only", *names, "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.time_to_loss", *line.split(), *more]
    command += ["--peer", "minimind", str(checkout), "--reference", racers.PACKED]
    command += ["--page", str(tmp_path / "race.html")]
    done = subprocess.run(command, **PLACE)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    found = json.loads(out.read_text())
    assert list(found["table"]) == names
    runs = [*found["search"], *(run for own in found["runs"].values() for run in own)]
    settings = [(run["name"], run["rate"], run["curve"][-1]["step"]) for run in runs]
    assert len({*settings}) == len(settings) == 12
    for run in runs:
        pace = found["pace"][run["name"]]
        assert len(run["curve"]) == time_to_loss.POINTS
        end = run["curve"][-1]["seconds"]
        assert end == pytest.approx(60 * run["minutes"], abs=10 * pace["step"] + pace["start"])
        assert run["curve"][-1]["tokens"] == pytest.approx(run["curve"][-1]["step"] * 2 * 256, 0.01)
        assert (
            0 < run["curve"][0]["cpu_seconds"] < run["curve"][-1]["cpu_seconds"] < run["wall"] * 2
        )
    assert f"the final value of {racers.PACKED} (inf: not reached)" in done.stdout
    again = subprocess.run(command, **PLACE)
    assert again.returncode == 0
    assert json.loads(out.read_text())["runs"] == found["runs"]


def test_the_best_rate_of_each_width_is_marked_and_a_run_that_diverged_is_left_out():
    by_rate = {1e-3: 3.5, 2e-3: 3.25, 4e-3: math.inf}
    row = mup_transfer.row_of(64, by_rate, [*by_rate])
    assert row.split() == ["64", "3.5000", "3.2500", "inf", "best", "0.002"]
    losses = {"mup": {64: by_rate}, "plain": {64: by_rate, 128: {1e-3: 3.0, 2e-3: 4.0}}}
    page = mup_transfer.page_of(losses, steps=10)
    assert page.count("width 64, best 0.002") == 2
    assert page.count("width 128, best 0.001") == 1
