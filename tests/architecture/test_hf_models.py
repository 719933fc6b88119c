"""--model hf:PLACE: causal language models of transformers in our loop, and what comes of them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import minimind.train
from minimind.architecture.hf_models import model_of
from minimind.architecture.select import HuggingFace, MiniMind, hugging_face
from minimind.cli.main import main
from minimind.config.deepspeed.backend_choice import read_setup
from minimind.config.launcher_env import read_launch
from minimind.config.origin import DEFAULT
from minimind.config.parse import config_file, parse_flags
from minimind.data.prepare.prepared import open_prepared
from minimind.data.rows.order import Order
from minimind.engine.compile import compile_model, uncompiled
from minimind.errors import CheckpointError, UsageError
from minimind.inference.load_model import load_model
from minimind.model.causal_lm import enable_checkpointing
from minimind.model.configuration import MiniMindConfig
from minimind.model.loss import next_token_loss
from minimind.train.dry_run import dry_run_text
from tests.conftest import ROOT, Launcher, sentences
from tests.train.starts import planned, read_initial
from tools.runs import config_of_stage

train: Any = minimind.train  # a module that is called
LENGTH, ROWS, PIECES, VOCABULARY = 32, 4, 600, 640
WIDE: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48},
    "vocab_size": VOCABULARY,
}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48, "vocab_size": VOCABULARY}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **WIDE},
    "qwen3": {"model_type": "qwen3", **WIDE, "head_dim": 16, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", **GPT2},  # with its dropout of 0.1
}
KINDS = tuple(CONFIGS)


def described(folder: Path, report: dict[str, Any]) -> Path:
    """A directory with that config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(report))
    return folder


