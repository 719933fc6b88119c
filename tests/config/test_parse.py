"""Command lines, --config files and presets against the fields and sources they should give."""

from pathlib import Path

import pytest

from minimind.config.flags import FLAGS
from minimind.config.parse import build_config, build_parser, parse_flags, words_of
from minimind.errors import UsageError

SEED_LINE = (
    "--epochs 3 --batch_size 24 --learning_rate 2e-4 --dtype bfloat16 --accumulation_steps 32"
    " --grad_clip 1.0 --log_interval 100 --save_interval 10000 --dim 1024 --n_layers 32"
    " --max_seq_len 1024 --use_flash_attn --profile --profile_interval 10"
)


def parse(line: str):
    return parse_flags(line.split())


def test_the_seed_documents_line_means_what_it_states():
    run = parse(SEED_LINE)
    assert (run.epochs, run.batch_size, run.accumulation_steps) == (3, 24, 32)
    assert (run.learning_rate, run.dtype, run.grad_clip) == (2e-4, "bfloat16", 1.0)
    assert (run.log_interval, run.save_interval, run.profile_interval) == (100, 10000, 10)
    assert (run.dim, run.n_layers, run.max_seq_len) == (1024, 32, 1024)
    assert run.use_flash_attn is True
    assert run.profile is True
    assert run.is_explicit("dim")
    assert not run.is_explicit("n_heads")


def test_hyphens_and_underscores_are_the_same_flag_and_the_last_one_wins():
    run = parse("--batch-size 3 --batch_size=5 --no-use-flash-attn --learning-rate=1e-3")
    assert (run.batch_size, run.use_flash_attn, run.learning_rate) == (5, False, 1e-3)


@pytest.mark.parametrize(("on", "text"), [(True, "a b"), (False, "-x"), (True, "--seed=1")])
def test_the_words_of_every_flag_are_read_as_its_value(on: bool, text: str):
    given = {}
    for name, spec in FLAGS.items():
        several = text if spec.repeats else "c=d:1"
        values = {"bool": on, "tuple": ["a=b:2", several]}
        given[name] = values.get(spec.type, text)
    assert vars(build_parser().parse_args(words_of(given))) == given


def test_one_value_of_a_list_may_begin_with_a_dash():
    assert words_of({"data_path": ["-x"]}) == ["--data_path=-x"]
    assert parse_flags(words_of({"data_path": ("-x",)})).data_path == ("-x",)


def test_folders_that_are_mixed_are_given_one_by_one():
    words = words_of({"source": ("a=pt:1", "b=pu:3"), "qk_norm": "true", "tf32": "FALSE"})
    assert words == ["--source", "a=pt:1", "--source", "b=pu:3", "--qk_norm", "--no-tf32"]
    assert parse_flags(words).source == ("a=pt:1", "b=pu:3")


def test_a_flag_beats_the_config_file_which_beats_the_preset_which_beats_the_default(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: 26m\nn_layers: 6\nbatch_size: 3\n")
    run = parse(f"--config {file} --batch_size 7")
    assert (run.batch_size, run.sources["batch_size"]) == (7, "--batch_size")
    assert (run.n_layers, run.sources["n_layers"]) == (6, f"--config {file}")
    assert (run.dim, run.sources["dim"]) == (512, "model 26m")
    assert (run.seed, run.sources["seed"]) == (42, "default")


@pytest.mark.parametrize("switch", ["no-async_save", "no-async-save", "no_async_save"])
def test_a_switch_is_turned_off_in_any_spelling(switch):
    assert not parse(f"--async_save --{switch}").async_save


def test_shape_flags_override_a_preset():
    run = parse("--n_layers 2 --model tiny")
    assert (run.n_layers, run.dim) == (2, 192)


def test_a_preset_may_be_a_file_of_ones_own(tmp_path):
    shape = tmp_path / "mine.yaml"
    shape.write_text("dim: 96\nn_heads: 4\n")
    assert parse(f"--model {shape}").dim == 96


def test_every_flag_is_in_the_help_under_a_group():
    text = build_parser().format_help()
    for name, spec in FLAGS.items():
        assert f"--{name}" in text
        assert spec.help


def test_split_batches_shares_the_batch_out_or_is_refused():
    run = parse("--batch_size 6 --split_batches")
    assert (run.micro_batch_rows(2), run.micro_batch_rows(3)) == (3, 2)
    assert parse("--batch_size 6").micro_batch_rows(4) == 6
    with pytest.raises(UsageError, match=r"batch_size = 6 \(--batch_size\) cannot be split over 4"):
        run.micro_batch_rows(4)


TEXTS = [name for name, spec in FLAGS.items() if spec.type in ("str", "tuple")]
LATER = ("config", "model")  # files that are opened first, and not found


@pytest.mark.parametrize("name", [name for name in TEXTS if name not in LATER])
def test_a_value_that_is_not_utf8_is_refused(name):
    choices = FLAGS[name].choices
    with pytest.raises(
        UsageError, match="must be one of" if choices else "is not UTF-8; "
    ) as caught:
        parse_flags([f"--{name}", "x\udcff"])
    assert f"{name} = " in str(caught.value)


def test_a_current_directory_that_is_not_utf8_is_refused(tmp_path, monkeypatch):
    place = tmp_path / "y\udcff"
    place.mkdir()
    monkeypatch.chdir(place)
    with pytest.raises(UsageError, match=r"y.udcff/\S+ \(default\) is not UTF-8; "):
        parse_flags(["--dry_run"])


def test_what_the_deepspeed_launcher_appends_is_accepted():
    assert parse("--local_rank=1").local_rank == 1
    assert parse("--local-rank 0").local_rank == 0


@pytest.mark.parametrize("name", ["a{x}", "{0}", "{name}", "{{", "}", "{", "{name!r:>9}"])
def test_the_braces_of_a_path_are_characters(name: str, tmp_path: Path):
    path = tmp_path / f"{name}.yaml"
    path.write_text("max_steps: 7\n")
    run = parse(f"--config {path}")
    assert (run.max_steps, run.sources["max_steps"]) == (7, f"--config {path}")
    path.write_text("max_steps: -7\n")
    with pytest.raises(UsageError) as error:
        parse(f"--config {path}")
    assert f"max_steps = -7 (--config {path}) must be" in str(error.value)


def test_flags_by_keyword_are_reported_as_such():
    run = build_config({"batch_size": 3, "data_path": "a.jsonl"}, "train({name}=...)")
    assert (run.batch_size, run.data_path) == (3, ("a.jsonl",))
    assert run.sources["batch_size"] == "train(batch_size=...)"
    assert run.is_explicit("batch_size")
    with pytest.raises(UsageError, match="did you mean batch_size"):
        build_config({"batch_sise": 3}, "train({name}=...)")
    with pytest.raises(UsageError, match=r"train\(batch_size=...\)"):
        build_config({"batch_size": 0}, "train({name}=...)")
    assert build_config({"batch_size": 4.0}, "train({name}=...)").batch_size == 4
    with pytest.raises(UsageError, match=r"batch_size = 2.5 .* is not a whole number"):
        build_config({"batch_size": 2.5}, "train({name}=...)")
