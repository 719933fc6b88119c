"""README.md of an export: what the run was, for the Hub, without its secrets; and the length that
tokenizers of transformers truncate to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoTokenizer, GPT2Config

from minimind.checkpoint.directory import describe_file, write_manifest
from minimind.checkpoint.retention import record_validation
from minimind.cli.main import main
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.vocabulary import dump_json, with_length
from minimind.interop.formats import WRITTEN
from minimind.interop.hf_folder import transformers_files
from minimind.interop.job import Job
from minimind.interop.model_card import shown_place
from tests.faults import tiny

pytest.importorskip("gguf")
FORMATS = [name for name in WRITTEN if name != "transformers"]
CONFIG = """\
# The flags of this run; --config reads them back. The comment is the source.
max_steps: 9  # --max_steps
out_dir: /home/someone/runs/mine  # --out_dir
cache_dir: /home/someone/cache  # --cache_dir
data_path: [/home/someone/poems.jsonl, 'https://host/more.jsonl?sig=S3CRET&a=1']  # --data_path
init_from: 'https://user:S3CRET@host/base'  # --init_from
ema: 0.9  # --config mine.yaml
# Not given: defaults, and what the start decided.
seed: 42  # default
compile: 'off'  # derived: no GPU
"""
START = {"event": "run_start", "step": 0, "world_size": 1, "resume_from": None}
BALANCE = {"event": "token_balance", "step": 0, "text": 12345, "held_out": 678}


def step(at: int, loss: float) -> dict[str, Any]:
    return {"event": "step", "step": at, "loss": loss, "lr": 0.1, "tokens": at * 50, "time": at}


def validation(at: int, loss: float) -> dict[str, Any]:
    figures = {"val_loss": loss, "val_ppl": 2 * loss, "val_bpb": loss / 2}
    more = {f"ema_{name}": value + 10 for name, value in figures.items()}
    return {"event": "eval", "step": at, "time": at, **figures, **more}


EVENTS = (START, BALANCE, step(1, 7.5), validation(1, 7.25), step(2, 6.5), validation(2, 6.25))
LATER = (step(3, 5.5), validation(3, 5.25))


def new_run(folder: Path, config: str = CONFIG, events: Any = (*EVENTS, *LATER)) -> Path:
    """A run with a checkpoint of step 2, and the records of later ones."""
    folder.mkdir(parents=True)
    run = tiny.new_run(folder / "mine", tiny.tokenizer_bytes(folder), steps=(2,))
    (run / "config.yaml").write_text(config)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return run


def export(place: Path, form: str, out: Path, *more: str) -> int:
    words = ["export", "--checkpoint", place, "--format", form, "--out", out, *more]
    return main(list(map(str, words)))


def card_of(run: Path, form: str, out: Path) -> str:
    assert export(run, form, out) == 0
    return (out / "README.md").read_text()


def given_flags(card: str) -> Any:
    """What Markdown shows as code at the end."""
    code = card.split("## Flags that were given\n\n")[1].split("\n\n<!-- ")[0]
    assert all(line.startswith("    ") or not line for line in code.split("\n"))
    return yaml.safe_load(code)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_run(tmp_path_factory.mktemp("card") / "run")


@pytest.mark.parametrize("form", FORMATS)
def test_a_card_tells_of_the_run_up_to_its_step(form, run, tmp_path):
    card = card_of(run, form, tmp_path / "out")
    assert "\n<h1>mine</h1>\n" in card
    for words in (
        "<td>poems.jsonl, https://host/more.jsonl?***; 12,345 tokens, 678 of them held out</td>",
        "<td>trained on</td><td>200 tokens in 2 steps of 4 rows of 32 tokens</td>",
        "<td>loss</td><td>6.5000 at step 2</td>",
        "<td>loss 6.2500, perplexity 12.5000, bits per byte 3.1250 at step 2, on held-out",
        "<td>optimizer</td><td>learning_rate 0.01</td>",
        "<td>schedule</td><td>min_lr_ratio 1e-05</td>",
        "<td>precision of these files</td><td>float32</td>",
        "<td>layers</td><td>2</td>",
        "<td>pieces of the vocabulary</td><td>512</td>",
        "<td>positions</td><td>32</td>",
        "Input and output have 32 tokens at most.",
    ):
        assert words in card, words
    assert ("trust_remote_code=True" in card) == (form == "minimind")
    assert ("llama-completion -m model.gguf" in card) == (form == "gguf")


@pytest.mark.parametrize("form", FORMATS)
def test_the_hub_reads_the_header_which_names_no_licence(form, run, tmp_path):
    card_of(run, form, tmp_path / "out")
    data = ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()
    kind = {"minimind": "minimind", "llama": "llama", "gguf": "llama"}[form]
    assert data.pop("library_name", None) == (None if form == "gguf" else "transformers")
    assert data.pop("pipeline_tag") == "text-generation"
    tags = ["minimind", *(["gguf"] if form == "gguf" else []), "llama"]
    assert data.pop("tags") == tags[: 1 if kind == "minimind" else None]
    assert data == {}


def test_flags_are_those_that_were_given_and_name_no_folder_of_the_host(run, tmp_path):
    card = card_of(run, "llama", tmp_path / "out")
    assert given_flags(card) == {
        "max_steps": 9,
        "data_path": ["poems.jsonl", "https://host/more.jsonl?***"],
        "init_from": "https://***@host/base",
        "ema": 0.9,
    }
    assert "someone" not in card


SECRET = "S3CRET"
LEAKS = {
    "signature": "https://host/a.jsonl?X-Amz-Signature=S3CRET",
    "password": "https://user:S3CRET@host/a.jsonl",
    "token of a fragment": "https://host/a.jsonl#token=S3CRET",
    "storage": "s3://bucket/a.jsonl?secret_key=S3CRET",
    "spaces": "https://host/a b.jsonl?sig=S3CRET x",
    "quotes": "https://host/'a'.jsonl?sig=\"S3CRET\"",
    "brackets": "https://host/[a].jsonl?sig[0]=S3CRET",
    "escaped": "https://host/a.jsonl%3Fsig%3DS3CRET",
    "by name": "text=https://host/a.jsonl?sig=S3CRET",
    "no scheme, two slashes": "https:/host/a.jsonl?token=S3CRET",
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("flag", ["data_path", "init_from", "tokenizer", "mirror", "unheard_of"])
def test_no_secret_of_a_url_is_published(flag, leak, tmp_path):
    value = [LEAKS[leak]] if flag == "data_path" else LEAKS[leak]
    config = f"{CONFIG.split('data_path')[0]}{flag}: {json.dumps(value)}  # --{flag}\n"
    sources = [{"name": LEAKS[leak], "epoch": 5}]
    run = new_run(tmp_path / "run", config, (START, {**BALANCE, "sources": sources}))
    tiny.vouch(tiny.newest(run), init_from={"place": LEAKS[leak], "kind": "llama"})
    card = card_of(run, "llama", tmp_path / "out")
    assert flag in card or flag == "mirror"
    assert "started from" in card
    assert ": 5 tokens in an epoch" in card
    assert SECRET not in card


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("/home/someone/text.jsonl", "text.jsonl"),
        ("text.jsonl", "text.jsonl"),
        ("~/text/*.jsonl", "*.jsonl"),
        ("hf:/home/someone/base", "hf:base"),
        ("file:///home/someone/text.jsonl", "text.jsonl"),
        ("/home/someone/runs/base/checkpoints/step_00000020", "base step_00000020"),
        ("s3://bucket/text.jsonl", "s3://bucket/text.jsonl"),
        ("hf://datasets/one/two/a.parquet", "hf://datasets/one/two/a.parquet"),
        ("0.5", "0.5"),
        ("/", "/"),
    ],
)
def test_files_of_the_host_are_shown_by_name(place, shown):
    assert shown_place(place) == shown


def test_the_average_has_its_own_validation_and_no_training_loss(tmp_path, monkeypatch, run):
    from minimind.interop import weights

    opened = weights.open_checkpoint
    monkeypatch.setattr(weights, "open_checkpoint", lambda path, which: opened(path))
    assert export(run, "llama", tmp_path / "out", "--weights", "ema") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        "<td>weights</td><td>a moving average of those that were trained (--ema 0.9)</td>" in card
    )
    assert (
        "<td>validation</td><td>loss 16.2500, perplexity 22.5000, bits per byte 13.1250 at" in card
    )
    assert "<td>loss</td>" not in card


@pytest.mark.parametrize("gone", ["metrics.jsonl", "config.yaml", "both", "its run", "torn"])
def test_what_is_missing_is_left_out(gone, tmp_path):
    run = new_run(tmp_path / "run")
    place = run
    if gone in ("metrics.jsonl", "both"):
        (run / "metrics.jsonl").unlink()
    if gone in ("config.yaml", "both"):
        (run / "config.yaml").unlink()
    if gone == "its run":
        place = run / "checkpoints" / "step_00000002"
        place = place.rename(tmp_path / "moved")
    if gone == "torn":
        (run / "config.yaml").write_text("a: [b\n")
        (run / "metrics.jsonl").write_text('{"event": "step", "step": "x", "loss"')
    card = card_of(place, "llama", tmp_path / "out")
    assert "<td>trained on</td><td>200 tokens in 2 steps" in card
    assert ("<td>loss</td>" in card) == (gone == "config.yaml")
    assert ("## Flags" in card) == (gone == "metrics.jsonl")
    assert "nan" not in card


def test_a_checkpoint_without_metrics_has_the_validation_beside_it(tmp_path):
    run = new_run(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    record_validation(tiny.newest(run), 4.25)
    card = card_of(run, "llama", tmp_path / "out")
    assert "<td>validation</td><td>loss 4.2500, on held-out" in card
    record_validation(tiny.newest(run), -0.25, "average")  # a score is no loss
    assert "<td>validation</td>" not in card_of(run, "llama", tmp_path / "scored")


def test_odd_names_and_numbers_are_text_in_the_card(tmp_path):
    name = "a|b`c``d <img src=x>\n# e\n\n<script>"
    config = f"data_path: [{json.dumps(name)}]  # --data_path\nema: '```'  # --ema\n"
    odd = {**BALANCE, "text": "many", "sources": [{"name": "<b>|x", "epoch": None}, 3]}
    run = new_run(tmp_path / "run", config, (START, odd, step(2, 6.5)))
    card = card_of(run, "llama", tmp_path / "out")
    shown = "a|b`c``d &lt;img src=x&gt; # e &lt;script&gt;, &lt;b&gt;|x: nan tokens in an epoch"
    assert f"<td>text</td><td>{shown}; nan tokens, 678 of them held out</td>" in card
    assert given_flags(card) == {"data_path": [name], "ema": "```"}


def test_an_import_names_its_source(run, tmp_path, capsys):
    assert export(run, "llama", tmp_path / "llama") == 0
    words = ["import", "--from", "llama", tmp_path / "llama", "--out", tmp_path / "out"]
    assert main(list(map(str, words))) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "<td>llama (llama), of which nothing more is known</td>" in card


def add_template(step: Path) -> None:
    """List one more file in the manifest of a checkpoint: a chat template."""
    (step / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    known = json.loads((step / "manifest.json").read_bytes())
    names = [*(entry["name"] for entry in known["files"]), "chat_template.jinja"]
    facts = {key: v for key, v in known.items() if key not in ("format", "files", "sha256")}
    write_manifest(step, facts, [describe_file(step / name) for name in names])


@pytest.mark.parametrize("form", ["minimind", "llama"])
@pytest.mark.parametrize("has_chat", [False, True], ids=["text", "chat"])
def test_the_code_of_a_card_runs(form, has_chat, tmp_path, monkeypatch, capsys):
    run = new_run(tmp_path / "run")
    if has_chat:
        add_template(tiny.newest(run))
    card = card_of(run, form, tmp_path / "out")
    assert ("apply_chat_template" in card) == has_chat
    assert ("- conversational" in card) == has_chat
    assert str(tmp_path) not in card
    assert "minimind chat" not in card  # what it does not take is no matter of who loads it
    monkeypatch.chdir(tmp_path / "out")
    code = card.split("```python\n")[1].split("```")[0]
    exec(compile(code, "card", "exec"), {"__name__": "card"})
    assert capsys.readouterr().out.strip()


def test_force_replaces_a_card_as_it_was_written_and_no_other(run, tmp_path, capsys):
    out = tmp_path / "out"
    written = card_of(run, "llama", out)
    assert export(run, "llama", out, "--force") == 0
    for edited in (
        written.replace("# license:", "license: mit #"),
        f"{written}\nMore.\n",
        written.replace("<h1>mine", "<h1>Mine"),
        "",
        "# By hand\n",
    ):
        (out / "README.md").write_text(edited)
        capsys.readouterr()
        assert export(run, "llama", out, "--force") == 2
        assert "README.md" in capsys.readouterr().err
        assert (out / "README.md").read_text() == edited
    (out / "README.md").write_text(written)
    assert export(run, "gguf", out, "--force") == 0


@pytest.mark.parametrize("form", FORMATS)
def test_tokenizers_of_an_export_truncate_to_its_positions(form, run, tmp_path):
    card_of(run, form, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert tokenizer.model_max_length == 32
    assert len(tokenizer("word " * 100, truncation=True)["input_ids"]) == 32
    assert len(tokenizer("word " * 100)["input_ids"]) > 32


@pytest.mark.parametrize(
    ("given", "positions", "length"),
    [
        (None, 64, 64),
        (1e30, 64, 64),
        (10**30, 64, 64),
        (128, 64, 64),
        (16, 64, 16),
        (64, 64, 64),
        (0, 64, 64),
        ("many", 64, 64),
        (None, None, None),
        (16, None, 16),
    ],
)
def test_a_shorter_length_of_the_model_stays(given, positions, length):
    config = {"a": 1} if given is None else {"a": 1, "model_max_length": given}
    files = with_length({"tokenizer_config.json": dump_json(config)}, positions)
    assert json.loads(files["tokenizer_config.json"]).get("model_max_length") == length


def test_models_of_transformers_with_another_name_for_positions(run, tmp_path):
    tokenizer = load_tokenizer(tiny.newest(run) / "tokenizer.model")
    config = GPT2Config(n_positions=48, vocab_size=512, n_layer=1, n_head=1, n_embd=8)
    files, _ = transformers_files(Job("", "gpt2", config, tokenizer, "float32"))
    assert json.loads(files["tokenizer_config.json"])["model_max_length"] == 48
