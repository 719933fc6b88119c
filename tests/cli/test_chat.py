"""`minimind chat`: what is typed at a terminal, kept and saved; the answers are given."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minimind.cli.generate import HELP
from minimind.cli.main import main
from minimind.data.chat.conversations import conversation_of_line
from minimind.data.chat.template import DEFAULT_TEMPLATE, SPECIAL_TOKENS, ChatTemplate
from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer, train_tokenizer
from minimind.errors import UsageError
from minimind.inference.chat import Chat, read_tools
from minimind.inference.engine import GenerationResult
from minimind.inference.text import Sampling
from tests.conftest import Trained
from tests.train.terminal import Terminal

POSITIONS, ROOM = 96, 20  # of the model, and of them the answer's


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    place = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(
        ["what is the sea? deep"] * 9, 512, place / "tokenizer.model", special=SPECIAL_TOKENS
    )
    return SentencePieceTokenizer(place)


class Answers:
    """Answers to give in turn, in place of a model's; an exception is raised after half of one."""

    def __init__(self) -> None:
        self.given: Iterator[str | BaseException] = iter(())

    def __call__(
        self, model: Any, tokenizer: Any, prompts: Any, sampling: Any, show: Any, **_: Any
    ):
        answer = next(self.given)
        if isinstance(answer, BaseException):
            show("half an ans")
            raise answer
        if show:
            show(answer)
        return GenerationResult((answer,), 1, 1.0)


@pytest.fixture
def start(
    tokenizer: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Sequence[str | BaseException], str | None], Chat]:
    """A chat with these answers and this system message."""
    answers = Answers()
    monkeypatch.setattr("minimind.inference.chat.continue_ids", answers)
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=POSITIONS))
    template = ChatTemplate(DEFAULT_TEMPLATE, tokenizer)

    def begin(given: Sequence[str | BaseException], system: str | None = None) -> Chat:
        answers.given = iter(given)
        return Chat(model, tokenizer, template, Sampling(ROOM, 0.0, 1.0, 0), system)

    return begin


