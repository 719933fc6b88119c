"""The processes that encode beside the first one: what they get from it, and what they do not."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from minimind.data.crew import _started


def test_a_helper_does_not_hear_of_ctrl_c_and_the_first_process_does():
    code = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with _started([sys.executable, "-c", code], []) as process:
        assert process.communicate()[0] == "True\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_helper_keeps_the_locks_of_a_first_process_that_is_killed(tmp_path: Path):
    path = tmp_path / "lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT)
    code = f"import os; print(os.path.samestat(os.fstat({lock}), os.stat({str(path)!r})))"
    with _started([sys.executable, "-c", code], [lock]) as process:
        assert process.communicate()[0] == "True\n"
    os.close(lock)
