"""Behind a socket: clients of OpenAI and lm-eval, cut connections, a full queue; the command."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from minimind.cli.main import main
from minimind.inference.engine import Batch
from minimind.inference.load_model import load_model
from minimind.serve import app
from minimind.serve.scheduler import Scheduler
from tests.cli.test_lm_eval import log_likelihoods, questions
from tests.conftest import ROOT
from tests.serve.conftest import POSITIONS, InProcess, until

ASKED: Any = [{"role": "user", "content": "ab"}]
LONG = {"messages": ASKED, "max_tokens": 900, "temperature": 1.5, "seed": 1}


def app_of(server: InProcess) -> Any:
    return server.app


@pytest.fixture
def client(server: InProcess, listening: Callable[[Any], int]) -> Any:
    openai = pytest.importorskip("openai")
    place = f"http://localhost:{listening(app_of(server.limited(api_key='k')))}/v1"
    with openai.OpenAI(base_url=place, api_key="k", max_retries=0) as found:
        yield found


def test_the_client_of_openai(server: InProcess, client: Any):
    import openai

    assert [one.id for one in client.models.list()] == ["tiny"]
    settings: dict[str, Any] = {"seed": 4, "max_tokens": 25, "temperature": 1}
    expected = server.chat("ab", **settings)["choices"][0]["message"]["content"]
    whole = client.chat.completions.create(model="tiny", messages=ASKED, **settings)
    assert whole.choices[0].message.content == expected
    stream = client.chat.completions.create(model="tiny", messages=ASKED, stream=True, **settings)
    deltas = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(deltas) == expected
    text = client.completions.create(model="tiny", prompt="ab", logprobs=2, **settings)
    assert len(text.choices[0].logprobs.tokens) == text.usage.completion_tokens
    with pytest.raises(openai.NotFoundError, match="ask for tiny"):
        client.chat.completions.create(model="other", messages=ASKED)
    with pytest.raises(openai.BadRequestError, match="has temperature"):
        client.chat.completions.create(model="tiny", messages=ASKED, temperature=-1)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


@pytest.mark.parametrize("ends", [False, True])
def test_lm_eval_finds_the_likelihoods_of_the_model(
    server: InProcess,
    chat_model: Path,
    listening: Callable[[Any], int],
    monkeypatch: pytest.MonkeyPatch,
    ends: bool,
):
    """Its client asks for one token more, and takes the last one off, also one that ends a text."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    draw = Batch._draw

    def draw_an_end(batch: Batch, logits: torch.Tensor) -> None:
        logits[:, [*batch.texts[0].ends]] = 99
        draw(batch, logits)

    if ends:
        monkeypatch.setattr(Batch, "_draw", draw_an_end)
    client_of: Any = LocalCompletionsAPI
    client = client_of(
        base_url=f"http://localhost:{listening(app_of(server))}/v1/completions",
        **{"model": "tiny", "tokenizer": str(chat_model), "tokenizer_backend": "huggingface"},
        **{"max_length": POSITIONS, "batch_size": 8, "num_concurrent": 2, "max_retries": 1},
    )
    asked = [
        Instance("loglikelihood", {}, (question["query"], choice), 0)
        for question in questions()[:5]
        for choice in question["choices"]
    ]
    found = [value for value, _ in client.loglikelihood(asked, disable_tqdm=True)]
    expected = [value for own in log_likelihoods(chat_model)[:5] for value in own]
    assert found == pytest.approx(expected, abs=1e-3)
    if ends:
        return
    prompt = server.served.tokenizer.encode("ab")
    with torch.no_grad():
        logits = load_model(None, str(chat_model))[0](input_ids=torch.tensor([prompt])).logits
    best = int(logits[0, -1, : server.served.tokenizer.vocab_size].argmax())
    pairs = [(("ab", ""), prompt, [token]) for token in (best, best - 1)]
    greedy = [is_best for _, is_best in client._loglikelihood_tokens(pairs, disable_tqdm=True)]
    assert greedy == [True, False]
    whole = server.complete("ab", temperature=0, max_tokens=12)["choices"][0]["text"]
    settings = {"until": [whole[5:7]], "max_gen_toks": 12}
    written = client.generate_until([Instance("generate_until", {}, ("ab", settings), 0)])
    assert written == [whole[: whole.index(whole[5:7])]]


def idle(server: InProcess) -> bool:
    return server.scheduler.counts == (0, 0)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes its time, and never ends a text by itself."""
    step, draw = Batch.step, Batch._draw

    def slow_step(batch: Batch) -> None:
        time.sleep(0.02)
        step(batch)

    def draw_no_end(batch: Batch, logits: torch.Tensor) -> None:
        logits[:, [*batch.texts[0].ends]] = -1e9
        draw(batch, logits)

    monkeypatch.setattr(Batch, "step", slow_step)
    monkeypatch.setattr(Batch, "_draw", draw_no_end)


def cut_off(port: int, body: Any, wait: Callable[[], None]) -> None:
    """Send a request, and close the connection once `wait` returns."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}"
    )
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + content)
        wait()


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_cut_off_stops_computing(
    server: InProcess, listening: Callable[[Any], int], stream: bool
):
    port = listening(app_of(server))
    for many in (1, 6):
        body = {**LONG, "stream": stream, "n": many}
        cut_off(port, body, lambda: until(lambda: server.scheduler.counts[0] > 0))
        until(lambda: idle(server), 5)
    half = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(half)
    assert httpx.get(f"http://localhost:{port}/health", timeout=60).status_code == 200


