"""Text and prepared folders by URL: local files of the cache, complete and verified."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from glob import has_magic
from pathlib import Path
from typing import Any

from minimind.data.prepare.prepared import is_prepared
from minimind.data.shards.manifest import MANIFEST_NAME, PLAN_NAME, index_name, read_manifest
from minimind.data.text.inputs import (
    KNOWN,
    PARTS,
    by_part,
    find_files,
    is_text_name,
    left_out,
    of_names,
    part_of,
    require_once,
    with_names,
)
from minimind.data.text.tables import TRAIN
from minimind.errors import DataError
from minimind.runtime import disk
from minimind.runtime.download import RemoteObject, etag_of, modified_of
from minimind.runtime.durable_files import canonical_json, fingerprint, storing, write_whole
from minimind.runtime.environment import rank_of
from minimind.runtime.filesystem import WEB, NoAnswer, open_filesystem, retrying, scheme_of
from minimind.runtime.hub import DATASET, Repository, fetch, repository
from minimind.runtime.object_cache import FOR_READING, REMEDY, ObjectCache, naming_urls
from minimind.runtime.urls import is_url, masked, require_path


def local_text(
    paths: Sequence[str], cache: ObjectCache, elsewhere: Collection[str] = ()
) -> tuple[str, ...]:
    """`paths` with the local files of each URL (an object, a prefix or a glob) in its place.

    Files come in the order of a local directory with the same names. Parts of data sets that are
    left out are printed, but for those that are read `elsewhere`.
    """
    files: list[str] = []
    for path in paths:
        if found := repository(path, DATASET):
            files += map(str, _text_on_the_hub(found, elsewhere))
        elif is_url(path):
            files += map(str, _fetched_text(path, cache))
        else:
            require_path(path)
            files.append(path)
    return tuple(files)


def local_folder(path: str, cache: ObjectCache) -> str:
    """The local copy of a prepared folder; `path` itself if it is not the URL of one.

    Each version has its own copy: a folder that is rewritten leaves that of a run as it is.
    """
    if not is_url(path):
        require_path(path)
        return path
    # Brackets may be of a name.
    if "*" in path or "?" in path or scheme_of(path) is WEB or repository(path, DATASET):
        return path
    filesystem, root = open_filesystem(path)
    url, root = path.rstrip("/"), root.rstrip("/")
    newest = cache.path(url) / MANIFEST_NAME
    try:
        manifest = _manifest_object(filesystem, f"{url}/{MANIFEST_NAME}", root)
        if manifest is None:
            return path
        cache.fetch(filesystem, [manifest], url)
    except NoAnswer as error:
        if has_magic(path):
            return path
        return str(_without_network(error, _known_folder(newest, url, cache))[0])
    folder, version = _version_folder(newest, url, cache)
    with naming_urls(cache.folder):
        objects = _objects(url, root, read_manifest(folder))
    cache.fetch(filesystem, objects, url, version)
    return str(folder)


def _version_folder(manifest: Path, url: str, cache: ObjectCache) -> tuple[Path, str]:
    """The folder of the version that a manifest describes, with the manifest in it."""
    content = manifest.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    remote = RemoteObject(f"{url}/{MANIFEST_NAME}", "", len(content), sha256=sha256)
    return cache.put(remote, content, sha256[:16]).parent, sha256[:16]


def local_data(paths: Sequence[str], cache: ObjectCache) -> dict[str, tuple[str, ...]]:
    """The local folder or files of each path; raise UsageError for a file that is there twice.

    Paths are named without their queries; a number tells those apart that have one name then.
    """
    given = [local_text([local_folder(path, cache)], cache) for path in paths]
    files: list[Path] = []
    for path in (path for group in given for path in group):
        files += [Path(path).expanduser()] if is_prepared(path) else find_files([path])
    require_once(files, "")
    names = [*map(masked, paths)]
    before = [names[:number].count(name) for number, name in enumerate(names)]
    unique = (f"{name} ({n + 1})" if n else name for name, n in zip(names, before, strict=True))
    return dict(zip(unique, given, strict=True))


def _manifest_object(filesystem: Any, url: str, root: str) -> RemoteObject | None:
    """The manifest of a prepared folder as it is now; None if there is none."""
    path = f"{root}/{MANIFEST_NAME}"

    def look() -> dict[str, Any] | None:
        try:
            return filesystem.info(path)
        except (FileNotFoundError, NotADirectoryError):  # the latter below a local file
            return None

    info = retrying(url, look)
    return None if info is None or info["type"] != "file" else _object(url, info)


def _objects(url: str, root: str, manifest: dict[str, Any]) -> list[RemoteObject]:
    """Every file that a manifest names, with its sha256."""
    sizes: dict[str, tuple[int | None, str]] = {
        name: (None, sha256) for name, sha256 in manifest["files"].items()
    }
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            sizes[shard["name"]] = shard["bytes"], shard["sha256"]
            sizes[index_name(shard)] = 8 * shard["documents"], shard["index_sha256"]
    return [
        # An early time: a shard newer than its manifest would be hashed at every start.
        RemoteObject(f"{url}/{name}", f"{root}/{name}", size, modified=0.0, sha256=sha256)
        for name, (size, sha256) in sizes.items()
    ]


def _known_folder(newest: Path, url: str, cache: ObjectCache) -> list[Path]:
    """The copy of the newest known version of a prepared folder; empty unless it is complete."""
    if not disk.is_file(newest):
        return []
    folder, version = _version_folder(newest, url, cache)
    try:
        objects = _objects(url, "", read_manifest(folder))
    except DataError:
        return []
    return [] if cache.known(objects, url, version) is None else [folder]


def _fetched_text(url: str, cache: ObjectCache) -> list[Path]:
    filesystem, root = open_filesystem(url)
    listing = cache.folder / f"listing-{fingerprint(url)}.json"
    try:
        objects = retrying(url, lambda: _list_text(filesystem, url, root))
    except NoAnswer as error:
        return _without_network(error, _known_text(listing, url, cache))
    if not objects:
        raise DataError(f"{masked(url)}: matches no {KNOWN} object; correct the URL{of_names(url)}")
    files = cache.fetch(filesystem, objects, url)
    content = [[o.url, o.size, o.etag] for o in objects] if scheme_of(url) is not WEB else []
    with storing(str(listing), REMEDY):
        _record_listing(listing, content)
    return files


def _record_listing(listing: Path, content: list[Any]) -> None:
    """Write what a URL lists, which is needed only without network: not in a cache for reading."""
    try:
        if not disk.exists(listing) or json.loads(listing.read_bytes()) != content:
            write_whole(listing, canonical_json(content))
        else:
            listing.touch()
    except OSError as error:
        if error.errno not in FOR_READING:
            raise


def _list_text(filesystem: Any, url: str, place: str) -> list[RemoteObject]:
    """The text of a URL in the order in which a local directory is read."""
    root = url[: len(url) - len(place)] if url.endswith(place) else f"{url.split('://')[0]}://"
    if scheme_of(url) is WEB:
        return [_object(url, filesystem.info(place))]
    with suppress(FileNotFoundError):
        info = filesystem.info(place)
        if info["type"] == "file":
            return [_object(root + info["name"], info)]
        found = filesystem.find(place, detail=True)
        if f"{place.rstrip('/')}/{PLAN_NAME}" in found:
            raise DataError(
                f"{masked(url)}: is a folder of `minimind prepare` (perhaps unfinished), not text;"
                " name the text, or give a finished folder alone as --data_path of a run"
            )
        texts = {one.url[len(url) :].strip("/"): one for one in _texts(root, found, place)}
        return [texts[name] for name in _to_train_on(masked(url), [*texts])]
    if not has_magic(place):
        raise FileNotFoundError(place)
    matching: list[RemoteObject] = []
    try:
        matches = filesystem.glob(place, detail=True)
        if not matches:
            matches = filesystem.glob(with_names(place, filesystem.isdir), detail=True)
    except ValueError as error:
        raise DataError(f"{masked(url)}: is not a pattern ({error}); correct it") from error
    folders = {name.rpartition("/")[0] for name, info in matches.items() if info["type"] == "file"}
    ours = {folder for folder in folders if filesystem.exists(f"{folder}/{PLAN_NAME}")}
    for name, info in sorted(matches.items()):
        above, is_file = name.rpartition("/")[0], info["type"] == "file"
        found = {name: info} if is_file else filesystem.find(name, detail=True)
        if not (is_file and above in ours):
            matching += _texts(root, found, above)
    return list(dict.fromkeys(matching))  # "**" gives a folder and what is in it


def _text_on_the_hub(wanted: Repository, elsewhere: Collection[str]) -> list[Path]:
    """The local files of a data set: of a path in it, of one part (`train`, ...), or both.

    Without a part they are those to train on, as of a local folder.
    """
    above, _, last = wanted.inside.rpartition("/")

    def choose(names: Sequence[str]) -> list[str]:
        texts = sorted(filter(_is_text, names), key=lambda name: name.split("/"))
        inside = _below(texts, wanted.inside)
        if inside or last not in PARTS:
            found = _to_train_on(str(wanted), inside, elsewhere)
            _print_folders(wanted, found)
            return found
        inside = _below(texts, above)
        if last == TRAIN:
            return _to_train_on("", inside, PARTS)
        return [name for name in inside if part_of(name) == last]

    what = f"text in {wanted.inside}" if wanted.inside else "text"
    folder, names = fetch(wanted, choose, what, DataError)
    return [folder / name for name in names]


def _print_folders(wanted: Repository, names: Sequence[str]) -> None:
    """Say which folders are read if they are several, which may be alternatives of one text."""
    start = len(wanted.inside) + 1 if wanted.inside else 0
    tops = {name[start:].partition("/")[0] for name in names if "/" in name[start:]}
    if len(tops) > 1 and rank_of(os.environ) == 0:
        some = f"{wanted}/{min(tops)}"
        print(
            f"note   {wanted}: {', '.join(sorted(tops))} are read; to read only one, give {some}",
            file=sys.stderr,
        )


def _to_train_on(place: str, names: Sequence[str], elsewhere: Collection[str] = ()) -> list[str]:
    """Return the files to train on; print other parts, unless they are read `elsewhere`."""
    parts = by_part(names)
    others = parts.keys() - {TRAIN, "", *elsewhere}
    if others and rank_of(os.environ) == 0:
        print(f"note   {left_out(place, others)}", file=sys.stderr)
    return [names[number] for number in parts.get(TRAIN) or parts.get("", [])]


def _below(names: Sequence[str], place: str) -> list[str]:
    """The names that are `place` or in it."""
    return [name for name in names if not place or name == place or name.startswith(f"{place}/")]


def _is_text(name: str) -> bool:
    """Whether an object is text, and neither hidden nor in a hidden folder."""
    parts = [part for part in name.split("/") if part]
    return is_text_name(parts[-1]) and not any(part[0] == "." for part in parts)


def _texts(root: str, found: dict[str, Any], below: str) -> list[RemoteObject]:
    """The objects that are text, not hidden and in no prepared folder, sorted by their parts."""
    ours = tuple(name.removesuffix(PLAN_NAME) for name in found if name.endswith(f"/{PLAN_NAME}"))

    def is_text(name: str) -> bool:
        return _is_text(name[len(below) :]) and not name.startswith(ours)

    names = sorted(filter(is_text, found), key=lambda name: name.split("/"))
    return [_object(root + name, found[name]) for name in names]


def _object(url: str, info: dict[str, Any]) -> RemoteObject:
    return RemoteObject(url, info["name"], info["size"], etag_of(info), modified_of(info))


def _known_text(listing: Path, url: str, cache: ObjectCache) -> list[Path]:
    """The files of the last listing; empty unless all are verified."""
    try:
        objects = [
            RemoteObject(url, "", size, etag)
            for url, size, etag in json.loads(listing.read_bytes())
        ]
    except (OSError, ValueError):
        return []
    return cache.known(objects, url) or []


def _without_network(error: NoAnswer, known: list[Path]) -> list[Path]:
    """What the cache has, with a line that says so; raise `error` if it has nothing."""
    if not known:
        raise error
    reason = str(error).split("; ")[0]
    print(f"{reason}; using the copy in the cache, {known[0].parent}", file=sys.stderr)
    return known
