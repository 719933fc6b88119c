"""The model's own modules as the files that a directory brings along for trust_remote_code=True.

They load where this package is not installed: whatever the decoder imports from this package comes
along, its imports made relative, and everything else has to be there with transformers.
"""

from __future__ import annotations

import re
from pathlib import Path

AUTO_MAP = {
    "AutoConfig": "configuration.MiniMindConfig",
    "AutoModelForCausalLM": "decoder.MiniMindForCausalLM",
}
"""What config.json says under "auto_map": which class of which file."""

_PACKAGE = Path(__file__).parents[1]
_OURS = re.compile(r"^([ \t]*)from minimind((?:\.\w+)*)\.(\w+) import ", re.MULTILINE)


def remote_code() -> dict[str, bytes]:
    """Content by file name, flat, in the order of the names.

    The files are read from where this package lies, so that what is exported is what ran.
    """
    found: dict[str, bytes] = {}
    waiting = [(".model", place.split(".")[0]) for place in AUTO_MAP.values()]
    while waiting:
        package, module = waiting.pop()
        if f"{module}.py" in found:
            continue
        folder = _PACKAGE.joinpath(*package.split("."))
        source = (folder / f"{module}.py").read_text(encoding="utf-8")
        found[f"{module}.py"] = _OURS.sub(r"\1from .\3 import ", source).encode()
        waiting += [(package, name) for _, package, name in _OURS.findall(source)]
    return dict(sorted(found.items()))
