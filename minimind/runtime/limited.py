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
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

PATIENCE = 60  # seconds, on a host that gives the process hardly any time
OUT_OF_MEMORY = 3  # exit status


def tried_within(file: str, request: Any, seconds: float, most_bytes: int) -> str | None:
    """The text that `main(request)` of a module returns, empty for none.

    None if it does not end within some seconds of the processor, and memory. `main` catches what it
    calls may raise: an error of a limited process is not reported.
    """
    command = [sys.executable, "-P", __file__, file]
    given = {"request": request, "seconds": seconds, "bytes": most_bytes}
    try:
        ended = subprocess.run(
            command,
            input=json.dumps(given).encode(),
            capture_output=True,
            timeout=PATIENCE,
            start_new_session=True,  # a signal to this program's group is for this program
        )
    except subprocess.TimeoutExpired:
        return None
    if ended.returncode < 0 or ended.returncode == OUT_OF_MEMORY:
        return None
    if ended.returncode:
        raise RuntimeError(f"{command} ended with {ended.returncode}: {ended.stderr.decode()}")
    return ended.stdout.decode()


def _main() -> None:
    spec = spec_from_file_location("limited", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    given = json.load(sys.stdin)
    for limit, value in ((resource.RLIMIT_AS, given["bytes"]), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value))
    signal.setitimer(signal.ITIMER_PROF, given["seconds"])  # CPU time
    try:
        sys.stdout.write(module.main(given["request"]) or "")
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    _main()
