"""Try what a stranger's file asks for in a process with limits of time and memory.

What a library does cannot be stopped within a process: C code ends when it ends, and signals wait
for it. As a program, `limited.py FILE` runs the function `main` of a module that is loaded by its
path; neither imports more than it needs, so that it starts at once.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

PATIENCE = 60  # seconds, on a host that gives the process hardly any time
LOOK = 0.02  # seconds between looks at the memory of a process that has no limit
OUT_OF_MEMORY = 3  # exit status


def tried_within(file: str, request: Any, seconds: float, most_bytes: int) -> str | None:
    """The text that `main(request)` of a module returns, empty for none.

    None if it does not end within some seconds of the processor, and memory. `main` catches what it
    calls may raise: an error of a limited process is not reported.
    """
    command = [sys.executable, "-P", __file__, file]
    # macOS refuses a limit below the addresses that a process has from the start, hundreds of GiB.
    is_watched = sys.platform == "darwin"
    given = {"request": request, "seconds": seconds, "bytes": None if is_watched else most_bytes}
    deadline = time.monotonic() + PATIENCE
    content: bytes | None = json.dumps(given).encode()
    pipe = subprocess.PIPE
    # In a session of its own, as a signal to this program's group is for this program.
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    ) as process:
        while True:
            try:
                output, errors = process.communicate(content, LOOK if is_watched else PATIENCE)
                break
            except subprocess.TimeoutExpired:
                content = None  # it has been given
                if time.monotonic() > deadline or _resident(process.pid) > most_bytes:
                    process.kill()
            except BaseException:  # Ctrl-C, too: the process, in its own session, would go on
                process.kill()
                raise
    if process.returncode < 0 or process.returncode == OUT_OF_MEMORY:
        return None
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}: {errors.decode()}")
    return output.decode()


def _resident(pid: int) -> int:
    """Bytes of a process that are in memory; 0 if it has ended."""
    import psutil  # needed on macOS only

    with suppress(psutil.Error):
        return psutil.Process(pid).memory_info().rss
    return 0


def _main() -> None:
    spec = spec_from_file_location("limited", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    given = json.load(sys.stdin)
    for limit, value in ((resource.RLIMIT_AS, given["bytes"]), (resource.RLIMIT_CORE, 0)):
        if value is not None:
            resource.setrlimit(limit, (value, value))
    signal.setitimer(signal.ITIMER_PROF, given["seconds"])  # CPU time
    try:
        sys.stdout.write(module.main(given["request"]) or "")
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    _main()
