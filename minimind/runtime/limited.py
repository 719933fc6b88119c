"""Do what a stranger's file asks for in a process with limits of time and memory.

What a library does cannot be stopped within a process: C code ends when it ends, and signals wait
for it. `LimitedServer` starts a process that loads what requests need, and forks for them. As a
program, `limited.py FILE FD` calls the function `load` of a module that is loaded by its path. It
imports no more than it needs, so that it starts at once.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from threading import Lock
from typing import Any

PATIENCE = 60  # seconds, on a host that gives the process hardly any time
LOOK = 0.02  # seconds between looks at the memory of a process that has no limit
OUT_OF_MEMORY = 3  # exit status


def _resident(pid: int) -> int:
    """Bytes of a process that are in memory; 0 if it has ended."""
    import psutil  # needed on macOS only

    with suppress(psutil.Error):
        return psutil.Process(pid).memory_info().rss
    return 0


class Exceeded(Exception):
    """A request takes more time or memory than it may."""


class LimitedServer:
    """A process that has loaded what requests need, and forks workers that answer them.

    `file` is a module with a function `load(given)`, which returns a value and a function that
    answers a request, bytes to bytes; RuntimeError is raised for what they raise. `given` and the
    value, which is `loaded`, are JSON. Exceeded is raised where loading takes more than `seconds`
    of the processor, or `most_bytes` of memory.
    """

    def __init__(self, file: str, given: Any, seconds: float, most_bytes: int) -> None:
        self._command = [sys.executable, "-P", __file__, file]
        self._start = {"path": sys.path, "given": given, "seconds": seconds, "bytes": most_bytes}
        self._lock, self._is_closed = Lock(), False
        self.loaded = self._load()

    def _load(self) -> Any:
        self._control, theirs = socket.socketpair()
        # Libraries start no threads, which a fork would not have.
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **alone, "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,  # a signal to this program's group is for this program
            )
        try:
            _send(self._control, json.dumps(self._start).encode())
            answer = _answer(self._control, self._process.pid, self._start["bytes"])
            return json.loads(answer[1:])
        except BaseException:  # Ctrl-C, too: the process, in its own session, would go on
            self._end()
            raise

    def worker(self, nice: int = 0) -> Worker:
        """A new process that answers one request at a time; `nice` lowers its priority."""
        with self._lock:
            for is_again in (False, True):
                with suppress(OSError):
                    self._control.sendall(bytes([nice]))
                    pid, files, _, _ = socket.recv_fds(self._control, 8, 1)
                    if files:
                        return Worker(socket.socket(fileno=files[0]), *struct.unpack("!q", pid))
                if not (is_again or self._is_closed):  # something has killed it
                    self._end()
                    self._load()
        raise RuntimeError(f"{self._command} ends at once")

    def close(self) -> None:
        """End it and its workers."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _end(self) -> None:
        self._control.close()
        with suppress(ProcessLookupError, PermissionError):  # macOS: all have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Worker:
    """A fork of a `LimitedServer`."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection, self._pid = connection, pid
        self.is_spent = False  # it answers no more

    def ask(self, request: bytes, seconds: float, most_bytes: int) -> bytes:
        """The answer to a request.

        Raise Exceeded where it takes more than `seconds` of the processor or `most_bytes` of
        memory, and BrokenPipeError where the worker has ended before: nothing was begun.
        """
        try:
            _send(self._connection, struct.pack("!dQ", seconds, most_bytes) + request)
            answer = _answer(self._connection, self._pid, most_bytes)
        except BaseException:  # Ctrl-C, too: what is not read now would answer the next request
            self.is_spent = True
            raise
        self.is_spent = answer[:1] == LAST
        return answer[1:]

    def close(self) -> None:
        """Let it end, once it has answered what it was asked."""
        self._connection.close()


ANSWERED, LAST, FAILED = b"a", b"l", b"f"  # the first byte of an answer


def _is_watched() -> bool:
    """Whether memory is looked at from outside.

    macOS refuses a limit below the addresses that a process has from the start, hundreds of GiB.
    """
    return sys.platform == "darwin"


def _answer(connection: socket.socket, pid: int, most_bytes: int) -> bytes:
    """What a process sends; raise Exceeded where it ends instead, RuntimeError for its error."""
    connection.settimeout(LOOK if _is_watched() else None)
    while True:
        try:
            connection.recv(1, socket.MSG_PEEK)
            break
        except TimeoutError:
            if _resident(pid) > most_bytes:
                os.kill(pid, signal.SIGKILL)
        except ConnectionResetError:
            break
    connection.settimeout(None)
    answer = None
    with suppress(ConnectionResetError):
        answer = _receive(connection)
    if answer is None:
        raise Exceeded
    if answer[:1] == FAILED:
        raise RuntimeError(answer[1:].decode())
    return answer


def _send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(struct.pack("!Q", len(content)))
    connection.sendall(content)


def _receive(connection: socket.socket) -> bytes | None:
    """The next content; None where the other side has ended."""
    head = _received(connection, 8)
    return None if head is None else _received(connection, *struct.unpack("!Q", head))


def _received(connection: socket.socket, size: int) -> bytes | None:
    content = bytearray()
    while len(content) < size:
        part = connection.recv(min(size - len(content), 2**20))
        if not part:
            return None
        content += part
    return bytes(content)


def _limit(seconds: float, most_bytes: int) -> None:
    """Limit the time of the processor, that of a busy host, and memory in addition to its own."""
    if not _is_watched():
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = _addresses() + most_bytes
        if hard != resource.RLIM_INFINITY:  # a lower limit of the host stays: none can raise it
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)


def _addresses() -> int:
    """Bytes of addresses that this process has; 0 where they are not limited."""
    if _is_watched():
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _computed(compute: Callable[[], bytes]) -> bytes:
    """What is answered; the process ends where memory is missing, as it does at a limit."""
    try:
        return ANSWERED + compute()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception:  # whatever it is, who asks raises it
        import traceback

        return FAILED + traceback.format_exc().encode()
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)


def _serve(file: str, control: socket.socket) -> None:
    """Load, and fork a worker for each byte that comes, which is its niceness."""
    start = json.loads(_receive(control) or b"{}")
    sys.path[:] = start["path"]
    answer: Callable[[bytes], bytes] = bytes

    def load() -> bytes:
        nonlocal answer
        module = _module(file)
        _limit(start["seconds"], start["bytes"])
        value, answer = module.load(start["given"])
        return json.dumps(value).encode()

    _send(control, _computed(load))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers are not waited for
    gc.freeze()  # memory that is shared until somebody writes it
    while nice := control.recv(1):
        ours, theirs = socket.socketpair()
        if not (pid := os.fork()):
            try:
                control.close()
                theirs.close()
                os.nice(nice[0])
                _work(answer, ours)
            except ConnectionError:  # who asked has ended
                pass
            except BaseException as error:  # SystemExit, too: a fork ends here
                sys.excepthook(type(error), error, error.__traceback__)
            finally:  # it is no copy of this loop
                os._exit(0)
        ours.close()
        with theirs:
            socket.send_fds(control, [struct.pack("!q", pid)], [theirs.fileno()])


def _work(compute: Callable[[bytes], bytes], connection: socket.socket) -> None:
    """Answer requests, until there are no more, or until too much memory is left from them."""
    begun = _addresses()
    while request := _receive(connection):
        seconds, most_bytes = struct.unpack("!dQ", request[:16])
        _limit(seconds, most_bytes)
        answer = _computed(partial(compute, request[16:]))
        if answer[:1] == ANSWERED and _addresses() - begun > most_bytes // 4:
            answer = LAST + answer[1:]
        _send(connection, answer)


def _module(file: str) -> Any:
    spec = spec_from_file_location("limited", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
