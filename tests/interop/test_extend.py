"""`minimind tokenizer extend`: the rows of new pieces, and runs that go on from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import minimind.train
from minimind.checkpoint.directory import published_checkpoints
from minimind.checkpoint.reader import Contents
from minimind.cli.main import main
from minimind.data.tokenizer.load import load_tokenizer
from minimind.interop.weights import load_weights_from
from minimind.model.causal_lm import MiniMindForCausalLM
from tests.data.tokenizer.test_hf_tokenizer import byte_level
from tests.data.tokenizer.test_tokenizer import verse
from tests.faults import tiny
from tools.forking import Nursery
from tools.runs import config_of_stage, events

train: Any = minimind.train  # a module that is called
OLD, ADDED, SPARE = 512, 30, 20
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PLACES = ("tied", "untied", "llama")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, a Llama with more rows than ids, and each of them extended in `NAME-grown`."""
    folder = tmp_path_factory.mktemp("places")
    texts = [*verse(3, 80), "Zürich naïve café\n" * 9]
    lines = (json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = tiny.tokenizer_bytes(folder)
    for name, is_tied in (("tied", True), ("untied", False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny, "SHAPE", {**tiny.SHAPE, "tie_word_embeddings": is_tied})
            tiny.new_run(folder / name, tokenizer, steps=(1,))
    byte_level(folder / "llama")
    (folder / "llama" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    torch.manual_seed(3)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.2}
    rows = load_tokenizer(folder / "llama").vocab_size + SPARE
    LlamaForCausalLM(LlamaConfig(vocab_size=rows, **shape)).save_pretrained(folder / "llama")
    for name in PLACES:
        words = ["--learn", ADDED, "--data_path", folder / "text.jsonl"]
        assert extend(folder / name, *words, "--out", folder / f"{name}-grown") == 0
    return folder


def extend(place: Path, *words: object) -> int:
    return main(["tokenizer", "extend", str(place), *map(str, words)])


def loaded(place: Path) -> Any:
    """The model in float32."""
    weights = load_weights_from(place)
    model = MiniMindForCausalLM(weights.config)
    weights.fill(model)
    return model.eval()


def is_text(content: bytes) -> bool:
    return "\ufffd" not in content.decode(errors="replace")


@pytest.mark.parametrize("name", PLACES)
def test_a_new_row_is_the_mean_of_the_rows_of_its_old_pieces(name: str, places: Path):
    before, after = (load_weights_from(places / one) for one in (name, f"{name}-grown"))
    old, new = before.load_tokenizer(), after.load_tokenizer()
    assert new.vocab_size == old.vocab_size + ADDED
    rows = max(before.config.vocab_size, new.vocab_size)
    assert after.config.vocab_size == rows
    with_rows = {EMBEDDING, HEAD} & {*before.tensors.shapes}
    assert len(with_rows) == 2 - (name == "tied")
    for key in after.tensors.shapes:
        was, now = before.tensors.read(key), after.tensors.read(key)
        if key not in with_rows:
            assert torch.equal(now, was), key
            continue
        assert now.shape == (rows, was.shape[1])
        assert torch.equal(now[: old.vocab_size], was[: old.vocab_size])
        assert torch.equal(now[new.vocab_size :], was[new.vocab_size :])
        contents = [piece.content for piece in new.pieces()]
        whole = [i for i in range(old.vocab_size, new.vocab_size) if is_text(contents[i])]
        assert len(whole) > ADDED / 3  # the others are parts of characters
        for i in whole:
            # The text of a piece behind a line end, where tokenizers put no space of their own.
            text = contents[i].decode()
            ids = old.encode("\n" + text)[len(old.encode("\n")) :]
            assert old.decode(ids) == text
            expected = torch.stack([was[one] for one in ids]).mean(0)
            assert torch.allclose(now[i], expected, atol=1e-6), (key, text)


@pytest.mark.parametrize("name", PLACES)
def test_logits_of_old_ids_stay(name: str, places: Path):
    ids = torch.randint(OLD, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before, after = (loaded(places / one)(ids).logits for one in (name, f"{name}-grown"))
    first = load_weights_from(places / name).load_tokenizer().vocab_size
    assert (after[..., :first] - before[..., :first]).abs().max() <= 1e-6 * before.abs().max()


@pytest.mark.parametrize("name", PLACES)
def test_transformers_reads_an_export_with_the_same_ids_and_logits(
    name: str, places: Path, tmp_path: Path
):
    grown, out = places / f"{name}-grown", tmp_path / "out"
    assert main(["export", str(grown), "--format", "llama", "--out", str(out)]) == 0
    own, theirs = load_tokenizer(grown), AutoTokenizer.from_pretrained(out)
    text = f"naïve café!\n{verse(3, 1)[0][:5]}"
    ids = own.encode(text)
    assert theirs.encode(text, add_special_tokens=False) == ids
    assert theirs.decode(ids) == own.decode(ids) == text
    assert max(ids) >= own.vocab_size - ADDED
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    given = torch.tensor([ids])
    with torch.no_grad():
        found, expected = model(given).logits, loaded(grown)(given).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def flags_of(places: Path, out_dir: Path, **more: Any) -> dict[str, Any]:
    """Flags of a run from the extended model."""
    return {
        **{"data_path": str(places / "text.jsonl"), "init_from": str(places / "untied-grown")},
        **{"cache_dir": str(places / "cache"), "out_dir": str(out_dir), "max_steps": 4},
        **{"deepspeed_config": "none", "device": "cpu", "dtype": "float32", "eval_rows": 0},
        **{"batch_size": 4, "log_interval": 1, "save_interval": 2, "ema": 0.9, **more},
    }


def run(places: Path, out_dir: Path, status: int = 0, **more: Any) -> list[dict[str, Any]]:
    """The steps of a run from the extended model."""
    assert train(flags_of(places, out_dir, **more)) == status
    return events(out_dir, "step")


def test_moments_have_the_rows_and_a_resumed_run_is_the_unbroken_one(places: Path, tmp_path: Path):
    whole = run(places, tmp_path / "whole")
    (checkpoint, *_) = published_checkpoints(tmp_path / "whole" / "checkpoints")
    stored = Contents(checkpoint)
    assert len(stored.kinds) == 4  # the weights, their average and two moments
    for kind in stored.kinds:
        for name in (EMBEDDING, HEAD):
            assert stored.read(kind, name).shape == (OLD + ADDED, 16), (kind, name)
    run(places, tmp_path / "parts", 75, stop_at_step=2)
    parts = run(places, tmp_path / "parts")
    fields = ("step", "loss", "grad_norm")
    assert [[one[f] for f in fields] for one in parts] == [
        [one[f] for f in fields] for one in whole
    ]


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize("stage", [None, 2, 3])
def test_two_processes_train_as_one(
    stage: int | None, places: Path, nursery: Nursery, tmp_path: Path
):
    alone = run(places, tmp_path / "one")
    config = "none" if stage is None else config_of_stage(stage, tmp_path)
    flags = flags_of(places, tmp_path / "two", batch_size=2, deepspeed_config=config)
    words = [f"--{name}={value}" for name, value in flags.items()]
    statuses, _, said = nursery.run("train_pretrain", words, tmp_path / "ranks")
    assert statuses == [0, 0], said
    both = events(tmp_path / "two", "step")
    assert len(both) == len(alone) == 4
    for name in ("loss", "grad_norm"):
        expected = pytest.approx([step[name] for step in alone], rel=1e-6)
        assert [step[name] for step in both] == expected, name


def test_the_rest_can_be_frozen(places: Path, tmp_path: Path):
    run(places, tmp_path / "out", freeze=["model.layers.*"])
    before, after = (load_weights_from(one) for one in (places / "untied-grown", tmp_path / "out"))
    pairs = {n: [w.tensors.read(n) for w in (before, after)] for n in before.tensors.shapes}
    changed = {name for name, (one, other) in pairs.items() if not torch.equal(one, other)}
    assert changed == {EMBEDDING, HEAD, "model.norm.weight"}


def test_a_list_takes_the_pieces_that_merges_need(places: Path, tmp_path: Path, capsys):
    (tmp_path / "list.txt").write_bytes("Zürich\r\n café\r\n".encode())
    words = ["--tokens", tmp_path / "list.txt", "--data_path", places / "text.jsonl"]
    assert extend(places / "tied", *words, "--out", tmp_path / "out") == 0
    tokenizer = load_tokenizer(tmp_path / "out")
    assert len(tokenizer.encode("Zürich café")) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"vocabulary {OLD} -> {tokenizer.vocab_size}, ")
    before, after = (int(word.replace(",", "")) for word in lines[2].split()[0:3:2])
    assert after < before


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--tokens", "LIST"], 3, ["'<unk>' cannot be one token"]),
        (["--tokens", "NONE"], 3, ["--tokens", "No such file"]),
        (["--tokens", "BYTES"], 3, ["bytes.txt: not UTF-8 at byte 1"]),
        (["--learn", 9999, "--data_path", "TEXT"], 3, ["--learn 9999: only "]),
    ],
)
def test_a_refusal_writes_nothing(words, status, said, places: Path, tmp_path: Path, capsys):
    (tmp_path / "list.txt").write_text("café\n\n<unk>\n", encoding="utf-8")
    (tmp_path / "bytes.txt").write_bytes(b"a\xff")
    named = {"LIST": tmp_path / "list.txt", "NONE": tmp_path / "none.txt"}
    named |= {"BYTES": tmp_path / "bytes.txt", "TEXT": places / "text.jsonl"}
    found = extend(places / "tied", *(named.get(w, w) for w in words), "--out", tmp_path / "out")
    output = capsys.readouterr().err
    assert (found, output.count("\n")) == (status, 1), output
    assert [one for one in said if one not in output] == []
    assert not (tmp_path / "out").exists()
