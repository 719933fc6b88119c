"""A training run that is killed as soon as it has logged a step.

python -m tests.distributed.kill_at_step STEP FLAGS
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from minimind.launch.train_pretrain import run
from minimind.report.run_logger import RunLogger

if __name__ == "__main__":
    at, log = int(sys.argv[1]), RunLogger.event

    def log_and_die(self: RunLogger, name: str, **fields: Any) -> None:
        """Log an event; of the step, the last."""
        log(self, name, **fields)
        if name == "step" and fields["step"] == at:
            os.kill(os.getpid(), signal.SIGKILL)

    RunLogger.event = log_and_die
    run(sys.argv[2:])
