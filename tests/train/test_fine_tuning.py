"""--task sft, from a base run to a chat: what is trained on, resumed, exported and answered."""

from __future__ import annotations

import json
import math
import random
import re
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import minimind.train as training
from minimind.cli.main import main as minimind
from minimind.data.chat.conversations import (
    Message,
    canonical_text,
    conversation_of,
    conversation_of_line,
)
from minimind.data.chat.template import DATE, DEFAULT_TEMPLATE, SPECIAL_TOKENS, ChatTemplate
from minimind.data.prepare.encode import split_of
from minimind.data.prepare.prepared import holds_conversations
from minimind.data.text.documents import parse_line
from minimind.data.tokenizer.load import load_tokenizer
from minimind.engine.engine import marked_inputs
from minimind.errors import CheckpointError, DataError, UsageError
from minimind.inference.chat import Chat, template_of
from minimind.inference.load_model import load_model
from minimind.inference.text import Sampling
from minimind.interop.gguf import CONTROL
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.serve.protocol import CompletionRequest, Settings
from minimind.serve.reading import Reader
from tests.cli.test_lm_eval import write_llama
from tests.data.chat.hostile import LOOPS
from tests.data.chat.made import CHATML
from tests.data.chat.test_turns import sft_line
from tests.serve.conftest import served_model

