"""transformers serve on an export: an OpenAI client gets the answers of `minimind chat`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minimind.cli.main import main as minimind
from minimind.inference.chat import Chat, template_of
from minimind.inference.load_model import load_model
from minimind.inference.text import Sampling
from tests.examples.conftest import environment
from tests.train.test_fine_tuning import CAPITALS
from tools.forking import free_port

pytestmark = [pytest.mark.long, pytest.mark.launch]
SERVE = [sys.executable, "-m", "transformers.cli.transformers", "serve"]
TOKENS = 30


@pytest.fixture(scope="module")
def openai() -> Any:
    pytest.importorskip("uvicorn", reason="needs the extra: pip install -e '.[examples]'")
    return pytest.importorskip("openai", reason="needs the extra: pip install -e '.[examples]'")


@pytest.fixture(scope="module")
def client(openai: Any, exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """OpenAI's client of a server on the loopback interface."""
    port, place = free_port(), tmp_path_factory.mktemp("server")
    line = [*SERVE, str(exported), "--device", "cpu", "--port", str(port)]
    own = {**os.environ, **environment(place)}
    with (place / "log").open("wb") as log:
        server = subprocess.Popen(line, env=own, stdout=log, stderr=log)
    try:
        place_of_api = f"http://localhost:{port}/v1"
        with openai.OpenAI(base_url=place_of_api, api_key="none", max_retries=0) as found:
            _wait(openai, found, server, place / "log")
            yield found
    finally:
        server.terminate()
        server.wait(60)


def _wait(openai: Any, client: Any, server: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the server listens."""
    for _ in range(600):
        assert server.poll() is None, log.read_text()
        try:
            client.get("/../health", cast_to=object)
        except openai.APIConnectionError:
            time.sleep(0.5)
        else:
            return
    raise AssertionError(log.read_text())


def asked(client: Any, exported: Path, messages: list[dict[str, str]], **more: Any) -> Any:
    request = {"model": str(exported), "messages": messages, "max_tokens": TOKENS, "temperature": 0}
    return client.chat.completions.create(**request, **more)


def test_its_answers_are_those_of_minimind_chat(
    client: Any, tuned: Path, exported: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["chat", "--checkpoint", str(tuned), "--temperature", "0"]
    words += ["--max_new_tokens", str(TOKENS), "--once"]
    for word in CAPITALS:
        question = f"what is {word}?"
        assert minimind([*words, question]) == 0
        answer = capsys.readouterr().out.removesuffix("\n")
        assert " is " in answer
        messages = [{"role": "user", "content": question}]
        whole = asked(client, exported, messages)
        assert whole.choices[0].message.content == answer
        assert whole.choices[0].finish_reason == "stop"  # it ends its turn
        chunks = [
            chunk.choices[0].delta.content
            for chunk in asked(client, exported, messages, stream=True)
        ]
        assert len([chunk for chunk in chunks if chunk]) > 1
        assert "".join(chunk or "" for chunk in chunks) == answer


def test_the_prompt_is_the_conversation_in_the_ids_of_training(
    client: Any, tuned: Path, exported: Path
):
    model, tokenizer, path = load_model(str(tuned), None)
    template, sampling = template_of(tokenizer, None, path), Sampling(TOKENS, 0.0, 1.0, 0)
    chat = Chat(model, tokenizer, template, sampling, system="be kind")
    for question in ("what is sky?", "what is wind?"):
        answer = chat.ask(question)
        before = chat.messages[:-1]
        turns = [{"role": one.role, "content": one.content} for one in before]
        found = asked(client, exported, turns)
        assert found.choices[0].message.content == answer
        assert found.usage.prompt_tokens == len(template.prompt(before))
