#!/usr/bin/env python
"""The name of the training script in tutorials; here it is train_pretrain.py."""

import os
import sys

from minimind.errors import UsageError
from minimind.runtime.process import write_torchrun_error
from minimind.runtime.terminal import one_line

if __name__ == "__main__":
    message = "this script is called train_pretrain.py here; start that, with the same flags"
    line = one_line("train_pretrain_accelerate.py", UsageError(message))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr)
    write_torchrun_error(line)
    sys.exit(UsageError.status)
