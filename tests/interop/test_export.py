"""minimind export: the same function of token ids in every format, read by what others have."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from minimind.cli.main import main
from minimind.data.tokenizer.sentencepiece import train_tokenizer
from minimind.errors import CheckpointError, UsageError
from minimind.inference.load_model import load_checkpoint, load_model
from minimind.interop import export as export_module
from minimind.interop import tensor_sources
from minimind.interop.formats import WRITTEN
from minimind.interop.hf_folder import AUTO_MAP, remote_code
from minimind.interop.weights import load_weights_from
from minimind.model.causal_lm import MiniMindForCausalLM
from tests.conftest import ROOT, sentences
from tests.faults import tiny

pytest.importorskip("gguf")
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed": {"qk_norm": True, "rope_theta": 500.0},
    "wide normed": {"qk_norm": True, "rope_theta": 500.0, "head_dim": 16},
    "narrow": {"head_dim": 4},
    "biased": {"qkv_bias": True},
    "untied": {"tie_word_embeddings": False, "rms_norm_eps": 1e-3},
}
FORMATS = [name for name in WRITTEN if name != "transformers"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    tokenizer = tiny.tokenizer_bytes(folder)
    found = {}
    for name, more in SHAPES.items():
        with pytest.MonkeyPatch.context() as patch:
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
            patch.setattr(tiny, "SHAPE", {**tiny.SHAPE, **heads, **more})
            found[name] = tiny.new_run(folder / name, tokenizer, steps=(2,))
    return found


@pytest.fixture(scope="module")
def exports(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model in every format, as NAME-FORMAT."""
    out = tmp_path_factory.mktemp("exports")
    for name, run in runs.items():
        for form in FORMATS:
            assert export(run, form, out / f"{name}-{form}") == 0
    return out


def export(place: Path, form: str, out: Path, *more: object) -> int:
    words = ("export", "--checkpoint", place, "--format", form, "--out", out, *more)
    return main([str(word) for word in words])


