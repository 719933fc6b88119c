#!/usr/bin/env python
"""The name that tutorials give the training script. It is train_pretrain.py here."""

import os
import sys

from minimind.errors import UsageError
from minimind.runtime.process import tell_torchrun
from minimind.runtime.terminal import one_line

if __name__ == "__main__":
    told = "this script is called train_pretrain.py here; start that, with the same flags"
    line = one_line("train_pretrain_accelerate.py", UsageError(told))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr)
    tell_torchrun(line)
    sys.exit(UsageError.status)
