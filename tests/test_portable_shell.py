"""The launch scripts and the Makefile keep to what a Mac has: bash 3.2, BSD tools, no /proc."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

FILES = ("run_accelerate.sh", "Makefile")
ABSENT = {  # from macOS, by a pattern of its use
    "bash 4 and newer": r"\b(mapfile|readarray|coproc)\b|\b(declare|local|typeset) -[a-zA-Z]*[Anlu]"
    r"|\$\{\w+(\[[^]]*\])?(,,?|\^\^?|@[A-Z])|&>>|\|&|\bwait -[a-zA-Z]*n|\[\[ (! )?-[vR] |%\(|;;?&"
    r"|\$\{\w+\[-\d|\bEPOCHSECONDS\b|\bBASHPID\b|\bglobstar\b|\{\d+\.\.\d+\.\.\d+\}",
    # Unset under `set -u` there, if the array is empty.
    "an empty array": r'(?<!\+)"\$\{\w+\[[@*]\]\}"',
    "options of GNU tools": r"\bsed [^|]*(-[a-zA-Z]*[ir]\b|/[^/|]*\\[tn][^/|]*/)|\bgrep -[a-zA-Z]*P"
    r"|\bdate -[a-zA-Z]*[dI]|\bdate [^|]*%N|\breadlink -[fem]|\bstat -c|\bxargs -[a-zA-Z]*[rd]\b"
    r"|\bmktemp [^|;)]*(-p|--)|\b(head|tail) -n? ?-\d|\bcp [^|]*--|\bsort -[a-zA-Z]*V",
    "tools": r"(^|[\s;(|])(nproc|tac|timeout|setsid|realpath|flock|numfmt|shuf|sha256sum)\b",
    "files": r"/proc/|/sys/|/dev/shm",
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ABSENT)
def test_what_a_mac_has_not_is_not_used(name: str, kind: str):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    code = [line for line in lines if not line.lstrip().startswith("#")]
    assert [line for line in code if re.search(ABSENT[kind], line)] == []


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("bash 4 and newer", 'echo "${name,,}"'),
        ("bash 4 and newer", "mapfile -t lines <file"),
        ("bash 4 and newer", "declare -A table"),
        ("bash 4 and newer", "local -n table=$1"),
        ("bash 4 and newer", "wait -n"),
        ("an empty array", 'start "$@" "${flags[@]}"'),
        ("options of GNU tools", r"sed 's/:.*##/\t/'"),
        ("options of GNU tools", "sed -i s/a/b/ file"),
        ("options of GNU tools", "readlink -f file"),
        ("options of GNU tools", "date +%s.%N"),
        ("tools", "cores=$(nproc)"),
        ("files", "read -r _ </proc/self/stat"),
    ],
)
def test_each_kind_is_found(kind: str, line: str):
    assert re.search(ABSENT[kind], line)
