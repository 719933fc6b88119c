"""The flags of `minimind data filter` as steps of datatrove, which importing this needs.

A task reads a unit of the text. Duplicates are found over all tasks: a stage writes its documents
to a folder, other stages find the duplicates, and a later one reads the folder and drops them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.io import DataFolder
from datatrove.pipeline import filters
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.decont import NGramsDecontConfig, NGramsDecontFilter
from datatrove.pipeline.dedup import exact_dedup, minhash
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.writers.disk_base import DiskWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import ngrams, simplify_text
from datatrove.utils.word_tokenizers import WhitespaceTokenizer
from fsspec.implementations.local import LocalFileSystem

from minimind.data.prepare.encode import documents_of, refuse
from minimind.data.prepare.work_units import Plan, Unit
from minimind.data.quality.models import PREFIX, language_detector
from minimind.data.quality.records import InRecord, field_of, record_around, with_records, with_text
from minimind.data.quality.request import FilterRequest
from minimind.data.text.documents import ReadOptions, Rejection
from minimind.runtime import disk
from minimind.runtime.durable_files import canonical_json

# The rule sets, in the order of FineWeb's pipeline.
RULES: dict[str, tuple[Callable[..., BaseFilter], ...]] = {
    "gopher": (filters.GopherRepetitionFilter, filters.GopherQualityFilter),
    "c4": (filters.C4QualityFilter,),
    "fineweb": (filters.FineWebQualityFilter,),
}
HASHES = HashConfig(hash_fc="sha1")  # datatrove's xxhash64 fails with xxhash 4
READ_LINES = 2**10  # signatures that are read at once
CJK = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # each character is a word
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")
WORD_OR_MARK = re.compile(rf"{WORD.pattern}|[^\w\s]")


@dataclass(frozen=True)
class Stage:
    """Steps that run for each of so many tasks, once the stage before is complete."""

    steps: list[Any]
    tasks: int
    logging_dir: DataFolder


def stages(
    request: FilterRequest, plan: Plan, decontamination: Decontamination | None, draft: Path
) -> list[Stage]:
    """The stages that write the documents that stay to `draft`, and lists of the others."""
    given, units, scratch = request.steps, plan.units, draft / "scratch"
    found: list[Stage] = []
    lists = 0

    def removed(reason: str, is_rules: bool = False) -> Lines:
        nonlocal lists
        lists += 1
        return Lines(scratch / "removed", f"${{rank}}-{lists:02d}", _listed(reason, is_rules))

    def add(name: str, steps: list[Any], tasks: int) -> None:
        found.append(Stage(steps, tasks, folder_of(scratch / f"{len(found)}_{name}")))

    steps: list[Any] = [Text(plan, request.reading, request.skips_bad, removed("rejected"))]
    if (least := given.min_chars) is not None:
        steps.append(filters.LambdaFilter(lambda doc: len(doc.text) >= least, removed("min_chars")))
    if (most := given.max_chars) is not None:
        steps.append(filters.LambdaFilter(lambda doc: len(doc.text) <= most, removed("max_chars")))
    if given.languages:
        probability = given.min_language_probability or 0.0
        steps.append(Languages(given.languages, probability, removed("languages")))
    words = "en" if given.rules_words == "spacy" else plain_words(WORD_OR_MARK)
    for rule in given.rules:
        for build in RULES[rule]:
            steps.append(build(exclusion_writer=removed(rule, is_rules=True), language=words))
    if given.classifier:
        labels = given.classifier_keep, given.classifier_remove
        steps.append(Classifier(given.classifier, *labels, removed("classifier")))
    if decontamination:
        decontamination.exclusion_writer = removed("decontaminate")
        steps.append(decontamination)

    if given.exact_dedup:
        passed, signatures, repeated = (
            folder_of(scratch / name) for name in ("exact_passed", "exact_signatures", "repeated")
        )
        # The document of the earliest task has the highest priority, in a task the first one.
        config = exact_dedup.ExactDedupConfig(
            lambda doc: " ".join(doc.text.split()),
            lambda doc: 2**16 - 1 - doc.metadata["task"],
            HASHES,
        )
        sign = exact_dedup.ExactDedupSignature(signatures, config)
        find = exact_dedup.ExactFindDedups(signatures, repeated, config, lines_to_buffer=READ_LINES)
        add("filters", [*steps, _passed(passed), sign], len(units))
        add("exact", [find], 1)
        drop = exact_dedup.ExactDedupFilter(repeated, config, removed("exact_duplicate"))
        steps = [Documents(passed), drop]
    if given.minhash:
        passed, signatures, pairs, clusters = (
            folder_of(scratch / name)
            for name in ("near_passed", "near_signatures", "pairs", "clusters")
        )
        buckets = given.minhash["buckets"]
        config = minhash.MinhashConfig(
            given.minhash["ngrams"], buckets, given.minhash["hashes"], hash_config=HASHES
        )
        reading: dict[str, Any] = {"config": config, "lines_to_buffer": READ_LINES}
        sign = Signature(signatures, config, plain_words(WORD))
        add("filters", [*steps, _passed(passed), sign], len(units))
        add("buckets", [minhash.MinhashDedupBuckets(signatures, pairs, **reading)], buckets)
        join = minhash.MinhashDedupCluster(pairs, clusters, save_cluster_id=True, **reading)
        add("clusters", [join], 1)
        drop = minhash.MinhashDedupFilter(
            clusters, removed("near_duplicate"), load_cluster_ids=True
        )
        steps = [Documents(passed), drop]
    kept = _kept(field_of(request.reading), "c4" in given.rules)
    add("filters", [*steps, Lines(draft, "part-${rank}.jsonl", kept, "zstd")], len(units))
    return found


class Folder(DataFolder):
    """A local folder. datatrove would read brackets in its name as a pattern."""

    def glob(self, path: str, **named: Any) -> Any:
        """The details of the files that match, by their names in the folder."""
        files = (file.relative_to(self.path) for file in disk.files_below(self.path))
        pattern = path.removeprefix("**/")
        return {str(file): {"type": "file"} for file in files if file.match(pattern)}


def folder_of(path: Path) -> DataFolder:
    """The folder for datatrove, which else takes some names for URLs."""
    return Folder(str(path), LocalFileSystem())


class Lines(DiskWriter):
    """Writes a line for each document: what the adapter returns for this writer and a document."""

    type, name = "💽 - WRITER", "lines"

    def __init__(
        self,
        folder: Path | DataFolder,
        filename: str,
        adapter: Callable[[DiskWriter, Document], bytes],
        compression: str | None = None,
    ) -> None:
        folder = folder_of(folder) if isinstance(folder, Path) else folder
        super().__init__(folder, filename, compression, adapter, mode="wb")

    def _write(self, document: Any, file_handler: Any, filename: str) -> None:
        file_handler.write(document + b"\n")


def _kept(field: str, may_be_cut: bool) -> Callable[[DiskWriter, Document], bytes]:
    """The record of a document, of which only --rules c4 changes the text."""

    def line(writer: DiskWriter, document: Document) -> bytes:
        record, size = document.metadata["record"], document.metadata["bytes"]
        if may_be_cut:
            left = len(document.text.encode())
            record = with_text(record, field, document.text)
            if record is not document.metadata["record"]:
                writer.stat_update("cut")
                writer.stat_update("cut_bytes", value=size - left)
            size = left
        writer.stat_update("text_bytes", value=size)
        return record.encode()

    return line


def _listed(reason: str, is_rules: bool) -> Callable[[DiskWriter, Document], bytes]:
    """The file, line and reason of a document, and what else the filter has found."""

    def line(writer: DiskWriter, document: Document) -> bytes:
        entry = {**document.metadata, "reason": reason}
        detail = str(entry.pop("filter_reason", ""))
        if is_rules:
            entry["reason"] = f"{reason}.{detail.removeprefix(f'{reason}_')}"
        for name in ("record", "task", "duplicate_count"):
            entry.pop(name, None)
        return canonical_json(entry)

    return line


def _passed(folder: DataFolder) -> Lines:
    """The writer of what `Documents` reads."""

    def line(writer: DiskWriter, document: Document) -> bytes:
        fields = {"id": "", "text": document.text, "metadata": document.metadata}
        return json.dumps(fields, ensure_ascii=False).encode()

    return Lines(folder, "${rank}.jsonl", line, "zstd")


class Documents(PipelineStep):
    """Reads what the task of the same number has passed."""

    type, name = "📖 - READER", "documents"

    def __init__(self, folder: DataFolder) -> None:
        super().__init__()
        self.folder = folder

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        """Yield the documents; a task that has passed none has no file."""
        name = f"{rank:05d}.jsonl.zst"
        if disk.exists(Path(self.folder.path) / name):
            with self.folder.open(name, "r", compression="zstd", encoding="utf-8") as file:
                for line in file:
                    yield Document(**json.loads(line))


class Text(PipelineStep):
    """Reads a unit of the text; bad documents are listed, or the first one is an error."""

    type, name = "📖 - READER", "text"

    def __init__(self, plan: Plan, reading: ReadOptions, skips_bad: bool, rejected: Lines) -> None:
        super().__init__()
        self.plan, self.reading = plan, reading
        self.numbers = {given.path: number for number, given in enumerate(plan.inputs)}
        self.skips_bad, self.rejected = skips_bad, rejected

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        """Yield the documents of the unit `rank`; raise DataError for a file that changes."""
        unit = self.plan.units[rank]
        self._require_unchanged(unit)
        reading = with_records(self.reading)
        field = field_of(reading)
        lines: Counter[str] = Counter()  # of a file that is cut into segments
        with self.rejected:
            reject = partial(self._reject, rank)
            for text, _, place in documents_of(unit.segments, reading, reject, lines):
                has_record = isinstance(text, InRecord)
                metadata = {
                    "file": self.numbers[str(place.path)],
                    "line": place.line,
                    "task": rank,
                    "bytes": len(text.encode()),
                    "record": text.record if has_record else record_around(text, field),
                }
                self.stat_update("text_bytes", value=metadata["bytes"])
                yield Document(str(text), "", metadata=metadata)
            for path, count in lines.items():
                self.stat_update(f"lines {self.numbers[path]}", value=count)
            for path, remark in reading.remarks:
                self._list(rank, path, 0, {"remark": remark})
        self._require_unchanged(unit)

    def _require_unchanged(self, unit: Unit) -> None:
        for given in self.plan.inputs_of(unit):
            given.require_unchanged()

    def _reject(self, rank: int, rejection: Rejection) -> None:
        if not self.skips_bad:
            refuse(rejection)
        lost = {"documents": rejection.documents, "bytes": rejection.bytes}
        self._list(rank, rejection.path, rejection.line, {"what": rejection.what, **lost})

    def _list(self, rank: int, path: Path, line: int, found: dict[str, Any]) -> None:
        metadata = {"file": self.numbers[str(path)], "line": line, **found}
        self.rejected.write(Document("", "", metadata=metadata), rank)


FIRST_CHARS = 2000  # characters of a text that are read for its language


class Languages(BaseFilter):
    """Removes texts whose most probable language is another, or less probable than `least`.

    datatrove's own filter downloads a model, and keeps a text by any language above a threshold.
    """

    name = "languages"

    def __init__(self, languages: Sequence[str], least: float, removed: Lines) -> None:
        super().__init__(removed)
        self.languages, self.least = languages, least

    def filter(self, doc: Document) -> bool:
        line = " ".join(doc.text[:FIRST_CHARS].split())
        found = language_detector().detect(line)
        language, score = (found[0]["lang"], round(found[0]["score"], 4)) if found else ("", 0.0)
        if language in self.languages and score >= self.least:
            return True
        doc.metadata |= {"language": language, "probability": score}
        return False


@cache
def _classifier_model(path: str) -> Any:
    import fasttext

    return fasttext.load_model(path)


class Classifier(filters.FastTextClassifierFilter):
    """datatrove's filter with the module of fasttext-predict, not that of another distribution."""

    def __new__(cls, *given: Any, **named: Any) -> Classifier:
        return object.__new__(cls)  # that of PipelineStep asks for the other distribution

    def __init__(
        self, path: str, keep: dict[str, float], remove: dict[str, float], removed: Lines
    ) -> None:
        super().__init__(path, [*keep.items()], [*remove.items()], exclusion_writer=removed)
        self.labels = [*keep, *remove]

    @property
    def model(self) -> Any:
        return _classifier_model(self.model_url)

    def filter(self, doc: Document) -> bool:
        before = dict(doc.metadata)
        stays = super().filter(doc)
        scores = {name: round(doc.metadata.get(PREFIX + name, 0.0), 4) for name in self.labels}
        doc.metadata = before if stays else {**before, "scores": scores}
        return stays