def random_model(report: dict[str, Any]) -> Any:
    torch.manual_seed(5)
    kind = report["model_type"]
    config = AutoConfig.for_model(**{**report, "bos_token_id": 1, "eos_token_id": 2})
    assert config.model_type == kind
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of shards with a tokenizer of 600 pieces."""
    folder = tmp_path_factory.mktemp("text")
    lines = (json.dumps({"text": one}) + "\n" for one in sentences(4, 120))
    (folder / "text.jsonl").write_text("".join(lines))
    words = ["prepare", folder / "text.jsonl", "--out", folder / "data", "--vocab_size", PIECES]
    assert main([*map(str, words), "--processes", "1"]) == 0
    return folder


def run(text: Path, place: Path, out_dir: Path, status: int = 0, **more: Any) -> list[Any]:
    """The events of a run in this process."""
    given = {
        **{"model": f"hf:{place}", "data_path": [str(text / "data")], "out_dir": str(out_dir)},
        **{"max_steps": 4, "batch_size": ROWS, "max_seq_len": LENGTH, "log_interval": 1},
        **{"device": "cpu", "deepspeed_config": "none", "eval_rows": 0, "learning_rate": 5e-3},
    }
    assert train({**given, **more}) == status
    lines = (out_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def course(events: list[Any]) -> list[list[str]]:
    """What has to be the same bit for bit."""
    names = ("step", "loss", "lr", "grad_norm", "tokens", "rows")
    return [[repr(e[name]) for name in names] for e in events if e["event"] == "step"]


def first_rows(text: Path) -> torch.Tensor:
    """Of step 1, (4, 33)."""
    shards = open_prepared(text / "data").train
    order = Order(shards.rows(LENGTH + 1), ROWS, 42)
    return torch.from_numpy(shards.read_rows(order.rows_for(0, 0, 1), LENGTH + 1)).long()


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By kind: a folder with `place`, and the run `out` of it, stopped at step 2 and resumed."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            folder = made[kind] = tmp_path_factory.mktemp(kind)
            place = described(folder / "place", CONFIGS[kind])
            run(text, place, folder / "out", 75, stop_at_step=2)
            run(text, place, folder / "out")
        return made[kind]

    return of


def events_of(out: Path) -> list[Any]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


# --- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_loss_is_that_of_transformers(kind, text, tmp_path):
    report = {**CONFIGS[kind], **(NO_DROPOUT if kind == "gpt2" else {})}
    source = random_model(report)
    source.save_pretrained(tmp_path / "place")
    more = {"init_from": str(tmp_path / "place"), "dtype": "float32", "max_steps": 1}
    started, _, step = run(text, tmp_path / "place", tmp_path / "out", **more)[:3]
    rows = first_rows(text)
    with torch.no_grad():
        theirs = float(source(input_ids=rows, labels=rows).loss)
    assert abs(step["loss"] - theirs) <= 1e-6 * theirs
    assert started["init_from"] == {"place": str(tmp_path / "place"), "kind": "transformers"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_continues_bit_for_bit(kind, text, trained, tmp_path):
    straight = run(text, trained(kind) / "place", tmp_path / "out")
    resumed = events_of(trained(kind) / "out")
    assert course(resumed) == course(straight)
    assert [e["resume_from"] is None for e in resumed if e["event"] == "run_start"] == [True, False]
    losses = [e["loss"] for e in straight if e["event"] == "step"]
    assert losses[-1] < losses[0] - 0.1
    rotary = None if kind == "gpt2" else "torch.float32"  # in bf16 too
    assert straight[0]["rotary"] == [rotary]


def test_dropout_is_that_of_the_file(text, trained, tmp_path):
    place = described(tmp_path / "place", {**CONFIGS["gpt2"], **NO_DROPOUT})
    without = course(run(text, place, tmp_path / "out"))
    assert without[0] != course(events_of(trained("gpt2") / "out"))[0]


def test_another_file_is_another_run(text, trained, tmp_path):
    out = Path(shutil.copytree(trained("llama") / "out", tmp_path / "out"))
    place = described(tmp_path / "place", {**CONFIGS["llama"], "rms_norm_eps": 1e-4})
    with pytest.raises(CheckpointError, match=r"model\.rms_norm_eps: None -> 0\.0001"):
        run(text, place, out)
    written = {"transformers_version": "4", "bos_token_id": 7, **CONFIGS["llama"]}
    run(text, described(tmp_path / "same", written), out)  # what is no shape may differ


def test_the_copy_of_the_flags_repeats_the_run(text, trained, tmp_path):
    given = ["--config", str(trained("llama") / "out" / "config.yaml")]
    found = read_initial(parse_flags([*given, "--out_dir", str(tmp_path)])).run
    assert (found.dim, found.n_layers, found.max_seq_len) == (32, 2, LENGTH)
    assert found.hidden_dim is found.rope_theta is None


def test_weights_of_a_run_begin_another(text, trained, tmp_path):
    folder = trained("qwen3")
    events = run(text, folder / "place", tmp_path / "out", init_from=str(folder / "out"))
    assert events[0]["init_from"]["kind"] == "checkpoint"
    last = [e["loss"] for e in events_of(folder / "out") if e["event"] == "step"][-1]
    first = next(e["loss"] for e in events if e["event"] == "step")
    assert first < last + 0.1  # and not where random weights begin
    with pytest.raises(UsageError, match="give --model hf:"):
        read_initial(parse_flags(["--init_from", str(folder / "out"), "--out_dir", str(tmp_path)]))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_are_computed_again_give_the_same_gradients(kind):
    """Dropout included."""
    tokens = torch.randint(VOCABULARY, (2, 16), generator=torch.manual_seed(1))
    model = model_of(random_model(CONFIGS[kind]).config).train()
    found = []
    for again in (False, True):
        if again:
            enable_checkpointing(model)
        model.zero_grad()
        torch.manual_seed(3)
        out = model(input_ids=tokens, shift_labels=tokens, loss_chunk_size=0)
        out.loss_sum.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.long  # each graph takes seconds
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_it_has_the_same_loss(kind, monkeypatch):
    tokens = torch.randint(VOCABULARY, (2, 16), generator=torch.manual_seed(1))
    model = model_of(random_model({**CONFIGS[kind], **NO_DROPOUT}).config).train()
    requested = {"input_ids": tokens, "shift_labels": tokens, "loss_chunk_size": 0}
    eager = model(**requested).loss_sum
    torch._dynamo.reset()
    whole = partial(torch.compile, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", whole)
    compile_model(model, parse_flags(["--compile", "on"]), "cuda")
    compiled = model(**requested).loss_sum
    with uncompiled(model):
        again = model(**requested).loss_sum
    torch._dynamo.reset()
    assert torch.allclose(compiled, eager, rtol=1e-6, atol=0)
    assert torch.equal(again, eager)


def test_it_is_compiled_only_when_requested(tmp_path):
    place = described(tmp_path, CONFIGS["llama"])
    for requested, expected in (("auto", "off"), ("on", "on")):
        words = ["--model", f"hf:{place}", "--deepspeed_config", "none", "--compile", requested]
        setup = read_setup(read_initial(parse_flags(words)).run, read_launch({}))
        assert setup.resolve().run.compile == expected


# --- the model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_rounds_weights_and_no_rotation(dtype):
    config = random_model(CONFIGS["llama"]).config
    exact = model_of(config).get_buffer("model.rotary_emb.inv_freq").clone()
    model = model_of(config).to(dtype)
    assert torch.equal(model.get_buffer("model.rotary_emb.inv_freq"), exact)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.to("meta").get_buffer("model.rotary_emb.inv_freq").device.type == "meta"


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_of_its_own_logits_and_targets_of_minus_100_count_for_nothing(kind):
    theirs = random_model(CONFIGS[kind])
    model = model_of(theirs.config).eval()
    model.load_state_dict(theirs.state_dict())
    tokens = torch.randint(VOCABULARY, (2, 16), generator=torch.manual_seed(1))
    targets = tokens.clone()
    targets[0, :5] = -100
    out = model(input_ids=tokens, shift_labels=targets, loss_chunk_size=0)
    loss_sum, count = next_token_loss(theirs(input_ids=tokens).logits, targets)
    assert torch.equal(out.loss_sum, loss_sum)
    assert (int(out.targets), int(count)) == (27, 27)


@pytest.mark.parametrize("tied", [False, True])
def test_flops_and_parameters_are_counted_as_ours(tied, text, tmp_path):
    report = {**CONFIGS["llama"], "tie_word_embeddings": tied}
    model = hugging_face(config_file(str(described(tmp_path, report))))
    assert isinstance(model, HuggingFace)
    words = "--dim 32 --hidden_dim 96 --n_layers 2 --n_heads 4 --n_kv_heads 2 --max_seq_len 32"
    ours = parse_flags([*words.split(), "--vocab_size", str(VOCABULARY)])
    for patterns in ((), ("model.layers.0.*", "*embed*"), ("*.mlp.*",)):
        frozen = replace(ours, freeze=patterns, tie_word_embeddings=tied)
        assert model.flops_per_token(frozen) == MiniMind().flops_per_token(frozen)
    given = ["--model", f"hf:{tmp_path}", "--data_path", str(text / "data"), "--max_seq_len", "32"]
    out = dry_run_text(planned(parse_flags([*given, "--deepspeed_config", "none"])))
    assert f"parameters  {random_model(report).num_parameters():,}: llama of transformers" in out
    assert "rope_theta" not in out


# --- what comes of a run ------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["export --format transformers", "checkpoint consolidate"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_written_out_is_what_transformers_loads(kind, command, trained, tmp_path, capsys):
    out = tmp_path / "whole"
    place = ["--checkpoint", str(trained(kind) / "out"), "--out", str(out)]
    assert main([*command.split(), *place]) == 0
    assert capsys.readouterr().err == ""
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    theirs, output = loaded
    assert not any(output.values())
    assert theirs.config.architectures == [type(theirs).__name__]
    model, tokenizer, _ = load_model(str(trained(kind) / "out"), None)
    assert type(model).__name__ == type(theirs).__name__
    tokens = torch.arange(24).view(2, 12) + 5
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, theirs(input_ids=tokens).logits)
    reader = AutoTokenizer.from_pretrained(out)
    texts = [*sentences(9, 200), "🙂👩‍👧", "春眠不覺曉。", "a ▁ b", "</s>"]
    assert [reader.encode(text) for text in texts] == list(map(tokenizer.encode, texts))
    ids = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    for stated in (theirs.config, theirs.generation_config, reader):
        assert (stated.bos_token_id, stated.eos_token_id, stated.pad_token_id) == ids
    assert tokenizer.vocab_size == PIECES


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_export_in_another_precision_and_in_several_files_loads(dtype, trained, tmp_path):
    out = tmp_path / "whole"
    words = ["export", "--checkpoint", str(trained("gpt2") / "out"), "--format", "transformers"]
    words += ["--out", str(out), "--dtype", dtype, "--max_shard_size", "20KB"]
    assert main(words) == 0
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 2
    theirs: Any = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    model, _, _ = load_model(str(trained("gpt2") / "out"), None)
    assert theirs.dtype == getattr(torch, dtype)
    for name, value in model.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], value.to(theirs.dtype)), name


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_written_with_the_tokenizers_ids_alone(kind, trained, capsys):
    """Most rows of the embedding that no piece has are as random as they were."""
    place = str(trained(kind) / "out")
    capsys.readouterr()  # what the first test of a worker has trained prints
    words = ["--prompt", "ab", "--max_new_tokens", "40", "--temperature", "9", "--top_p", "1"]
    assert main(["generate", "--checkpoint", place, *words]) == 0
    assert capsys.readouterr().out.startswith("ab")


def test_eval_reads_it(text, trained):
    place = str(trained("gpt2") / "out")
    assert main(["eval", "--checkpoint", place, "--data_path", str(text / "text.jsonl")]) == 0


@pytest.mark.parametrize("form", ["llama", "minimind", "gguf"])
def test_a_format_of_the_minimind_decoder_is_refused_with_the_one_that_fits(
    form, trained, tmp_path, capsys
):
    place, out = str(trained("gpt2") / "out"), tmp_path / "x"
    words = ["export", "--checkpoint", place, "--format", form, "--out", str(out)]
    assert main(words) == 2
    assert "is a gpt2 model; give --format transformers" in capsys.readouterr().err
    assert not out.exists()


# --- what does not fit --------------------------------------------------------------------------


def refused(tmp_path: Path, report: dict[str, Any] | None, *words: str) -> str:
    place = described(tmp_path / "place", report) if report else tmp_path / "place"
    given = ["--model", f"hf:{place}", "--out_dir", str(tmp_path / "out"), *words]
    with pytest.raises(UsageError) as caught:
        read_initial(parse_flags(given))
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--dim", "64"), "dim = 64 (--dim)"),
        (("--n_layers", "2"), "n_layers = 2 (--n_layers)"),
        (("--rope_theta", "10"), "rope_theta"),
        (("--no-tie_word_embeddings",), "tie_word_embeddings"),
        (("--use_moe",), "use_moe"),
        (("--doc_mask",), "doc_mask"),
        (("--loss", "chunked"), "loss = chunked"),
        (("--mup_base_dim", "64"), "mup_base_dim = 64"),
        (("--max_seq_len", "49"), "max_position_embeddings = 48"),
        (("--vocab_size", "641"), "vocab_size = 640"),
    ],
)
def test_a_flag_beside_the_file_is_refused(words, named, tmp_path):
    assert named in refused(tmp_path, CONFIGS["llama"], *words)


@pytest.mark.parametrize(
    ("report", "named"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "evil.Evil"}}, "auto_map"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "nobody"}, "model_type = 'nobody'"),
        ({"model_type": "vit"}, "vit, which is not a causal language model"),
        ({"model_type": "mixtral"}, "experts can only be trained in the built-in decoder"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 5}, "num"),
        ({"num_hidden_layers": 10**7}, "more than 4096 layers"),
    ],
)
def test_a_file_that_is_not_trained_gives_the_reason(report, named, tmp_path):
    assert named in refused(tmp_path, {**CONFIGS["llama"], **report})


def test_a_name_at_a_hub_is_no_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError, match="no such directory or file; name the directory of a model, its"
    ):
        parse_flags(["--model", "hf:gpt2"])
    (tmp_path / "place").mkdir()
    assert "has no config.json" in refused(tmp_path, None)


def test_a_tokenizer_that_is_too_large_ends_the_start(text, tmp_path):
    report = {**CONFIGS["llama"], "vocab_size": PIECES - 1}
    place = described(tmp_path / "place", report)
    with pytest.raises(UsageError, match=r"has 600 pieces, more than vocab_size = 599"):
        run(text, place, tmp_path / "out")
    given = ("--tokenizer", str(text / "data" / "tokenizer"))
    assert "has 600 pieces" in refused(tmp_path, report, *given)


def test_a_model_that_fills_gaps_is_found_out(text, tmp_path):
    """Its loss would fall to 0, for it sees what it is to predict."""
    report = {**WIDE, "model_type": "bert"}
    with pytest.raises(UsageError, match="attends to later tokens"):
        run(text, described(tmp_path / "place", report), tmp_path / "out")


def test_weights_are_all_there_and_of_the_shape(tmp_path):
    """As at the hub, GPT-2's may lack a prefix, and have masks that nobody reads any more."""
    source = random_model(CONFIGS["gpt2"])
    place = tmp_path / "place"
    source.save_pretrained(place)
    file = place / "model.safetensors"
    whole = {name.removeprefix("transformer."): v for name, v in load_file(file).items()}
    save_file({**whole, "h.0.attn.bias": torch.ones(1, 1, 48, 48)}, file)
    words = ["--model", f"hf:{place}", "--init_from", str(place), "--out_dir", str(tmp_path / "o")]
    given = parse_flags([*words, "--tokenizer", str(tmp_path)])
    found = read_initial(given.with_values(DEFAULT, tokenizer=None))
    assert found.weights
    model = model_of(source.config)
    found.weights.fill(model)
    assert all(map(torch.equal, model.state_dict().values(), source.state_dict().values()))
    for change, named in (
        ({"wte.weight": None}, "has no .transformer.wte.weight"),
        ({"extra.weight": torch.ones(2)}, "has .extra.weight"),
        ({"wpe.weight": torch.ones(2, 32)}, "wpe.weight. has shape"),
        ({"lm_head.weight": torch.ones(VOCABULARY, 32)}, "lm_head.weight. is not .wte.weight"),
    ):
        changed = {name: v for name, v in {**whole, **change}.items() if v is not None}
        save_file(changed, file)
        with pytest.raises(CheckpointError, match=named):
            read_initial(given.with_values(DEFAULT, tokenizer=None))


