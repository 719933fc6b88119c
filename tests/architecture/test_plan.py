"""`minimind plan`: what it recommends, what it refuses, and what it never needs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import minimind.train as training
from minimind.architecture.costs import GPUS, Layout, known_gpu, memory
from minimind.architecture.plan import (
    HEADROOM,
    alternatives,
    layout_of,
    name_of,
    plan_text,
    recommend,
    shape_of,
)
from minimind.architecture.shape import flops_per_token
from minimind.cli.main import main
from minimind.config.deepspeed.document import read_deepspeed_json
from minimind.config.deepspeed.resolve import resolve
from minimind.config.origin import Rank
from minimind.config.parse import parse_flags
from minimind.config.run_config import deepspeed_files
from minimind.data.tokenizer.add_special import with_special_tokens
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.sentencepiece import train_tokenizer
from minimind.runtime.installed import LAUNCH
from tests.conftest import ROOT, sentences

train: Any = training  # a package that is called like a function
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


def command_of(out: str) -> list[str]:
    """The flags of the printed command."""
    return shlex.split(out.split(f"{LAUNCH} \\\n")[1].replace("\\\n", " "))


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
    assert "on 4 x 165 TFLOPS at 40% MFU (assumed: --mfu)" in out
    assert "ds_config.json" not in out
    assert "NUM_PROCESSES=4 bash run_accelerate.sh \\\n" in out
    assert out.endswith(f" \\\n    {LARGE} --deepspeed_config zero1\n")  # for 16 rows at once
    table = out.split("Per process")[1].split("Recommended")[0].splitlines()
    assert max(map(len, table)) <= 80
    assert re.search(r"^\*ZeRO-2 ", out, re.MULTILINE)


def test_the_command_it_prints_requests_the_run_it_planned(capsys):
    requested = (
        "--model 26m --no-use_flash_attn --dtype float32 --batch_size 6 --accumulation_steps 2"
    )
    out = plan_output(capsys, f"{requested} --gpus 2 --memory 6GiB")
    run = parse_flags(command_of(out))
    assert (run.model, run.use_flash_attn, run.dtype) == ("26m", False, "float32")
    assert run.batch_size * run.accumulation_steps == 12


SMALL = "--dim 64 --n_layers 2 --n_heads 4 --n_kv_heads 2 --max_seq_len 32 --memory 24GiB"


@pytest.mark.parametrize(
    ("length", "processes"),
    [
        ("--max_tokens 4e8", 2),
        ("--max_steps 5000", 1),
        ("--data_path {}", 1),
        ("--source a={}", 2),
        ("--data_path {} --epochs 12 --split_batches", 3),
        ("--tokens_per_param 20 --accumulation_steps 2", 2),
    ],
)
def test_a_batch_that_is_auto_is_that_of_the_start_and_in_no_command(
    capsys, prepared, monkeypatch, tmp_path, length: str, processes: int
):
    given = f"{SMALL} {length.format(prepared)}"
    out = plan_output(capsys, f"{given} --gpus {processes}")
    (sentence,) = re.findall(
        r"^auto: --batch_size (\d+) --accumulation_steps (\d+), chosen", out, re.M
    )
    command = command_of(out)
    assert "--batch_size" not in command
    assert ("--accumulation_steps" in command) == ("--accumulation_steps" in given)
    monkeypatch.setenv("NUM_PROCESSES", str(processes))
    run = parse_flags(command)
    flags = {name: getattr(run, name) for name, by in run.sources.items() if by == f"--{name}"}
    own = {"device": "cuda", "out_dir": str(tmp_path / "out"), "dry_run": True}
    assert train({**flags, **own}) == 0
    shown = capsys.readouterr().out
    found = [
        re.search(rf"^  {name} +(\d+)", shown, re.M)
        for name in ("batch_size", "accumulation_steps")
    ]
    numbers = [int(one[1]) for one in found if one]
    assert numbers[0] * numbers[1] == int(sentence[0]) * int(sentence[1])
    assert numbers[0] <= int(sentence[0])  # the dry run does not know the memory


def test_the_vocabulary_is_that_of_the_prepared_text(capsys, prepared):
    known = plan_output(capsys, f"{SMALL} --data_path {prepared}")
    assert re.findall(r"^parameters .*", known, re.M) == re.findall(
        r"^parameters .*", plan_output(capsys, f"{SMALL} --vocab_size 600"), re.M
    )


def test_a_batch_that_the_text_decides_is_planned_for_the_largest_micro_batch(capsys):
    out = plan_output(capsys, f"{SMALL} --gpus 2")
    assert "auto: --batch_size depends on the text, and on the memory, and is chosen when" in out
    assert "\ntable is for micro-batches of 256 rows.\n" in out
    assert "step        256 rows x 32 tokens x accumulation 1 x 2 processes" in out
    assert "--batch_size" not in command_of(out)
    elsewhere = plan_output(capsys, f"{SMALL} --gpus 2 --source a=/none --source b=s3://b/b")
    assert elsewhere.split("Recommended")[0] == out.split("Recommended")[0]
    by_tokens = plan_output(capsys, f"{SMALL} --gpus 2 --tokens 4e8")
    limited = plan_output(capsys, f"{SMALL} --gpus 2 --max_tokens 4e8")
    assert by_tokens.splitlines()[:4] == limited.splitlines()[:4]
    assert "--max_tokens" not in command_of(by_tokens)


def test_a_rule_takes_the_micro_batch_that_fits(capsys):
    """With the same rows in a step. With --accumulation_steps numbers replace the rule."""
    steps, most = set(), 0
    for gib in (10, 24, 80):
        out = plan_output(capsys, f"{LARGE} --gpus 2 --max_tokens 2e10 --memory {gib}GiB")
        assert "--batch_size" not in command_of(out)
        (row,) = re.findall(r"^\*.*", out, re.M)
        assert row.endswith("yes")
        (found,) = re.findall(r"auto: --batch_size (\d+) --accumulation_steps (\d+)", out)
        rows, micro_batches = map(int, found)
        assert rows > most
        most = rows
        steps.add(rows * micro_batches)
    assert len(steps) == 1
    out = plan_output(capsys, f"{LARGE} --gpus 2 --max_tokens 2e10 --memory 10GiB"
                      " --accumulation_steps 2")  # fmt: skip
    assert " rows do not fit: the command below sets a smaller one.\n" in out
    run = parse_flags(command_of(out))
    assert run.batch_size * run.accumulation_steps in steps


@pytest.mark.parametrize("optimizer", ["lion", "muon", "sgd"])
def test_the_command_names_a_file_that_takes_the_optimizer(capsys, optimizer: str):
    line = f"plan --deepspeed_config none --memory 24GiB --optimizer {optimizer}"
    assert main(line.split()) == 0
    assert capsys.readouterr().out.endswith("--deepspeed_config none\n")
    assert main(f"{line} --gpus 4 --deepspeed_config zero3".split()) == 0
    run = parse_flags(command_of(capsys.readouterr().out))
    assert run.deepspeed_config
    document = read_deepspeed_json(run.deepspeed_config)
    assert resolve(document, run.deepspeed_config, run, 4, "cuda").run.optimizer == optimizer


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


def test_a_file_stays_if_it_has_the_stage_and_does_not_set_another_batch(capsys, tmp_path: Path):
    own = tmp_path / "own.json"
    shutil.copy(ROOT / "configs/deepspeed/zero0.json", own)
    words = f"--model tiny --gpus 2 --memory 24GiB --deepspeed_config {own}"
    assert plan_output(capsys, words).endswith(f" --deepspeed_config {own}\n")
    shutil.copy(ROOT / "configs/deepspeed/zero3_offload.json", own)
    out = plan_output(capsys, words)
    assert out.endswith(" --deepspeed_config zero0\n")
    assert f"The command below does not use {own}; its other settings are lost.\n" in out
    own.write_text('{"train_micro_batch_size_per_gpu": 64, "zero_optimization": {"stage": 2}}')
    out = plan_output(capsys, f"--model 0.4b --gpus 2 --memory 12GiB --deepspeed_config {own}")
    assert "--batch_size" in out
    assert own.name not in out.splitlines()[-1]


def test_a_shipped_file_with_more_than_a_stage_is_kept_where_its_stage_fits(capsys):
    words = "--model 0.4b --gpus 4 --deepspeed_config warmup_cosine"
    out = plan_output(capsys, f"{words} --memory 16GiB")
    assert "Recommended: ZeRO-2" in out
    assert out.endswith("--deepspeed_config warmup_cosine\n")
    large = f"{words} --dim 4096 --n_heads 32 --gradient_checkpointing --batch_size 1"
    out = plan_output(capsys, f"{large} --memory 24GiB")
    assert re.search(r" --deepspeed_config zero[23]_offload\n$", out)
    assert "its other settings are lost" in out


CARDS = [gpu.name for gpu in GPUS if gpu.memory]
FLAGS = [
    "--model tiny",
    "--model 0.4b --deepspeed_config none",
    "--model 0.4b --deepspeed_config zero3 --batch_size 64 --accumulation_steps 2",
    "--model 104m --deepspeed_config fp16 --dtype float16",
    "--model 104m --optimizer muon --config strong --no-doc_mask",
    "--model 26m --optimizer lion --deepspeed_config torch_adamw --data_path 'a b.jsonl' c.txt",
    "--model tiny --vocab_size 6400 --source a=p/t:1 --source 'b=p u:3' --max_steps 20",
    "--dim 2048 --n_layers 24 --n_heads 16 --max_seq_len 2048 --dtype float32 --ema 0.9",
    "--dim 4096 --n_layers 32 --n_heads 32 --batch_size 1 --deepspeed_config zero2_offload",
]


@pytest.mark.parametrize("words", FLAGS)
def test_every_printed_command_parses_and_resolves_to_what_is_recommended(
    capsys, words: str, request: pytest.FixtureRequest
):
    words = words if "--batch_size" in words else f"{words} --batch_size 8"
    few = ["RTX 4090", "A100-40GB", "H100"]
    for card in CARDS if request.config.getoption("--long") else few:
        for gpus in (1, 8):
            assert (
                main(["plan", *shlex.split(words), "--gpus", str(gpus), "--gpu_model", card]) == 0
            )
            out = capsys.readouterr().out
            if "Nothing fits" in out:
                continue
            run, given = parse_flags(command_of(out)), parse_flags(shlex.split(words))
            path = run.deepspeed_config or str(ROOT / "configs" / "ds_config.json")
            if path == "none":
                found = replace(layout_of(run, gpus, {}, "cuda"), stage=None)
            else:
                resolved = resolve(read_deepspeed_json(path), path, run, gpus, "cuda")
                found = layout_of(resolved.run, gpus, resolved.config, "cuda")
            best = re.findall(
                r"^Recommended: (.+), micro-batch (\d+), accumulation (\d+)", out, re.M
            )
            assert best == [(name_of(found), str(found.rows), str(found.accumulation_steps))]
            if gpus == 1 and "fp16" not in words and not found.offload_optimizer:
                assert path == "none"
            for name, source in given.sources.items():
                is_kept = name not in ("batch_size", "accumulation_steps", "deepspeed_config")
                if source.rank is Rank.FLAG and is_kept:
                    assert getattr(run, name) == getattr(given, name)


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("text", "name", "memory"),
    [
        *[(name, name, None) for name in CARDS],
        *[(name.lower().replace(" ", "-"), name, None) for name in CARDS],
        *[("h100", "H100", 80), ("4090", "RTX 4090", 24), ("rtx4090", "RTX 4090", 24)],
        *[("a100-40gb", "A100-40GB", 40), ("a100-80gb", "A100", 80), ("a100", "A100", 80)],
        *[("A100-SXM4-40GB", "A100-40GB", 40), ("NVIDIA H100 80GB HBM3", "H100", 80)],
        *[("h100 sxm5", "H100", 80), ("h100_nvl", "H100 NVL", 94), ("h100pcie", "H100 PCIe", 80)],
        *[("GeForce RTX 3090", "RTX 3090", 24), ("l40s", "L40S", 48), ("h200-141gb", "H200", 141)],
    ],
)
def test_a_card_is_known_by_its_short_name_with_its_memory(
    text: str, name: str, memory: int | None, capsys
):
    assert main(["plan", "--model", "tiny", "--gpu_model", text, "--tokens", "1e9"]) == 0
    out = capsys.readouterr().out
    gpu = known_gpu(name)
    assert gpu
    assert f"on 1 x {gpu.peak_tflops:g} TFLOPS at 40% MFU (assumed: --mfu)" in out
    assert f"of {memory}.00 GiB" in out if memory else "Recommended: no DeepSpeed" in out
    assert main(["plan", "--model", "tiny", "--gpu_model", text, "--memory", "9GiB"]) == 0
    assert "of 9.00 GiB" in capsys.readouterr().out


def test_every_gpu_can_be_named():
    assert [known_gpu(gpu.name) for gpu in GPUS] == [*GPUS]


@pytest.mark.parametrize("text", ["h101", "4080", "h100-40gb", "a100-41gb", "", "rtx"])
def test_an_unknown_card_is_refused_with_the_known_ones(text: str, capsys):
    assert main(["plan", "--gpu_model", text]) == 2
    assert "H100 NVL" in capsys.readouterr().err


def test_the_page_has_one_mfu_and_the_hours_that_follow_from_it(capsys):
    words = "--model 0.4b --gpus 8 --tokens 7.2e9 --batch_size 24 --accumulation_steps 32"
    for more in ("--gpu_model h100", "--gpu_model h100 --mfu 0.5", "--peak_tflops 989.4"):
        out = plan_output(capsys, f"{words} {more}")
        rates = {*re.findall(r"(\d+)% MFU", out)}
        assert len(rates) == 1
        hours = float(re.findall(r"time +([\d.]+) hours", out)[0])
        share = float(rates.pop()) / 100
        needed = 7.2e9 * flops_per_token(shape_of(parse_flags(["--model", "0.4b"])))
        assert hours == pytest.approx(needed / (8 * 989.4e12 * share) / 3600, rel=0.02)


def test_short_names_are_the_shipped_files_whatever_lies_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, path in deepspeed_files().items():
        assert parse_flags(["--deepspeed_config", name]).deepspeed_config == path
        assert read_deepspeed_json(path)
    assert {"zero0", "zero1", "zero2", "zero3", "muon"} <= deepspeed_files().keys()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero1").write_text("{}")
    shipped = deepspeed_files()["zero1"]
    assert parse_flags(["--deepspeed_config", "zero1"]).deepspeed_config == shipped
    assert parse_flags(["--deepspeed_config", "./zero1"]).deepspeed_config == "./zero1"


def test_stage_0_is_no_choice_in_float16(capsys):
    out = plan_output(capsys, "--model tiny --dtype float16 --gpus 2 --memory 24GiB")
    assert "ZeRO-0" not in out
    assert "Recommended: ZeRO-1" in out


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("24GiB", 24 * GIB),
        ("24GB", 24 * 10**9),
        ("80G", 80 * GIB),
        ("24", 24 * GIB),
        ("512mib", 2**29),
    ],
)
def test_sizes_are_read_as_written(capsys, written: str, size: int):
    out = plan_output(capsys, f"--model tiny --memory {written}")
    assert f"of {size / GIB:.2f} GiB" in out


def test_dashes_are_another_way_to_state_the_same(capsys):
    one = plan_output(capsys, f"{LARGE} --gpus 4")
    assert plan_output(capsys, f"{LARGE.replace('_', '-')} --gpus 4") == one
    assert plan_output(capsys, f"{LARGE} --gpus=4") == one


def test_an_apple_gpu_has_no_stage_to_compare(capsys: pytest.CaptureFixture[str]):
    out = plan_output(capsys, "--device mps --memory 16GiB --model 26m")
    assert "ZeRO" not in out
    assert "Recommended: no DeepSpeed" in out
    assert "stays free for the device's libraries" in out
    out = plan_output(capsys, "--device mps --memory 100MiB --model 104m")
    assert "\nno DeepSpeed needs 1.86 GiB with 1 row" in out


def test_the_table_of_a_dry_run_is_that_of_the_plan():
    run = parse_flags(["--model", "26m", "--dtype", "bfloat16"])
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
    shape = "--model 26m --vocab_size 2000 --memory 24GiB --batch_size 8"
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
    assert "remove one of them" in refused(capsys, words)


def test_the_password_of_a_url_is_in_no_command(capsys):
    out = plan_output(capsys, "--model tiny --data_path https://me:secret@h/t.txt --memory 8GiB")
    assert "--data_path 'https://***@h/t.txt'" in out
    assert "secret" not in out
