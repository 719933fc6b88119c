"""Text generation: single and batched, streaming, stop strings, and messages of the command."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from transformers.modeling_outputs import CausalLMOutput

from minimind.cli.main import main
from minimind.data.tokenizer.load import Tokenizer, load_tokenizer
from minimind.errors import NumericError, UsageError
from minimind.inference.engine import generate_texts, next_tokens
from minimind.inference.load_model import load_checkpoint
from minimind.inference.text import Sampling, Text
from tests.conftest import ROOT, Trained, sentences

GREEDY = Sampling(max_new_tokens=40, temperature=0.0)
PROMPTS = ["春眠", "a", "abc def gh, 曉處 a little longer than the others", ""]


@pytest.fixture(scope="module")
def loaded(trained: Trained) -> tuple[Any, Tokenizer]:
    model, tokenizer, _ = load_checkpoint(str(trained.run))
    with torch.no_grad():  # a model of six steps gives the same text for all prompts
        for number, weight in enumerate(model.parameters()):
            torch.manual_seed(number)
            weight.add_(0.3 * torch.randn_like(weight))
    return model, tokenizer


def alone_without_cache(model: Any, tokenizer: Tokenizer, prompt: str, most: int) -> str:
    """Greedy decoding that recomputes everything for each token."""
    ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    begin = len(ids)
    while len(ids) - begin < most and len(ids) < model.config.max_position_embeddings:
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        if token == tokenizer.eos_id:
            break
        ids = [*ids, token]
    return tokenizer.decode(ids[begin:]).rstrip("\ufffd")


def test_batched_generation_equals_single_prompts_without_cache(loaded):
    model, tokenizer = loaded
    for most in (40, 100):  # within the 64 positions, and up to the last of each
        how = replace(GREEDY, max_new_tokens=most)
        texts = generate_texts(model, tokenizer, PROMPTS, how).texts
        assert list(texts) == [alone_without_cache(model, tokenizer, p, most) for p in PROMPTS]
        assert len(set(texts)) == len(PROMPTS)
    penalised = replace(GREEDY, repetition_penalty=1.5)
    texts = generate_texts(model, tokenizer, PROMPTS, penalised).texts
    assert list(texts) == [
        generate_texts(model, tokenizer, [prompt], penalised).texts[0] for prompt in PROMPTS
    ]
    assert list(texts) != list(generate_texts(model, tokenizer, PROMPTS, GREEDY).texts)


def test_seed_determines_the_text_and_top_k_1_is_greedy(loaded):
    model, tokenizer = loaded
    drawn = replace(GREEDY, temperature=1.0, top_p=1.0)
    first, again = (generate_texts(model, tokenizer, ["ab"], drawn) for _ in range(2))
    assert first.texts == again.texts
    assert generate_texts(model, tokenizer, ["ab"], replace(drawn, seed=7)).texts != first.texts
    greedy = generate_texts(model, tokenizer, ["ab"], GREEDY).texts
    assert greedy != first.texts
    assert generate_texts(model, tokenizer, ["ab"], replace(drawn, top_k=1)).texts == greedy


def test_sampled_text_depends_on_the_prompt_number_and_not_on_the_batch(loaded):
    model, tokenizer = loaded
    drawn = replace(GREEDY, temperature=1.0, top_p=0.9, top_k=300, max_new_tokens=12)
    prompts = ["ab", "a longer one", "ab", ""]
    together = generate_texts(model, tokenizer, prompts, drawn).texts
    apart = [
        generate_texts(model, tokenizer, [prompt], drawn, numbers=[number]).texts[0]
        for number, prompt in enumerate(prompts, 1)
    ]
    assert list(together) == apart
    assert together[0] != together[2], "the same prompt twice is two texts"


def drawn(logits: torch.Tensor, **flags: Any) -> list[int]:
    """The next token of a text for each row of logits."""
    how, tokenizer = Sampling(**{"temperature": 1.0, "top_p": 1.0, **flags}), cast(Any, None)
    texts = [
        Text([0], tokenizer, how, 9, how.generator(number), frozenset())
        for number in range(len(logits))
    ]
    return next_tokens(logits, texts)


def test_sampling_follows_the_requested_probabilities():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(2000, 1)

    def shares(**flags: Any) -> list[float]:
        found = drawn(logits, **flags)
        return [found.count(token) / len(found) for token in range(4)]

    assert shares() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert shares(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert shares(top_p=0.9) == pytest.approx([0.526, 0.316, 0.158, 0], abs=0.03)
    assert shares(temperature=0.5) == pytest.approx([0.685, 0.247, 0.062, 0.007], abs=0.03)
    for tiny in (1e-30, 5e-324):
        assert shares(temperature=tiny) == [1, 0, 0, 0]


def test_random_number_0_draws_no_excluded_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.zeros(1))
    assert drawn(torch.tensor([[0.0, 0, 5]]), top_k=1) == [2]


class Played:
    """A model that generates given ids, whatever the prompt; it has no cache."""

    def __init__(self, ids: list[int]) -> None:
        self.config = SimpleNamespace(max_position_embeddings=1000)
        self.ids, self.prompt = ids, 0

    def parameters(self):
        yield torch.zeros(1)

    def prepare_inputs_for_generation(self, ids: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"input_ids": ids}

    def forward(self, input_ids: torch.Tensor) -> CausalLMOutput:
        size = input_ids.shape[1]
        self.prompt = self.prompt or size
        logits: Any = F.one_hot(torch.tensor([[self.ids[size - self.prompt]]]), 9999) * 1e9
        return CausalLMOutput(logits=logits)

    __call__ = forward


def test_padding_does_not_affect_the_repetition_penalty(loaded):
    """It is made of tokens of the text itself."""
    _, tokenizer = loaded
    how = Sampling(temperature=0, repetition_penalty=2.0)
    prompts = [[5], [6, 7, 8]]
    texts = [Text(ids, tokenizer, how, 9, how.generator(1), frozenset()) for ids in prompts]
    logits = torch.full((2, 10), 1.0)
    logits[:, 4], logits[0, 5:] = 0.9, torch.tensor([1.7, 0.8, 0.7, 0.6, 0.5])
    logits[1, 5:] = torch.tensor([1.6, 1.9, 1.8, 1.7, 0.5])
    assert next_tokens(logits, texts) == [0, 5]


def test_text_is_streamed_in_whole_characters(loaded):
    _, tokenizer = loaded
    text = "ab 鑫é𝄞 cd \ufffd ▁ ef"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text), "some characters have to be bytes here"
    shown: list[str] = []
    played = Played([*ids, tokenizer.eos_id])
    written = generate_texts(played, tokenizer, ["x"], Sampling(), shown.append)
    assert "".join(shown) == written.texts[0] == text
    assert len(shown) > 8
    assert "鑫" in shown
    assert "𝄞" in shown
    for size in range(1, len(ids)):  # cut anywhere, what is whole is there
        cut = generate_texts(played, tokenizer, ["x"], Sampling(max_new_tokens=size)).texts[0]
        assert text.startswith(cut)
        assert len(text.encode()) - len(cut.encode()) >= 0


def test_space_between_prompt_and_continuation_is_kept(tmp_path: Path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(1, 60)),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = load_tokenizer(tmp_path)  # writes a space before a text, and takes it away again
    for prompt, more in (("ab", " cd 鑫 ef"), ("ab cd", "ef gh"), ("a 鑫", " 鑫"), ("", "ab cd")):
        before, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + more)
        assert whole[: len(before)] == before, "a prompt that ends where a piece does"
        shown: list[str] = []
        played = Played([*whole[len(before) :], tokenizer.eos_id])
        written = generate_texts(played, tokenizer, [prompt], Sampling(), shown.append)
        assert "".join(shown) == written.texts[0] == more


@pytest.mark.parametrize("stop", [("cd",), ("zz", "d e"), ("b 鑫", "ef")])
def test_stop_string_is_neither_returned_nor_streamed(loaded, stop):
    _, tokenizer = loaded
    text = "ab 鑫 c cd ef"
    shown: list[str] = []
    how = Sampling(stop=stop)
    played = Played([*tokenizer.encode(text), tokenizer.eos_id])
    written = generate_texts(played, tokenizer, ["x"], how, shown.append)
    expected = text[: min(at for at in map(text.find, stop) if at >= 0)]
    assert "".join(shown) == written.texts[0] == expected


def test_prompt_that_fills_all_positions_is_rejected(loaded):
    model, tokenizer = loaded
    with pytest.raises(UsageError, match=r"prompt 2 has \d+ tokens and the model 64 positions;"):
        generate_texts(model, tokenizer, ["a", "abc " * 60], GREEDY)


def run_greedy(trained: Trained, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Standard output of `minimind generate` at temperature 0."""
    capsys.readouterr()
    ask = ["generate", "--checkpoint", str(trained.run), "--temperature", "0"]
    assert main([*ask, "--max_new_tokens", "9", *words]) == 0
    output = capsys.readouterr()
    assert "step_00000006" in output.err
    assert " tokens/s]" in output.err
    return output.out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_prompt_from_flag_file_or_standard_input(
    trained: Trained,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    by_flag = run_greedy(trained, capsys, "--prompt", "a 曉處")
    assert by_flag.startswith("a 曉處")
    assert len(by_flag) > len("a 曉處\n")
    (tmp_path / "prompt.txt").write_text("a 曉處\n", encoding="utf-8")
    assert run_greedy(trained, capsys, "--prompt_file", str(tmp_path / "prompt.txt")) == by_flag
    (tmp_path / "prompt.txt").write_text("a 曉處", encoding="utf-8-sig")
    assert run_greedy(trained, capsys, "--prompt_file", str(tmp_path / "prompt.txt")) == by_flag
    for given in ("a 曉處", "a 曉處\n", "\ufeffa 曉處\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(given))
        assert run_greedy(trained, capsys) == by_flag
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run_greedy(trained, capsys) == run_greedy(trained, capsys, "--prompt", "")


def test_conversation_continues_after_ctrl_c(
    trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    alone = run_greedy(trained, capsys, "--prompt", "曉處")
    calls = []

    def stopped_at_first(*given: Any, **more: Any) -> Any:
        calls.append(given[2])
        if len(calls) == 1:
            raise KeyboardInterrupt
        return generate_texts(*given, **more)

    monkeypatch.setattr("minimind.inference.engine.generate_texts", stopped_at_first)
    monkeypatch.setattr("sys.stdin", Terminal("never\n曉處\n"))
    out = run_greedy(trained, capsys)
    assert calls == [["never"], ["曉處"]]
    assert out == f"> never\n> {alone.removesuffix(chr(10))}> \n"


ECHO = """
import sys
import time
from minimind.cli import main as cli
from minimind.cli import generate as generate_commands
from minimind.errors import UsageError
class Generator:
    path = "a model"
    def check(self, prompt, number):
        return None
    def generate(self, prompts, numbers, on_text):
        on_text(f"<{prompts[0]}>")
        return type("Result", (), {"tokens_per_second": 1.0})
def load(args):
    time.sleep(1)  # the prompt is there by then
    if args.model == "wrong":
        raise UsageError("no such model; name another")
    return Generator()
generate_commands._Generator = load
sys.exit(cli.main(["generate", "--model", sys.argv[1]]))
"""


class Screen:
    """`minimind generate` at a terminal, with a loader and a model that take no torch."""

    def __init__(self, model: str) -> None:
        ours, theirs = pty.openpty()
        command, environ = [sys.executable, "-c", ECHO, model], {**os.environ, "TERM": "xterm"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self._keys = open(ours, "r+b", buffering=0)
        self._shown = ""

    def type(self, keys: bytes) -> None:
        self._keys.write(keys)

    def until(self, words: str) -> str:
        """What is shown up to these words; an AssertionError where they do not come."""
        while words not in self._shown:
            came = select.select([self._keys], [], [], 20)[0]
            assert came, f"no {words!r} in {self._shown!r}"
            self._shown += self._keys.read(4096).decode()
        before, _, self._shown = self._shown.partition(words)
        return before

    def status(self) -> int:
        return self._process.wait(timeout=60)

    def close(self) -> None:
        self._keys.close()  # which ends a process that still asks
        self._process.wait(timeout=60)


@pytest.fixture
def at_terminal() -> Iterator[Callable[[str], Screen]]:
    found: list[Screen] = []

    def start(model: str) -> Screen:
        found.append(Screen(model))
        return found[-1]

    yield start
    for screen in found:
        screen.close()


def test_prompt_line_editing_and_history(at_terminal):
    screen = at_terminal("right")
    left, up = b"\x1b[D", b"\x1b[A"
    for typed, prompt in ((b"ac" + left + b"b", "abc"), (up, "abc"), (up + b"d", "abcd")):
        screen.until("> ")
        screen.type(typed + b"\r")
        screen.until(f"{prompt}<{prompt}>")
    screen.until("> ")
    screen.type(b"\x04")  # Ctrl-D
    assert screen.status() == 0


def test_model_is_loaded_while_the_first_prompt_is_typed(at_terminal):
    screen = at_terminal("right")
    assert "loading" not in screen.until("> ")
    screen.type(b"abc\r")
    assert "loading the model ..." in screen.until("<abc>")


def test_loading_error_ends_the_wait_for_a_prompt(at_terminal):
    screen = at_terminal("wrong")
    screen.until("> ")
    screen.type(b"half a prom")
    screen.until("minimind: error[E_USAGE]: no such model; name another")
    assert screen.status() == 2


def test_conversation_continues_after_an_invalid_prompt(
    trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", Terminal(f"{'abc ' * 60}\n\ud800\nab\nab\n"))
    ask = ["generate", "--checkpoint", str(trained.run), "--max_new_tokens", "9"]
    assert main([*ask, "--top_p", "1"]) == 0
    output = capsys.readouterr()
    assert "prompt 1 has 121 tokens and the model 64 positions; shorten it" in output.err
    assert "a lone surrogate" in output.err
    texts = output.out.split("> ")[1:]
    assert [text[:2] for text in texts] == ["", "", "ab", "ab", "\n"]
    assert texts[2] != texts[3], "a repeated prompt gets another text"


def test_invalid_prompts_of_a_file_do_not_affect_the_others(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    long, answers = "abc " * 60, tmp_path / "answers.jsonl"
    prompts = tmp_path / "prompts.jsonl"
    texts = ["ab", long, "cd", "\ud800"]
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in texts))
    ask = ["--prompts", str(prompts), "--out", str(answers), "--batch_size", "1"]
    ask += ["--checkpoint", str(trained.run), "--max_new_tokens", "9", "--top_p", "1"]
    assert main(["generate", *ask]) == 2
    output = capsys.readouterr().err.splitlines()
    assert "2 prompts, " in output[0]
    assert "2 of 4 prompts cannot be continued, the first: prompt 2 has 121 tokens" in output[1]
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [one["prompt"] for one in found] == texts
    assert [one["completion"] is None for one in found] == [False, True, False, True]
    assert found[1]["error"] == "prompt 2 has 121 tokens and the model 64 positions; shorten it"
    ask[ask.index("--batch_size") + 1] = "4"
    assert main(["generate", *ask, "--force"]) == 2
    assert [json.loads(line) for line in answers.read_text().splitlines()] == found


def test_prompts_of_a_file_are_answered_in_order(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    lines, fields = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("ab\n\n曉處\ncd ef\n", encoding="utf-8")
    prompts = ["ab", "曉處", "cd ef"]
    fields.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    out = run_greedy(trained, capsys, "--prompts", str(lines), "--batch_size", "2")
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["prompt"] for one in found] == prompts
    for one in found:
        alone = run_greedy(trained, capsys, "--prompt", one["prompt"])
        assert alone == f"{one['prompt']}{one['completion']}\n"
    answers = tmp_path / "answers.jsonl"
    flags = ("--prompts", str(fields), "--out", str(answers))
    assert run_greedy(trained, capsys, *flags) == ""
    assert [json.loads(line) for line in answers.read_text().splitlines()] == found
    assert main(["generate", "--checkpoint", str(trained.run), *flags]) == 2
    assert "exists; give another file, or --force" in capsys.readouterr().err
    run_greedy(trained, capsys, *flags, "--force")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--prompt a --prompts P", 2, "--prompt and --prompts cannot be used together"),
        ("--prompt a --out P", 2, "--out has no effect without --prompts"),
        ("--prompt_file nowhere", 3, "--prompt_file nowhere: No such file"),
        ("--prompts EMPTY", 3, "has no prompt; write one a line"),
        ("--prompts BAD.jsonl", 3, 'BAD.jsonl:2: has no "prompt" that is a string'),
        ("--prompts TORN.jsonl", 3, "TORN.jsonl:1: is not JSON"),
        ("--prompts LATIN", 3, "not UTF-8 at byte 1"),
        ("--prompts LONG", 2, "prompt 1 has 121 tokens"),
        ("--prompt a --top_p 0", 2, "--top_p"),
        ("--prompt a --repetition_penalty 0", 2, "--repetition_penalty"),
        ("--prompt a --repetition_penalty 1e-45", 2, "1e-45 must be at least 0.01 and at most 100"),
        ("--prompt a --temperature inf", 2, "inf is not a finite number"),
        ("--prompt a --temperature nan", 2, "nan is not a finite number"),
        ("--prompts HALF.jsonl", 3, "prompt 1: a text is not Unicode: a lone surrogate"),
        ("--prompts P --out " + "x" * 300, 5, "cannot be written (File name too long)"),
        ("--prompts P --out nowhere/answers", 5, "there is no folder nowhere; make it"),
        ("--prompts P --out /proc/answers", 5, "--out /proc/answers: cannot be written (its file"),
        ("--prompts P --out P --force", 2, "is the file of the prompts; give another"),
        ("--prompt a --tokenizer P", 2, "--tokenizer has no effect with a checkpoint"),
    ],
)
def test_invalid_input_gives_a_one_line_error(
    words: str,
    status: int,
    message: str,
    trained: Trained,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "P").write_text("a\n")
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "BAD.jsonl").write_text('{"prompt": "a"}\n{"prompt": 1}\n')
    (tmp_path / "TORN.jsonl").write_text('{"prompt": \n')
    (tmp_path / "HALF.jsonl").write_text('{"prompt": "\\ud800"}\n')
    (tmp_path / "LATIN").write_bytes(b"a\xe9\n")
    (tmp_path / "LONG").write_text("abc " * 60)
    here = {path.name: str(path) for path in tmp_path.iterdir()}
    words_given = [here.get(word, word) for word in words.split()]
    assert main(["generate", "--checkpoint", str(trained.run), *words_given]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert ";" in line


@pytest.mark.parametrize("words", [["--prompt", "a"], ["--prompts", "FILE"]])
def test_a_full_standard_output_is_a_storage_error(
    trained: Trained,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    (tmp_path / "prompts.txt").write_text("ab\n")
    given = [str(tmp_path / "prompts.txt") if word == "FILE" else word for word in words]
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(full, write_through=True))
        assert main(["generate", "--checkpoint", str(trained.run), *given]) == 5
    assert "standard output: No space left on device; free" in capsys.readouterr().err


@pytest.mark.parametrize(("closed", "status"), [("sys.stdout", 0), ("sys.stdin", 2)])
def test_closed_standard_streams(
    closed: str,
    status: int,
    trained: Trained,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(closed, None)
    given = ["--prompt", "a"] if closed == "sys.stdout" else []
    assert main(["generate", "--checkpoint", str(trained.run), *given]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert "tokens/s" in line if given else "standard input is closed; give --prompt" in line


def test_broken_pipe_is_not_an_error(
    trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb", buffering=0) as nobody:
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(nobody, write_through=True))
        assert main(["generate", "--checkpoint", str(trained.run), "--prompt", "a"]) == 0
    assert capsys.readouterr().err == ""


def test_huge_seed_and_tiny_temperature(trained: Trained, capsys: pytest.CaptureFixture[str]):
    greedy = run_greedy(trained, capsys, "--prompt", "ab")
    assert run_greedy(trained, capsys, "--prompt", "ab", "--temperature", "1e-320") == greedy
    flags = ("--prompt", "ab", "--temperature", "1", "--top_p", "1")
    seeds = [str(2**64 + 1), str(2**128), "1"]
    assert len({run_greedy(trained, capsys, *flags, "--seed", seed) for seed in seeds}) == 3


def test_each_kind_of_place_requires_its_flag(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out, gguf = tmp_path / "exported", tmp_path / "model.gguf"
    words = ["export", "--checkpoint", str(trained.run), "--format", "minimind"]
    assert main([*words, "--out", str(out)]) == 0
    gguf.write_bytes(b"GGUF")
    run = shutil.copytree(trained.run, tmp_path / "run")
    shutil.copy(gguf, run)
    for flag, place, status, message in (
        ("--checkpoint", out, 2, "is an exported model, not a run; give it as --model"),
        ("--model", trained.run, 2, "belongs to a training run; give it as --checkpoint"),
        ("--model", run, 2, "belongs to a training run; give it as --checkpoint"),
        ("--checkpoint", tmp_path, 2, "is GGUF"),
        ("--checkpoint", tmp_path / "no", 4, "there is no such file or directory"),
        ("--checkpoint", gguf, 2, "is GGUF, which llama.cpp and Ollama read; name the checkpoint"),
        ("--model", gguf, 2, "is GGUF, which llama.cpp and Ollama read; name the checkpoint"),
        ("--model", tmp_path, 2, "is GGUF, which llama.cpp and Ollama read; name the checkpoint"),
        ("--model", "", 2, "--model is empty, as from a variable that is not set"),
        ("--model", tmp_path / "no", 4, "there is no such file or directory"),
    ):
        assert main(["generate", flag, str(place), "--prompt", "a"]) == status
        assert message in capsys.readouterr().err
    tokenizer = tmp_path / "tokenizer.model"
    (out / tokenizer.name).rename(tokenizer)
    (out / "tokenizer.json").unlink()
    ask = ["generate", "--model", str(out), "--prompt", "ab", "--temperature", "0"]
    ask += ["--max_new_tokens", "9"]
    assert main(ask) == 4
    assert "or give it as --tokenizer" in capsys.readouterr().err
    assert main([*ask, "--tokenizer", str(tokenizer)]) == 0
    assert capsys.readouterr().out == run_greedy(trained, capsys, "--prompt", "ab")


def test_nonfinite_logits_raise_an_error(trained: Trained):
    model, tokenizer, _ = load_checkpoint(str(trained.run))
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NumericError, match="not finite"):
        generate_texts(model, tokenizer, ["abc"], Sampling())


def test_a_rank_that_is_done_computes_until_all_are(loaded, monkeypatch: pytest.MonkeyPatch):
    """Where a forward pass is collective."""
    model, tokenizer = loaded
    forwards: list[torch.Size] = []
    handle = model.register_forward_pre_hook(
        lambda *given: forwards.append(given[2]["input_ids"].shape), with_kwargs=True
    )
    others = iter([2] * 6 + [1] * 3)  # texts that other ranks have left

    def all_reduce(left: torch.Tensor) -> None:
        left += next(others, 0)

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    how = replace(GREEDY, max_new_tokens=4)
    texts = generate_texts(model, tokenizer, ["ab", "c"], how, is_collective=True).texts
    handle.remove()
    assert len(forwards) == 1 + 9
    assert texts == generate_texts(model, tokenizer, ["ab", "c"], how).texts