class PlainWords(WhitespaceTokenizer):
    """Words by an expression, and sentences by datatrove's own."""

    def __init__(self, word: re.Pattern[str]) -> None:
        super().__init__()
        self.word = word

    def word_tokenize(self, text: str) -> list[str]:
        return self.word.findall(text)


def plain_words(word: re.Pattern[str]) -> Any:
    """A tokenizer of words, which datatrove takes in place of the name of a language."""
    return PlainWords(word)


class Decontamination(NGramsDecontFilter):
    """datatrove's filter of n-grams, which names the files that they are of."""

    def __init__(self, index: Path, names: Sequence[str]) -> None:
        config = NGramsDecontConfig(hash_config=HASHES)
        super().__init__(folder_of(index), config, language=plain_words(WORD_OR_MARK))
        self.names = names

    def write_index(self, number: int, texts: Iterator[str]) -> bool:
        """Write the n-grams of the texts of a file; return whether there are some.

        datatrove's own indexer does the same, and needs lighteval.
        """
        hash_of: Any = self.hash_func
        hashes = {
            hash_of(" ".join(ngram))
            for text in texts
            for ngram in ngrams(
                self.tokenizer.word_tokenize(simplify_text(text, self.config.norm_config)),
                self.config.n_grams,
            )
        }
        with self.index_folder.open(f"{number}.index.hashes", "wb") as file:
            file.write(np.fromiter(hashes, "<u8").tobytes())
        return bool(hashes)

    def filter(self, doc: Document) -> Any:
        result = super().filter(doc)
        if result is not True:
            ngram, number = (doc.metadata.pop(f"contaminated_{name}") for name in ("ngram", "task"))
            doc.metadata |= {"ngram": ngram, "of": self.names[int(number)]}
        return result


BLOCK_SHINGLES = 2**12  # hashed at once, or a long document would need a kilobyte a word


class Signature(minhash.MinhashDedupSignature):
    """datatrove's hashes in bounded memory."""

    def get_signature(self, shingles: np.ndarray) -> list[list[int]]:
        starts = range(0, len(shingles), BLOCK_SHINGLES)
        blocks = (shingles[start : start + BLOCK_SHINGLES] for start in starts)
        least = [super(Signature, self).get_signature(block) for block in blocks]
        return np.min(least, axis=0).tolist()
