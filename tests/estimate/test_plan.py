"""`minimind plan`: what it recommends, what it refuses, and what it never needs."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from minimind.cli.main import main
from minimind.config.deepspeed.resolve import read_deepspeed_json, resolve
from minimind.config.parse import parse_flags
from minimind.data.tokenizer.add_special import with_special_tokens
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.sentencepiece import train_tokenizer
from minimind.estimate.costs import Layout, memory
from minimind.estimate.plan import HEADROOM, alternatives, layout_of, plan_text, recommend, shape_of
from tests.conftest import ROOT, sentences

GIB = 2**30
LARGE = "--dim 1024 --n_layers 32 --max_seq_len 1024"
SHAPE = shape_of(parse_flags(LARGE.split()))
HERE = Layout(2, 4, "bfloat16", 8, 1, 12 * 1024**2, overlap=True)


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def plan_output(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main(["plan", *words.split()]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main(["plan", *words.split()]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("minimind: error[E_USAGE]: ")
    return output.err


def test_the_whole_answer_fits_a_terminal_and_reports_what_to_type(capsys):
    out = plan_output(capsys, f"{LARGE} --gpus 4 --memory 24GiB --peak_tflops 165 --tokens 1e9")
    assert max(map(len, out.splitlines())) <= 100
    assert "361,038,848" in out
    assert "on 4 x 165 TFLOPS at 40% MFU" in out
    assert 'configs/ds_config.json: "zero_optimization": {"stage": 0}' in out
    assert "NUM_PROCESSES=4 bash run_accelerate.sh \\\n" in out
    assert f"    {LARGE} --batch_size 8 --accumulation_steps 1\n" in out
    assert re.search(r"^\*ZeRO-2 ", out, re.MULTILINE)


def test_the_command_it_prints_requests_the_run_it_planned(capsys):
    requested = (
        "--model 26m --no-use_flash_attn --dtype float32 --batch_size 6 --accumulation_steps 2"
    )
    out = plan_output(capsys, f"{requested} --gpus 2 --memory 6GiB")
    run = parse_flags(out.rstrip().splitlines()[-1].split())
    assert (run.model, run.use_flash_attn, run.dtype) == ("26m", False, "float32")
    assert run.batch_size * run.accumulation_steps == 12


@pytest.mark.parametrize("optimizer", ["lion", "muon", "sgd"])
def test_the_command_names_a_file_that_takes_the_optimizer(capsys, optimizer: str):
    line = f"plan --deepspeed_config none --memory 24GiB --optimizer {optimizer}"
    assert main(line.split()) == 0
    command = capsys.readouterr().out.split("run_accelerate.sh", 1)[1].replace("\\", " ")
    run = parse_flags(command.split())
    assert run.deepspeed_config
    document = read_deepspeed_json(run.deepspeed_config)
    assert resolve(document, run.deepspeed_config, run, 1, "cuda").run.optimizer == optimizer


def test_flags_that_the_optimizer_does_not_read_are_refused_without_deepspeed(capsys):
    assert main("plan --deepspeed_config none --sgd_momentum 0.5".split()) == 2
    assert "sgd_momentum = 0.5 (--sgd_momentum) has no effect" in capsys.readouterr().err


@pytest.mark.parametrize("gib", [2.5, 3, 4, 6, 8, 10, 12, 16, 24, 80])
def test_what_is_recommended_fits_and_nothing_before_it_does(gib: float):
    best = recommend(SHAPE, HERE, int(gib * GIB))
    budget = gib * GIB * (1 - HEADROOM)
    if best is None:
        ways = [replace(s, rows=1, accumulation_steps=8) for s in alternatives(HERE)]
        assert all(memory(SHAPE, way).total > budget for way in ways)
        return
    assert memory(SHAPE, best).total <= budget
    assert best.rows * best.accumulation_steps == HERE.rows * HERE.accumulation_steps
    for way in alternatives(best):
        if (way.stage, way.offload_optimizer) == (best.stage, best.offload_optimizer):
            break
        assert memory(SHAPE, way).total > budget


def test_less_memory_never_gets_a_larger_micro_batch():
    found = [recommend(SHAPE, HERE, gib * GIB) for gib in range(2, 30)]
    rows = [best.rows if best else 0 for best in found]
    assert rows == sorted(rows)
    assert (rows[0], rows[-1]) == (0, 8)


def test_nothing_is_offloaded_where_something_fits_without():
    for gib in range(2, 30):
        best = recommend(SHAPE, HERE, gib * GIB)
        if best is not None and best.offload_optimizer:
            rows = replace(HERE, rows=1, accumulation_steps=8)
            kept = [s for s in alternatives(rows) if not s.offload_optimizer]
            budget = gib * GIB * (1 - HEADROOM)
            assert all(memory(SHAPE, way).total > budget for way in kept)


def test_where_nothing_fits_it_reports_it_and_what_would_help(capsys):
    out = plan_output(capsys, f"{LARGE} --gpus 2 --memory 600MiB")
    assert "Nothing fits in 0.59 GiB" in out
    assert "The largest part is activations" in out
    assert "Recommended" not in out


def test_more_gpus_are_named_where_they_save_the_offloading(capsys):
    deep = "--dim 4096 --n_layers 40 --n_heads 32 --batch_size 1"
    out = plan_output(capsys, f"{deep} --gpus 2 --memory 40G")
    assert "Recommended: ZeRO-1 offload opt" in out
    counted = re.search(r"With (\d+) GPUs nothing has to be offloaded", out)
    assert counted
    assert (
        "offload"
        not in plan_output(capsys, f"{deep} --gpus {counted[1]} --memory 40G").split("Rec")[1]
    )


def test_without_memory_there_is_a_table_and_no_advice(capsys):
    out = plan_output(capsys, "--model tiny")
    assert "Give --memory" in out
    assert "fits" not in out.split("Give")[0]


def test_of_experts_all_are_counted_and_those_a_token_visits_computed(capsys):
    flags = ("", "--use_moe", "--use_moe --n_routed_experts 8")
    dense, few, many = (plan_output(capsys, f"--model tiny {words}") for words in flags)
    counts = [re.findall(r"^parameters +([\d,]+)", text)[0] for text in (dense, few, many)]
    sizes = [int(count.replace(",", "")) for count in counts]
    expert = 3 * 192 * 512
    assert sizes[1] - sizes[0] == 4 * (4 * expert + 4 * 192)  # of layers; experts, and the gate
    assert sizes[2] - sizes[1] == 4 * (4 * expert + 4 * 192)
    assert "(6 x active weights + 12" in few
    assert "active" not in dense
    flops = [float(re.findall(r"FLOPs +([\d.]+) G", text)[0]) for text in (dense, few, many)]
    assert flops[0] < flops[1] == flops[2]  # but for a larger gate, in three digits


def test_the_configured_stage_and_offload_are_starred(capsys, tmp_path: Path):
    path = tmp_path / "ds.json"
    zero = '{"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000}'
    path.write_text(f'{{"zero_optimization": {zero}, "train_micro_batch_size_per_gpu": 5}}')
    out = plan_output(capsys, f"--model tiny --gpus 2 --deepspeed_config {path}")
    assert re.search(r"^\*ZeRO-3 offload opt ", out, re.MULTILINE)
    assert "5 rows x 256 tokens" in out
    assert re.search(
        r"^\*DDP", plan_output(capsys, "--gpus 2 --deepspeed_config none"), re.MULTILINE
    )


def test_a_misspelt_name_inside_a_section_is_reported(capsys, tmp_path: Path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stge": 3}}')
    assert "did you mean stage?" in refused(capsys, f"--deepspeed_config {path}")


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("zero2_offload", "offload_optimizer"), ("zero3_offload", "offload_optimizer, offload_param")],
)
def test_offload_blocks_that_must_go_are_named(capsys, name: str, blocks: str):
    words = f"--model tiny --memory 24GiB --deepspeed_config configs/deepspeed/{name}.json"
    out = plan_output(capsys, words)
    assert f'"zero_optimization": {{"stage": 0}}\n  and remove {blocks}\n' in out


def test_offload_blocks_that_stay_are_not_to_be_removed(capsys):
    large = "--dim 4096 --n_layers 40 --n_heads 32 --batch_size 1 --gpus 2 --memory 40G"
    out = plan_output(capsys, f"{large} --deepspeed_config configs/deepspeed/zero3_offload.json")
    assert (
        '{"stage": 1, "offload_optimizer": {"device": "cpu"}}\n  and remove offload_param\n' in out
    )
    kept = plan_output(capsys, f"{large} --deepspeed_config configs/deepspeed/zero2_offload.json")
    assert "and remove" not in kept


def test_stage_0_is_no_choice_in_float16(capsys):
    out = plan_output(capsys, "--model tiny --dtype float16 --gpus 2 --memory 24GiB")
    assert "ZeRO-0" not in out
    assert "Recommended: ZeRO-1" in out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--memory 24X", "'24X' is no amount such as 24GiB"),
        ("--memory 24", "'24' is no amount"),
        ("--memory 0GiB", "'0GiB' is no amount"),
        ("--memory -3G", "--memory"),
        ("--gpus 0", "0 is below 1"),
        ("--gpus two", "invalid whole number value: 'two'"),
        ("--mfu 1.5", "not above 0 and at most 1"),
        ("--peak_tflops nan", "not above 0 and finite"),
        ("--tokens -1", "--tokens"),
        ("--tokens abc", "--tokens: invalid number value: 'abc'"),
        ("--mfu abc", "--mfu: invalid number value: 'abc'"),
        ("--memry 24GiB", "unknown flag --memry; did you mean --memory?"),
        ("--n_layer 3", "unknown flag --n_layer; here it is --n_layers"),
        ("--dim 100 --n_heads 7", "not divisible"),
        ("--dim 0", "dim = 0 (--dim) must be at least 1"),
        ("--model 27m", "no such preset"),
        ("--deepspeed_config nowhere.json", "nowhere.json"),
        ("--batch_size 3 --split_batches --gpus 2", "cannot be split over 2"),
        ("24GiB", "unexpected argument '24GiB'"),
    ],
)
def test_mistakes_are_reported_in_one_sentence(capsys, words: str, reason: str):
    assert reason in refused(capsys, words)


@pytest.mark.parametrize(
    ("written", "size"),
    [("24GiB", 24 * GIB), ("24GB", 24 * 10**9), ("80G", 80 * GIB), ("512mib", 2**29)],
)
def test_sizes_are_read_as_written(capsys, written: str, size: int):
    out = plan_output(capsys, f"--model tiny --memory {written}")
    assert f"of {size / GIB:.2f} GiB" in out


def test_world_size_and_dashes_are_other_ways_to_state_the_same(capsys):
    one = plan_output(capsys, f"{LARGE} --gpus 4")
    assert plan_output(capsys, f"{LARGE.replace('_', '-')} --world-size 4") == one
    assert plan_output(capsys, f"{LARGE} --world_size=4") == one


def test_the_table_of_a_dry_run_is_that_of_the_plan():
    run = parse_flags(["--model", "26m"])
    text = plan_text(run, 2)
    assert "25,829,888" in text
    assert re.search(r"^\*DDP", text, re.MULTILINE)
    assert layout_of(run, 2, {}, "cuda").reduce_bucket == 12 * 512**2


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from minimind.cli.main import main; main(['plan', '--memory', '24GiB']);"
        " sys.exit(bool({'torch', 'numpy', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr.strip()) == (0, "")


# --- fine-tuning --------------------------------------------------------------------------------


def test_fine_tuning_has_a_document_mask_and_rows_for_special_tokens(capsys, tmp_path: Path):
    shape = "--model 26m --vocab_size 2000 --memory 24GiB"
    out = plan_output(capsys, f"--task sft {shape}")
    first, rest = out.split("\n", 1)
    assert first == "vocabulary  2,000 and 5 special tokens of the chat template"
    same = plan_output(capsys, f"{shape.replace('2000', '2005')} --doc_mask")
    tables = [text[: text.index("  NUM_PROCESSES")] for text in (rest, same)]
    assert tables[0] == tables[1]
    assert "--init_from RUN --model 26m" in out
    assert plan_output(capsys, f"--task sft {shape} --train_on all").startswith(f"{first}\n")
    (tmp_path / "own.jinja").write_text("<|one|>{{ messages }}<|two|>")
    out = plan_output(capsys, f"--task sft {shape} --chat_template {tmp_path / 'own.jinja'}")
    assert out.startswith("vocabulary  2,000 and 2 special tokens")


def test_special_tokens_that_a_tokenizer_has_are_not_added(capsys, tmp_path: Path):
    train_tokenizer(sentences(1, 200), 600, tmp_path / "given.model")
    tokenizer = load_tokenizer(tmp_path / "given.model")
    out = plan_output(capsys, f"--task sft --tokenizer {tokenizer.path}")
    assert out.startswith(f"vocabulary  {tokenizer.vocab_size:,} and 5 special")
    with_special_tokens(tokenizer, ["<|user|>", "<|end|>"], tmp_path / "some")
    out = plan_output(capsys, f"--task sft --tokenizer {tmp_path / 'some'}")
    assert out.startswith(f"vocabulary  {tokenizer.vocab_size + 2:,} and 3 special")
    words = f"--task sft --tokenizer {tmp_path / 'some'} --vocab_size 999"
    assert "drop one of the two" in refused(capsys, words)


def test_weights_to_start_from_are_left_to_a_dry_run(capsys):
    assert "the command itself with --dry_run" in refused(capsys, "--task sft --init_from out")