def test_a_directory_of_ours_gives_its_shape(tmp_path, text):
    config = MiniMindConfig(vocab_size=PIECES, dim=32, n_layers=1, n_heads=2, max_seq_len=24)
    place = described(tmp_path / "place", config.to_dict())
    given = ["--model", f"hf:{place}", "--data_path", str(text / "data")]
    found = read_initial(parse_flags(given))
    assert isinstance(found.architecture, MiniMind)
    assert (found.run.dim, found.run.n_layers, found.run.max_seq_len) == (32, 1, 24)


def test_plan_counts_our_own_decoder(tmp_path, capsys):
    place = described(tmp_path / "place", CONFIGS["llama"])
    assert main(["plan", "--model", f"hf:{place}"]) == 2
    assert "is a model of transformers" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize(
    ("kind", "stage", "dtype"),
    [
        ("llama", "0", "bfloat16"),
        ("llama", "3", "float32"),
        ("qwen3", "1", "bfloat16"),
        ("gpt2", "2", "bfloat16"),
        ("gpt2", "3", "bfloat16"),
        ("gpt2", "none", "float32"),
    ],
)
def test_two_processes_resume_bit_for_bit(kind, stage, dtype, text, tmp_path):
    config = stage if stage == "none" else config_of_stage(int(stage), tmp_path)
    place = described(tmp_path / "place", CONFIGS[kind])

    def launched(out: Path, more: str) -> list[Any]:
        words = f"--model hf:{place} --data_path {text / 'data'} --out_dir {out} --max_seq_len 32"
        words += f" --batch_size 2 --accumulation_steps 2 --max_steps 4 --log_interval 1 {more}"
        words += f" --device cpu --save_interval 2 --deepspeed_config {config} --dtype {dtype}"
        done = subprocess.run(
            ["bash", str(ROOT / "run_accelerate.sh"), *words.split()],
            env=Launcher.environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return events_of(out)

    whole = launched(tmp_path / "whole", "")
    again = launched(tmp_path / "again", f"--resume {tmp_path / 'whole/checkpoints/step_00000002'}")
    assert course(again) == course(whole)[2:]
    assert whole[0]["world_size"] == 2
