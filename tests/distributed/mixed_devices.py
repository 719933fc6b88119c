"""Worker of test_agreement.py: a run in which only the device of rank 0 has bf16 instructions."""

from __future__ import annotations

import os
from unittest.mock import patch

from minimind.launch.train_pretrain import run
from minimind.runtime.device import Host

if __name__ == "__main__":
    with patch.object(Host, "has_bf16", os.environ["RANK"] == "0"):
        run()
