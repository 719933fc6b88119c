"""Rule sets by name: filters of datatrove with its thresholds, which are those for English."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from minimind.data.quality.near_duplicates import WORD, require_datatrove
from minimind.errors import UsageError
from minimind.runtime.installed import install_extra

RULES = ("gopher", "c4", "fineweb")
WORD_OR_MARK = re.compile(rf"{WORD.pattern}|[^\w\s]")


def require_rules(names: Sequence[str], words: str) -> None:
    """Raise UsageError if a name is no rule set, or a package is missing."""
    if unknown := [name for name in names if name not in RULES]:
        raise UsageError(f"--rules: {unknown[0]!r} is none of {', '.join(RULES)}; correct it")
    require_datatrove("--rules")
    if words == "spacy":
        try:
            import spacy  # pyright: ignore[reportMissingImports] # noqa: F401 (optional)
        except ModuleNotFoundError as error:
            raise UsageError(
                "--rules needs spacy for the words of English, which is not installed;"
                f" {install_extra('quality')}, or give --rules_words plain"
            ) from error


def filters_of(names: Sequence[str], words: str) -> list[tuple[str, Any]]:
    """The filters in order, each with the name of its rule set."""
    from datatrove.pipeline import filters

    classes = {
        # in the order of FineWeb's pipeline
        "gopher": (filters.GopherRepetitionFilter, filters.GopherQualityFilter),
        "c4": (filters.C4QualityFilter,),
        "fineweb": (filters.FineWebQualityFilter,),
    }
    language = "en" if words == "spacy" else plain_words()
    return [(name, one(language=language)) for name in names for one in classes[name]]


def plain_words() -> Any:
    """Words and punctuation marks by an expression, and sentences by datatrove's own."""
    from datatrove.utils.word_tokenizers import WhitespaceTokenizer

    class Words(WhitespaceTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return WORD_OR_MARK.findall(text)

    return Words()
