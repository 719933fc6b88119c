"""How fast text becomes shards, against tokenizers that are handed it in memory.

    python -m benchmarks.preparation FILE.jsonl... [--rounds 5] [--vocab_size 6400] [--out JSON]

Every round times, one after another, with the same tokenizer and as many threads as there are
cores: `prepare`, from files to a folder that lasts; SentencePiece's own encode of the parsed texts;
`encode_batch_fast` of the library tokenizers, by 1,000 documents; and, on one thread, a call of
transformers' tokenizer for each document, which is the slowest way to call the same library. MB are
10^6 bytes of text.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import AutoTokenizer

from benchmarks.record import arguments, record
from minimind.data.prepare.dataset_folder import prepare_folder
from minimind.data.prepare.prepare import PrepareRequest
from minimind.data.text.documents import ReadOptions
from minimind.data.text.formats import read_segment, segments_of
from minimind.data.text.inputs import Source, find_files
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.sentencepiece import train_tokenizer
from minimind.runtime.environment import usable_cores

BATCH = 1000  # documents in a call of tokenizers


def seconds(work: Callable[[], Any]) -> float:
    """How long `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(
    files: list[Path], texts: list[str], model: Path, folder: Path, rounds: int
) -> dict[str, list[float]]:
    """Seconds by what was timed, one number a round."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model / "tokenizer.model"))
    hugging_face: Any = AutoTokenizer.from_pretrained(model)
    encode = hugging_face.backend_tokenizer.encode_batch_fast
    batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
    sources = (Source("data", tuple(map(str, files))),)
    request = PrepareRequest(sources, str(model), progress=False)
    rivals: dict[str, Callable[[], Any]] = {
        "SentencePiece": lambda: processor.encode(texts, num_threads=usable_cores()),
        "tokenizers, batches": lambda: [[one.ids for one in encode(part)] for part in batches],
        "transformers, a call per document": lambda: [hugging_face(t)["input_ids"] for t in texts],
    }
    found: dict[str, list[float]] = {"prepare": [], **{name: [] for name in rivals}}
    for number in range(rounds):
        out = folder / f"out-{number}"
        found["prepare"].append(seconds(lambda out=out: prepare_folder(request, out)))
        shutil.rmtree(out)
        for name, work in rivals.items():
            found[name].append(seconds(work))
    return found


def main() -> None:
    """Measure, print, and write the figures to --out."""
    parser = arguments(__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocab_size", type=int, default=6400)
    args = parser.parse_args()
    # tokenizers starts its threads with the first batch.
    os.environ |= {"RAYON_NUM_THREADS": str(usable_cores()), "TOKENIZERS_PARALLELISM": "true"}
    files = find_files(args.files)
    segments = [segment for file in files for segment in segments_of(file, 2**40)]
    read = (one for segment in segments for one in read_segment(segment, ReadOptions()))
    texts = [one[0] for one in read if isinstance(one, tuple)]
    size = sum(len(text.encode()) for text in texts)
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "tokenizer"
        model.mkdir()
        train_tokenizer(texts, args.vocab_size, model / "tokenizer.model")
        load_tokenizer(model).save(model)
        found = measure(files, texts, model, Path(name), args.rounds)
    print(
        f"{size / 1e6:.1f} MB in {len(texts):,} documents, {usable_cores()} cores,"
        f" load {load[0]:.1f}"
    )
    for name, times in found.items():
        rates = sorted(size / 1e6 / time for time in times)
        low, middle, high = rates[0], statistics.median(rates), rates[-1]
        print(f"  {name:<36}{low:>8.2f}{middle:>8.2f}{high:>8.2f}  MB/s (min, median, max)")
    ours = found["prepare"]
    ratios = {
        name: [theirs / mine for mine, theirs in zip(ours, times, strict=True)]
        for name, times in found.items()
        if times is not ours
    }
    for name, own in ratios.items():
        print(f"  prepare / {name}: {statistics.median(own):.2f} (median), {min(own):.2f} (min)")
    record(args.out, "preparation", load, bytes=size, seconds=found, ratios=ratios)


if __name__ == "__main__":
    main()
