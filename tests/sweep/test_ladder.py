"""`minimind scaling run`: its runs, the prediction before its run, and what is refused."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from minimind.cli.main import main
from minimind.config import rules
from minimind.runtime.process import CAUGHT
from minimind.sweep import run, scaling
from minimind.sweep.law import Fit, fit
from tests.docs.commands import all_blocks, files_in
from tests.report.made import Drawn, evaluation, run_start, write_run
from tests.sweep.made import Killed
from tests.sweep.made_runs import LAW, TOKENS_PER_STEP, shape_of_dim, write_point

CONTENT: dict[str, Any] = {
    "flags": {
        **{"n_layers": 4, "n_heads": 8, "n_kv_heads": 2, "max_seq_len": 256, "vocab_size": 4096},
        **{"data_path": "text.jsonl", "device": "cpu", "batch_size": 4},
    },
    "sizes": [{"dim": 128}, {"dim": 192, "learning_rate": "2e-3"}, {"dim": 256}],
    "tokens": ["4e7", "2e8", "1e9"],
    "predict": {"size": {"dim": 512}, "tokens": "5e9"},
}
FITTED = [f"trial-{n:04d}" for n in range(9)]
LAST = "trial-0009"


def whole_steps(budget: float) -> float:
    """Tokens of the whole steps within a budget."""
    return budget // TOKENS_PER_STEP * TOKENS_PER_STEP


class MadeRun:
    """A run that ends at its first look with a loss of LAW."""

    given: ClassVar[dict[str, Mapping[str, Any]]] = {}  # flags by folder
    starts: ClassVar[list[str]] = []
    noise: ClassVar[dict[str, float]] = {}  # of log loss
    statuses: ClassVar[dict[str, int]] = {}
    kill_at = ""  # folder
    stop_at = ""  # folder whose run ends as the command gets a SIGTERM

    def __init__(self, flags: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.place = Path(flags["out_dir"])
        self.place.mkdir(parents=True, exist_ok=True)
        self.flags = flags
        self.given[self.place.name] = flags
        self.starts.append(self.place.name)

    def poll(self) -> int:
        name, flags = self.place.name, self.flags
        if name == self.kill_at:
            raise Killed
        if name == self.stop_at:
            signal.raise_signal(signal.SIGTERM)
        if status := self.statuses.get(name, 0):
            write_run(self.place, [run_start(), evaluation(20, 3.0)])
            return status
        dim = int(flags["dim"])
        ratio = float(flags.get("tokens_per_param", 0))
        budget = float(flags.get("max_tokens", ratio * shape_of_dim(dim).parameters))
        write_point(self.place, dim, whole_steps(budget), self.noise.get(name, 0.0))
        return 0

    def stop(self) -> None: ...

    def last_line(self) -> str:
        return "the last line"


@cache
def fitted(*given: Any) -> Fit:
    """The fit of these runs, which most tests share."""
    return fit(*given, resamples=10)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[MadeRun]]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "one"}\n')
    noise = {name: 0.004 * math.sin(5 * n) for n, name in enumerate(FITTED)}
    fresh = {"given": {}, "starts": [], "noise": noise, "statuses": {}}
    made = type("Made", (MadeRun,), fresh)
    monkeypatch.setattr(scaling, "fit", lambda *given: fitted(*map(tuple, given[:3]), given[3]))
    monkeypatch.setattr(run, "TrialProcess", made)
    handlers = {number: signal.getsignal(number) for number in CAUGHT}
    yield made
    for number, handler in handlers.items():
        signal.signal(number, handler)


def write_spec(place: Path, **changes: Any) -> Path:
    """SPEC.yaml with CONTENT; a change of None removes the field."""
    place.mkdir(parents=True, exist_ok=True)
    content = {k: v for k, v in {**CONTENT, **changes}.items() if v is not None}
    path = place / "spec.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def train(tmp_path: Path, *more: str, **changes: Any) -> int:
    words = ["scaling", "run", write_spec(tmp_path, **changes), "--out_dir", tmp_path / "out"]
    return main([*map(str, words), *map(str, more)])


def test_the_predicted_run_is_the_last_and_no_part_of_the_fit(tmp_path, capsys, made):
    made.noise[LAST] = 0.5
    assert train(tmp_path) == 0
    text = capsys.readouterr().out
    assert made.starts == [*FITTED, LAST]
    found = re.search(
        r"^prediction for dim 512, 5e9 \(([\d.]+M) parameters, 5B tokens\) from the other runs:"
        r" loss ([\d.]+), 95% interval ([\d.]+) to ([\d.]+)$",
        text,
        re.MULTILINE,
    )
    assert found
    value, low, high = map(float, found.groups()[1:])
    assert low < value < high
    shape = shape_of_dim(512)
    assert value == pytest.approx(float(LAW.loss(shape.parameters, 5e9)), rel=0.03)
    assert found.end() < text.index(f"{LAST}: size dim 512, tokens 5e9\n")  # before it is trained
    assert re.search(r"^measured: loss [\d.]+, outside the interval, \+\d\d\.\d\d%$", text, re.M)
    assert LAST not in re.findall(r"^trial-\d{4}(?= +[\d,]+ +[\d,]+ +[\d.]+ )", text, re.MULTILINE)


def test_a_measured_loss_within_the_interval_is_on_the_page_and_in_json(tmp_path, capsys, made):
    assert train(tmp_path, "--json", "--flops", "1e17") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["runs"]) == len(FITTED)
    assert len(found["optima"]) == 1
    one = found["prediction"]
    assert (one["run"], one["is_within"]) == ("dim 512, 5e9", True)
    assert one["loss"]["low"] <= one["measured"] <= one["loss"]["high"]
    page = (tmp_path / "out" / "scaling.html").read_text(encoding="utf-8")
    drawn = Drawn(page)
    assert "within the interval" in page
    (predicted,) = drawn.points("loss", "predicted").tolist()
    (measured,) = drawn.points("loss", "measured").tolist()
    tokens = whole_steps(5e9)
    assert predicted == [tokens, pytest.approx(one["loss"]["value"])]
    assert measured == [tokens, pytest.approx(one["measured"])]
    bar = drawn.trace("loss", "predicted")["error_y"]
    assert bar["array"] == [pytest.approx(one["loss"]["high"] - one["loss"]["value"])]
    assert drawn.points("loss", "law, prediction").shape == (80, 2)
    # The folder is one of runs as any other.
    assert main(["scaling", str(tmp_path / "out"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert len(again["runs"]) == len(FITTED) + 1
    assert "prediction" not in again


@pytest.mark.parametrize("at", ["trial-0004", LAST])
def test_a_killed_command_goes_on_without_the_runs_that_are_done(tmp_path, capsys, made, at):
    made.kill_at = at
    with pytest.raises(Killed):
        train(tmp_path)
    made.kill_at = ""
    capsys.readouterr()
    assert train(tmp_path) == 0
    everything = [*FITTED, LAST]
    assert made.starts == [
        *everything[: everything.index(at) + 1],
        *everything[everything.index(at) :],
    ]
    text = capsys.readouterr().out
    assert f"{at}: was interrupted, and continues\n" in text
    assert text.index("prediction for") < text.index(f"{LAST}: size dim 512")
    starts = [*made.starts]
    assert train(tmp_path) == 0
    assert made.starts == starts
    assert "within the interval" in capsys.readouterr().out


def test_a_stop_before_the_predicted_run_is_a_status_of_its_own(tmp_path, capsys, made):
    made.stop_at = FITTED[-1]
    assert train(tmp_path) == 75
    assert made.starts == FITTED
    error = "minimind scaling run: stopped on SIGTERM; run the same command again to continue\n"
    assert error in capsys.readouterr().err
    made.stop_at = ""
    assert train(tmp_path) == 0
    assert made.starts == [*FITTED, LAST]


def test_a_run_that_fails_ends_the_command_and_is_tried_again(tmp_path, capsys, made):
    made.statuses["trial-0002"] = 3
    assert train(tmp_path) == 3
    log = tmp_path / "out" / "trial-0002" / "log.txt"
    error = f"minimind scaling run: trial-0002 failed; correct what {log} says, and run the same"
    assert error in capsys.readouterr().err
    assert made.starts == FITTED[:3]
    made.statuses.clear()
    assert train(tmp_path) == 0
    assert made.starts == [*FITTED[:3], *FITTED[2:], LAST]


def test_a_killed_run_is_started_again_and_no_result_of_its_flags(tmp_path, capsys, made):
    made.statuses["trial-0002"] = -9
    assert train(tmp_path) == 7
    error = capsys.readouterr().err
    assert "minimind scaling run: trial-0002 died: killed by SIGKILL" in error
    assert "correct" not in error
    assert made.starts == [*FITTED[:3], "trial-0002"]
    made.statuses.clear()
    assert train(tmp_path) == 0
    assert made.starts[4:] == [*FITTED[2:], LAST]


def test_a_failure_ends_the_command_although_a_run_beside_it_ends_well(tmp_path, made):
    made.statuses["trial-0002"] = 3
    assert train(tmp_path, "--parallel", "2") == 3
    assert made.starts == FITTED[:4]
    made.statuses.clear()
    assert train(tmp_path, "--parallel", "2") == 0
    assert sorted(made.starts) == sorted([*FITTED, LAST, "trial-0002"])


def test_a_run_that_diverges_is_left_out(tmp_path, capsys, made):
    made.statuses["trial-0002"] = 6
    assert train(tmp_path) == 0
    text = capsys.readouterr().out
    assert "left out:\n  trial-0002: diverged by step 20\n" in text
    assert "within the interval" in text


def test_without_a_run_that_ends_well_the_status_tells_why(tmp_path, capsys, made):
    made.statuses.update(dict.fromkeys(FITTED, 6))
    for _ in range(2):
        assert train(tmp_path) == 6
        sentence = (
            f"minimind scaling run: no trial finished with a val_loss: {FITTED[-1]} diverged by"
            " step 20; change sizes, or change flags and give another --out_dir\n"
        )
        assert sentence in capsys.readouterr().err
    assert sorted(made.starts) == FITTED


def test_runs_that_are_left_do_not_predict_other_numbers_of_tokens(tmp_path, capsys, made):
    sizes = [{"dim": dim} for dim in (128, 192, 256, 320)]
    made.statuses.update({f"trial-{n:04d}": 6 for n in range(12) if n % 3})
    assert train(tmp_path, sizes=sizes) == 2
    sentence = f"predict in {tmp_path / 'spec.yaml'} has 5B tokens, but all runs have 40M tokens"
    assert sentence in capsys.readouterr().err
    assert len(made.starts) == 12


def test_a_predicted_run_without_a_loss_has_a_status_of_its_own(tmp_path, capsys, made):
    made.statuses[LAST] = 10
    assert train(tmp_path) == 10
    sentence = (
        f"minimind scaling run: no loss to compare: {LAST} out of memory; change predict, or"
        " change flags and give another --out_dir\n"
    )
    assert sentence in capsys.readouterr().err


def test_without_a_prediction_the_law_is_fitted(tmp_path, capsys, made):
    assert train(tmp_path, "--parallel", "2", predict=None) == 0
    assert sorted(made.starts) == FITTED
    assert "prediction for" not in capsys.readouterr().out


def test_the_plan_is_printed_and_a_dry_run_makes_nothing(tmp_path, capsys, made):
    changes = {"tokens": None, "tokens_per_param": ["5", "20", "80"]}
    assert train(tmp_path, "--dry_run", **changes) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["trial", "size", "tokens", "parameters", "tokens", "FLOPs"]
    parameters = shape_of_dim(192).parameters
    expected = f"{parameters:,} {whole_steps(20 * parameters):,.0f}"
    assert re.sub(" +", " ", lines[5]).startswith(
        f"trial-0004 dim 192 learning_rate 2e-3 20 per parameter {expected} "
    )
    assert re.search(r"^trial-0009  dim 512 .* predicted$", "\n".join(lines), re.MULTILINE)
    assert re.fullmatch(r"10 runs, [\d.]+e\+\d+ FLOPs", lines[-1])
    assert not (tmp_path / "out").exists()
    assert made.starts == []


def test_flags_of_a_size_are_those_of_its_runs(tmp_path, made):
    assert train(tmp_path, tokens=None, tokens_per_param=["5", "20", "80"]) == 0
    rates = {made.given[name].get("learning_rate") for name in FITTED[3:6]}
    assert (rates, "learning_rate" in made.given["trial-0000"]) == ({"2e-3"}, False)
    ratios = [made.given[name]["tokens_per_param"] for name in FITTED[:3]]
    assert ratios == ["5", "20", "80"]
    assert made.given[LAST]["max_tokens"] == "5e9"


def test_runs_of_one_ratio_predict_a_run_of_that_ratio(tmp_path, capsys, made):
    changes: dict[str, Any] = {"tokens": None, "tokens_per_param": ["20"]}
    changes["sizes"] = [{"dim": dim} for dim in (128, 192, 256, 320)]
    assert train(tmp_path, **changes) == 2
    sentence = "has 5B tokens, but tokens follow from parameters in all runs"
    assert sentence in capsys.readouterr().err
    changes["predict"] = {"size": {"dim": 512}, "tokens_per_param": "20"}
    assert train(tmp_path, **changes) == 0
    assert re.search(r"^prediction for dim 512, 20 per parameter ", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("place", ["data_path", "source", "stages"])
def test_the_vocabulary_is_that_of_the_prepared_text(tmp_path, capsys, prepared, place):
    stages = tmp_path / "stages.yaml"
    stages.write_text(f"sources: {{a: {prepared}}}\nstages: [{{until: 50%}}, {{name: rest}}]\n")
    values = {"data_path": str(prepared), "source": [f"a={prepared}"], "stages": str(stages)}
    flags = {k: v for k, v in CONTENT["flags"].items() if k not in ("vocab_size", "data_path")}
    changes = {"tokens": None, "tokens_per_param": ["5", "20", "80"]}
    assert train(tmp_path, "--dry_run", flags={**flags, place: values[place]}, **changes) == 0
    parameters = shape_of_dim(192).parameters - (4096 - 600) * 192
    expected = f"20 per parameter {parameters:,} {whole_steps(20 * parameters):,.0f}"
    assert expected in re.sub(" +", " ", capsys.readouterr().out)


def test_sources_that_no_run_can_read_are_named_before_the_first(tmp_path, capsys, made):
    flags = {k: v for k, v in CONTENT["flags"].items() if k != "data_path"}
    assert train(tmp_path, flags={**flags, "source": [f"a={tmp_path}"]}) == 2
    assert f"source a: {tmp_path} is not a folder of `minimind prepare`" in capsys.readouterr().err
    assert made.starts == []


FOUR = [{"dim": dim} for dim in (128, 192, 256, 320)]


def plan_of(text: str) -> list[int]:
    """The tokens of the runs of a plan."""
    found = re.findall(r"^trial-\d{4}  .* ([\d,]+)  +[\d.e+]+(?:  predicted)?$", text, re.MULTILINE)
    return [int(tokens.replace(",", "")) for tokens in found]


@pytest.mark.parametrize("budget", ["5e3", "4096", "5.1e3"])
def test_a_run_is_predicted_at_the_tokens_that_the_others_trained_on(
    tmp_path, capsys, made, budget
):
    predict = {"size": {"dim": 512}, "tokens": budget}
    assert train(tmp_path, sizes=FOUR, tokens=["5e3"], predict=predict) == 0
    text = capsys.readouterr().out
    assert plan_of(text) == [4096] * 5
    assert re.search(r"^prediction for .* 4.1K tokens\) from the other runs", text, re.M)
    assert len(made.starts) == 5


def test_a_prediction_with_other_tokens_than_the_runs_have_is_refused(tmp_path, capsys, made):
    predict = {"size": {"dim": 512, "batch_size": 7}, "tokens": "5e3"}
    assert train(tmp_path, sizes=FOUR, tokens=["5e3"], predict=predict) == 2
    error = capsys.readouterr().err
    assert "has 3.58K tokens, but all runs have 4.1K tokens" in error
    assert "; predict a run of about 4.1K tokens, or add runs with other numbers\n" in error
    assert made.starts == []


def test_steps_by_rule_are_those_of_the_plan(tmp_path, capsys, made):
    flags = {name: value for name, value in CONTENT["flags"].items() if name != "batch_size"}
    predict = {"size": {"dim": 512}, "tokens": "3e6"}
    changes = {"sizes": FOUR, "tokens": ["3e6"], "predict": predict}
    assert train(tmp_path, "--dry_run", flags=flags, **changes) == 0
    (tokens,) = {*plan_of(capsys.readouterr().out)}
    step = int(2 ** round(math.log2(rules.tokens_per_step(3e6, "AdamW"))))
    assert tokens == 3_000_000 // step * step != whole_steps(3e6)


def test_budgets_of_the_same_steps_are_one_run(tmp_path, capsys, made):
    tokens = ["4096", "4100", "8192", "16384"]
    assert train(tmp_path, sizes=[{"dim": 128}], tokens=tokens, predict=None) == 2
    sentence = "dim 128, 4096 and dim 128, 4100 are one run of 4,096 tokens; remove one"
    assert sentence in capsys.readouterr().err


def test_runs_of_which_the_fit_takes_the_better_count_once(tmp_path, capsys, made):
    sizes = [{"dim": 128}, {"dim": 192}, {"dim": 192, "learning_rate": "2e-3"}, {"dim": 256}]
    assert train(tmp_path, sizes=sizes, tokens=["4e7"], predict=None) == 2
    error = capsys.readouterr().err
    assert (
        "3 runs can be used, and a law of 3 constants needs 4 or more (left out: dim 192" in error
    )
    assert made.starts == []
    seeds = [{"dim": 128}, {"dim": 192}, {"dim": 192, "seed": "2"}, {"dim": 256}]
    assert train(tmp_path, "--dry_run", sizes=seeds, tokens=["4e7"], predict=None) == 0


def test_stages_that_do_not_fit_the_budget_are_refused_before_the_first_run(
    tmp_path, capsys, prepared, made
):
    stages = tmp_path / "stages.yaml"
    stages.write_text(f"sources: {{a: {prepared}}}\nstages: [{{until: 20%}}, {{name: rest}}]\n")
    flags = {k: v for k, v in CONTENT["flags"].items() if k not in ("vocab_size", "data_path")}
    flags["stages"] = str(stages)
    assert train(tmp_path, flags=flags, tokens=["8e5", "4e5", "4e3"]) == 2
    sentence = f"--stages {stages}: stage stage-1 has no whole step of 1,024 tokens between step 0"
    assert sentence in capsys.readouterr().err
    stages.write_text(stages.read_text().replace("name: rest", "weights: {b: 1}"))
    assert train(tmp_path, flags=flags) == 2
    assert f"--stages {stages}" in capsys.readouterr().err
    assert made.starts == []


def test_a_text_that_is_not_there_is_named_before_the_first_run(tmp_path, capsys, made):
    (tmp_path / "text.jsonl").rename(tmp_path / "moved.jsonl")
    for words in ([], ["--dry_run"]):
        assert train(tmp_path, *words) == 3
        assert "text.jsonl: there is no such file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_that_are_done_are_fitted_without_their_text(tmp_path, capsys, made):
    assert train(tmp_path) == 0
    (tmp_path / "text.jsonl").unlink()
    made.starts.clear()
    assert train(tmp_path, "--flops", "1e17") == 0
    assert made.starts == []


def test_a_prepared_text_without_held_out_rows_is_named(tmp_path, capsys, corpus, made):
    out = tmp_path / "prepared"
    words = ["prepare", corpus, "--vocab_size", "600", "--val_fraction", "0", "--out", out]
    assert main([*map(str, words)]) == 0
    flags = {k: v for k, v in CONTENT["flags"].items() if k != "vocab_size"}
    capsys.readouterr()
    assert train(tmp_path, flags={**flags, "data_path": str(out)}) == 2
    sentence = f"{out} holds no row of 256 tokens out, and so has no val_loss to compare trials by"
    assert sentence in capsys.readouterr().err
    assert made.starts == []


def test_a_budget_that_needs_both_terms_is_refused_before_the_start(tmp_path, capsys, made):
    sizes = [{"dim": dim} for dim in (128, 192, 256, 320)]
    assert train(tmp_path, "--flops", "1e17", sizes=sizes, tokens=["1e9"], predict=None) == 2
    assert "--flops needs a law over parameters and tokens, but all runs" in capsys.readouterr().err
    assert made.starts == []


GROWN: dict[str, Any] = {
    "sizes": [{"dim": 160}, *CONTENT["sizes"]],
    "tokens": [*CONTENT["tokens"], "4e8"],
}


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_spec_that_grows_keeps_what_is_done(tmp_path, capsys, made, is_whole: bool):
    made.statuses.update({} if is_whole else {"trial-0005": 3})
    assert train(tmp_path) == (0 if is_whole else 3)
    before = {**made.given}
    made.statuses.clear()
    made.starts.clear()
    capsys.readouterr()
    assert train(tmp_path, **GROWN) == 0
    text = capsys.readouterr().out
    kept = [name for name in before if is_whole or name != "trial-0005"]
    assert not {*kept} & {*made.starts}
    assert len({*kept, *made.starts}) == 17
    assert sorted({*kept, *made.starts}) == [f"trial-{n:04d}" for n in range(17)]
    combinations = {(flags["dim"], flags["max_tokens"]) for flags in made.given.values()}
    assert len(combinations) == 17
    for name, flags in made.given.items():  # the plan names the folders
        size, tokens = str(flags["dim"]), str(flags["max_tokens"])
        assert re.search(rf"^{name}  dim {size} .*{tokens} ", text, re.M)
    assert "measured: loss" in text
    starts = [*made.starts]
    assert train(tmp_path, "--json", **GROWN) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 16
    assert made.starts == starts


def test_a_prediction_that_was_interrupted_waits_for_the_runs_that_are_new(tmp_path, capsys, made):
    made.kill_at = LAST
    with pytest.raises(Killed):
        train(tmp_path)
    made.kill_at = ""
    made.starts.clear()
    assert train(tmp_path, **GROWN) == 0
    new = [f"trial-{n:04d}" for n in range(10, 17)]
    assert made.starts == [*new, LAST]
    text = capsys.readouterr().out
    assert text.index("prediction for") < text.rindex(f"{LAST}: size dim 512")


def test_another_run_is_predicted_by_the_runs_that_are_done(tmp_path, capsys, made):
    assert train(tmp_path, predict=None) == 0
    assert train(tmp_path) == 0
    first = made.given[LAST]
    sizes = [*CONTENT["sizes"], {"dim": 512}]
    changes = {"tokens": [*CONTENT["tokens"], "5e9"], "sizes": sizes}
    predict = {"size": {"dim": 768}, "tokens": "1e10"}
    made.starts.clear()
    assert train(tmp_path, predict=predict, **changes) == 0
    assert made.given[LAST] is first  # it is one of the fit now
    assert made.starts == [f"trial-{n:04d}" for n in range(10, 17)]
    assert made.given["trial-0016"]["dim"] == "768"


def test_a_spec_may_leave_out_what_it_had(tmp_path, capsys, made):
    made.statuses["trial-0002"] = 3
    assert train(tmp_path) == 3
    made.starts.clear()
    capsys.readouterr()
    sizes = [{"dim": 128}, {"dim": 192}, {"dim": 256}, {"dim": 320}]  # no rate for dim 192
    changes = {"tokens": ["4e7", "2e8", "2e9"], "sizes": sizes}
    assert train(tmp_path, "--json", **changes) == 0
    assert made.starts == [f"trial-{n:04d}" for n in range(3, 14)]
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 12


def test_an_interrupted_run_that_the_spec_leaves_out_does_not_go_on(tmp_path, capsys, made):
    made.kill_at = "trial-0001"
    with pytest.raises(Killed):
        train(tmp_path)
    made.kill_at = ""
    made.starts.clear()
    assert train(tmp_path, tokens=["4e7", "4e8", "1e9"]) == 0
    assert "trial-0001: was interrupted\n" in capsys.readouterr().out
    assert "trial-0001" not in made.starts


def test_changed_flags_are_refused_by_their_names(tmp_path, capsys, made):
    made.stop_at = FITTED[1]
    assert train(tmp_path, predict=None) == 75
    assert train(tmp_path, flags={**CONTENT["flags"], "n_layers": 5}) == 2
    path, out = tmp_path / "spec.yaml", tmp_path / "out"
    sentence = f"flags.n_layers in {path} changed since --out_dir {out} was started; sizes, tok"
    assert sentence in capsys.readouterr().err


def test_a_folder_called_run_is_read_as_before(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("run", "other"):
        for dim in (128, 192, 256):
            for tokens in (4e7, 2e8, 1e9):
                write_point(Path(place, f"{place}-{dim}-{tokens:g}"), dim, tokens, seed=len(place))
    assert main(["scaling", "run", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 9
    assert main(["scaling", "run", "other", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 18
    for word in ("--parallel=2", "--dry_run"):
        assert main(["scaling", "run", word]) == 2
        assert "has no effect without run SPEC.yaml; remove it" in capsys.readouterr().err


def test_the_spec_of_the_docs_is_accepted(tmp_path, capsys):
    path = tmp_path / "ladder.yaml"
    path.write_text(files_in(all_blocks())[path.name])
    (tmp_path / "text.jsonl").rename(tmp_path / "my_text.jsonl")
    assert main(["scaling", "run", str(path), "--dry_run"]) == 0
    assert "predicted" in capsys.readouterr().out