@pytest.fixture
def typed(start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Output and error messages of a terminal where these lines are typed."""

    def type_lines(
        lines: Sequence[str], answers: Sequence[str | BaseException], given: Chat | None = None
    ) -> tuple[str, str]:
        chat = start(answers)
        chat = given or chat
        monkeypatch.setattr("minimind.cli.generate._load", lambda args: chat)
        monkeypatch.setattr("sys.stdin", Terminal("".join(f"{line}\n" for line in lines)))
        assert main(["chat", "--model", "a-model"]) == 0
        shown = capsys.readouterr()
        return shown.out, shown.err

    return type_lines


def test_a_conversation_is_saved_as_a_line_to_train_on(typed, tmp_path: Path):
    place = tmp_path / "talk.jsonl"
    lines = ["what is the sea?", "", "and the sky?", f"/save {place}", f"/save {place}", "/reset"]
    out, err = typed([*lines, f"/save {place}2"], ["deep", "high"])
    assert out == "> deep\n> > high\n> > > > > \n"
    first, *saved = err.splitlines()
    assert first.startswith("a-model: /reset ")
    assert saved == [
        f"saved to {place}",
        f"not saved: {place} exists; give another file",
        "not saved: there is no answer yet; ask something",
    ]
    texts = [turn["content"] for turn in json.loads(place.read_text())["messages"]]
    assert texts == ["what is the sea?", "deep", "and the sky?", "high"]
    assert conversation_of_line(place.read_bytes())


def test_commands_that_cannot_be_done_are_explained(typed, tmp_path: Path):
    nowhere = tmp_path / "nowhere" / "x"
    lines = ["ab", "/save", f"/save {nowhere}", "/save ~no-such-user/x", "/save a\0b", "/quit"]
    lines += ["/help"]
    _, err = typed(lines, ["cd"])
    said = err.splitlines()[1:]
    assert said[0] == "/save needs a file; write /save talk.jsonl"
    assert said[1] == f"not saved: {nowhere}: No such file or directory; give another file"
    assert said[2].startswith("not saved: ~no-such-user/x: ")
    assert said[3].endswith("; give another file")
    assert said[4].startswith("/quit: no such command; /reset ")
    assert said[5] == HELP


def test_what_could_not_be_trained_on_is_not_saved(typed, tmp_path: Path):
    place = tmp_path / "talk.jsonl"
    _, err = typed(["ab", "cd", f"/save {place}"], ["x", " "])
    assert 'not saved: it could not be trained on: turn 4: "content" is blank; ' in err
    _, err = typed(["ab", f"/save {place}"], ["x <|end|>"])
    assert 'trained on: turn 2: contains "<|end|>"' in err
    assert not place.exists()


def test_lines_that_are_no_turn_leave_the_conversation_as_it_is(typed):
    long = "what is " * 60
    lines = ["a <|end|> b", "a\0b", "a\ud800b", long, "what is the sea?"]
    out, err = typed(lines, ["deep"])
    assert out == "> > > > > deep\n> \n"
    said = err.splitlines()[1:]
    assert said[0].startswith('the turn: contains "<|end|>", a special token')
    assert said[1] == "the turn: the text holds a NUL character; write it in another way"
    assert said[2] == "the turn: contains a lone surrogate (\\ud800); write it in another way"
    assert said[3].endswith(
        f"tokens, more than {POSITIONS - ROOM}: the answer needs {ROOM} of the model's"
        f" {POSITIONS} positions; shorten it"
    )
    assert all("conversation" not in line for line in said)


THINKING = (
    "{% if tools %}{{ '<|system|>' + tools | tojson + '<|end|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' + call | tojson + '</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' + ('<think>' if quick else '') }}{% endif %}"
)


@pytest.mark.parametrize("quick", [False, True], ids=["written", "asked for"])
def test_thoughts_are_shown_hidden_and_kept(typed, start, tokenizer, tmp_path: Path, quick: bool):
    chat = start([])
    template = ChatTemplate(THINKING, tokenizer, variables={"quick": quick})
    chat.template = template
    place = tmp_path / "talk.jsonl"
    answers = ["what</think>\n\ndeep", "the</think>sea", "<", "no thought"]
    if not quick:
        answers = [f"<think>{answers[0]}", f" <think>{answers[1]}", *answers[2:]]
    lines = ["one?", "/think", "two?", *(["three?", "four?"] if not quick else [])]
    out, err = typed([*lines, f"/save {place}", "/think"], answers, chat)
    shown = [line for line in out.replace("> ", "").splitlines() if line]
    first = ["what</think>" if quick else "<think>what</think>", "deep"]
    assert shown == [*first, "sea", *([] if quick else ["<", "no thought"])]
    assert "thoughts are hidden" in err
    assert "thoughts are shown" in err
    saved = json.loads(place.read_text())["messages"]
    assert saved[1] == {"role": "assistant", "content": "deep", "reasoning_content": "what"}
    assert saved[3] == {"role": "assistant", "content": "sea", "reasoning_content": "the"}


def test_calls_are_printed_and_what_is_typed_then_is_the_tool_s_answer(
    typed, start, tokenizer, tmp_path: Path
):
    chat = start([])
    chat.template = ChatTemplate(THINKING, tokenizer, variables={"quick": False})
    chat.tools = [{"name": "what"}]
    chat.model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=500))
    place = tmp_path / "talk.jsonl"
    call = {"name": "what", "arguments": {"is": "sea"}}
    answers = [f"<tool_call>{json.dumps(call)}</tool_call>", "deep", "<tool_call>{</tool_call>"]
    _, err = typed(["sea?", "the sea", "what?", f"/save {place}"], answers, chat)
    assert "[it calls what; type what the call returns]" in err
    saved = json.loads(place.read_text())
    assert saved["tools"] == chat.tools
    roles = [turn["role"] for turn in saved["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert saved["messages"][1]["tool_calls"] == [call]
    assert saved["messages"][5]["content"] == answers[2]


def test_the_file_of_tools(tmp_path: Path):
    place = tmp_path / "tools.json"
    place.write_text('[{"name": "f"}]')
    assert read_tools(place) == [{"name": "f"}]
    for content, words in (("{}", "is not a list"), ("[", "is cut off"), ("[1]", "is not a list")):
        place.write_text(content)
        with pytest.raises(UsageError, match=f'--tools {place}: "tools" {words}'):
            read_tools(place)
    with pytest.raises(UsageError, match="No such file or directory; give a file"):
        read_tools(tmp_path / "none")


def test_a_stopped_answer_is_forgotten_with_its_question(typed, tmp_path: Path):
    place = tmp_path / "talk.jsonl"
    out, err = typed(["one?", "two?", f"/save {place}"], [KeyboardInterrupt(), "deep"])
    assert out == "> half an ans\n> deep\n> > \n"
    assert "[stopped; question and answer are forgotten]\n" in err
    assert [turn["content"] for turn in json.loads(place.read_text())["messages"]] == [
        "two?",
        "deep",
    ]


def test_an_answer_that_spells_a_special_token_ends_the_conversation(start):
    chat = start(["a <|user|>", "deep"])
    chat.ask("one?")
    with pytest.raises(UsageError, match=r"turn 2: contains .*; begin another conversation"):
        chat.ask("two?")
    chat.reset()
    assert chat.ask("two?") == "deep"


def test_the_first_turns_are_forgotten_and_the_system_message_is_not(start):
    chat = start(["deep sea"] * 9, "what is the sea?")
    for _ in range(9):
        chat.ask("what is the sea?")
    assert chat.forgotten > 0
    assert [message.role for message in chat.messages[:2]] == ["system", "user"]
    assert chat.forgotten + len(chat.messages) == 1 + 2 * 9


@pytest.mark.parametrize(
    ("system", "words"),
    [
        ("be <|user|> kind", 'the system message: contains "<|user|>"'),
        ("what is " * 60, "the system message and the turn have"),
    ],
)
def test_a_system_message_that_is_none(start, system: str, words: str):
    with pytest.raises(UsageError, match=words):
        start(["deep"], system).ask("what is the sea?")


@pytest.mark.parametrize(
    "words", [["chat", "--once", "hi"], ["eval", "--task", "sft", "--data_path", "talk.jsonl"]]
)
def test_a_model_without_a_template_is_refused(
    words: list[str], trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("talk.jsonl").write_text("{}")
    capsys.readouterr()
    assert main([*words, "--checkpoint", str(trained.run), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "step_00000006 has no chat template beside its tokenizer; fine-tune it (bash" in said
