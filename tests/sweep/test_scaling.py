"""`minimind scaling`: the points of run folders, what is refused, and the answer in three forms."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minimind.architecture.shape import flops_per_token, shape_of
from minimind.cli.main import main
from minimind.config.parse import parse_flags
from minimind.sweep import scaling
from minimind.sweep.scaling import collect
from tests.report.made import Drawn, end, evaluation, run_start, step_line, write_run
from tests.report.test_report_commands import in_browser
from tests.sweep.made_runs import DIMS, LAW, TOKENS, shape_of_dim, write_grid, write_point


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = scaling.fit
    monkeypatch.setattr(scaling, "fit", lambda *given: fit(*given, resamples=10))


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_grid(tmp_path_factory.mktemp("grid") / "runs", sigma=0.002)


def answered(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["scaling", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["scaling", *map(str, words)]) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    return output.err


def test_the_law_of_run_folders_is_the_one_they_were_made_by(grid, capsys):
    found = answered(capsys, grid, "--flops", "1e17", "--tokens", "1e9")
    assert found["terms"] == "both"
    assert len(found["runs"]) == len(DIMS) * len(TOKENS)
    for name in ("E", "A", "alpha", "B", "beta"):
        assert found["constants"][name]["value"] == pytest.approx(getattr(LAW, name), rel=0.2)
    shapes = [shape_of_dim(dim) for dim in DIMS]
    costs = [flops_per_token(shape) / shape.parameters for shape in shapes]
    assert found["flops_per_parameter_and_token"] == pytest.approx(math.prod(costs) ** 0.25)
    by_flops, by_tokens = found["optima"]
    best = LAW.optimum(1e17, found["flops_per_parameter_and_token"])
    assert by_flops["parameters"]["value"] == pytest.approx(best[0], rel=0.1)
    assert by_flops["tokens"]["value"] == pytest.approx(best[1], rel=0.1)
    assert by_flops["parameters"]["low"] < by_flops["parameters"]["high"]
    assert by_tokens["tokens"]["value"] == 1e9
    assert by_flops["times_beyond_the_runs"] == pytest.approx(
        by_flops["parameters"]["value"] / shape_of_dim(512).parameters
    )


def test_the_command_trains_the_size_within_the_budget(grid, capsys):
    (one,) = answered(capsys, grid, "--flops", "1e17")["optima"]
    run = parse_flags(shlex.split(one["command"])[2:])
    size = shape_of(run).parameters
    assert abs(math.log(size / one["parameters"]["value"])) < scaling.FIT_OF_A_SHAPE
    assert (run.max_flops, run.vocab_size, run.max_seq_len) == (1e17, 4096, 256)


def test_no_shape_is_proposed_where_none_is_near(grid):
    assert scaling.nearest_shape(1e4, collect([grid]).used[0]) is None


def test_runs_that_cannot_be_used_are_named_with_the_reason(grid, tmp_path, capsys):
    runs = shutil.copytree(grid, tmp_path / "runs")
    write_run(runs / "z-stopped", [run_start(), evaluation(20, 3.0), end(20, 75, "PREEMPTED", "x")])
    long_ago = {**evaluation(40, 3.0), "time": 1.7e9}
    write_run(runs / "z-silent", [run_start(at=1.7e9), long_ago])
    write_run(runs / "z-unvalidated", [run_start(), step_line(40), end(40)])
    write_run(runs / "z-early", [run_start(), evaluation(30, 3.0), end(40)])
    write_run(runs / "z-infinite", [run_start(), evaluation(40, math.inf), end(40)])
    write_run(runs / "z-nameless", [run_start(), evaluation(40, 3.0), end(40)])
    started = run_start(init_from={"place": "exported", "kind": "x"})
    write_run(runs / "z-continued", [started, evaluation(40, 3.0), end(40)])
    taught = run_start(identity={"model": {"loss": "0 cross-entropy + 1 KL"}})
    write_run(runs / "z-taught", [taught, evaluation(40, 3.0), end(40)])
    write_point(runs / "z-experts", 128, 3e8, use_moe=True)
    left = answered(capsys, runs)["left_out"]
    reasons = {name.rpartition("/")[2]: reason for name, reason in left.items()}
    assert reasons == {
        "z-stopped": "not finished: x",
        "z-silent": "not finished: no end recorded",
        "z-unvalidated": "has no validation",
        "z-early": "its last validation is at step 30 of 40",
        "z-infinite": "its last validation has no finite loss",
        "z-nameless": "has no config.yaml",
        "z-continued": "begins with trained weights (--init_from)",
        "z-taught": "trains with another loss (0 cross-entropy + 1 KL)",
        "z-experts": "is a mixture of experts, and the law is for dense models",
    }


def test_of_one_size_and_budget_only_the_best_settings_count_with_all_their_seeds(grid, tmp_path):
    runs = shutil.copytree(grid, tmp_path / "runs")
    write_point(runs / "worse", 128, 4e7, 0.5, learning_rate=1.0)
    write_point(runs / "seed", 128, 4e7, 0.01, seed=7)
    write_point(runs / "same", 128, 4e7, 0.02)
    found = collect([runs])
    assert len(found.used) == len(DIMS) * len(TOKENS) + 1
    assert "seed" in {one.name for one in found.used}
    assert re.fullmatch(r"loss [\d.]+; .* is better: d128-4e\+07, [\d.]+", found.left_out["worse"])
    assert found.left_out["same"] == "has the flags of d128-4e+07"


@pytest.mark.parametrize(
    ("dims", "tokens", "term", "note"),
    [
        (DIMS, [1e9], "parameters", "all runs have 1B tokens"),
        ([256], TOKENS, "tokens", "all runs have 3.87M parameters"),
    ],
)
def test_runs_that_share_a_size_give_a_law_of_the_other(dims, tokens, term, note, tmp_path, capsys):
    runs = write_grid(tmp_path / "runs", dims, tokens)
    found = answered(capsys, runs)
    assert found["terms"] == term
    assert found["notes"][0].startswith(note)
    exponent = {"parameters": "alpha", "tokens": "beta"}[term]
    assert [*found["constants"]][::2] == ["E", exponent]
    assert found["constants"][exponent]["value"] == pytest.approx(getattr(LAW, exponent), rel=0.01)
    assert f"--flops needs a law over parameters and tokens, but {note}" in refused(
        capsys, runs, "--flops", "1e17"
    )


def test_runs_of_one_ratio_of_tokens_give_no_optimum(tmp_path, capsys):
    for dim in (*DIMS, 640):
        write_point(tmp_path / f"r/{dim}", dim, 20 * shape_of_dim(dim).parameters)
    found = answered(capsys, tmp_path / "r")
    assert found["terms"] == "parameters"
    assert "tokens follow from parameters" in found["notes"][0]
    assert "--tokens needs a law" in refused(capsys, tmp_path / "r", "--tokens", "1e9")


def test_text_that_is_read_again_is_noted(grid, tmp_path, capsys):
    runs = shutil.copytree(grid, tmp_path / "runs")
    path = runs / "d512-5e+09" / "metrics.jsonl"
    path.write_text(path.read_text().replace(str(10**9), str(10**7)))
    (note,) = answered(capsys, runs)["notes"]
    assert "1 run reads text more than once, up to 2.0 times (d512-5e+09)" in note


def test_bad_input_is_refused_by_name(grid, tmp_path, capsys):
    assert f"{tmp_path}/gird: there is no such file or directory" in refused(
        capsys, tmp_path / "gird"
    )
    (tmp_path / "empty").mkdir()
    assert "empty holds no run" in refused(capsys, tmp_path / "empty")
    one = grid / "d128-4e+07"
    assert f"the run {one} is given twice" in refused(capsys, grid, one)
    assert "1 run can be used, and a law of 5 constants" in refused(capsys, one)
    few = write_grid(tmp_path / "few", DIMS[:2])
    assert "2 different numbers of parameters, and their term needs 3" in refused(capsys, few)
    assert "argument --flops: 0 must be above 0" in refused(capsys, grid, "--flops", "0")


@pytest.mark.parametrize(
    "flags", [{"vocab_size": 5000}, {"data_path": ["other.jsonl"]}, {"max_seq_len": 512}]
)
def test_losses_that_do_not_compare_are_refused(flags, grid, tmp_path, capsys):
    write_point(tmp_path / "odd", 128, 4e7, **flags)
    (name,) = flags
    error = refused(capsys, grid, tmp_path / "odd")
    assert error.startswith(f"minimind: error[E_USAGE]: {name} is ")
    assert "in odd, so their losses do not compare" in error


def test_without_scipy_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("minimind.runtime.installed.find_spec", lambda name: None)
    error = refused(capsys, "out")
    assert "the package scipy, which is not installed; " in error
    assert "-m pip install -e '.[sweep]'" in error


def test_the_text_has_the_runs_the_constants_and_the_budgets(grid, capsys):
    assert main(["scaling", str(grid), "--flops", "1e17"]) == 0
    text = capsys.readouterr().out
    assert "L(N, D) = E + A / N^alpha + B / D^beta" in text
    assert len(re.findall(r"^d\d+-\de\+\d\d ", text, re.MULTILINE)) == 16
    assert re.search(r"^alpha +0\.3\d+ +0\.3\d+ to 0\.3\d+$", text, re.MULTILINE)
    assert re.search(r"^1e\+17 FLOPs +2[\d.]+M \(.*x the runs$", text, re.MULTILINE)


def test_the_page_draws_the_runs_and_the_law(grid, tmp_path, capsys):
    out = tmp_path / "page.html"
    words = ["scaling", str(grid), "--flops", "1e17", "--out", str(out)]
    assert main(words) == 0
    page = Drawn(out.read_text(encoding="utf-8"))
    assert [*page.charts] == ["loss"]
    assert len(page.charts["loss"]["data"]) == 2 * len(DIMS)  # a curve and its points
    points = page.points("loss", "1.28M parameters")
    assert points[:, 0].tolist() == pytest.approx(TOKENS, rel=1e-4)
    assert points[:, 1].tolist() == pytest.approx(
        LAW.loss(shape_of_dim(128).parameters, np.array(TOKENS)).tolist(), rel=0.01
    )
    curve = page.points("loss", "law, 1.28M parameters")
    assert curve[:, 1].tolist() == pytest.approx(
        LAW.loss(shape_of_dim(128).parameters, curve[:, 0]).tolist(), rel=0.01
    )
    axis = page.charts["loss"]["layout"]["xaxis"]
    assert {"50M", "100M", "1B", "5B"} < {*axis["ticktext"]}
    html = out.read_text(encoding="utf-8")
    assert "default-src 'none'" in html
    assert re.search(r"<h2>Compute-optimal, where a run takes [\d.]+ N D FLOPs</h2>", html)
    capsys.readouterr()
    assert "exists; give another file, or --force" in refused(capsys, *words[1:])
    assert main([*words, "--force"]) == 0
    seen = in_browser(out)
    assert len(re.findall(r'class="main-svg"', seen)) >= 1


def test_the_page_of_one_term_has_its_curve(tmp_path, capsys):
    runs = write_grid(tmp_path / "runs", DIMS, [1e9])
    assert main(["scaling", str(runs), "--out", str(tmp_path / "page.html")]) == 0
    page = Drawn((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert [*page.charts] == ["loss"]
    assert len(page.points("loss", "runs")) == len(DIMS)
    assert page.charts["loss"]["layout"]["xaxis"]["title"]["text"] == "parameters"