@pytest.mark.usefixtures("slow")
def test_a_full_queue_and_a_timeout(server: InProcess, listening: Callable[[Any], int]):
    scheduler = Scheduler(server.scheduler._model, 2, 3)
    small = replace(server, scheduler=scheduler)
    url, hasty = (
        f"http://localhost:{listening(app_of(small.limited(timeout=seconds)))}"
        for seconds in (60.0, 1.0)
    )
    with closing(scheduler), ThreadPoolExecutor(5) as pool:
        ask = {**LONG, "max_tokens": 60}
        waiting = []
        for count in ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3)):
            waiting.append(
                pool.submit(httpx.post, f"{url}/v1/chat/completions", json=ask, timeout=60)
            )
            until(lambda count=count: scheduler.counts == count)
        refused = httpx.post(f"{url}/v1/chat/completions", json=ask, timeout=60)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "queue_full"
        statuses = [one.result().status_code for one in waiting]
        assert statuses[:2] == [200, 200]
        post = partial(httpx.post, f"{hasty}/v1/chat/completions", timeout=60)
        late = pool.submit(post, json={**LONG, "stream": True})
        response = post(json=LONG)
        assert (response.status_code, "of --timeout" in response.text) == (503, True)
        last = late.result().text.strip().rpartition("\n\n")[2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        until(lambda: scheduler.counts == (0, 0))


@pytest.mark.usefixtures("slow")
def test_a_stream_that_nobody_reads_ends(server: InProcess, listening: Callable[[Any], int]):
    small = server.limited(timeout=1.0)
    port = listening(app_of(small))

    def wait() -> None:
        until(lambda: server.scheduler.counts[0] > 0)
        until(lambda: idle(server), 10)

    cut_off(port, {**LONG, "stream": True, "logprobs": True, "top_logprobs": 20}, wait)
    short = {"prompt": "a", "max_tokens": 2}
    assert httpx.post(f"http://localhost:{port}/v1/completions", json=short, timeout=60).is_success


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
HALF = HEAD + b"Content-Length: 99\r\n\r\n{"
NEVER_WHOLE = [
    HALF,
    HEAD + b"Content-Length: 99\r\nExpect: 100-continue\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    HEAD.replace(b"/v1/completions", b"/v1/chat/completions") + b"Content-Length: 99\r\n\r\n",
]


def status_of(connection: socket.socket) -> int:
    """The status of the next response; 0 where the connection ends without one."""
    with connection.makefile("rb") as lines:
        for line in lines:
            if line.startswith(b"HTTP/1.1 ") and b" 100 " not in line:
                return int(line.split()[1])
    return 0


def test_a_body_that_does_not_arrive(
    server: InProcess, listening: Callable[[Any], int], monkeypatch: pytest.MonkeyPatch
):
    """A byte now and then is not enough; the time of an answer does not hold for a body."""
    monkeypatch.setattr(app, "BODY_ENDS", 0.5)
    port = listening(app_of(server))
    with ExitStack() as stack:
        found = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            for _ in NEVER_WHOLE
        ]
        for connection, sent in zip(found, NEVER_WHOLE, strict=True):
            connection.sendall(sent)
        health = f"http://localhost:{port}/health"
        until(lambda: httpx.get(health, timeout=60).json()["arriving"] == len(found))
        for _ in range(4):
            time.sleep(0.05)
            found[0].sendall(b" ")
        assert [*map(status_of, found)] == [408] * len(found)
    assert httpx.get(health, timeout=60).json()["arriving"] == 0


def test_slow_bodies_shut_nobody_out(server: InProcess, listening: Callable[[Any], int]):
    """However much a client sends, there is a place for the next; its largest leave theirs."""
    few = server.limited(bodies=8, max_body=1000)
    large = HALF.replace(b"99", b"999") + b" " * 899
    port = listening(app_of(few))
    short = {"prompt": "a", "max_tokens": 2}
    url = f"http://localhost:{port}"
    with ExitStack() as stack:

        def opened(host: str, sent: bytes) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", port), 20, (host, 0))
            stack.enter_context(connection)
            connection.sendall(sent)
            return connection

        first = opened("127.0.0.2", HALF)
        until(lambda: httpx.get(f"{url}/health", timeout=60).json()["arriving"] == 1)
        slow = [opened("127.0.0.1", HALF) for _ in range(100)]
        until(lambda: httpx.get(f"{url}/health", timeout=60).json()["arriving"] == 101)
        slow += [opened("127.0.0.1", large) for _ in range(10)]
        until(lambda: httpx.get(f"{url}/health", timeout=60).json()["arriving"] == 109)
        assert [*map(status_of, slow[100:102])] == [408] * 2
        assert httpx.post(f"{url}/v1/completions", json=short, timeout=60).is_success
        body = json.dumps(short).encode()
        first.sendall(body[1:] + b" " * (99 - len(body)))
        assert status_of(first) == 200


