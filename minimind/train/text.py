"""The text of a run: what the user named, where it lies on this machine, and its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimind.config.loss_weights import loss_weights
from minimind.config.origin import Origin, Rank
from minimind.config.run_config import RunConfig
from minimind.config.template_variables import template_variables
from minimind.data.prepare.prepared import Part, Prepared, is_prepared, open_text
from minimind.data.shards.manifest import Options, require_document_ends
from minimind.data.tokenizer.load import load_tokenizer, longest_document
from minimind.errors import DataError, UsageError
from minimind.runtime.terminal import phase
from minimind.runtime.urls import is_url, masked

if TYPE_CHECKING:
    from minimind.data.text.inputs import Source

RAW_TEXT = "data"  # name of the source that raw text is


@dataclass(frozen=True)
class Text:
    """The text of a run.

    `names` are what the user named, without secrets. `paths` are the files and folders on this
    machine, of `parts` the first, and URLs of raw text, which is fetched when it is tokenized.
    """

    flag: str  # --data_path, --source, or --stages FILE:
    names: tuple[str, ...]
    paths: tuple[str, ...]
    folder: Path | None  # the prepared folder, or the first of several; None for raw text
    parts: tuple[Part, ...] = ()  # prepared folders that are mixed
    sources: tuple[Source, ...] = ()  # of raw text, with its paths

    def __str__(self) -> str:
        return f"{self.flag} {' '.join(self.names)}"


@phase("fetching the prepared folder")
def find_text(run: RunConfig, cleanup: ExitStack) -> Text:
    """Find the text of a run; a copy of a prepared folder at a URL is kept until `cleanup`.

    Raise UsageError if a prepared folder is not all of the text, is given with --val_path, or is
    to be fine-tuned on.
    """
    from minimind.data.text.inputs import Source

    sources: Sequence[Source] = ()
    parts: Sequence[Part] = ()
    if run.source or run.stages:
        from minimind.data.prepare.mixed import sources_of

        sources = sources_of(run)
    paths = [path for source in sources for path in source.paths] or [*run.data_path]
    if any(map(is_url, paths)):
        from minimind.data.prepare.remote import local_folder
        from minimind.runtime.object_cache import open_cache

        cache = cleanup.enter_context(open_cache(run.cache_dir, run.max_cache_gib))
        paths = [local_folder(path, cache) for path in paths]
    flag, names = "--data_path", [masked(path) for path in run.data_path]
    if sources:
        flag = "--source" if run.source else f"--stages {run.stages}:"
        weights = ("" if one.weight is None else f":{one.weight:g}" for one in sources)
        pairs = zip(sources, weights, strict=True)
        names = [f"{one.name}={masked(*one.paths)}{weight}" for one, weight in pairs]
        sources = [replace(one, paths=(path,)) for one, path in zip(sources, paths, strict=True)]
    if sources and run.task != "sft":
        from minimind.data.prepare.mixed import whole_parts_of

        parts = whole_parts_of(sources)
        paths = [str(parts[0].folder)]
    prepared = [number for number, path in enumerate(paths) if is_prepared(path)]
    if prepared and run.task == "sft":
        raise UsageError(
            f"{flag} {names[prepared[0]]} is prepared; give the files of conversations"
        )
    if sources and not prepared and run.val_path is not None:
        raise UsageError(
            f"val_path = {masked(run.val_path)} ({run.sources['val_path']}) is held-out text of one"
            " source, but here each source holds out --val_fraction of its own; remove it"
        )
    if not prepared:
        sources = sources or (Source(RAW_TEXT, tuple(paths)),)
        loss_weights(run.loss_weight or (), [source.name for source in sources])
        return Text(flag, tuple(names), tuple(paths), None, sources=tuple(sources))
    name = names[prepared[0]] if not sources else f"{flag} {' '.join(names)}"
    if len(paths) > 1:
        raise UsageError(
            f"--data_path: {name} has prepared shards and must be the only path; mix several texts"
            " with `minimind prepare --source`"
        )
    if run.val_path is not None:
        raise UsageError(
            f"val_path = {masked(run.val_path)} ({run.sources['val_path']}): {name} is prepared and"
            " has its own held-out text; remove val_path, or give it to `minimind prepare`"
        )
    folder = Path(paths[0]).expanduser()
    return Text(flag, tuple(names), tuple(paths), folder, tuple(parts))


@phase("reading the text")
def read_text(run: RunConfig, text: Text) -> Prepared:
    """Open a prepared folder, or prepare raw text in the cache.

    Raise DataError for a damaged file, as far as that shows without reading all tokens.
    """
    if text.parts:
        from minimind.data.prepare.mixed import open_parts

        prepared = open_parts(text.parts, run.tokenizer)
    elif text.folder:
        prepared = open_text(text.folder, run.tokenizer)
    else:
        prepared = _prepare(run, text)
    require_document_ends(prepared.directory, prepared.manifest)
    return prepared


def _prepare(run: RunConfig, text: Text) -> Prepared:
    from minimind.data.prepare.prepare import PrepareRequest, prepare_for_run

    is_explicit = run.is_explicit("max_document_bytes")
    max_bytes = run.max_document_bytes if is_explicit else longest_document(run.tokenizer)
    val_fraction = float(run.val_fraction) if run.val_path is None else 0.0
    conversations = {}
    if run.task == "sft":
        conversations = {
            "chat_template": load_tokenizer(run.tokenizer or "").chat_template,
            "train_on": run.in_force("train_on"),
            "template_date": run.template_date,
            "chat_template_kwargs": template_variables(run.chat_template_kwargs) or None,
        }
    options = Options(
        text_field=run.text_field,
        max_document_bytes=max_bytes,
        val_fraction=val_fraction,
        **conversations,
    )
    policy = (run.on_bad_data == "skip", run.max_bad_fraction, run.allow_lossy_tokenizer)
    with _fetched(run, text) as (sources, val_path):
        request = PrepareRequest(sources, run.tokenizer, run.vocab_size, options, *policy)
        request = replace(request, val_path=val_path)
        return prepare_for_run(request, Path(run.cache_dir).expanduser())


@contextmanager
def _fetched(run: RunConfig, text: Text) -> Iterator[tuple[tuple[Source, ...], tuple[str, ...]]]:
    """Sources of raw text and --val_path; what URLs name has a local copy inside the block."""
    from minimind.data.text.inputs import AUTO, VALIDATION, val_paths

    val_path = val_paths(run.val_path, text.paths)
    if not any(map(is_url, (*text.paths, *val_path))):
        yield text.sources, val_path
        return
    from minimind.data.prepare.remote import local_text
    from minimind.runtime.object_cache import open_cache

    with open_cache(run.cache_dir, run.max_cache_gib) as cache:
        elsewhere = (VALIDATION,) if run.val_path == AUTO else ()
        sources = [
            replace(one, paths=local_text(one.paths, cache, elsewhere)) for one in text.sources
        ]
        try:
            held_out = local_text(val_path, cache)
        except DataError as error:
            if run.val_path != AUTO:
                raise
            raise DataError(f"--val_path {AUTO}: {error}") from error
        yield tuple(sources), held_out


def with_text(run: RunConfig, text: Text, prepared: Prepared | None) -> RunConfig:
    """Return the run with the values that its text decides; raise UsageError if a flag differs.

    Without `prepared`, the text is raw and not read: a --tokenizer alone decides the vocabulary.
    """
    by = f"--tokenizer {run.tokenizer}" if run.tokenizer else str(text)
    if prepared is None:
        if run.tokenizer is None:
            return run
        vocab_size = load_tokenizer(run.tokenizer).vocab_size
        return with_derived_values(run, by, {"vocab_size": vocab_size})
    run = with_derived_values(run, by, {"vocab_size": prepared.tokenizer.vocab_size})
    options = Options(**prepared.manifest["options"]).to_json()
    if text.folder:
        return with_derived_values(run, str(text), options)
    run = with_derived_values(run, by, {"max_document_bytes": options["max_document_bytes"]})
    held_out = {"val_fraction": 0.0} if run.val_path is not None else {}
    return with_derived_values(run, f"--val_path {masked(run.val_path or '')}", held_out)


def with_derived_values(
    run: RunConfig, by: str, values: Mapping[str, Any], above: Rank = Rank.PRESET
) -> RunConfig:
    """Return the run with values derived from `by`.

    Raise UsageError if one that ranks above `above` differs.
    """
    for name, value in values.items():
        current, source = getattr(run, name), run.sources[name]
        if current == value:
            continue
        if source.rank > above:
            raise UsageError(
                f"{name} = {current} ({source}), but {by} has {value}; remove one of them"
            )
        run = run.with_values(Origin(by, Rank.DATA), **{name: value})
    return run
