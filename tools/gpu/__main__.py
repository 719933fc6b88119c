"""Check what holds on a GPU within 20 minutes, on an Apple one within 10; a CPU tries the parts.

    python -m tools.gpu [--device cuda|mps|xpu|npu|cpu] [--out out/gpu] [--parts NAME ...]
        [--minutes 20]
    make gpu
    make gpu DEVICE=mps

Each part prints its table as it ends, and results.json and results.md in --out are written then. A
part that fails or is out of time stops no other. The exit status is 0 only if all passed, 2 for a
command that cannot be run here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts import check_environment

BESIDES = ("pytest",)  # what the parts need besides the package
DEVICES = ("cuda", "mps", "xpu", "npu", "cpu")
MINUTES = {**dict.fromkeys(DEVICES, 20.0), "mps": 10.0}


def main(argv: Sequence[str]) -> int:
    """Run the parts; return the exit status."""
    parser = argparse.ArgumentParser(
        "python -m tools.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--minutes", type=float, help="default: 20, with --device mps 10")
    given = parser.parse_args(argv)
    if sentence := check_environment.main([*BESIDES]):
        return refused(sentence)
    from minimind.runtime.device import device_kind
    from tools.gpu.parts import PARTS
    from tools.gpu.runner import Plan, run_parts

    unknown = [name for name in given.parts or () if name not in PARTS]
    if unknown:
        return refused(f"--parts {' '.join(unknown)}: the parts are {', '.join(PARTS)}")
    kind = device_kind(given.device)
    if not kind.is_available():
        return refused(
            f"--device {kind.name}: torch sees no such GPU here; --device cpu tries the command"
        )
    parts = {name: PARTS[name] for name in given.parts or PARTS}
    minutes = given.minutes if given.minutes is not None else MINUTES[kind.name]
    results = run_parts(Plan(parts, kind.name, given.out.resolve(), minutes, kind.count()))
    failed = [result.name for result in results if not result.has_passed]
    verdict = f"these do not hold: {', '.join(failed)}" if failed else "all hold"
    print(f"{verdict}; {given.out / 'results.md'}")
    return 1 if failed else 0


def refused(sentence: str) -> int:
    """Say why nothing is run."""
    print(f"python -m tools.gpu: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
