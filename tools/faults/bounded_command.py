"""`minimind` with little more memory than it has: `python -m tools.faults.bounded_command ...`."""

import resource
import sys
from pathlib import Path

from minimind.cli.main import main

ROOM = 2 * 2**30  # address space beyond what the process has

if __name__ == "__main__":
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.exit(main(sys.argv[1:]))
