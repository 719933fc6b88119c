"""Prepared folders mixed at train time: a folder in the cache whose shards are links to theirs.

It is read as one that `minimind prepare --source` wrote. Other weights give other links, and no
text is tokenized again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minimind.config.run_config import RunConfig
from minimind.data.prepare.merge import tokens_fingerprint
from minimind.data.prepare.prepare import REMEDY, build_once
from minimind.data.prepare.prepared import CONVERSATIONS, missing_of
from minimind.data.prepare.work_units import Input, Options, Plan, Unit, read_described
from minimind.data.shards.block_sums import read_sums
from minimind.data.shards.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    PLAN_NAME,
    SPLITS,
    SUMS_NAME,
    TOKENIZER_NAME,
    index_name,
    read_manifest,
    require_untouched,
    require_whole,
    seal,
)
from minimind.data.text.inputs import Source, join_sources, name_of, parse_source
from minimind.errors import UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import canonical_json, fingerprint, sha256_of, write_whole
from minimind.runtime.urls import is_url, named


def sources_of(run: RunConfig) -> tuple[Source, ...]:
    """The prepared folders of --source and of the file of --stages; raise UsageError for a mistake.

    Without one in either, the text is that of --data_path.
    """
    sources = [parse_source(text) for text in run.source or ()]
    if run.stages:
        from minimind.config.stages import read_stages

        of_file = read_stages(run.stages).sources
        sources += [
            Source(name_of(name, f"--stages {run.stages}"), (path,))
            for name, path in of_file.items()
        ]
        if sources and run.is_explicit("data_path"):
            raise UsageError(
                f"--stages {run.stages}: has sources, and data_path = {' '.join(run.data_path)}"
                f" ({run.sources['data_path']}) names other text; drop one of them"
            )
    names = [source.name for source in sources]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"source {twice} is given twice; give each source one folder")
    return join_sources(sources)


def mixed_folder(sources: Sequence[Source], cache_dir: Path) -> Path:
    """Return the folder of links to the shards of `sources`, one prepared folder each.

    Raise as `parts_of`, and DataError for a shard that is missing, cut or changed.
    """
    parts = parts_of(sources)
    for part in parts:  # also of a mixture in the cache, whose links lead to these files
        require_whole(part.folder, (shard for split in SPLITS for shard in part.shards(split)))
    names = [[*part.key(), part.manifest["sha256"]] for part in parts]
    directory = cache_dir / f"mixed-{fingerprint([FORMAT_VERSION, names])}"

    def build(draft: Path) -> None:
        for part in parts:
            require_untouched(part.folder, part.manifest)
        _write(draft, parts)

    build_once(directory, build, REMEDY)
    return directory


def parts_of(sources: Sequence[Source]) -> list[Part]:
    """The folders of some sources; of a folder of several the source of the same name.

    Raise UsageError for another folder, for folders that were prepared with other options, and for
    one text that is two sources.
    """
    parts = [Part.of(source) for source in sources]
    seen: dict[tuple[Path, int], str] = {}
    for part in parts:
        _require_alike(parts[0], part)
        name = seen.setdefault((part.folder, part.number), part.source.name)
        if name != part.source.name:
            raise UsageError(
                f"source {part.source.name}: {part.folder} is the text of source {name}, too; drop"
                " one of the two"
            )
    return parts


def described_text(run: RunConfig) -> dict[str, Any] | None:
    """Vocabulary, shards and sources of the run's text as a manifest has them; opens no shard.

    None if the text is raw, or a part of it is at a URL or not here.
    """
    if sources := sources_of(run):
        paths = [path for source in sources for path in source.paths]
        if any(is_url(path) or not disk.exists(Path(path).expanduser()) for path in paths):
            return None
        parts = parts_of(sources)
        splits = {
            split: {
                "shards": [
                    {**shard, "source": number}
                    for number, part in enumerate(parts)
                    for shard in part.shards(split)
                ]
            }
            for split in SPLITS
        }
        described = {**parts[0].manifest, "splits": splits, "sources": _entries(parts)}
        return {**described, "fingerprint": tokens_fingerprint(described)}
    folder = Path(run.data_path[0]).expanduser()
    return read_manifest(folder) if not missing_of(folder) else None


@dataclass(frozen=True)
class Part:
    """A prepared folder, and the number in it of the source that is read."""

    source: Source
    folder: Path
    manifest: dict[str, Any]
    number: int

    @classmethod
    def of(cls, source: Source) -> Part:
        (path,) = source.paths
        folder = disk.resolve(Path(path).expanduser())
        where = f"source {source.name}: {named(path)}"
        if missing := missing_of(folder):
            raise UsageError(
                f"{where} is no folder of `minimind prepare` (it has no {missing[0]}); prepare the"
                " text, and give that folder"
            )
        manifest = read_manifest(folder)
        if CONVERSATIONS in manifest["options"]:
            raise UsageError(f"{where} holds conversations; give folders of text")
        names = [one["name"] for one in manifest["sources"]]
        if len(names) > 1 and source.name not in names:
            raise UsageError(
                f"{where} holds the sources {', '.join(names)}; name one of those, as in"
                f" {names[0]}={named(path)}"
            )
        return cls(source, folder, manifest, names.index(source.name) if len(names) > 1 else 0)

    def key(self) -> list[Any]:
        return [self.source.name, self.source.weight, str(self.folder), self.number]

    def shards(self, split: str) -> list[dict[str, Any]]:
        every = self.manifest["splits"][split]["shards"]
        return [shard for shard in every if shard["source"] == self.number]

    def text_bytes(self, split: str) -> int:
        """Bytes of text of a split; 0 in early folders of several sources."""
        is_alone = len(self.manifest["sources"]) == 1
        whole = self.manifest["splits"][split]["text_bytes"] if is_alone else 0
        return self.entry.get("split_bytes", {}).get(split, whole)

    @property
    def entry(self) -> dict[str, Any]:
        """The entry of the source in its manifest."""
        return self.manifest["sources"][self.number]


def _require_alike(first: Part, other: Part) -> None:
    """Raise UsageError if two folders were prepared with another tokenizer or other options."""
    names = first.source.name, other.source.name
    if first.manifest["tokenizer"] != other.manifest["tokenizer"]:
        raise UsageError(
            f"source {names[1]}: {other.folder} has another tokenizer than {first.folder} of source"
            f" {names[0]}; prepare it again with --tokenizer {first.folder / TOKENIZER_NAME}"
        )
    ours, theirs = first.manifest["options"], other.manifest["options"]
    for option in ours:
        if ours[option] != theirs.get(option):
            raise UsageError(
                f"source {names[1]}: {other.folder} was prepared with {option} ="
                f" {theirs.get(option)}, and {first.folder} of source {names[0]} with"
                f" {ours[option]}; prepare one of them again with the --{option} of the other"
            )


def _entries(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [
        {**part.entry, "name": part.source.name, "weight": part.source.weight} for part in parts
    ]


def _write(draft: Path, parts: Sequence[Part]) -> None:
    """Write plan, tokenizer, links and manifest of a mixture."""
    units: list[Unit] = []
    inputs: list[Input] = []
    held_out: list[str] = []
    shards: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    sums: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    for number, part in enumerate(parts):
        plan = Plan.from_json(read_described(part.folder))
        inputs += [replace(one, source=number) for one in plan.inputs if one.source == part.number]
        held_out += plan.held_out
        own = [unit for unit in plan.units if unit.source == part.number]
        of_part = read_sums(part.folder, part.manifest)
        numbers = {unit.number: at for at, unit in enumerate(own, len(units))}
        units += [replace(unit, number=numbers[unit.number], source=number) for unit in own]
        for split in SPLITS:
            for shard in part.shards(split):
                unit = numbers[int(Path(shard["name"]).stem.removeprefix(f"{split}-"))]
                link = {**shard, "name": f"{split}-{unit:05d}.bin", "source": number}
                for of in (index_name, lambda one: one["name"]):
                    (draft / of(link)).symlink_to(disk.resolve(part.folder / of(shard)))
                shards[split].append(link)
                sums[split] += [of_part[shard["name"]].tobytes()] if of_part else []
    first = parts[0].manifest
    sources, options = tuple(part.source for part in parts), Options(**first["options"])
    plan = Plan(sources, tuple(inputs), options, tuple(units), tuple(held_out))
    write_whole(draft / PLAN_NAME, canonical_json(plan.to_json()))
    (draft / TOKENIZER_NAME).mkdir()
    files = [name for name in first["files"] if name.startswith(f"{TOKENIZER_NAME}/")]
    for name in files:
        write_whole(draft / name, (parts[0].folder / name).read_bytes())
    if all(SUMS_NAME in part.manifest["files"] for part in parts):
        files.append(SUMS_NAME)
        write_whole(draft / SUMS_NAME, b"".join(one for split in SPLITS for one in sums[split]))
    manifest = {
        **{key: first[key] for key in ("format_version", "tokenizer", "vocab_size", "eos_id")},
        **{key: first[key] for key in ("dtype", "options")},
        "documents": sum(one["documents"] for own in shards.values() for one in own),
        "splits": {
            split: {
                **{key: sum(one[key] for one in own) for key in ("tokens", "documents")},
                "text_bytes": sum(part.text_bytes(split) for part in parts),
                "shards": own,
            }
            for split, own in shards.items()
        },
        "sources": _entries(parts),
        "rejected": {"count": 0, "listed": 0, "bytes": 0, "first": ""},  # each part has its own
        "files": {name: sha256_of(draft / name) for name in sorted([PLAN_NAME, *files])},
    }
    manifest["fingerprint"] = tokens_fingerprint(manifest)
    write_whole(draft / MANIFEST_NAME, canonical_json(seal(manifest)))
