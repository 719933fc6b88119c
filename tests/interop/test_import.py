"""minimind import: MiniMind2's and Llama's weights, and invalid sources."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from minimind.cli.main import main
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.sentencepiece import train_tokenizer
from minimind.interop.gguf import gguf_vocabulary
from minimind.interop.weights import load_weights_from
from minimind.model.causal_lm import MiniMindForCausalLM
from tests.conftest import sentences
from tests.faults import tiny
from tests.interop import minimind2

SHAPE = minimind2.Shape()
WEIGHTS = minimind2.random_weights(SHAPE)
CONFIG: dict[str, Any] = {
    "model_type": "minimind",
    **{name: getattr(SHAPE, name) for name in minimind2.Shape.__dataclass_fields__},
    "hidden_dim": None,
    "use_moe": False,
}
FLAGS = ["--n_heads", "4", "--rope_theta", "1e4", "--norm_eps", "1e-5", "--max_seq_len", "64"]
WQ = "layers.1.attention.wq.weight"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    return Path(folder / "tokenizer.model") if tiny.tokenizer_bytes(folder) else folder


@pytest.fixture
def pth(tmp_path: Path) -> Path:
    path = tmp_path / "pretrain_32.pth"
    torch.save(WEIGHTS, path)
    return path


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Path) -> Path:
    path = tmp_path / "MiniMind2"
    path.mkdir()
    torch.save(WEIGHTS, path / "pytorch_model.bin")
    (path / "config.json").write_text(json.dumps(CONFIG))
    shutil.copy(tokenizer, path / "tokenizer.model")
    return path


def import_model(place: Path, out: Path, *more: object, kind: str = "minimind2") -> int:
    words = ("import", "--from", kind, place, "--out", out, *more)
    return main([str(word) for word in words])


def ids() -> torch.Tensor:
    return torch.randint(512, (20, 64), generator=torch.Generator().manual_seed(1))


def logits(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return MiniMindForCausalLM.from_pretrained(path).eval()(ids()).logits


# --- what is right ------------------------------------------------------------------------------


def test_minimind2_file_has_the_logits_of_its_architecture(pth, tokenizer, tmp_path):
    out = tmp_path / "out"
    assert import_model(pth, out, *FLAGS, "--tokenizer", tokenizer) == 0
    expected = minimind2.logits(SHAPE, WEIGHTS, ids())
    assert expected.std() > 0.5
    assert (logits(out) - expected).abs().max() <= 1e-5
    values = json.loads((out / "config.json").read_text())
    assert (values["intermediate_size"], values["num_key_value_heads"]) == (SHAPE.hidden_dim, 2)
    assert (values["bos_token_id"], values["eos_token_id"], values["pad_token_id"]) == (1, 2, 3)
    assert (out / "tokenizer.model").read_bytes() == tokenizer.read_bytes()


def test_minimind2_directory_defines_its_shape(folder, tmp_path):
    assert import_model(folder, tmp_path / "out") == 0
    expected = minimind2.logits(SHAPE, WEIGHTS, ids())
    assert (logits(tmp_path / "out") - expected).abs().max() <= 1e-5


def test_untied_head_stays_untied(pth, tokenizer, tmp_path):
    own = {**WEIGHTS, "output.weight": WEIGHTS["output.weight"].flip(0)}
    torch.save(own, pth)
    assert import_model(pth, tmp_path / "out", *FLAGS, "--tokenizer", tokenizer) == 0
    expected = minimind2.logits(SHAPE, own, ids())
    assert (logits(tmp_path / "out") - expected).abs().max() <= 1e-5


def test_half_precision_and_the_tables_of_older_files_are_read(pth, tokenizer, tmp_path):
    half = {name: value.half() for name, value in WEIGHTS.items()}
    tables = {"pos_cis": torch.zeros(64, 4, dtype=torch.complex64)}
    tables |= {f"layers.{n}.attention.mask": torch.zeros(1, 1, 64, 64) for n in range(2)}
    torch.save({**half, **tables}, pth)
    assert import_model(pth, tmp_path / "out", *FLAGS, "--tokenizer", tokenizer) == 0
    expected = minimind2.logits(SHAPE, {n: v.float() for n, v in half.items()}, ids())
    assert (logits(tmp_path / "out") - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("face", [LlamaForCausalLM, Qwen3ForCausalLM])
def test_llama_and_qwen3_round_trip_exactly(face, tokenizer, tmp_path):
    config = {LlamaForCausalLM: LlamaConfig, Qwen3ForCausalLM: Qwen3Config}[face](
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 777.0, "rope_type": "default"},
        tie_word_embeddings=face is Qwen3ForCausalLM,
    )
    torch.manual_seed(1)
    theirs = face(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    out, back = tmp_path / "ours", tmp_path / "back"
    assert import_model(tmp_path / "theirs", out, "--tokenizer", tokenizer, kind="llama") == 0
    with torch.no_grad():
        expected = theirs(ids()).logits
    assert (logits(out) - expected).abs().max() <= 1e-5 * expected.abs().max()
    flags = ["--n_heads", 4, "--rope_theta", 777, "--norm_eps", 1e-6, "--max_seq_len", 64]
    file, bare = tmp_path / "theirs" / "model.safetensors", tmp_path / "bare"
    assert import_model(file, bare, *flags, "--tokenizer", tokenizer, kind="llama") == 0
    assert (bare / file.name).read_bytes() == (out / file.name).read_bytes()
    assert (bare / "config.json").read_bytes() == (out / "config.json").read_bytes()
    words = ["export", "--checkpoint", out, "--format", "llama", "--out", back]
    assert main(list(map(str, words))) == 0
    again = load_file(back / "model.safetensors")
    before = load_file(tmp_path / "theirs" / "model.safetensors")
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], value) for name, value in before.items())
    assert type(AutoModelForCausalLM.from_pretrained(back)) is face


def test_format_of_a_place_is_detected(pth, folder, tokenizer, tmp_path):
    assert import_model(folder, tmp_path / "ours") == 0
    words = ["export", "--checkpoint", tmp_path / "ours", "--format", "llama"]
    assert main([*map(str, words), "--out", str(tmp_path / "llama")]) == 0
    places = (folder, tmp_path / "ours", tmp_path / "llama")
    found = [load_weights_from(place) for place in places]
    assert [one.kind for one in found] == ["minimind2", "minimind", "llama"]
    for one in found:
        assert one.config.head_dim == 8
        name = "model.layers.1.self_attn.q_proj.weight"
        assert torch.equal(one.tensors.read(name), WEIGHTS[WQ])


# --- what is not --------------------------------------------------------------------------------


def refused(status: int, *named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = capsys.readouterr().err
    assert output.startswith("minimind: error["), output
    assert len(output.splitlines()) == 1
    assert "; " in output  # the remedy
    for name in named:
        assert name in output
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]
    assert {2: "E_USAGE", 4: "E_CHECKPOINT", 5: "E_STORAGE"}[status] in output


class Code:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


BAD_TENSORS = {
    "missing": ({WQ: None}, WQ),
    "missing embedding": ({"tok_embeddings.weight": None}, "tok_embeddings.weight"),
    "extra": ({"layers.1.attention.wx.weight": torch.zeros(2)}, "layers.1.attention.wx.weight"),
    "extra layer": ({"layers.2.ffn_norm.weight": torch.zeros(32)}, "layers.2."),
    "experts": ({"layers.0.feed_forward.gate.weight": torch.zeros(4, 32)}, "feed_forward.gate"),
    "shape": ({WQ: torch.zeros(32, 16)}, WQ),
    "flat": ({"tok_embeddings.weight": torch.zeros(512)}, "tok_embeddings.weight"),
    "not finite": ({WQ: torch.full((32, 32), torch.inf)}, f"{WQ} has"),
    "whole numbers": ({WQ: torch.zeros(32, 32, dtype=torch.int64)}, WQ),
    "stretched": ({WQ: torch.zeros(1).expand(32, 32)}, WQ),
    "code": ({WQ: Code()}, "pretrain_32.pth"),
    "a number": ({"step": 3}, "step"),
}


@pytest.mark.parametrize("why", BAD_TENSORS)
def test_invalid_tensors_are_rejected(why, pth, tokenizer, tmp_path, capsys):
    change, named = BAD_TENSORS[why]
    changed: dict[str, Any] = {**WEIGHTS, **change}
    torch.save({name: value for name, value in changed.items() if value is not None}, pth)
    assert import_model(pth, tmp_path / "out", *FLAGS, "--tokenizer", tokenizer) == 4
    refused(4, "pretrain_32.pth", named, capsys=capsys, tmp_path=tmp_path)
    assert not Path("ran").exists()


def written(content: bytes) -> Any:
    return lambda path: path.write_bytes(content)


BAD_FILES = {
    "nothing": written(b""),
    "text": written(b"hello" * 99),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-99]),
    "flipped": lambda path: path.write_bytes(
        path.read_bytes().replace(b"FloatStorage", b"F?oatStorage")
    ),
    "a list": lambda path: torch.save([1], path),
    "old": lambda path: torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("why", BAD_FILES)
def test_unreadable_files_are_rejected(why, pth, tokenizer, tmp_path, capsys):
    BAD_FILES[why](pth)
    assert import_model(pth, tmp_path / "out", *FLAGS, "--tokenizer", tokenizer) == 4
    refused(4, "pretrain_32.pth", capsys=capsys, tmp_path=tmp_path)


@pytest.mark.parametrize("name", ["n_heads", "rope_theta", "norm_eps", "max_seq_len"])
def test_missing_shape_values_are_required_as_flags(name, pth, tokenizer, tmp_path, capsys):
    at = FLAGS.index(f"--{name}")
    words = FLAGS[:at] + FLAGS[at + 2 :]
    assert import_model(pth, tmp_path / "out", *words, "--tokenizer", tokenizer) == 2
    refused(2, f"--{name}", capsys=capsys, tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--n_heads", "5"), "--n_heads 5"),
        (("--n_heads", "64"), "--n_heads 64"),
        (("--n_kv_heads", "4"), "--n_kv_heads 4"),
    ],
)
def test_flags_that_contradict_the_tensors(more, named, pth, tokenizer, tmp_path, capsys):
    assert import_model(pth, tmp_path / "out", *FLAGS, *more, "--tokenizer", tokenizer) == 2
    refused(2, named, capsys=capsys, tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dim": 64}, "dim = 64"),
        ({"n_layers": 3}, "n_layers = 3"),
        ({"n_kv_heads": 4}, "n_kv_heads = 4"),
        ({"n_heads": 7}, "n_heads = 7"),
        ({"norm_eps": 0}, "norm_eps"),
        ({"multiple_of": 64}, "hidden_dim = 128"),
        ({"vocab_size": 6400}, "vocab_size = 6400"),
        ({"use_moe": True}, "use_moe"),
        ({"norm_eps": "small"}, "norm_eps"),
        ({"max_seq_len": 2**40}, "max_seq_len"),
    ],
)
def test_configuration_that_contradicts_its_tensors(change, named, folder, tmp_path, capsys):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **change}))
    assert import_model(folder, tmp_path / "out") == 4
    refused(4, "MiniMind2/config.json", named, capsys=capsys, tmp_path=tmp_path)


def test_old_configuration_without_rope_theta(folder, tmp_path, capsys):
    values = {name: value for name, value in CONFIG.items() if name != "rope_theta"}
    (folder / "config.json").write_text(json.dumps(values))
    assert import_model(folder, tmp_path / "out") == 2
    refused(2, "--rope_theta", capsys=capsys, tmp_path=tmp_path)
    assert import_model(folder, tmp_path / "out", "--rope_theta", 1e4) == 0


def test_tokenizer_size_differs_from_the_embedding(pth, tokenizer, tmp_path, capsys):
    other = tmp_path / "other.model"
    train_tokenizer(sentences(2, 50), 600, other)
    assert import_model(pth, tmp_path / "out", *FLAGS, "--tokenizer", other) == 4
    refused(4, "other.model", "600", "512", capsys=capsys, tmp_path=tmp_path)
    wide = torch.cat([WEIGHTS["tok_embeddings.weight"], torch.ones(88, 32)])
    torch.save({**WEIGHTS, "tok_embeddings.weight": wide, "output.weight": wide}, pth)
    assert import_model(pth, tmp_path / "out", *FLAGS, "--tokenizer", tokenizer) == 4
    refused(4, "tokenizer.model", "512", "600", capsys=capsys, tmp_path=tmp_path)
    assert import_model(pth, tmp_path / "out", *FLAGS) == 4
    refused(4, "--tokenizer", capsys=capsys, tmp_path=tmp_path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """Two files with an index."""
    folder = tmp_path_factory.mktemp("llama")
    torch.save(WEIGHTS, folder / "m.pth")
    words = (*FLAGS, "--tokenizer", tokenizer)
    assert import_model(folder / "m.pth", folder / "ours", *words) == 0
    more = ["--max_shard_size", "100KB", "--out", str(folder / "llama")]
    words = ["export", "--checkpoint", str(folder / "ours"), "--format", "llama", *more]
    assert main(words) == 0
    assert len(list((folder / "llama").glob("*.safetensors"))) == 2
    return folder / "llama"


def changed_config(**change: Any) -> Any:
    """A value of None takes the name away."""

    def change_it(path: Path) -> None:
        values = {**json.loads((path / "config.json").read_text()), **change}
        kept = {name: value for name, value in values.items() if value is not None}
        (path / "config.json").write_text(json.dumps(kept))

    return change_it


def changed_header(path: Path) -> None:
    file = path / "model-00002-of-00002.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def changed_index(path: Path) -> None:
    file = path / "model.safetensors.index.json"
    values = json.loads(file.read_text())
    values["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    file.write_text(json.dumps(values))


def changed_tensors(**change: Any) -> Any:
    def change_it(path: Path) -> None:
        file = path / "model-00002-of-00002.safetensors"
        held = {**load_file(file), **change}
        save_file({name: value for name, value in held.items() if value is not None}, file)

    return change_it


BAD_FOLDERS = {
    "header": (changed_header, "model-00002-of-00002.safetensors"),
    "index": (changed_index, "elsewhere.safetensors"),
    "no config": (lambda path: (path / "config.json").unlink(), "config.json"),
    "no json": (lambda path: (path / "config.json").write_text("{"), "config.json"),
    "one file gone": (lambda path: (path / "model-00001-of-00002.safetensors").unlink(), "00001"),
    "missing": (changed_tensors(**{"model.norm.weight": None}), "model.norm.weight"),
    "extra": (changed_tensors(extra=torch.zeros(1)), "'extra'"),
    "shape": (changed_tensors(**{"model.norm.weight": torch.zeros(31)}), "model.norm.weight"),
    "twice": (changed_tensors(**{"model.embed_tokens.weight": torch.zeros(1)}), "embed_tokens"),
    "another kind": (changed_config(model_type="gemma"), "gemma"),
    "a list of kinds": (changed_config(model_type=["llama"]), "model_type"),
    "head of no size": (changed_config(head_dim={"a": 1}), "head_dim"),
    "huge base": (
        changed_config(rope_parameters={"rope_type": "default", "rope_theta": 10**20}),
        "rope_theta",
    ),
    "biases": (changed_config(attention_bias=True), "attention_bias"),
    "scaled": (changed_config(rope_scaling={"rope_type": "longrope", "factor": 4}), "longrope"),
    "scaled, newly": (
        changed_config(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}),
        "llama3",
    ),
    "wide heads": (changed_config(head_dim=16), "16"),
    "layers": (changed_config(num_hidden_layers=10**9), "num_hidden_layers"),
    "vocabulary": (changed_config(vocab_size=10**12), "embed_tokens"),
    "tied": (changed_config(tie_word_embeddings=False), "lm_head.weight"),
    "silent of a tie": (changed_config(tie_word_embeddings=None), "has no 'lm_head.weight'"),
}


@pytest.mark.parametrize("why", BAD_FOLDERS)
def test_invalid_directories_are_rejected(why, llama, tmp_path, capsys):
    change, named = BAD_FOLDERS[why]
    place = Path(shutil.copytree(llama, tmp_path / "llama"))
    change(place)
    assert import_model(place, tmp_path / "out", kind="llama") == 4
    refused(4, str(place), named, capsys=capsys, tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("kind", "place", "words"),
    [
        ("llama", "m.pth", "has the tensors of minimind2, not of llama; give --from minimind2"),
        ("minimind2", "llama", "has the tensors of llama, not of minimind2; give --from llama"),
        ("llama", "ours", "is an export of ours, and no import is needed; name it as it is to"),
        ("minimind2", "ours", "is an export of ours"),
        ("llama", "ours/model.safetensors", "is part of a model of ours; name its directory"),
        ("llama", "run", "is a run of ours, and no import is needed"),
        ("minimind2", "run/checkpoints", "is a run of ours"),
    ],
)
def test_wrong_format_is_reported_with_the_right_one(
    kind, place, words, llama, tokenizer, tmp_path, capsys
):
    (llama.parent / "run" / "checkpoints").mkdir(parents=True, exist_ok=True)
    flags = [*FLAGS, "--tokenizer", tokenizer]
    assert import_model(llama.parent / place, tmp_path / "out", *flags, kind=kind) == 2
    refused(2, f"{place}: {words}", capsys=capsys, tmp_path=tmp_path)


def test_unknown_tensor_names_are_not_reported_as_llama(pth, tokenizer, tmp_path, capsys):
    torch.save({"wte.weight": torch.zeros(4, 4)}, pth)
    for kind, named in (("minimind2", "'wte.weight' is not a tensor"), ("llama", "embed_tokens")):
        assert import_model(pth, tmp_path / "out", "--tokenizer", tokenizer, kind=kind) == 4
        refused(4, named, capsys=capsys, tmp_path=tmp_path)


def test_file_beside_a_configuration_is_reported_with_its_folder(llama, tmp_path, capsys):
    files = [load_file(path) for path in sorted(llama.glob("*.safetensors"))]
    save_file({**files[0], **files[1]}, tmp_path / "m.safetensors")
    shutil.copy(llama / "config.json", tmp_path)
    assert import_model(tmp_path / "m.safetensors", tmp_path / "out", kind="llama") == 2
    refused(2, f"name {tmp_path}, where config.json may, or give", capsys=capsys, tmp_path=tmp_path)


@pytest.mark.parametrize("kind", ["llama", "minimind2"])
@pytest.mark.parametrize("place", ["model.gguf", "."])
def test_gguf_input_is_rejected(kind, place, tmp_path, capsys):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(99))
    assert import_model(tmp_path / place, tmp_path / "out", kind=kind) == 4
    words = "is GGUF, which this program writes but does not read; name what it was exported"
    refused(4, words, capsys=capsys, tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        (("--n_heads", "8"), "--n_heads 8 differs from num_attention_heads = 4"),
        (("--n_kv_heads", "4"), "--n_kv_heads 4 differs from num_key_value_heads = 2"),
        (("--rope_theta", "7"), "--rope_theta 7.0 differs from rope_theta = 10000.0"),
        (("--norm_eps", "1e-3"), "--norm_eps 0.001 differs from rms_norm_eps = 1e-05"),
        (("--max_seq_len", "65"), "--max_seq_len 65 differs from max_position_embeddings = 64"),
    ],
)
def test_flag_that_contradicts_a_configuration_is_rejected(
    flag, named, llama, folder, tmp_path, capsys
):
    for place, kind in ((llama, "llama"), (folder, "minimind2")):
        assert import_model(place, tmp_path / "out", *flag, kind=kind) == 2
        refused(2, named, str(place), capsys=capsys, tmp_path=tmp_path)


def test_special_ids_come_from_the_imported_tokenizer(llama, tmp_path):
    place = Path(shutil.copytree(llama, tmp_path / "llama"))
    changed_config(bos_token_id=7, eos_token_id=[8, 9], pad_token_id=10)(place)
    assert import_model(place, tmp_path / "out", kind="llama") == 0
    for file in ("config.json", "generation_config.json"):
        values = json.loads((tmp_path / "out" / file).read_text())
        ids = [values[f"{name}_token_id"] for name in ("bos", "eos", "pad")]
        assert ids == [1, 2, 3], file


def test_head_is_untied_if_the_configuration_does_not_tie_it(llama, tmp_path):
    """As transformers has it: tie_word_embeddings is False where it is not named."""
    place = Path(shutil.copytree(llama, tmp_path / "llama"))
    changed_config(tie_word_embeddings=None)(place)
    embedding = WEIGHTS["tok_embeddings.weight"]
    changed_tensors(**{"lm_head.weight": embedding.flip(0)})(place)
    index = place / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(values))
    assert import_model(place, tmp_path / "out", kind="llama") == 0
    assert load_weights_from(tmp_path / "out").config.tie_word_embeddings is False
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], embedding.flip(0))


# --- where it goes ------------------------------------------------------------------------------


def test_existing_output_is_replaced_only_with_force_if_it_is_an_export(folder, tmp_path, capsys):
    out = tmp_path / "there"
    assert import_model(folder, out) == 0
    assert import_model(folder, out) == 2
    assert import_model(folder, out, "--force") == 0
    (out / "thesis.tex").write_text("mine")
    assert import_model(folder, out, "--force") == 2
    assert "'thesis.tex'" in capsys.readouterr().err
    assert (out / "thesis.tex").exists()
    words = ["export", "--checkpoint", folder, "--format", "gguf", "--out", folder, "--force"]
    assert main(list(map(str, words))) == 2


@pytest.mark.parametrize("form", ["minimind", "llama", "gguf"])
def test_export_that_does_not_fit_on_the_disk(form, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    words = ["export", "--checkpoint", folder, "--format", form, "--out", tmp_path / "out"]
    assert main(list(map(str, words))) == 5
    refused(5, "bytes", "1,000", capsys=capsys, tmp_path=tmp_path)


def test_values_that_float16_cannot_represent(folder, tmp_path, capsys):
    large = {**WEIGHTS, WQ: torch.full((32, 32), 1e6)}
    torch.save(large, folder / "pytorch_model.bin")
    for form in ("llama", "gguf"):
        words = ["export", "--checkpoint", folder, "--format", form, "--dtype", "float16"]
        assert main([*map(str, words), "--out", str(tmp_path / "out")]) == 6
        assert "float16 cannot represent" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_gguf_is_one_file(folder, tmp_path, capsys):
    words = ["export", "--checkpoint", folder, "--format", "gguf", "--max_shard_size", "1GB"]
    assert main([*map(str, words), "--out", str(tmp_path / "out")]) == 2
    refused(2, "--max_shard_size", capsys=capsys, tmp_path=tmp_path)


def test_hugging_face_tokenizer_is_exported_with_its_pieces(pth, folder, tmp_path):
    assert import_model(folder, tmp_path / "ours") == 0
    (tmp_path / "hf").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "ours" / name, tmp_path / "hf" / name)
    theirs = tmp_path / "hf" / "tokenizer.json"
    assert import_model(pth, tmp_path / "theirs", *FLAGS, "--tokenizer", theirs) == 0
    assert (tmp_path / "theirs" / "tokenizer.json").read_bytes() == theirs.read_bytes()
    assert not (tmp_path / "theirs" / "tokenizer.model").exists()
    words = ["export", "--checkpoint", tmp_path / "theirs", "--out", tmp_path / "out", "--format"]
    assert main([*map(str, words), "gguf"]) == 0
    assert main([*map(str, words), "llama", "--force"]) == 0
    one, other = (load_tokenizer(tmp_path / name) for name in ("ours", "theirs"))
    vocabularies = [gguf_vocabulary(given, one.vocab_size) for given in (one, other)]
    for name in ("tokens", "merges", "add_space_prefix", "bos_token_id", "eos_token_id"):
        assert vocabularies[0][name] == vocabularies[1][name]
