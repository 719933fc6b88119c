"""Text and prepared folders by URL: local files of the cache, complete and verified."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from glob import has_magic
from pathlib import Path
from typing import Any

from minimind.data.loader.manifest import MANIFEST_NAME, index_name, read_manifest
from minimind.data.prepare.prepare import is_prepared
from minimind.data.text.inputs import KNOWN, SUFFIXES, find_files, require_once
from minimind.errors import DataError, StorageError
from minimind.runtime.durable_files import canonical_json, fingerprint, storing, write_whole
from minimind.storage.download import RemoteObject, etag_of
from minimind.storage.filesystem import WEB, is_url, masked, open_filesystem, retrying, scheme_of
from minimind.storage.object_cache import (
    MIRROR,
    REMEDY,
    fetch_all,
    is_verified,
    naming_urls,
    path_of,
)


def local_text(paths: Sequence[str], cache_dir: Path) -> tuple[str, ...]:
    """`paths` with the local files of each URL (an object, a prefix or a glob) in its place.

    The order is that of the same files in a local directory.
    """
    files: list[str] = []
    for path in paths:
        files += map(str, _fetched_text(path, cache_dir)) if is_url(path) else [path]
    return tuple(files)


def local_folder(path: str, cache_dir: Path) -> str:
    """The local copy of a prepared folder; `path` itself if it is not the URL of one."""
    if not is_url(path) or has_magic(path) or scheme_of(path) is WEB:
        return path
    url = path.rstrip("/")
    folder = path_of(url, cache_dir)
    filesystem, place = open_filesystem(url)
    try:
        manifest = _manifest_object(filesystem, f"{url}/{MANIFEST_NAME}", place)
        if manifest is None:
            return path
        fetch_all(filesystem, [manifest], cache_dir, url)
    except StorageError as error:
        return str(_without_network(error, [folder] if _is_complete(folder, url) else [])[0])
    with naming_urls():
        objects = _objects(url, place, read_manifest(folder))
    fetch_all(filesystem, objects, cache_dir, url)
    return str(folder)


def local_data(paths: Sequence[str], cache_dir: Path) -> dict[str, tuple[str, ...]]:
    """The local folder or files of each path; raise UsageError for a file that is there twice."""
    given = [local_text([local_folder(path, cache_dir)], cache_dir) for path in paths]
    files: list[Path] = []
    for path in (path for own in given for path in own):
        files += [Path(path).expanduser()] if is_prepared(path) else find_files([path])
    require_once(files, "")
    return dict(zip(paths, given, strict=True))


def _manifest_object(filesystem: Any, url: str, place: str) -> RemoteObject | None:
    """The manifest of a prepared folder as it is now; None if there is none."""
    path = f"{place}/{MANIFEST_NAME}"

    def look() -> dict[str, Any] | None:
        try:
            return filesystem.info(path)
        except FileNotFoundError:
            return None

    info = retrying(url, look)
    return None if info is None or info["type"] != "file" else _object(url, info)


def _objects(url: str, place: str, manifest: dict[str, Any]) -> list[RemoteObject]:
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
        RemoteObject(f"{url}/{name}", f"{place}/{name}", size, modified=0.0, sha256=sha256)
        for name, (size, sha256) in sizes.items()
    ]


def _is_complete(folder: Path, url: str) -> bool:
    """Whether every file of the local copy of a prepared folder is verified."""
    try:
        objects = _objects(url, "", read_manifest(folder))
    except DataError:
        return False
    return all(is_verified(one, folder / one.url[len(url) + 1 :]) for one in objects)


def _fetched_text(url: str, cache_dir: Path) -> list[Path]:
    filesystem, place = open_filesystem(url)
    listing = cache_dir.expanduser().absolute() / MIRROR / f"listing-{fingerprint(url)}.json"
    try:
        objects = retrying(url, lambda: _list_text(filesystem, url, place))
    except StorageError as error:
        return _without_network(error, _known(listing, cache_dir))
    if not objects:
        raise DataError(f"{masked(url)}: matches no {KNOWN} object; correct the URL")
    files = fetch_all(filesystem, objects, cache_dir, url)
    content = [[o.url, o.size, o.etag] for o in objects] if scheme_of(url) is not WEB else []
    with storing(str(listing), REMEDY):
        listing.parent.mkdir(parents=True, exist_ok=True)
        if not listing.exists() or json.loads(listing.read_bytes()) != content:
            write_whole(listing, canonical_json(content))
        else:
            listing.touch()
    return files


def _list_text(filesystem: Any, url: str, place: str) -> list[RemoteObject]:
    """The text of a URL in the order in which a local directory is read."""
    root = url[: len(url) - len(place)] if url.endswith(place) else f"{url.split('://')[0]}://"
    if scheme_of(url) is WEB:
        return [_object(url, filesystem.info(place))]
    with suppress(FileNotFoundError):
        info = filesystem.info(place)
        if info["type"] == "file":
            return [_object(root + info["name"], info)]
        return _texts(root, filesystem.find(place, detail=True), place)
    if not has_magic(place):
        raise FileNotFoundError(place)
    texts: list[RemoteObject] = []
    try:
        matches = filesystem.glob(place, detail=True)
    except ValueError as error:
        raise DataError(f"{url}: is no pattern ({error}); correct it") from error
    for name, info in sorted(matches.items()):
        is_file = info["type"] == "file"
        found = {name: info} if is_file else filesystem.find(name, detail=True)
        texts += _texts(root, found, name.rpartition("/")[0])
    return list(dict.fromkeys(texts))  # "**" gives a folder and what is in it


def _texts(root: str, found: dict[str, Any], below: str) -> list[RemoteObject]:
    """The objects that are text and not hidden, sorted by the parts of their names."""

    def is_text(name: str) -> bool:
        parts = name[len(below) :].strip("/").split("/")
        return name.lower().endswith(SUFFIXES) and not any(part[0] == "." for part in parts if part)

    names = sorted(filter(is_text, found), key=lambda name: name.split("/"))
    return [_object(root + name, found[name]) for name in names]


def _object(url: str, info: dict[str, Any]) -> RemoteObject:
    when = info.get("LastModified")
    modified = when.timestamp() if isinstance(when, datetime) else None
    return RemoteObject(url, info["name"], info["size"], etag_of(info), modified)


def _known(listing: Path, cache_dir: Path) -> list[Path]:
    """The files of the last listing; empty unless all are verified."""
    try:
        objects = [
            RemoteObject(url, "", size, etag)
            for url, size, etag in json.loads(listing.read_bytes())
        ]
    except (OSError, ValueError):
        return []
    paths = [path_of(one.url, cache_dir) for one in objects]
    return paths if all(map(is_verified, objects, paths)) else []


def _without_network(error: StorageError, known: list[Path]) -> list[Path]:
    """What the cache has, with a line that says so; raise `error` if it has nothing."""
    if not known:
        raise error
    reason = str(error).split("; ")[0]
    print(f"{reason}; using the copy in the cache, {known[0].parent}", file=sys.stderr)
    return known
