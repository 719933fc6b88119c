"""The verdict on made-up profiles, and on real runs made slow on purpose."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import minimind.train as training
import minimind.train.evaluate as evaluation
from minimind.checkpoint.saver import Saver
from minimind.config.flags import FLAGS
from minimind.data.shards.token_shards import TokenShards
from minimind.engine.plain_backend import PlainBackend
from minimind.report.slowness import MOST_WORKERS, Finding, Setting, Times, Verdicts, slowest

PHASES = ("data", "forward", "backward", "optimizer")


def profile(
    *times: float, comm: list[float] | None = None, step: int = 20, steps: int = 10, **more: Any
) -> dict[str, Any]:
    """A profile of equal ranks: milliseconds of the four phases; `more` are medians by rank,
    with which the means are those of rank 0, or pauses in all.
    """
    world = len(comm or next((v for v in more.values() if isinstance(v, list)), [0]))
    ranks = {f"{name}_ms": [ms] * world for name, ms in zip(PHASES, times, strict=True)}
    ranks |= {name: values for name, values in more.items() if isinstance(values, list)}
    ranks |= {"comm_ms": comm} if comm else {}
    means = {f"{name}_ms": ranks[f"{name}_ms"][0] for name in PHASES}
    pauses = {name: ms for name, ms in more.items() if not isinstance(ms, list)}
    return {"step": step, "steps": steps, **means, **pauses, "ranks": ranks}


def judge(one: dict[str, Any], **setting: Any) -> Finding:
    found = slowest(Times([one]), Setting(**setting))
    assert "\n" not in found.text
    assert found.figures["share"] == pytest.approx(
        found.figures["part_ms"] / found.figures["whole_ms"]
    )
    named = re.findall(r"--(\w+)", found.text)
    assert {name.removeprefix("no_") for name in named} <= {*FLAGS}, found.text
    return found


def test_where_nothing_stands_out_the_verdict_says_so():
    found = judge(profile(1.0, 30.0, 60.0, 9.0), num_workers=1)
    assert found.kind == "compute"
    share = "90 % of the step (90.0 of 100.0 ms)"
    assert found.text == f"nothing stands out: forward and backward are {share}"


@pytest.mark.parametrize(
    ("wait", "workers", "advice"),
    [
        (31.0, 1, "; --num_workers 2"),
        (31.0, 3, "; --num_workers 5"),
        (11.0, 0, "; --num_workers 1"),
        (75.0, 0, "; --num_workers 3"),
        (95.0, 1, f"; --num_workers {MOST_WORKERS}, and a faster disk for the token files"),
        (31.0, MOST_WORKERS, f"; the disk of the token files or the CPU is the limit, --num_workers"
         f" is {MOST_WORKERS}"),
        (31.0, 64, "; the disk of the token files or the CPU is the limit, --num_workers is 64"),
        (31.0, -1, "; increase --num_workers"),
    ],
)  # fmt: skip
def test_a_wait_for_rows_is_answered_by_the_threads_that_would_end_it(wait, workers, advice):
    rest = (100 - wait) / 10
    found = judge(profile(wait, 3 * rest, 6 * rest, rest), num_workers=workers)
    share = f"{wait:.0f} % of the step ({wait:.1f} of 100.0 ms)"
    assert (found.kind, found.text) == ("data", f"data-bound: {share} waits for rows{advice}")


def test_rows_read_in_blocks_are_a_wait_though_most_steps_have_none():
    one = profile(0.0, 30.0, 60.0, 10.0, data_ms=[0.0, 0.0], comm=[1.0, 1.0])
    found = judge({**one, "data_ms": 100.0}, world_size=2, num_workers=1)
    assert found.text.startswith("data-bound: 50 % of the step (100.0 of 200.0 ms) waits for rows")


def test_one_rank_that_waits_for_rows_is_named_and_no_threads_are_advised():
    one = profile(1.0, 30.0, 30.0, 9.0, data_ms=[1.0, 1.0, 40.0], comm=[40.0, 40.0, 1.0])
    found = judge({**one, "backward_ms": 70.0}, world_size=3, num_workers=1)
    assert (found.kind, found.figures["rank"]) == ("data", 2)
    assert found.text.startswith("rank 2 waits for rows for 57 % of the step")
    assert "--" not in found.text


def test_a_rank_with_a_long_forward_pass_is_named_and_the_wait_of_the_others_is_not():
    late = profile(
        1.0, 0, 0, 9.0,
        forward_ms=[30.0, 31.0, 29.0, 80.0], backward_ms=[110.0, 109.0, 111.0, 60.0],
        comm=[60.0, 59.0, 61.0, 10.0],
    )  # fmt: skip
    found = judge(late, world_size=4, device="cuda")
    assert (found.kind, found.figures["rank"]) == ("rank", 3)
    assert found.text == (
        "rank 3 is 167 % slower than the median of the others in forward (80.0 against 30.0 ms,"
        " of a step of 150.0 ms); look at its clock and what else uses its GPU"
    )


def test_a_rank_that_is_slow_in_both_passes_is_compared_without_communication():
    slow = profile(
        1.0, 0, 0, 9.0, forward_ms=[36.0, 30.0], backward_ms=[74.0, 80.0], comm=[2.0, 20.0]
    )  # fmt: skip
    found = judge(slow, world_size=2, device="cpu")
    assert (found.kind, found.figures["rank"]) == ("rank", 0)
    assert found.text == (
        "rank 0 is 18 % slower than rank 1 in computation (117.0 against 99.0 ms, of a step of"
        " 120.0 ms); look at its cores"
    )


def test_a_rank_is_named_whose_peer_does_nothing_but_wait():
    """Time in collectives is a mean, the phases are medians: nothing may be left of the peer."""
    late = profile(0.1, 1, 1, 1, comm=[432, 31], forward_ms=[1, 402], backward_ms=[408, 9])
    found = judge(late, world_size=2)
    assert (found.kind, found.figures["rank"]) == ("rank", 1)
    assert "rank 1 is far slower than rank 0 in forward (402.0 against 1.0 ms" in found.text
    late = profile(0.1, 1, 1, 1, comm=[31, 432], forward_ms=[2, 2], backward_ms=[408, 420])
    found = judge(late, world_size=2)
    assert "rank 0 is far slower than rank 1 in computation (380.0 against 0.0 ms" in found.text


@pytest.mark.parametrize("comm", [[10.0, 10.0, 10.0], None])
def test_ranks_within_their_spread_are_not_slow(comm):
    near: dict[str, Any] = {"forward_ms": [24.0, 30.0, 34.0], "backward_ms": [60.0, 60.0, 60.0]}
    assert judge(profile(1.0, 0, 0, 9.0, **near, comm=comm), world_size=3).kind == "compute"


def test_without_communication_times_stage_3_names_no_slow_rank():
    late = profile(1.0, 0, 60.0, 9.0, forward_ms=[30.0, 80.0])
    assert judge(late, world_size=2, zero_stage=2).kind == "rank"
    assert judge(late, world_size=2, zero_stage=3).kind == "compute"


@pytest.mark.parametrize(
    ("setting", "words", "not_said"),
    [
        ({"zero_stage": 2, "accumulation_steps": 4}, "stage 1, if it fits: it reduces", "stage 0"),
        ({"zero_stage": 3, "accumulation_steps": 2}, "stage 1, if it fits: it reduces", "stage 0"),
        ({"zero_stage": 2}, "a larger --batch_size, or stage 0", "accumulation"),
        ({"zero_stage": 2, "dtype": "float16"}, "a larger --batch_size", "stage 0"),
        ({"zero_stage": 1, "offloads": True}, "or more --accumulation_steps", "stage 0"),
        ({"zero_stage": 1}, "--batch_size, or more --accumulation_steps, or stage 0", "stage 1"),
        ({"zero_stage": 1, "global_batch_size": 8}, "--global_batch_size", "--accumulation"),
        (
            {"zero_stage": 2, "global_batch_size": 8},
            "larger --batch_size and --global_batch_size",
            "--accumulation",
        ),
        ({"zero_stage": 1, "accumulation_steps": 8}, "or more --accumulation_steps", "stage"),
        ({"zero_stage": 0, "accumulation_steps": 8}, "or more --accumulation_steps", "stage"),
        ({"zero_stage": 3}, "a larger --batch_size", "stage"),
    ],
)
def test_communication_is_answered_by_what_sends_less_in_this_layout(setting, words, not_said):
    found = judge(profile(1.0, 20.0, 60.0, 19.0, comm=[45.0, 44.0]), world_size=2, **setting)
    assert found.kind == "communication"
    assert found.text.startswith("communication is 44 % of the step (44.0 of 100.0 ms); ")
    assert words in found.text
    assert not re.search(not_said, found.text.split("; ")[1])


def test_with_tensor_parallel_ranks_communication_is_mostly_that_of_the_passes():
    divided = {"world_size": 4, "zero_stage": 2, "accumulation_steps": 4, "tensor_parallel": 2}
    found = judge(profile(1.0, 20.0, 60.0, 19.0, comm=[45.0, 44.0, 46.0, 45.0]), **divided)
    assert found.kind == "communication"
    assert found.text == (
        "communication, including both passes of tensor_parallel = 2, is 44 % of the step (44.0 of"
        " 100.0 ms); remove --tensor_parallel if a micro-batch fits without it"
    )
    update = profile(1.0, 20.0, 30.0, 49.0, comm=[10.0] * 4)
    assert judge(update, **divided).kind == "compute"  # which part of it computes is unknown
    assert judge(update, **{**divided, "zero_stage": 0}).kind == "optimizer"
    assert judge(update, **{**divided, "tensor_parallel": 1}).kind == "optimizer"


def test_one_process_has_no_communication_to_save():
    assert judge(profile(1.0, 20.0, 60.0, 19.0, comm=[50.0]), world_size=1).kind == "compute"


def test_an_update_that_gathers_weights_is_no_slow_optimizer():
    times = (1.0, 20.0, 39.0, 40.0)
    assert judge(profile(*times), accumulation_steps=2).kind == "optimizer"
    assert judge(profile(*times), global_batch_size=8).advice.endswith(": --global_batch_size")
    assert "more rows a step" in judge(profile(*times)).text
    assert judge(profile(*times), offloads=True).text.count("offload_optimizer") == 1
    gathers = profile(*times, comm=[25.0, 25.0])
    assert judge(gathers, world_size=2, zero_stage=1).kind == "compute"
    assert judge(gathers, world_size=2, zero_stage=0).kind == "optimizer"


EAGER = {"compile": "off", "device": "cuda"}
OWN = {"zero_stage": 2, "zero_update": "by DeepSpeed (--zero_update)"}


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ({}, "a larger --batch_size"),
        ({"accumulation_steps": 4, "global_batch_size": 64}, "a larger --batch_size"),
        # The micro-batch is the whole share of a process.
        ({"global_batch_size": 64}, "a larger --batch_size and --global_batch_size"),
        ({"accumulation_steps": 4}, "a larger --batch_size with fewer --accumulation_steps"),
        (EAGER, "--compile on, or a larger --batch_size"),
        ({**EAGER, "device": "mps"}, "a larger --batch_size"),
        ({**EAGER, "compile": "on"}, "a larger --batch_size"),
        ({**EAGER, "use_moe": True}, "a larger --batch_size"),
        ({**EAGER, "model": "hf:gpt2"}, "a larger --batch_size"),
        ({**EAGER, "tensor_parallel": 2}, "a larger --batch_size"),
        ({**EAGER, "sequence_parallel": 2}, "a larger --batch_size"),
        ({**EAGER, "zero_stage": 3, "zero_update": "by DeepSpeed (its wrapper is another)"},
         "a larger --batch_size, or a lower ZeRO stage if the model fits"),
        (OWN, "--zero_update auto, or a larger --batch_size"),
        ({**OWN, "zero_stage": 0}, "--zero_update auto, or a larger --batch_size"),
        ({**OWN, "zero_stage": 3},
         "a larger --batch_size, or a lower ZeRO stage if the model fits"),
        ({**OWN, **EAGER}, "--compile on, or --zero_update auto, or a larger --batch_size"),
        ({**OWN, "zero_update": "by DeepSpeed (zenflow)"}, "a larger --batch_size"),
        ({**OWN, "zero_update": "by flat partitions"}, "a larger --batch_size"),
    ],
)  # fmt: skip
def test_a_host_that_the_gpu_waits_for_is_answered_by_fewer_launches_per_row(setting, advice):
    share = "84 % of the step (84.0 of 100.0 ms)"
    one = profile(1.0, 24.0, 60.0, 15.0, host_ms=[84.0])
    found = judge(one, **setting)
    assert (found.kind, found.figures["part_ms"]) == ("host", 84.0)
    waits = f"the GPU waits for it in passes that are {share}; {advice}"
    assert found.text == f"the host is the limit: {waits}"
    launches = "it launches about 4,286 kernels a step, and "
    assert judge(one, **setting, kernels=4286).text == f"the host is the limit: {launches}{waits}"


@pytest.mark.parametrize(
    ("one", "setting", "kind"),
    [
        (profile(1.0, 24.0, 60.0, 15.0, host_ms=[0.0]), {}, "compute"),
        (profile(1.0, 24.0, 60.0, 15.0, host_ms=[24.0]), {}, "compute"),
        (profile(1.0, 24.0, 60.0, 15.0), {}, "compute"),  # of an older run, or of a CPU
        (profile(1.0, 24.0, 60.0, 15.0, host_ms=[84.0]), {"offloads": True}, "compute"),
        (profile(1.0, 40.0, 60.0, 15.0, host_ms=[100.0, 0.0]), {}, "host"),
        (profile(1.0, 24.0, 60.0, 15.0, host_ms=[0.0, 84.0]), {}, "compute"),
        (profile(60.0, 14.0, 20.0, 6.0, host_ms=[34.0]), {"num_workers": 1}, "data"),
        (profile(1.0, 14.0, 20.0, 65.0, host_ms=[34.0]), {}, "optimizer"),
        (profile(1.0, 30.0, 30.0, 39.0, host_ms=[60.0]), {}, "host"),
    ],
)
def test_the_host_is_named_where_it_costs_most(one, setting, kind):
    assert judge(one, **setting).kind == kind


def test_an_update_by_deepspeeds_own_path_is_answered_by_the_flag_that_chose_it():
    found = judge(profile(1.0, 14.0, 20.0, 65.0, host_ms=[34.0]), **OWN)
    assert found.text.endswith(
        "; --zero_update auto, or more rows a step: --batch_size or --accumulation_steps"
    )


@pytest.mark.parametrize(
    ("cause", "setting", "words"),
    [
        ("checkpoint", {"save_interval": 5}, "checkpoints take 33 % of the time (0.5 of 1.5 s);"
         " --save_interval above 5"),
        ("checkpoint", {"save_interval": 5, "async_save": False},
         "; --async_save or --save_interval above 5"),
        ("evaluate", {"eval_interval": 5, "eval_rows": 64},
         "evaluation takes 33 % of the time (0.5 of 1.5 s); --eval_interval above 5 or --eval_rows"
         " below 64"),
        ("sample", {"sample_interval": 5}, "; --sample_interval above 5"),
    ],
)  # fmt: skip
def test_pauses_are_answered_by_their_interval(cause, setting, words):
    pause: dict[str, Any] = {f"{cause}_ms": 500.0}
    one = profile(1.0, 30.0, 60.0, 9.0, **pause)
    found = judge(one, **setting)
    assert found.kind == cause
    assert words in found.text
    # Due only at the last step, which is saved and validated at any interval; or not known.
    assert judge(one, **setting | dict.fromkeys([*setting][:1], 20), total_steps=20).kind == (
        "compute"
    )
    assert judge(one, **setting | dict.fromkeys([*setting][:1], 0)).kind == "compute"


def test_checkpoints_by_minutes_are_answered_by_minutes():
    one = profile(1.0, 30.0, 60.0, 9.0, steps=1000, step=1000, checkpoint_ms=60e3)
    found = judge(one, save_interval=5000, save_minutes=1.5, total_steps=9000)
    assert found.text.endswith("; --save_minutes above 1.5")
    assert judge(one, save_interval=5000, save_minutes=30.0, total_steps=9000).kind == "compute"


def test_compiling_is_a_cause_only_of_a_run_that_is_over():
    one = {**profile(1.0, 30.0, 60.0, 9.0), "forward_ms": 1030.0}
    found = judge(one, compile="on", total_steps=20)
    assert found.text == (
        "compiling takes 91 % of the time (10.0 of 11.0 s); --compile off for a run of 10 steps"
    )
    assert judge(one, compile="on", total_steps=1000).kind == "compute"
    assert judge(one, compile="off", total_steps=20).kind == "compute"


def test_the_cause_that_costs_most_is_named():
    both = {"num_workers": 1, "eval_interval": 5}
    assert judge(profile(50.0, 30.0, 60.0, 9.0, evaluate_ms=400.0), **both).kind == "data"
    assert judge(profile(50.0, 30.0, 60.0, 9.0, evaluate_ms=600.0), **both).kind == "evaluate"


def test_a_verdict_is_announced_when_its_kind_changes_and_at_the_end():
    verdicts = Verdicts(Setting(num_workers=1))
    usual, waits = profile(1.0, 30.0, 60.0, 9.0), profile(900.0, 30.0, 60.0, 9.0)
    kinds = [
        found and found.kind
        for one, is_last in ((waits, False), (usual, False), (usual, False), (waits, False),
                             (waits, False), (waits, True))
        for found in [verdicts.after(one, is_last)]
    ]  # fmt: skip
    assert kinds == [None, "compute", None, "data", None, "data"]


def test_a_setting_is_read_from_values_and_from_text():
    values = {"num_workers": 2, "async_save": False, "zero_stage": None, "save_minutes": 1.5}
    text = {name: str(value).lower() for name, value in values.items()}
    for known in (values, text):
        assert Setting.read(known) == Setting(num_workers=2, async_save=False, save_minutes=1.5)
    assert Setting.read({"zero_optimization.offload_optimizer.device": '"cpu"'}).offloads
    assert not Setting.read({"zero_optimization.offload_optimizer.device": '"none"'}).offloads
    assert Setting.read({"num_workers": "x", "world_size": 10**400}) == Setting()


# ---- real runs

SHAPE: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "device": "cpu", "deepspeed_config": "none"},
    **{"max_steps": 12, "profile_interval": 4, "log_interval": 4, "save_interval": 100},
    **{"eval_interval": 100, "eval_rows": 2, "profile": True},
}
SLOW = 0.15  # seconds, several steps


def slowed(work: Callable[..., Any], seconds: float = SLOW) -> Callable[..., Any]:
    def late(*given: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return work(*given, **named)

    return late


def verdict_events(out_dir: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (out_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "verdict"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "owner", "name", "flags", "words"),
    [
        ("data", TokenShards, "read_rows", {"num_workers": 0}, "--num_workers"),
        ("evaluate", evaluation, "evaluate", {"eval_interval": 2}, "--eval_interval above 2"),
        ("checkpoint", Saver, "begin", {"save_interval": 2}, "--save_interval above 2"),
        ("optimizer", PlainBackend, "update", {}, "more rows a step"),
        ("compute", PlainBackend, "backward", {}, "nothing stands out"),
    ],
)
def test_a_run_made_slow_names_what_was_slow(
    corpus: Path, tmp_path: Path, monkeypatch, capsys, kind, owner, name, flags, words
):
    from minimind.cli.main import main

    monkeypatch.setattr(owner, name, slowed(getattr(owner, name)))
    train: Any = training  # a package that is called like a function
    places = {"data_path": [str(corpus)], "cache_dir": str(tmp_path / "cache")}
    out_dir = tmp_path / "out"
    assert train({**SHAPE, **places, **flags}, out_dir=str(out_dir)) == 0
    printed = [x for x in capsys.readouterr().out.splitlines() if x.startswith("verdict  ")]
    events = verdict_events(out_dir)
    assert [(e["step"], e["kind"]) for e in events] == [(8, kind), (12, kind)]
    assert words in events[-1]["text"]
    figures = events[-1]["figures"]
    assert figures["share"] == pytest.approx(figures["part_ms"] / figures["whole_ms"])
    assert printed == [f"verdict  {event['text']}" for event in events]
    # The report says the same, also where the run recorded no verdict.
    text = events[-1]["text"]
    assert f"{text[0].upper()}{text[1:]}." in (out_dir / "report.html").read_text()
    metrics = out_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"event": "verdict"' not in line))
    assert not verdict_events(out_dir)
    assert main(["report", str(out_dir)]) == 0
    assert f"  verdict     {text}\n" in capsys.readouterr().out


def test_a_run_of_two_names_the_rank_that_is_late(nursery: Any, corpus: Path, tmp_path: Path):
    words = {**SHAPE, "data_path": corpus, "cache_dir": tmp_path / "cache", "out_dir": tmp_path}
    words = {**words, "eval_rows": 0, "dtype": "float32"}
    flags = [f"--{name}={value}" for name, value in words.items() if name != "profile"]
    statuses, out, err = nursery.run("tests.report.late_rank", [*flags, "--profile"], tmp_path)
    assert statuses == [0, 0], err
    *_, last = verdict_events(tmp_path)
    assert (last["kind"], last["figures"]["rank"]) == ("rank", 1)
    assert re.fullmatch(
        r"rank 1 is (\d+ %|far) slower than rank 0 in forward \(.* ms\); look at its cores",
        last["text"],
    )
    assert out.count(f"verdict  {last['text']}\n") == 1
