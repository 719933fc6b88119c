"""`python -m minimind`, as where no `minimind` is on the path."""

import sys

from minimind.cli.main import main

sys.exit(main())