def logits(model: Any) -> torch.Tensor:
    """Of 1,024 random positions."""
    ids = torch.randint(512, (32, 32), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def beside_card(folder: Path) -> dict[str, bytes]:
    """All files but README.md, which tells of the run."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "README.md"}


def loaded(path: Path, **options: Any) -> Any:
    if (path / "model.gguf").exists():
        if "normed" in str(path):  # transformers reads no width of a head for qwen3, and takes 128
            options["head_dim"] = 16 if "wide" in str(path) else 8
        return AutoModelForCausalLM.from_pretrained(path, gguf_file="model.gguf", **options)
    kind = json.loads((path / "config.json").read_text())["model_type"]
    face = MiniMindForCausalLM if kind == "minimind" else AutoModelForCausalLM
    return face.from_pretrained(path, **options)


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_exported_model_has_the_logits_of_the_checkpoint(name, form, runs, exports):
    ours, _, _ = load_checkpoint(str(runs[name]))
    theirs = loaded(exports / f"{name}-{form}")
    expected = {"minimind": "MiniMind", "llama": "Llama", "gguf": "Llama"}[form]
    if name == "biased" and form != "minimind":
        expected = "Qwen2"
    if "normed" in name and form != "minimind":
        expected = "Qwen3"
    assert type(theirs).__name__ == f"{expected}ForCausalLM"
    assert theirs.dtype == torch.float32
    difference = (logits(theirs) - logits(ours)).abs().max()
    assert difference <= (0 if form == "minimind" else 1e-5)
    assert logits(ours).std() > 0.01


def test_model_code_is_exported_only_in_our_format(exports):
    values = json.loads((exports / "plain-minimind" / "config.json").read_text())
    assert values["auto_map"] == AUTO_MAP
    for name, content in remote_code().items():
        assert (exports / "plain-minimind" / name).read_bytes() == content
    assert not list((exports / "plain-llama").glob("*.py"))


@pytest.mark.parametrize("form", ["minimind", "llama"])
def test_special_ids_and_tokenizer_are_exported(form, runs, exports):
    path = exports / f"plain-{form}"
    assert json.loads((path / "generation_config.json").read_text()) == {
        "_from_model_config": True,
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3},
    }
    _, ours, _ = load_checkpoint(str(runs["plain"]))
    theirs = AutoTokenizer.from_pretrained(path)
    for text in (*sentences(5, 10), " <s> a  </s>\n", "▁x"):
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eos_id, ours.pad_id)
    checkpoint = runs["plain"] / "checkpoints" / "step_00000002"
    assert (path / "tokenizer.model").read_bytes() == (checkpoint / "tokenizer.model").read_bytes()


def test_tokenizer_beside_gguf_has_our_ids_and_the_embedded_one_adds_a_space(
    runs, exports, tmp_path
):
    _, ours, _ = load_checkpoint(str(runs["plain"]))
    beside = AutoTokenizer.from_pretrained(exports / "plain-gguf", gguf_file="model.gguf")
    (tmp_path / "model.gguf").hardlink_to(exports / "plain-gguf" / "model.gguf")
    alone = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    # transformers 5.17 reads add_space_prefix; later versions put a space where there is none.
    adds_space = alone.encode("a") != ours.encode("a")
    for text in (*sentences(5, 10), "a  b\n\n c\t", " begins with a space", "0123", "<unused_0>"):
        assert beside.encode(text) == ours.encode(text)
        in_front = f" {text}" if adds_space and not text.startswith(" ") else text
        assert alone.encode(text) == ours.encode(in_front), text
    assert alone.encode("</s>") != ours.encode(" </s>")  # it takes the name for the token


def test_entries_of_a_gguf_file(exports):
    from gguf import GGUFReader

    found = GGUFReader(exports / "plain-gguf" / "model.gguf")

    def entry(name: str) -> Any:
        return found.fields[name].contents()

    assert entry("general.architecture") == "llama"
    assert entry("general.name") == "plain"
    assert entry("llama.attention.head_count_kv") == 2
    assert entry("llama.rope.dimension_count") == 8
    assert entry("tokenizer.ggml.model") == "llama"
    assert entry("tokenizer.ggml.token_type")[:5] == [2, 3, 3, 3, 6]
    assert entry("tokenizer.ggml.tokens")[:5] == ["<unk>", "<s>", "</s>", "<pad>", "<0x00>"]
    assert len(entry("tokenizer.ggml.scores")) == 512
    for name in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        assert entry(f"tokenizer.ggml.{name}") is False
    ids = ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
    assert [entry(f"tokenizer.ggml.{name}") for name in ids] == [1, 2, 0, 3]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_precisions_are_the_rounded_float32(form, dtype, runs, exports, tmp_path):
    out = tmp_path / "normed"
    assert export(runs["normed"], form, out, "--dtype", dtype) == 0
    kind = getattr(torch, dtype)
    whole, rounded = loaded(exports / f"normed-{form}"), loaded(out, dtype=kind)
    for name, value in whole.state_dict().items():
        assert torch.equal(rounded.state_dict()[name], value.to(kind)), name
    if form == "gguf":
        from gguf import GGUFReader

        kinds = {t.name: t.tensor_type.name for t in GGUFReader(out / "model.gguf").tensors}
        assert kinds["blk.0.attn_norm.weight"] == kinds["blk.1.attn_q_norm.weight"] == "F32"
        assert kinds["token_embd.weight"] == {"bfloat16": "BF16", "float16": "F16"}[dtype]
    else:
        assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {kind}


@pytest.mark.parametrize("form", FORMATS)
def test_float32_files_do_not_depend_on_the_process_count(form, runs, exports, tmp_path):
    step = runs["normed"] / "checkpoints" / "step_00000002"
    other = tmp_path / "other" / "normed"  # a GGUF file has the name of the run in it
    tiny.recut(step, other / "checkpoints", 2, 3)
    assert export(other, form, tmp_path / "out") == 0
    for name, content in beside_card(exports / f"normed-{form}").items():
        assert content == (tmp_path / "out" / name).read_bytes(), name


@pytest.mark.parametrize("form", FORMATS)
def test_one_tensor_at_a_time_is_in_memory(form, runs, tmp_path, monkeypatch):
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    read = tensor_sources.Contents.read

    def watched(self, kind, name):
        alive.append(sum(ref() is not None for ref in seen))
        value = read(self, kind, name)
        seen.append(weakref.ref(value))
        return value

    monkeypatch.setattr(tensor_sources.Contents, "read", watched)
    assert export(runs["untied"], form, tmp_path / "out", "--dtype", "bfloat16") == 0
    assert len(seen) == 21
    assert max(alive) <= 1  # gguf: the one before is let go when the next has been read


def test_sharded_export_loads_and_can_be_exported_again(runs, exports, tmp_path):
    out, again = tmp_path / "out", tmp_path / "again"
    assert export(runs["plain"], "minimind", out, "--max_shard_size", "20KB") == 0
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 4
    assert torch.equal(logits(loaded(out)), logits(loaded(exports / "plain-minimind")))
    assert export(out, "llama", again) == 0
    assert beside_card(again) == beside_card(exports / "plain-llama")


@pytest.mark.parametrize("form", ["llama", "gguf"])
def test_experts_are_no_model_of_other_software(form, runs, tmp_path):
    found = load_weights_from(runs["plain"])
    found.config.use_moe = True
    with pytest.raises(UsageError, match=rf"--format {form}: .* use_moe"):
        export_module.export(found, found.load_tokenizer(), tmp_path / "out", form)
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_python_code_of_the_docs_loads_each_export(exports, tmp_path):
    """In one process; the options of each format are those that the page names."""
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    given = re.search(r"^place, options = .*$", block, re.MULTILINE)
    assert given
    options = dict(re.findall(r"(\w+): (\{.*?\})", block)) | {"llama": "{}"}
    assert sorted(options) == sorted(FORMATS)
    code = ""
    for form, settings in options.items():
        place = str(exports / f"plain-{form}")
        code += block.replace(given[0], f"place, options = {place!r}, {settings}\nprint({form!r})")
    done = subprocess.run(
        [sys.executable, "-c", code.replace("max_new_tokens=50", "max_new_tokens=9")],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    model: Any = MiniMindForCausalLM.from_pretrained(exports / "plain-minimind")
    tokenizer = AutoTokenizer.from_pretrained(exports / "plain-llama")
    tokens = tokenizer("Once upon a time", return_tensors="pt")
    ids: Any = model.generate(**tokens, max_new_tokens=9)
    text = tokenizer.decode(ids[0], skip_special_tokens=True)
    assert len(ids[0]) > tokens["input_ids"].shape[1]
    assert done.stdout == "".join(f"{form}\n{text}\n" for form in options)


def test_format_for_other_models_is_rejected(runs, tmp_path, capsys):
    assert export(runs["plain"], "transformers", tmp_path / "out") == 2
    assert "is a MiniMind model; give --format llama, or minimind" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("poems/checkpoints/step_00000002", "poems"),
        ("exported", "exported"),
        (b"p\xffems", "p\ufffdems"),
    ],
)
def test_gguf_name_is_the_name_of_the_run(place, name, tmp_path):
    path = tmp_path / os.fsdecode(place)
    path.mkdir(parents=True)
    assert export_module.run_name(path) == name


def test_export_prints_a_summary(runs, tmp_path, capsys):
    assert export(runs["plain"], "llama", tmp_path / "out") == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    count = sum(math.prod(t.shape) for t in weights.values())
    output = capsys.readouterr().out
    assert f"{count:,} parameters as llama in float32" in output
    assert "step_00000002" in output


@pytest.mark.long
def test_every_export_loads_where_this_package_cannot_be_imported(runs):
    """scripts/check_export.py with this interpreter; it makes a fresh environment by itself."""
    words = ["scripts/check_export.py", "--python", sys.executable, "--checkpoint"]
    done = subprocess.run(
        [sys.executable, *words, str(runs["normed"])],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        *(["minimind:", "MiniMindForCausalLM"], ["llama:", "Qwen3ForCausalLM"]),
        ["gguf:", "Qwen3ForCausalLM"],
    ]


def test_check_export_gives_a_one_line_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["check_export.py", "--checkpoint", str(tmp_path / "none")])
    assert runpy.run_path(str(ROOT / "scripts" / "check_export.py"))["main"]() == 4
    output = capsys.readouterr().err
    assert output.startswith(f"check_export: error[E_CHECKPOINT]: {tmp_path / 'none'}: there is no")


def test_source_is_not_overwritten(exports: Path, capsys: pytest.CaptureFixture[str]):
    place = first(exports)
    before = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
    assert export(place, "minimind", place, "--force") == 2
    assert "is the source; give another folder" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in place.iterdir() if p.is_file()} == before


def test_file_of_our_export_is_not_read_as_llama(exports: Path):
    with pytest.raises(UsageError, match="name its directory"):
        load_weights_from(first(exports) / "model.safetensors")


def test_nonfinite_weights_are_rejected(exports: Path, tmp_path: Path):
    place = shutil.copytree(first(exports), tmp_path / "broken")
    tensors = load_file(place / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    found = load_weights_from(place)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has numbers"):
        found.fill(MiniMindForCausalLM(found.config))


def test_tokenizer_larger_than_the_embedding_is_rejected(exports: Path, tmp_path: Path):
    place = shutil.copytree(first(exports), tmp_path / "export")
    (place / "tokenizer.json").unlink()
    train_tokenizer(sentences(2, 50), 513, place / "tokenizer.model")
    with pytest.raises(CheckpointError, match="has 513 pieces and the embedding 512 rows; "):
        load_model(None, str(place))


def first(exports: Path) -> Path:
    """An export in our own format."""
    return next(path for path in sorted(exports.iterdir()) if path.name.endswith("-minimind"))
