"""benchmarks.stages: who takes part, what differs between them, and what is made of their steps."""

import json

import pytest

from benchmarks.stages import (
    PHASES,
    SETTINGS,
    STAGES,
    Entry,
    both_scalings,
    phases,
    scaling,
    settings,
    stages,
    summary,
)
from benchmarks.throughput import race
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG

SHIPPED = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())


def steps(*seconds, cpu=1.0):
    return [{"seconds": one, "cpu": cpu, "peak_mib": 900.0} for one in seconds]


def test_two_processes_have_the_rows_of_one_between_them_or_each():
    found = stages(4, [1, 2])
    assert list(found) == [
        f"{each}, {kind}" for each in ("1 x 4 rows", "2 x 2 rows") for kind in STAGES
    ]
    assert [one.zero and one.zero["stage"] for one in found.values()] == [None, 0, 1, 2, 3] * 2
    assert {(one.processes, one.rows) for one in found.values()} == {(1, 4), (2, 2)}
    found = both_scalings(4, [1, 2])
    assert {(one.processes, one.rows) for one in found.values()} == {(1, 4), (2, 2), (2, 4)}


def test_a_contender_changes_what_it_is_called_by_and_nothing_else(tmp_path):
    for name, one in settings(4, [1, 2]).items():
        flags = one.starter(name, "tiny", tmp_path).keywords["flags"]
        written = json.loads((tmp_path / f"{name}.json").read_text())
        zero = SHIPPED["zero_optimization"] | SETTINGS[name]
        assert written == SHIPPED | {"zero_optimization": zero}
        assert flags[flags.index("--deepspeed_config") + 1] == str(tmp_path / f"{name}.json")
    plain = Entry(1, 4, None).starter("plain", "tiny", tmp_path).keywords["flags"]
    assert plain[plain.index("--deepspeed_config") + 1] == "none"


def test_ratios_are_of_the_same_round():
    entries = {"one": Entry(1, 4, None), "other": Entry(2, 4, None)}
    found = {"one": steps(1, 1, 4, 4, 4), "other": steps(2, 2, 8, 8, 4, cpu=3.0)}
    other = summary(found, entries, 10, "one")["other"]
    assert (other["ms"], other["least_ms"], other["peak_mib"]) == (4000, 2000, 900)
    assert (other["time"], other["time_quartiles"], other["time_by_cpu"]) == (2, [2, 2], 3)
    assert other["tokens_per_second"] == 80 / 4


def test_scaling_is_in_tokens():
    found = {
        "1 x 4 rows, no DeepSpeed": steps(2, 4),
        "2 x 2 rows, no DeepSpeed": steps(1.25, 2.5),
        "2 x 4 rows, no DeepSpeed": steps(2.5, 5),
        "1 x 4 rows, stage 1": steps(2),
        "2 x 2 rows, stage 1": steps(2),
    }
    assert scaling(found, 4) == {
        "no DeepSpeed": {"strong": 1.6, "weak": 1.6},
        "stage 1": {"strong": 1.0},
    }


def test_phases_are_those_of_warm_steps(tmp_path):
    lines = [{"event": "run_start"}]
    lines += [{"event": "step", "step": n, **dict.fromkeys(PHASES, n)} for n in (2, 4, 6, 8)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert phases(tmp_path) == dict.fromkeys(PHASES, 6)


@pytest.mark.launch
@pytest.mark.long
def test_two_processes_race_one(tmp_path):
    lines = (DEFAULT_DEEPSPEED_CONFIG.parents[1] / "README.md").read_text().splitlines()
    text = "".join(json.dumps({"text": line}) + "\n" for line in filter(str.strip, lines))
    (tmp_path / "text.jsonl").write_text(text)
    small = ["--vocab_size", "600", "--max_seq_len", "64", "--val_fraction", "0"]
    entries = {"alone": Entry(1, 2, None), "together": Entry(2, 1, {"stage": 1})}
    starts = {n: one.starter(n, "tiny", tmp_path, small) for n, one in entries.items()}
    found = race(starts, 2)
    assert {name: len(taken) for name, taken in found.items()} == {"alone": 2, "together": 2}