train: Any = training  # a package that is called like a function
BASE: dict[str, Any] = {
    **{"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 64},
    **{"vocab_size": 600, "batch_size": 4, "device": "cpu", "dtype": "float32"},
    **{"log_interval": 1, "eval_rows": 64, "save_minutes": 0, "deepspeed_config": "none"},
}
WORDS = "the a of sky sea bread stone river bird tree house light salt wind star".split()
CAPITALS = {"sky": "blue", "sea": "deep", "bread": "warm", "stone": "hard", "wind": "cold"}


def conversations(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Questions about some words and their one true answer, in the four formats in turn."""
    choose = random.Random(seed)
    found: list[dict[str, Any]] = []
    for number in range(n):
        word = choose.choice([*CAPITALS])
        ask, answer = f"what is {word}?", f"{word} is {CAPITALS[word]}"
        turns = [("user", ask), ("assistant", answer)] * choose.choice([1, 1, 2])
        found.append(
            [
                {"conversations": [{"role": role, "content": text} for role, text in turns]},
                {"messages": [{"role": role, "content": text} for role, text in turns]},
                {
                    "conversations": [
                        {"from": "human" if role == "user" else "gpt", "value": text}
                        for role, text in turns
                    ]
                },
                {"prompt": ask, "completion": answer},
            ][number % 4]
        )
    return found


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def events(out_dir: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == name]


def losses(out_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in events(out_dir, "step")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sft")


@pytest.fixture(scope="module")
def base(corpus: Path, place: Path) -> dict[str, Any]:
    """Flags that fine-tune a base run of a few steps."""
    flags = {**BASE, "data_path": str(corpus), "cache_dir": str(place / "cache")}
    few = {"max_steps": 20, "learning_rate": 5e-4}
    assert train({**flags, **few}, out_dir=str(place / "base")) == 0
    keys = ("dim", "n_layers", "n_heads", "n_kv_heads", "max_seq_len", "vocab_size")
    flags = {name: value for name, value in flags.items() if name not in keys}
    talk = write(place / "talk.jsonl", conversations(400))
    more = {"task": "sft", "init_from": str(place / "base"), "data_path": str(talk)}
    return {**flags, **more, "learning_rate": 5e-3, "max_steps": 120, "val_fraction": 0.05}


@pytest.fixture(scope="module")
def tuned(base: dict[str, Any], place: Path) -> Path:
    assert train({**base, "eval_interval": 40}, out_dir=str(place / "tuned")) == 0
    return place / "tuned"


def test_the_loss_is_that_of_answers_and_falls(tuned: Path):
    first, *_, last = (event["val_loss"] for event in events(tuned, "eval"))
    assert last < 0.8 * first
    (balance,) = events(tuned, "token_balance")
    assert balance["text"] == balance["held_out"] + balance["in_rows"] + balance["cut_off"]
    assert 0 < balance["targets"] < balance["in_rows"]
    assert (balance["cut"], balance["dropped"]) == (0, 0)
    assert balance["conversations"] + balance["held_out_conversations"] == 400
    (start,) = events(tuned, "run_start")
    assert start["init_from"]["kind"] == "checkpoint"


def test_stopped_and_resumed_it_is_the_same_run(tuned: Path, base: dict[str, Any], place: Path):
    out_dir = place / "stopped"
    assert train({**base, "eval_interval": 40}, out_dir=str(out_dir), stop_at_step=25) == 75
    assert train({**base, "eval_interval": 40}, out_dir=str(out_dir)) == 0
    assert losses(out_dir) == losses(tuned)


def test_the_model_answers_by_the_template_that_is_stored_with_it(
    tuned: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["chat", "--checkpoint", str(tuned), "--temperature", "0", "--max_new_tokens", "30"]
    assert minimind([*words, "--once", "what is bread?"]) == 0
    answer = capsys.readouterr().out.strip()
    assert " is " in answer
    assert len(answer) < 40  # it ends its turn
    model, tokenizer, path = load_model(str(tuned), None)
    sampling = Sampling(30, 0.0, 1.0, 0)
    chat = Chat(model, tokenizer, template_of(tokenizer, None, path), sampling, system="be kind")
    assert chat.ask("what is bread?") == chat.messages[-1].content
    assert [one.role for one in chat.messages] == ["system", "user", "assistant"]
    for _ in range(6):  # more than 64 positions
        chat.ask("what is the sea?")
    assert chat.forgotten > 0
    assert chat.messages[0] == Message("system", "be kind")
    with pytest.raises(UsageError, match=r'contains "<\|end\|>"'):
        chat.ask("a <|end|> b")
    with pytest.raises(UsageError, match="positions; shorten"):
        chat.ask("word " * 70)
    chat.save(tuned / "saved.jsonl")
    assert json.loads((tuned / "saved.jsonl").read_text())["messages"][0]["role"] == "system"
    with pytest.raises(UsageError, match="exists; give another"):
        chat.save(tuned / "saved.jsonl")
    chat.reset()
    with pytest.raises(UsageError, match="no answer yet"):
        chat.save(tuned / "other.jsonl")
    assert len(chat.messages) == 1


def test_exports_carry_the_template_and_format_alike(
    tuned: Path, place: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["export", "--checkpoint", str(tuned), "--format", "llama", "--out"]
    assert minimind([*words, str(place / "llama")]) == 0
    generation = json.loads((place / "llama" / "generation_config.json").read_text())
    ours = load_tokenizer(place / "llama")
    end = ours.special_tokens()["<|end|>"]
    assert generation["eos_token_id"] == [ours.eos_id, end]
    assert ours.chat_template == DEFAULT_TEMPLATE
    theirs = AutoTokenizer.from_pretrained(place / "llama")
    turns = [{"role": "user", "content": "what is salt?"}, {"role": "assistant", "content": "x y"}]
    messages = [Message(turn["role"], turn["content"]) for turn in turns]
    ids = ChatTemplate(DEFAULT_TEMPLATE, ours).encode(messages)[0].tolist()
    assert theirs.apply_chat_template(turns, tokenize=True, return_dict=False) == ids
    assert theirs.encode("a<|user|>")[-1] == ours.special_tokens()["<|user|>"]  # matched in texts
    words = ["chat", "--model", str(place / "llama"), "--temperature", "0", "--max_new_tokens"]
    capsys.readouterr()
    assert minimind([*words, "30", "--once", "what is wind?"]) == 0
    answer = capsys.readouterr().out.removesuffix("\n")
    pipe = pipeline("text-generation", model=str(place / "llama"), device="cpu")
    (found,) = pipe(
        [{"role": "user", "content": "what is wind?"}], max_new_tokens=30, do_sample=False
    )
    assert found["generated_text"][-1] == {"role": "assistant", "content": answer}


def test_a_base_model_reads_special_tokens_in_texts_as_text(base: dict[str, Any], place: Path):
    words = ["export", "--checkpoint", base["init_from"], "--format", "llama", "--out"]
    assert minimind([*words, str(place / "base-llama")]) == 0
    theirs = AutoTokenizer.from_pretrained(place / "base-llama")
    assert theirs.encode("a</s>") == load_tokenizer(place / "base-llama").encode("a</s>")


def test_a_gguf_file_carries_the_template_and_the_end_of_a_turn(tuned: Path, place: Path):
    gguf = pytest.importorskip("gguf")
    words = ["export", "--checkpoint", str(tuned), "--format", "gguf", "--out"]
    assert minimind([*words, str(place / "gguf")]) == 0
    fields = gguf.GGUFReader(place / "gguf" / "model.gguf").fields
    entry = {name.removeprefix("tokenizer."): fields[name].contents() for name in fields}
    assert entry["chat_template"] == DEFAULT_TEMPLATE
    tokens, types = entry["ggml.tokens"], entry["ggml.token_type"]
    assert tokens[entry["ggml.eot_token_id"]] == "<|end|>"
    assert tokens[entry["ggml.eos_token_id"]] == "</s>"
    of_type = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    assert of_type == ["<s>", "</s>", "<pad>", *SPECIAL_TOKENS]


@pytest.mark.parametrize(
    "turn",
    [
        "{% generation %}{{ m['content'] }}{% endgeneration %}<|end|>",
        "{% generation %}{{ m['content'] + '<|end|>\\n' }}{% endgeneration %}",
    ],
)
def test_the_end_of_a_turn_is_a_special_token(tuned: Path, turn: str):
    tokenizer = load_tokenizer(tuned / "tokenizer")
    asked = "{% if add_generation_prompt %}<|user|>{% endif %}"
    source = "{% for m in messages %}<|user|>" + turn + "{% endfor %}" + asked
    end = tokenizer.special_tokens()["<|end|>"]
    assert ChatTemplate(source, tokenizer).end_of_turn == end


def test_a_template_may_end_turns_with_the_end_of_a_document(base: dict[str, Any], tmp_path: Path):
    """As that of MiniMind and of Zephyr does."""
    template = tmp_path / "zephyr.jinja"
    template.write_text(
        "{% for m in messages %}{% if m['role'] == 'assistant' %}<|a|>{% generation %}"
        "{{ m['content'] + eos_token }}{% endgeneration %}{% else %}<|u|>{{ m['content'] }}"
        "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
    )
    out = tmp_path / "out"
    assert train({**base, "chat_template": str(template)}, out_dir=str(out)) == 0
    tokenizer = load_tokenizer(out / "tokenizer")
    ours = ChatTemplate(template.read_text(), tokenizer)
    assert ours.end_of_turn == tokenizer.eos_id
    model: Any = load_model(str(out), None)[0]
    turns = [Message("user", "what?"), Message("assistant", "x")]
    ids = torch.from_numpy(ours.encode(turns)[0])[None].long()
    assert ids[0].tolist().count(tokenizer.eos_id) == 2
    cached = model(input_ids=ids, use_cache=True).logits
    assert torch.allclose(model(input_ids=ids).logits, cached, atol=1e-5)


def test_thoughts_and_calls_as_minimind_writes_them_need_no_flag(
    base: dict[str, Any], tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    draw = random.Random(1)
    lines: list[Any] = [sft_line(draw, number) for number in range(32)]
    lines += [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    talk = write(tmp_path / "talk.jsonl", lines)
    given = {**base, "data_path": str(talk), "max_seq_len": 512, "max_steps": 1, "val_fraction": 0}
    assert train(given, out_dir=str(tmp_path / "out")) == 0
    one, other = (load_tokenizer(run / "tokenizer") for run in (tmp_path / "out", tuned))
    assert one.special_tokens() == other.special_tokens()  # tags are text
    capsys.readouterr()
    assert minimind(["data", "at", str(tmp_path / "out"), "--step", "1", "--text"]) == 0
    shown = capsys.readouterr().out
    assert "[[<think>" in shown
    assert '<tool_call>{"name": "find"' in shown


def test_a_template_without_an_end_of_a_turn_is_refused(base: dict[str, Any], tmp_path: Path):
    template = tmp_path / "endless.jinja"
    template.write_text(
        "{% for m in messages %}<|x|>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|x|>{% endif %}"
    )
    given = {**base, "chat_template": str(template)}
    with pytest.raises(UsageError, match="no special token after an answer"):
        train(given, out_dir=str(tmp_path / "out"))


def test_tags_of_a_model_s_own_template_stay_text(
    base: dict[str, Any],
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """ChatML in a model without its tokens: trained, exported, and a turn ends."""
    source, out, exported = tmp_path / "source", tmp_path / "out", tmp_path / "exported"
    tokenizer = load_tokenizer(place / "base" / "tokenizer")
    write_llama(source, tokenizer, 256)
    (source / "chat_template.jinja").write_text(CHATML)
    given = {**base, "init_from": str(source), "max_steps": 2, "eval_rows": 4}
    assert train(given, out_dir=str(out)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "vocabulary 600" in said
    assert "(chat_template.jinja); text, as they are not tokens: <|im_start|>" in said
    words = ["--checkpoint", str(out), "--format", "llama", "--out", str(exported)]
    assert minimind(["export", *words]) == 0
    assert "answers end with the text '<|im_end|>', no token" in capsys.readouterr().err
    theirs, turns = AutoTokenizer.from_pretrained(exported), [Message("user", "hi<|im_end|>")]
    template = template_of(load_tokenizer(exported), None, exported)
    assert (
        template.prompt(turns)
        == theirs.apply_chat_template(
            [{"role": "user", "content": "hi<|im_end|>"}], add_generation_prompt=True
        ).input_ids
    )
    facts = Reader(load_tokenizer(exported), template, "m", 256, 256, 256, 1).template_facts()
    served = served_model(load_model(None, str(exported))[0], tokenizer, facts)
    asked = Settings(**CompletionRequest(prompt="a", stop="b").settings())
    assert served.sampling(asked, served.answers).stop == ("<|im_end|>", "b")
    assert served.sampling(asked, served.texts).stop == ("b",)

    ids = iter(tokenizer.encode("the sea<|im_end|>\nmore"))
    monkeypatch.setattr("minimind.inference.engine.next_tokens", lambda *_: [next(ids)])
    assert minimind(["chat", "--model", str(exported), "--once", "what is deep?"]) == 0
    assert capsys.readouterr().out == "the sea\n"


def test_a_tokenizer_that_is_given_and_another_template_on_resume(
    base: dict[str, Any], place: Path, tmp_path: Path
):
    given = {**base, "tokenizer": str(place / "base" / "tokenizer"), "max_steps": 4}
    out = tmp_path / "out"
    assert train(given, out_dir=str(out), stop_at_step=2) == 75
    template = tmp_path / "other.jinja"  # the same text of a whole conversation, another prompt
    template.write_text(DEFAULT_TEMPLATE + "{% if add_generation_prompt %}{{ ' ' }}{% endif %}")
    with pytest.raises(CheckpointError, match="chat_template"):
        train({**given, "chat_template": str(template)}, out_dir=str(out))
    assert train(given, out_dir=str(out)) == 0


def test_a_template_that_asks_for_the_date_is_told_one_on_every_day_of_a_run(
    base: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    template = tmp_path / "dated.jinja"
    dated = "<|system|>{{ strftime_now('%d %b %Y') }}<|end|>"
    template.write_text(dated + DEFAULT_TEMPLATE)
    given = {**base, "chat_template": str(template), "max_steps": 4}
    assert train(given, out_dir=str(tmp_path / "whole")) == 0
    assert f"dated.jinja, which is told {DATE}" in " ".join(capsys.readouterr().out.split())

    class OtherDay(date):
        @classmethod
        def today(cls) -> date:
            return cls(2031, 2, 3)

    out, other = tmp_path / "out", {"cache_dir": str(tmp_path / "cache of another host")}
    assert train(given, out_dir=str(out), stop_at_step=2) == 75
    monkeypatch.setattr("minimind.data.chat.sandbox.date", OtherDay)
    assert train({**given, **other}, out_dir=str(out)) == 0
    assert losses(out) == losses(tmp_path / "whole")
    (manifest,) = (tmp_path / "cache of another host").glob("tokens-*/manifest.json")
    assert json.loads(manifest.read_bytes())["options"]["template_date"] == DATE
    capsys.readouterr()
    assert minimind(["data", "at", str(out), "--step", "1", "--text"]) == 0
    assert "<|system|>26 Jul 2024<|end|>" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=f"template_date.*{DATE}.*2025-01-02"):
        train({**given, "template_date": "2025-01-02"}, out_dir=str(out))
    with pytest.raises(UsageError, match=r"template_date = 2025-01-02 .* does not ask for the da"):
        train({**base, "template_date": "2025-01-02"}, out_dir=str(tmp_path / "no"))
    words = ["chat", "--checkpoint", str(out), "--once", "a", "--max_new_tokens", "1"]
    assert minimind(words) == 0  # on that day
    data = ["--data_path", *base["data_path"].split()]
    words = ["eval", "--task", "sft", "--checkpoint", str(out), *data, "--device", "cpu", "--json"]
    found = []
    for more in ([], ["--template_date", DATE], ["--template_date", "2025-01-02"]):
        capsys.readouterr()
        assert minimind([*words, *more, "--cache_dir", str(tmp_path / "cache")]) == 0
        found.append(json.loads(capsys.readouterr().out)["loss"])
    assert found[0] == found[1] != found[2]


def test_config_yaml_repeats_the_run(tuned: Path, tmp_path: Path):
    out = tmp_path / "again"
    assert train({"config": str(tuned / "config.yaml")}, out_dir=str(out), stop_at_step=2) == 75
    first = losses(out)
    assert first == {step: loss for step, loss in losses(tuned).items() if step <= 2}


def test_special_tokens_may_be_built_from_roles(base: dict[str, Any], tmp_path: Path):
    """As in the template of Phi-3; an expression is no name."""
    template = tmp_path / "phi.jinja"
    template.write_text(
        "{% for m in messages %}{{'<|'+m['role']+'|>'+m['content']+'<|end|>'}}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    given = {**base, "chat_template": str(template), "max_steps": 2}
    assert train(given, out_dir=str(tmp_path / "out")) == 0
    special = load_tokenizer(tmp_path / "out" / "tokenizer").special_tokens()
    added = {"<|user|>", "<|assistant|>", "<|end|>", "<|system|>", "<|tool|>"}
    assert {name for name in special if "|" in name} == added


def test_a_second_stage_keeps_the_template_and_a_restart_its_vocabulary(
    tuned: Path, base: dict[str, Any], tmp_path: Path
):
    given = {**base, "init_from": str(tuned), "max_steps": 4, "out_dir": str(tmp_path / "out")}
    assert train(given, stop_at_step=2) == 75
    with pytest.raises(UsageError, match=r"vocab_size = 599 .* but .*step_00000002 has 605"):
        train({**given, "vocab_size": 599})
    assert train({**given, "vocab_size": 605}) == 0
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    assert (tokenizer.vocab_size, tokenizer.chat_template) == (605, DEFAULT_TEMPLATE)
    first = {**base, "vocab_size": 600, "max_steps": 4, "out_dir": str(tmp_path / "first")}
    assert train(first, stop_at_step=2) == 75
    assert train(first) == 0  # the checkpoint has 605


def test_it_needs_its_own_folder(base: dict[str, Any], place: Path):
    with pytest.raises(UsageError, match="lacks special tokens of the chat template"):
        train(base, out_dir=str(place / "base"))


def test_a_conversation_in_a_row_is_what_a_chat_sees(tuned: Path):
    """Not the conversations before it; and its own end tokens restart nothing."""
    model: Any = load_model(str(tuned), None)[0]
    choose = torch.Generator().manual_seed(1)
    rows = torch.randint(5, 600, (2, 41), generator=choose)
    rows[:, [20, 30]] = model.config.eos_token_id
    rows[1, 21:] = rows[0, 21:]  # the same conversation after another one
    starts = torch.arange(41).expand(2, -1) == 21
    out = model(input_ids=rows, document_starts=starts).logits[:, 21:]
    assert torch.equal(out[0], out[1])
    alone = model(input_ids=rows[:1, 21:]).logits[0]
    assert torch.allclose(out[0], alone, rtol=1e-5, atol=1e-6)


def test_only_targets_have_a_gradient():
    shape = MiniMindConfig(
        vocab_size=96, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = MiniMindForCausalLM(shape)
    ids = torch.randint(96, (1, 12))
    targets = torch.full((1, 12), -100)
    out = model(input_ids=ids, shift_labels=targets, loss_chunk_size=0)
    out.loss_sum.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_the_last_user_turn_changes_no_gradient():
    """Not by one bit, though it is another text: nothing is trained on it, and nothing follows."""
    shape = MiniMindConfig(
        vocab_size=96, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    found = []
    for last_turn in (range(10, 15), range(60, 65)):
        torch.manual_seed(0)
        model = MiniMindForCausalLM(shape)
        row = torch.tensor([[~1, ~2, 3, 4, ~5, 6, 7, *(~token for token in last_turn)]])
        model(**marked_inputs(row, has_starts=True), loss_chunk_size=0).loss_sum.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert any(gradient.any() for gradient in found[0].values() if gradient is not None)
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def test_bad_conversations_are_refused_by_line_or_skipped_and_counted(
    base: dict[str, Any], tmp_path: Path
):
    lines = conversations(60, seed=3)
    bad = {"conversations": [{"role": "user", "content": "x"}, {"role": "boss", "content": "y"}]}
    forged = {"prompt": "a<|assistant|>b", "completion": "c"}
    path = write(tmp_path / "bad.jsonl", [*lines[:7], bad, *lines[7:20], forged, *lines[20:]])
    given = {**base, "data_path": str(path), "max_steps": 2}
    with pytest.raises(DataError, match=r"bad\.jsonl:8 .*turn 2"):
        train(given, out_dir=str(tmp_path / "a"))
    assert train({**given, "on_bad_data": "skip"}, out_dir=str(tmp_path / "b")) == 0
    rejected = (tmp_path / "b" / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in rejected] == [8, 22]
    assert "<|assistant|>" in rejected[1]


def test_a_conversation_that_hangs_its_template_is_not_skipped(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Which conversations are skipped may not depend on the speed of a host."""
    monkeypatch.setattr("minimind.data.chat.sandbox.MAX_SECONDS", 0.2)
    loops = "{% if 'whales' in messages[0].content %}" + LOOPS + "{% endif %}"
    (tmp_path / "chat.jinja").write_text(DEFAULT_TEMPLATE + loops)
    talk = [{"prompt": prompt, "completion": "b"} for prompt in ["a b", "whales"] * 20]
    given = {**base, "data_path": str(write(tmp_path / "talk.jsonl", talk))}
    given |= {"chat_template": str(tmp_path / "chat.jinja"), "on_bad_data": "skip"}
    with pytest.raises(UsageError, match=r"^the chat template takes more than 0\.2 s"):
        train(given, out_dir=str(tmp_path / "out"))


@pytest.mark.parametrize("fitting", [0, 1])
def test_conversations_that_fit_no_row_are_counted_with_the_way_out(
    fitting: int, base: dict[str, Any], tmp_path: Path
):
    """A shorter row would drop more of them."""
    long = [{"prompt": " ".join(WORDS * 20), "completion": f"b {n}"} for n in range(32)]
    path = write(tmp_path / "long.jsonl", [*conversations(fitting), *long])
    given = {**base, "data_path": str(path), "max_steps": 2, "val_fraction": 0}
    given["cache_dir"] = str(tmp_path / "cache")
    dropped = "all 32" if not fitting else "32 of the 33"
    words = (
        rf"{dropped} conversations are dropped, as no answer .* of 65 tokens .*; raise --max_seq"
    )
    with pytest.raises(DataError, match=words) as caught:
        train(given, out_dir=str(tmp_path / "a"))
    assert "lower" not in str(caught.value)


def test_the_steps_that_read_a_conversation(
    tuned: Path, base: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    assert minimind(["data", "where", str(tuned), f"{base['data_path']}:5"]) == 0
    step = next(
        line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")
    )
    assert minimind(["data", "at", str(tuned), "--step", step]) == 0
    assert "talk.jsonl:5" in capsys.readouterr().out


def prepared_by(out_dir: Path) -> str:
    """The folder of the cache with a run's conversations."""
    return events(out_dir, "run_start")[0]["data"]["directory"]


ROUND = r"<\|user\|>what is (\w+)\?<\|end\|><\|assistant\|>\[\[(\w+) is \w+<\|end\|>\]\]"


def test_the_text_of_a_step_has_special_tokens_and_marks_what_is_trained_on(
    tuned: Path, capsys: pytest.CaptureFixture[str]
):
    assert minimind(["data", "at", str(tuned), "--step", "3", "--text", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    parts = [part for row in rows for part in row["parts"]]
    lines = (tuned.parent / "talk.jsonl").read_text().splitlines()
    assert len(parts) > 4
    for part in parts:
        rounds = re.findall(ROUND, part["text"])
        assert re.fullmatch(f"(?:{ROUND})+</s>", part["text"]), part["text"]
        line = lines[part["line"] - 1]
        assert all(ask == say and f"what is {ask}?" in line for ask, say in rounds)
        assert line.count("what is") == len(rounds)
    assert minimind(["data", "at", str(tuned), "--step", "3", "--text"]) == 0
    assert re.search(rf"    {ROUND}", capsys.readouterr().out)


def test_a_folder_of_conversations_is_inspected(tuned: Path, capsys: pytest.CaptureFixture[str]):
    folder = prepared_by(tuned)
    assert minimind(["data", "inspect", folder, "--rows", "2"]) == 0
    out = capsys.readouterr().out
    assert "all files match their hashes" in out
    assert re.search(rf"row 0: {ROUND}", out)
    assert re.search(rf" times, \d+ tokens: {ROUND}", out)
    assert minimind(["data", "inspect", folder, "--json", "--row_tokens", "40"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(count for _, count in found["lengths"]) == 400
    assert found["splits"]["train"]["documents"] + found["splits"]["val"]["documents"] == 400


def test_a_folder_of_conversations_is_no_data_path(
    tuned: Path, base: dict[str, Any], corpus: Path, tmp_path: Path
):
    folder = prepared_by(tuned)
    with pytest.raises(UsageError, match="is prepared; give the files of conversations"):
        train({**base, "data_path": folder}, out_dir=str(tmp_path / "out"))
    given = {**BASE, "data_path": folder, "max_steps": 2, "vocab_size": 605}
    (tmp_path / "stages.yaml").write_text("stages: [{}]")
    stages = str(tmp_path / "stages.yaml")
    for changes in ({}, {"dry_run": True}, {"dry_run": True, "stages": stages}):
        with pytest.raises(DataError, match="holds conversations, as --task sft prepares them"):
            train({**given, **changes}, out_dir=str(tmp_path / "out"))


def test_a_table_is_trained_on_and_resumed_as_lines_are(base: dict[str, Any], tmp_path: Path):
    lines = conversations(80, seed=9)
    turns = [message_list(line) for line in lines]
    parquet.write_table(pyarrow.table({"messages": turns}), tmp_path / "talk.parquet")
    table = {**base, "data_path": str(tmp_path / "talk.parquet"), "max_steps": 4}
    assert train(table, out_dir=str(tmp_path / "table"), stop_at_step=2) == 75
    assert train(table, out_dir=str(tmp_path / "table")) == 0
    of_lines = {**table, "data_path": str(write(tmp_path / "talk.jsonl", lines))}
    assert train(of_lines, out_dir=str(tmp_path / "lines")) == 0
    assert losses(tmp_path / "table") == losses(tmp_path / "lines")
    assert minimind(["data", "at", str(tmp_path / "table"), "--step", "4"]) == 0


def message_list(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a line in any format; a key that is not given, as a table gives it."""
    found = conversation_of(parse_line(json.dumps(line), ""), set())
    return [{"role": one.role, "content": one.content, "tool_calls": None} for one in found]


# --- minimind eval ------------------------------------------------------------------------------


def held_out(talk: Path, fraction: float) -> list[bytes]:
    """The lines of conversations that a run with this --val_fraction holds out."""
    found = []
    for line in talk.read_bytes().splitlines():
        text = canonical_text(conversation_of_line(line))
        if split_of(sha256(text.encode()).digest(), fraction) == "val":
            found.append(line)
    return found


def evaluated(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert minimind(["eval", "--task", "sft", "--device", "cpu", "--json", *map(str, words)]) == 0
    return json.loads(capsys.readouterr().out)


def loss_by_hand(model: Any, tokenizer: Any, lines: list[bytes]) -> list[float]:
    """Summed loss and number of targets, one conversation at a time, by transformers' mask."""
    loss, count = 0.0, 0
    for line in lines:
        turns = json.loads(canonical_text(conversation_of_line(line)))
        options = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenize": True}
        found = tokenizer.apply_chat_template(turns, **options)
        ids, mask = found["input_ids"], found["assistant_masks"]
        with torch.no_grad():
            chances = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        loss -= sum(float(chances[at - 1, ids[at]]) for at in range(1, len(ids)) if mask[at])
        count += sum(mask)
    return [loss, count]


def test_eval_gives_the_validation_loss_of_the_run(
    tuned: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    lines = held_out(place / "talk.jsonl", 0.05)
    (tmp_path / "held.jsonl").write_bytes(b"\n".join(lines))
    asked = ("--checkpoint", tuned, "--data_path", tmp_path / "held.jsonl")
    found = evaluated(capsys, *asked, "--cache_dir", tmp_path)
    last = events(tuned, "eval")[-1]
    assert found["loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert (found["targets"], found["conversations"]) == (last["tokens"], len(lines))
    every = evaluated(capsys, *asked, "--cache_dir", tmp_path, "--train_on", "all")
    assert every["targets"] > found["targets"]


def test_eval_of_an_export_per_file_is_that_of_transformers(
    tuned: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    words = ["export", "--checkpoint", tuned, "--format", "llama", "--out", out]
    assert minimind([*map(str, words)]) == 0
    lines = held_out(place / "talk.jsonl", 0.05)
    files = {tmp_path / "a.jsonl": lines[:5], tmp_path / "b.jsonl": lines[5:]}
    for path, own in files.items():
        path.write_bytes(b"\n".join(own))
    found = evaluated(capsys, "--model", out, "--data_path", *files, "--cache_dir", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    whole = [0.0, 0.0]
    for path, own in files.items():
        loss, count = loss_by_hand(model, tokenizer, own)
        one = found["by_source"][str(path)]
        assert one["loss"] == pytest.approx(loss / count, rel=1e-5)
        assert (one["targets"], one["conversations"]) == (count, len(own))
        whole = [whole[0] + loss, whole[1] + count]
    assert found["loss"] == pytest.approx(whole[0] / whole[1], rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert (found["cut"], found["dropped"]) == (0, 0)


def test_eval_rows_are_as_long_as_the_longest_conversation(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    lines = conversations(40)[3::4]  # of one answer, so that 64 positions hold two
    data = write(tmp_path / "given.jsonl", lines)
    asked = ("--checkpoint", tuned, "--data_path", data, "--cache_dir", tmp_path)
    _, tokenizer, path = load_model(str(tuned), None)
    template = template_of(tokenizer, None, path)
    messages = [conversation_of(parse_line(json.dumps(line), ""), set()) for line in lines]
    longest = max(len(template.encode(one)[0]) for one in messages)
    widths: list[int] = []
    forward = MiniMindForCausalLM.forward

    def watched(self: Any, input_ids: torch.Tensor, **more: Any) -> Any:
        widths.append(input_ids.shape[1])
        return forward(self, input_ids, **more)

    monkeypatch.setattr(MiniMindForCausalLM, "forward", watched)
    found = evaluated(capsys, *asked)
    assert max(widths) == longest  # the end of document after it is only predicted
    longer = evaluated(capsys, *asked, "--max_seq_len", "64")
    assert max(widths) > longest
    for name in ("loss", "perplexity"):
        assert longer.pop(name) == pytest.approx(found.pop(name), rel=1e-6)
    assert longer.pop("loss_se") > 0 < found.pop("loss_se")  # from other rows
    assert longer == found


def test_eval_prints_a_table_of_conversations(
    tuned: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["--checkpoint", tuned, "--data_path", place / "talk.jsonl", "--cache_dir", tmp_path]
    assert minimind(["eval", "--task", "sft", *map(str, words), "--max_seq_len", "40"]) == 0
    _, heading, line, note = capsys.readouterr().out.splitlines()
    assert heading.split() == ["source", "loss", "+-", "perplexity", "targets", "conversations"]
    assert line.startswith(str(place / "talk.jsonl"))
    assert "conversations are cut after an answer" in note


@pytest.mark.parametrize(
    ("words", "data", "status", "answer"),
    [
        (("--task", "sft"), [{"text": "plain"}], 3, "remove --task sft"),
        ((), conversations(3), 3, "fine-tune on it with --task sft, or write"),
        ((), "conversations", 3, "holds conversations, as --task sft prepares them"),
        (("--task", "sft"), "text", 2, "holds text, and --task sft reads files of"),
        (("--task", "sft"), "conversations", 2, "conversations; give the files themselves"),
        (
            ("--task", "sft", "--max_rows", "3"),
            conversations(3),
            2,
            "--max_rows and --task sft cannot be used together",
        ),
        (
            ("--task", "sft", "--no-doc_mask"),
            conversations(3),
            2,
            "--no-doc_mask and --task sft cannot be used together",
        ),
        (("--task", "sft", "--max_seq_len", "3"), conversations(3), 3, "ends within 4 tokens"),
        (("--train_on", "all"), conversations(3), 2, "--train_on has no effect without --task sft"),
    ],
)
def test_eval_names_the_flag_that_fits(
    words: tuple[str, ...],
    data: Any,
    status: int,
    answer: str,
    tuned: Path,
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    if isinstance(data, str):  # the prepared folder of the base run, or of the fine-tuned one
        folders = [path.parent for path in (place / "cache").glob("tokens-*/manifest.json")]
        wanted = data == "conversations"
        given = next(path for path in folders if holds_conversations(path) == wanted)
    else:
        given = write(tmp_path / "given.jsonl", data)
    asked = ["--checkpoint", tuned, "--data_path", given, "--cache_dir", tmp_path / "cache"]
    assert minimind(["eval", *words, *map(str, asked)]) == status
    assert answer in capsys.readouterr().err


def test_eval_of_a_base_model_on_conversations_is_refused(
    place: Path, base: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    asked = ["--task", "sft", "--checkpoint", str(place / "base"), "--data_path", base["data_path"]]
    assert minimind(["eval", *asked]) == 2
    assert "has no chat template beside its tokenizer" in capsys.readouterr().err
