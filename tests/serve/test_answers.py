"""Answers of the server are those of `minimind chat` and `minimind generate`."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MistralConfig, OpenAIGPTConfig

from minimind.architecture.hf_models import model_of
from minimind.cli.main import main
from minimind.cli.model import ANSWER
from minimind.data.chat.conversations import ASSISTANT, USER, Message
from minimind.data.chat.template import DEFAULT_TEMPLATE, ChatTemplate
from minimind.inference.chat import Chat, template_of
from minimind.inference.engine import Batch, generate_texts
from minimind.inference.load_model import load_model
from minimind.inference.text import Sampling
from minimind.serve.protocol import ChatRequest, conversation_of_request
from minimind.serve.reading import CHAT
from minimind.serve.scheduler import Scheduler
from tests.serve.conftest import POSITIONS, InProcess

SETTINGS = [
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9, "seed": 1},
    {"temperature": 1.5, "top_p": 1, "seed": 2},
    {"temperature": 1, "top_k": 20, "repetition_penalty": 1.3, "seed": 3},
]


def words(settings: dict[str, float]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


@pytest.mark.parametrize("settings", SETTINGS)
def test_an_answer_is_that_of_chat_once(
    server: InProcess, chat_model: Path, settings, capsys: pytest.CaptureFixture[str]
):
    line = ["chat", "--model", str(chat_model), "--device", "cpu", "--max_new_tokens", "30"]
    assert main([*line, *words(settings), "--once", "春眠 ab"]) == 0
    expected = capsys.readouterr().out.removesuffix("\n")
    answer = server.chat("春眠 ab", max_tokens=30, **settings)
    assert answer["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_completion_is_that_of_generate(
    server: InProcess, chat_model: Path, settings, capsys: pytest.CaptureFixture[str]
):
    line = ["generate", "--model", str(chat_model), "--device", "cpu", "--max_new_tokens", "30"]
    assert main([*line, *words(settings), "--prompt", "春眠 ab"]) == 0
    expected = capsys.readouterr().out.removesuffix("\n")
    answer = server.complete("春眠 ab", max_tokens=30, echo=True, **settings)
    assert answer["choices"][0]["text"] == expected


SIZE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
LAYERS: dict[str, Any] = {"intermediate_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(**SIZE, state_size=4),
        MistralConfig(**SIZE, **LAYERS, num_key_value_heads=2, sliding_window=8),
        OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=4, initializer_range=0.3),
    ],
    ids=["recurrent", "sliding window", "no cache"],
)
def test_caches_of_other_kinds_give_the_same_texts(server: InProcess, config: Any):
    """Together and beside each other, and as the model without a cache."""
    tokenizer = server.served.tokenizer
    config.vocab_size, config.max_position_embeddings = tokenizer.vocab_size, POSITIONS
    torch.manual_seed(0)
    model = model_of(config).eval()
    prompts, how = ["ab", "春眠 ab cd", "c"], Sampling(12, 0.0, 1.0)
    together = generate_texts(model, tokenizer, prompts, how).texts
    for prompt, text in zip(prompts, together, strict=True):
        ids = tokenizer.encode(prompt)
        for _ in range(12):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
            ids = [*ids, int(logits[: tokenizer.vocab_size].argmax())]
        assert tokenizer.decode(ids) == prompt + text or tokenizer.eos_id in ids
    with closing(Scheduler(model, 8, 64)) as scheduler, ThreadPoolExecutor(3) as pool:
        other = replace(server, scheduler=scheduler)
        ask = partial(other.complete, max_tokens=12, temperature=0)
        found = [answer["choices"][0]["text"] for answer in pool.map(ask, prompts)]
        long = tokenizer.encode("春眠 ab cdef 曉處 " * 50)[:300]
        scored = other.complete(long, max_tokens=3, echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert found == [*together]
    with torch.no_grad():
        logs = model(input_ids=torch.tensor([long])).logits[0].log_softmax(-1)
    expected = [float(logs[at - 1, token]) for at, token in enumerate(long) if at]
    assert scored["token_logprobs"][1:300] == pytest.approx(expected, abs=1e-3)
    assert len(scored["tokens"]) in range(301, 304)


def test_neighbours_change_nothing(server: InProcess):
    questions = [f"{'ab cd ' * (n % 7)}春眠 {n}" for n in range(16)]
    settings = [{**SETTINGS[n % 4], "max_tokens": 5 + n, "logprobs": True} for n in range(16)]
    alone = [server.chat(q, **s)["choices"] for q, s in zip(questions, settings, strict=True)]
    scheduler = Scheduler(server.scheduler._model, 8, 64, is_invariant=True)
    invariant = replace(server, scheduler=scheduler)
    with closing(scheduler), ThreadPoolExecutor(16) as pool:
        together, to_the_last_bit = (
            list(pool.map(lambda q, s, to=to: to.chat(q, **s)["choices"], questions, settings))
            for to in (server, invariant)
        )
    assert to_the_last_bit == alone
    for one, other in zip(alone, together, strict=True):
        assert one[0]["message"] == other[0]["message"]
        assert one[0]["finish_reason"] == other[0]["finish_reason"]
        pairs = [[t["logprob"] for t in c[0]["logprobs"]["content"]] for c in (one, other)]
        assert pairs[0] == pytest.approx(pairs[1], abs=1e-4)


def test_choices_are_numbered_as_the_prompts_of_generate(
    server: InProcess, chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "prompts.txt"
    file.write_text("ab\n春眠\n")
    line = ["generate", "--model", str(chat_model), "--device", "cpu", "--seed", "5"]
    assert main([*line, "--max_new_tokens", "12", "--prompts", str(file)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    answer = server.complete(["ab", "春眠"], max_tokens=12, seed=5)
    assert [c["text"] for c in answer["choices"]] == [line["completion"] for line in lines]
    several = server.chat("ab", n=3, seed=5, max_tokens=12)["choices"]
    assert [choice["index"] for choice in several] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in several}) == 3
    assert (
        several[0]["message"] == server.chat("ab", seed=5, max_tokens=12)["choices"][0]["message"]
    )


def joined(events: list[Any], key: str) -> str:
    return "".join(
        choice["delta"].get(key) or "" for event in events for choice in event["choices"]
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_stream_is_the_whole_in_pieces(server: InProcess, settings):
    body = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 40, **settings}
    body |= {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    whole = server.chat("ab", **{**body, "stream_options": None})
    *events, usage = server.events("/v1/chat/completions", body)
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert joined(events, "content") == whole["choices"][0]["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    logs = [e["choices"][0]["logprobs"] for e in events]
    content = [token for log in logs if log for token in log["content"]]
    assert content == whole["choices"][0]["logprobs"]["content"]

    body = {"prompt": ["ab", [5, 6]], "max_tokens": 40, "echo": True, "logprobs": 1, **settings}
    whole = server.post("/v1/completions", body).json()
    events = server.events("/v1/completions", body)
    for choice in whole["choices"]:
        own = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [v for c in own if c["logprobs"] for v in c["logprobs"][name]] == values


def test_a_stop_text_ends_an_answer(server: InProcess):
    whole = server.chat("ab", temperature=0, max_tokens=40)["choices"][0]["message"]["content"]
    stop = whole[9:11]
    for given in (stop, ["no such text", stop]):
        (choice,) = server.chat("ab", temperature=0, max_tokens=40, stop=given)["choices"]
        assert choice["message"]["content"] == whole[: whole.index(stop)]
        assert choice["finish_reason"] == "stop"


def test_an_answer_ends_at_the_last_position(server: InProcess):
    prompt = [7] * (POSITIONS - 5)
    answer = server.complete(prompt, max_tokens=50, temperature=0)
    assert answer["usage"]["completion_tokens"] <= 5
    assert answer["choices"][0]["finish_reason"] == "length"
    response = server.post("/v1/completions", {"prompt": [7] * POSITIONS, "max_tokens": 1})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    body = {"prompt": [7] * POSITIONS, "max_tokens": 0, "echo": True}
    assert server.post("/v1/completions", body).status_code == 200


@pytest.mark.parametrize("most_new", [None, 1, 100, 1024])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_conversation_is_cut_as_in_the_terminal(
    server: InProcess, chat_model: Path, most_new: int | None, system: str | None
):
    """As few of the first questions as leave room for the answer, each with what follows it."""
    model, tokenizer, _ = load_model(None, str(chat_model))
    template = template_of(tokenizer, None, chat_model)
    sampling = Sampling(max_new_tokens=most_new or ANSWER["max_new_tokens"])
    chat = Chat(model, tokenizer, template, sampling, system)
    limit, found = POSITIONS - min(sampling.max_new_tokens, POSITIONS // 2), set()
    for count in range(0, 20, 3):
        pairs = [Message(role, f"{n} " * 25) for n in range(count) for role in (USER, ASSISTANT)]
        last = Message(USER, "ab")
        cuts = [[*chat.messages, *pairs[2 * n :], last] for n in range(count + 1)]
        kept, ids = next((one, ids) for one in cuts if len(ids := template.prompt(one)) <= limit)
        assert chat._fitting(cuts[0]) == (kept, ids)
        asked = [{"role": one.role, "content": one.content} for one in cuts[0]]
        fields = {"messages": asked, "truncation": "auto", "max_tokens": most_new}
        read = asyncio.run(server.readers.read("a", CHAT, json.dumps(fields).encode()))
        assert read["prompts"] == [[ids, ""]]
        assert read["dropped"] == len(cuts[0]) - len(kept)
        found.add(read["dropped"] > 0)
    assert found == {False, True}


def test_an_answer_says_how_many_messages_it_has_not_read(server: InProcess):
    pair = [{"role": "user", "content": "ab " * 400}, {"role": "assistant", "content": "c " * 400}]
    last = {"role": "user", "content": "ab"}
    cut: Any = {"truncation": "auto", "max_tokens": 2}
    body = {"messages": [*pair * 3, last], **cut}
    assert server.post("/v1/chat/completions", body).json()["dropped_messages"] == 4
    for event in server.events("/v1/chat/completions", body):
        assert event["dropped_messages"] == 4
    assert server.chat("ab", **cut)["dropped_messages"] == 0
    assert "dropped_messages" not in server.chat("ab", max_tokens=2)
    response = server.post("/v1/chat/completions", {**body, "truncation": "disabled"})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    alone = {"messages": [{**last, "content": "ab " * 2000}], **cut}
    response = server.post("/v1/chat/completions", alone)
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_last_question_may_leave_an_answer_little_room(server: InProcess):
    """The terminal refuses one that leaves less than half; here the answer ends at the last."""
    body = {"messages": [{"role": "user", "content": "ab " * 700}], "truncation": "auto"}
    usage = server.post("/v1/chat/completions", body).json()["usage"]
    assert POSITIONS // 2 < usage["prompt_tokens"] < POSITIONS
    assert usage["total_tokens"] <= POSITIONS


def test_likelihoods_are_those_of_the_model(server: InProcess, chat_model: Path):
    model, tokenizer, _ = load_model(None, str(chat_model))
    ids = tokenizer.encode("春眠 ab cdef 曉處 " * 6)
    answer = server.complete(ids, max_tokens=3, echo=True, logprobs=3, temperature=0)
    found = answer["choices"][0]["logprobs"]
    with torch.no_grad():
        logs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    assert found["token_logprobs"][0] is None
    for at in range(1, len(ids)):
        assert found["token_logprobs"][at] == pytest.approx(float(logs[at - 1, ids[at]]), abs=1e-4)
        best = found["top_logprobs"][at].values()
        assert max(best) == pytest.approx(float(logs[at - 1].max()), abs=1e-4)


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "春"}}</tool_call>'


class Played:
    """Texts to be generated in turn, in place of a model's."""

    def __init__(self, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ids: list[int] = []

        def draw(batch: Batch, logits: Any) -> None:
            for text in batch.texts:
                text.append(self.ids[len(text.new)])

        monkeypatch.setattr(Batch, "_draw", draw)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> None:
        self.ids = [*self._tokenizer.encode(text), self._tokenizer.eos_id]


@pytest.fixture
def play(server: InProcess, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(server.served.tokenizer, monkeypatch)


PARTS = ["<think>", "</think>", "\n", "<tool_call>", "</tool_call>", " ", "ab", "<", CALL, "春"]
TEXTS = [
    ("ab", "ab", None, 0),
    ("<think>\nab\n</think>\n\ncd", "cd", "ab", 0),
    ("<think>ab", "", "ab", 0),
    (f"ab {CALL}", "ab", None, 1),
    (f"{CALL}{CALL}", None, None, 2),
    ("<tool_call>{</tool_call>", "<tool_call>{</tool_call>", None, 0),
    ("<thin", "<thin", None, 0),
    (f"<think>a</think>{CALL} b", "b", "a", 1),
]
TEXTS += [("".join(random.Random(n).choices(PARTS, k=8)), ..., ..., ...) for n in range(40)]


@pytest.mark.sample(16)
@pytest.mark.parametrize(("text", "content", "thoughts", "calls"), TEXTS)
def test_thoughts_and_calls_are_told_apart(
    server: InProcess, play: Played, text: str, content: Any, thoughts: Any, calls: Any
):
    play(text)
    body = {"messages": [{"role": "user", "content": "ab"}], "tools": TOOLS, "max_tokens": 700}
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    message = choice["message"]
    found = message.get("tool_calls", [])
    if content is not ...:
        assert (message["content"], message.get("reasoning_content")) == (content, thoughts)
        assert len(found) == calls
    assert choice["finish_reason"] == ("tool_calls" if found else "stop")
    for call in found:
        assert json.loads(call["function"]["arguments"]) == {"city": "春"}
    events = server.events("/v1/chat/completions", body)
    assert joined(events, "content") == (message["content"] or "")
    assert joined(events, "reasoning_content") == message.get("reasoning_content", "")
    streamed = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", [])]
    assert [c["function"] for c in streamed] == [c["function"] for c in found]


def test_the_token_that_ends_a_text_is_counted(server: InProcess, play: Played):
    play("ab")
    size = len(server.served.tokenizer.encode("ab"))
    for found in (server.complete("c", max_tokens=9), server.chat("c", max_tokens=9)):
        assert found["usage"]["completion_tokens"] == size + 1
        assert found["choices"][0]["finish_reason"] == "stop"


def test_likelihoods_have_the_end_of_a_text_but_not_of_a_turn(server: InProcess, monkeypatch):
    draw, end = Batch._draw, server.served.tokenizer.eos_id

    def draw_an_end(batch: Batch, logits: torch.Tensor) -> None:
        logits[:, end] = 99
        draw(batch, logits)

    monkeypatch.setattr(Batch, "_draw", draw_an_end)
    for fields in ({}, {"echo": True}):
        body = {"prompt": [7, 8], "max_tokens": 9, "logprobs": 0, **fields}
        (choice,) = server.post("/v1/completions", body).json()["choices"]
        assert choice["logprobs"]["tokens"][-1] == server.served.token(end)[0]
        parts = [one["choices"][0] for one in server.events("/v1/completions", body)]
        sent = [token for one in parts if one["logprobs"] for token in one["logprobs"]["tokens"]]
        assert sent == choice["logprobs"]["tokens"]
    (choice,) = server.chat("ab", max_tokens=9, logprobs=True)["choices"]
    assert choice["logprobs"]["content"] == []


def test_a_call_goes_back_as_it_was_written(server: InProcess, play: Played):
    play(CALL)
    asked: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]
    body = {"messages": asked, "tools": TOOLS, "max_tokens": 700}
    message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    call_id = message["tool_calls"][0]["id"]
    answered = {"role": "tool", "content": "rain", "tool_call_id": call_id}
    request = ChatRequest(messages=[*asked, message, answered], tools=TOOLS)
    template = ChatTemplate(DEFAULT_TEMPLATE, server.served.tokenizer)
    conversation = conversation_of_request(request, template, (True, False))
    text = template.render(conversation, True)
    assert CALL in text
    assert text.endswith("<|tool|>rain<|end|><|assistant|>")
    none = ChatRequest(messages=asked, tools=TOOLS, tool_choice="none")
    assert not conversation_of_request(none, template, (True, False)).tools


def test_a_base_model_completes_and_does_not_chat(base: InProcess):
    assert base.complete("ab", seed=1)["choices"][0]["text"]
    response = base.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "no_chat_template"
    assert "ask /v1/completions" in response.json()["error"]["message"]


def test_models_that_cannot_be_padded_run_beside_each_other(server: InProcess, monkeypatch):
    questions = ["ab", "春眠 ab cd", "c"]
    alone = [server.chat(q, max_tokens=20, seed=1)["choices"] for q in questions]
    monkeypatch.setattr(Batch, "can_grow", False)
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda q: server.chat(q, max_tokens=20, seed=1)["choices"], questions)
    assert list(found) == alone


def test_a_model_without_finite_logits_is_said_to_be_broken(server: InProcess, monkeypatch):
    forward = Batch._forward
    monkeypatch.setattr(Batch, "_forward", lambda *a: forward(*a) * float("nan"))
    body = {"prompt": "ab"}
    response = server.post("/v1/completions", body)
    assert response.status_code == 503
    assert "logits are not finite" in response.json()["error"]["message"]
    monkeypatch.undo()
    assert server.complete("ab")["choices"][0]["text"]


def test_a_bug_ends_its_requests_alone(server: InProcess, monkeypatch, capsys):
    monkeypatch.setattr(Batch, "_forward", lambda *a: 1 / 0)
    response = server.post("/v1/completions", {"prompt": "ab"})
    assert (response.status_code, "ZeroDivisionError" in response.text) == (500, False)
    assert "ZeroDivisionError" in capsys.readouterr().err
    monkeypatch.undo()
    assert server.complete("ab")["choices"][0]["text"]