def test_idle_connections_end_and_are_bounded(
    server: InProcess, listening: Callable[[Any], int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(app, "HEAD_ENDS", 0.5)
    monkeypatch.setattr(app, "MOST_CONNECTIONS", 4)
    port = listening(app_of(server))
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

    def connected(*sent: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", port), timeout=20)
        for part in sent:
            connection.sendall(part)
        return connection

    with ExitStack() as stack:
        idle, slow, half = (
            stack.enter_context(connected(*sent)) for sent in ([], [whole[:9]], [whole, whole[:9]])
        )
        while not half.recv(4096).endswith(b"}"):
            pass
        served = stack.enter_context(connected(whole))
        assert served.recv(4096).startswith(b"HTTP/1.1 200")
        more = stack.enter_context(connected(whole))  # for which the oldest ends
        assert more.recv(4096).startswith(b"HTTP/1.1 200")
        for connection in (idle, slow, half):
            assert ends(connection)
    assert httpx.get(f"http://localhost:{port}/health", timeout=60).is_success


def test_a_connection_is_kept_for_longer_than_clients_use_it(server: InProcess, client: Any):
    """Else a request, which is not sent twice, may meet the end of its connection."""
    kept = app.http_server(app_of(server)).config.timeout_keep_alive
    limits: Any = client._client._transport._pool  # of httpx, as OpenAI's client sets it
    assert kept >= 2 * limits._keepalive_expiry


def ends(connection: socket.socket) -> bool:
    """Whether nothing more comes."""
    with suppress(ConnectionResetError):
        return connection.recv(4096) == b""
    return True


@pytest.mark.parametrize("is_told", [True, False])
def test_a_huge_body_is_refused_while_it_is_sent(
    server: InProcess, listening: Callable[[Any], int], is_told: bool
):
    url = f"http://localhost:{listening(app_of(server))}/v1/completions"
    body = (b" " * 100_000 for _ in range(100))
    headers = {"Content-Length": "10000000"} if is_told else {}
    assert httpx.post(url, content=body, headers=headers, timeout=60).status_code == 413


COMMAND = [sys.executable, "-m", "minimind", "serve", "--device", "cpu"]


@pytest.mark.sample(1)
@pytest.mark.launch
@pytest.mark.parametrize(("number", "prefix"), [(signal.SIGTERM, ""), (signal.SIGINT, "hf:")])
def test_the_command_ends_on_a_signal(chat_model: Path, number: int, prefix: str):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    place = f"{prefix}{chat_model}"
    line = [*COMMAND, "--checkpoint", place, "--port", "0", "--api_key", "k"]
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, env=environment, cwd=ROOT, **options) as process:
        assert process.stdout is not None
        url, rest = process.stdout.readline().split(" ", 1)  # a terminal's link ends at the blank
        assert rest == f"serves {chat_model.name}; Ctrl-C ends it\n"
        body = {**LONG, "stream": True}
        right = {"Authorization": "Bearer k"}
        post = partial(httpx.stream, "POST", timeout=60)
        with post(f"{url}/v1/chat/completions", json=body, headers=right) as found:
            assert found.status_code == 200
            process.send_signal(number)
            *_, last = filter(None, found.iter_lines())
            assert last == "data: [DONE]" or "the server ends; ask later" in last
            assert process.wait(30) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_uvicorn_has_its_handlers_ends_the_command(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    serve, late = uvicorn.Server.run, []

    def signalled(server: uvicorn.Server, sockets: Any) -> None:
        signal.raise_signal(number)
        late.append(threading.Timer(20, setattr, (server, "should_exit", True)))
        late[0].start()
        serve(server, sockets)

    monkeypatch.setattr(uvicorn.Server, "run", signalled)
    try:
        words = ["serve", "--model", str(chat_model), "--device", "cpu", "--port", "0"]
        assert main(words) == 0
        assert late[0].is_alive()
    finally:
        late[0].cancel()
        for one, handler in before.items():
            signal.signal(one, handler)


def test_a_port_in_use_and_other_faults(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = ["serve", "--model", str(chat_model), "--device", "cpu"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main([*words, "--port", port]) == 9
    assert f"--port {port}: Address already in use; give another" in capsys.readouterr().err
    for more, text in (
        (["--host", "192.0.2.1"], "--host 192.0.2.1: Cannot assign requested address"),
        (["--host", "no such host"], "--host no such host: "),
    ):
        assert main([*words, *more]) == 2
        assert text in capsys.readouterr().err
    monkeypatch.setenv("MINIMIND_API_KEY", "")
    assert main(words) == 2
    assert "MINIMIND_API_KEY is empty" in capsys.readouterr().err
    monkeypatch.delenv("MINIMIND_API_KEY")
    for package in ("uvicorn", "starlette"):
        with monkeypatch.context() as missing:
            missing.setitem(sys.modules, package, None)
            assert main([*words, "--port", "0"]) == 2
        assert f"needs the package {package}, which is not" in capsys.readouterr().err
