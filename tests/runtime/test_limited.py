"""A process with limits, also where the system refuses one of its memory."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from minimind.runtime import limited
from minimind.runtime.heartbeat import is_alive
from minimind.runtime.limited import Exceeded, LimitedServer

GIB = 2**30


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no limit of addresses")
def test_a_lower_limit_of_the_host_stays(served: str):
    """`ulimit -v`: a process cannot raise it, and what fits in it is done."""
    text = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
from minimind.runtime.limited import Exceeded, LimitedServer
server = LimitedServer(sys.argv[1], "large", 10, 2**33)
worker = server.worker()
worker.ask(b"again", 10, 2**33)
server.close()
try:
    LimitedServer(sys.argv[1], "larger", 10, 2**33)
except Exceeded:
    sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", text, served], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 3, done.stderr


SERVED = """
import time
held = []
def load(given):
    while given == "for ever":
        pass
    sizes = {"large": 2**29, "larger": 3 * 2**30}
    held.append(bytearray(b"1") * sizes.get(str(given), 0))
    return {"given": given}, answer
def answer(request):
    word, _, more = request.partition(b" ")
    if word == b"for ever":
        while True:
            pass
    while word == b"spin":
        sum(range(1000))
    if word == b"take":
        held.append(bytearray(b"1") * int(more))
    if word == b"fail":
        raise ValueError("of a test")
    return request
"""
TAKEN = 2**24


@pytest.fixture
def served(tmp_path: Path) -> str:
    path = tmp_path / "served.py"
    path.write_text(SERVED)
    return str(path)


@pytest.fixture
def server(served: str) -> Iterator[LimitedServer]:
    with closing(LimitedServer(served, ["a"], 10, GIB)) as found:
        yield found


def test_a_worker_answers_until_it_exceeds_a_limit(server: LimitedServer):
    assert server.loaded == {"given": ["a"]}
    large = os.urandom(3 * 2**20)
    with closing(server.worker(nice=5)) as worker:
        for request in (b"", b"a", large):
            assert worker.ask(request, 10, GIB) == request
        with pytest.raises(RuntimeError, match="ValueError: of a test"):
            worker.ask(b"fail", 10, GIB)
    for request in (b"spin", b"take %d" % GIB):
        with closing(server.worker()) as worker:
            with pytest.raises(Exceeded):
                worker.ask(request, 0.05, GIB // 4)
            assert worker.is_spent
        with closing(server.worker()) as worker:
            assert worker.ask(b"next", 10, GIB) == b"next"


def test_a_worker_that_keeps_memory_is_spent(server: LimitedServer):
    asked = 0
    with closing(server.worker()) as worker:
        while not worker.is_spent:
            assert worker.ask(b"take %d" % TAKEN, 10, 4 * TAKEN).startswith(b"take")
            asked += 1
    assert 1 <= asked <= 3


def test_what_something_else_has_killed_is_started_again(server: LimitedServer):
    with closing(server.worker()) as worker:
        os.kill(worker._pid, signal.SIGKILL)
        gone(worker._pid)
        with pytest.raises(ConnectionError):
            worker.ask(b"a", 10, GIB)
    server._process.kill()
    server._process.wait()
    with closing(server.worker()) as worker:
        assert worker.ask(b"a", 10, GIB) == b"a"


def gone(pid: int) -> None:
    """Wait for the end of a process."""
    end = time.monotonic() + 30
    while is_alive(pid):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("is_closed", [True, False])
def test_nothing_goes_on_without_its_program(served: str, is_closed: bool):
    """Also where the program is killed: its sockets are then closed, and nothing else."""
    server = LimitedServer(served, 1, 10, GIB)
    worker = server.worker()
    assert worker.ask(b"a", 10, GIB) == b"a"
    if is_closed:
        server.close()
        gone(worker._pid)
        worker.close()
    else:
        server._control.close()
        worker.close()
        assert server._process.wait(30) == 0
        gone(worker._pid)


@pytest.mark.parametrize(("given", "seconds"), [("for ever", 0.2), ("large", 10)])
def test_what_cannot_be_loaded_within_limits(served: str, given: str, seconds: float):
    with pytest.raises(Exceeded):
        LimitedServer(served, given, seconds, GIB // 4)


def test_a_module_that_cannot_be_imported_is_an_error(tmp_path: Path):
    (tmp_path / "bad.py").write_text("import nothing_of_this_name")
    with pytest.raises(RuntimeError, match="nothing_of_this_name"):
        LimitedServer(str(tmp_path / "bad.py"), 1, 10, GIB)


def test_memory_is_watched_where_it_has_no_limit(served: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limited, "_is_watched", lambda: True)
    with closing(LimitedServer(served, 1, 10, GIB)) as server:
        with closing(server.worker()) as worker:
            assert worker.ask(b"a", 10, GIB) == b"a"
            os.kill(worker._pid, signal.SIGSTOP)
            with pytest.raises(Exceeded):  # more than a byte
                worker.ask(b"a", 10, 1)
