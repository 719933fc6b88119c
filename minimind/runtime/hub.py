"""Repositories of the Hugging Face Hub, by huggingface_hub and in its cache.

`hf:USER/NAME[@REVISION][/INSIDE]` names a data set or a model there. The token is the one that
huggingface_hub finds; it is in no message.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from minimind.errors import RunError, StorageError, UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import free_bytes, mebibytes, sha256_of, storing
from minimind.runtime.environment import rank_of
from minimind.runtime.file_kinds import STATE
from minimind.runtime.filesystem import HUB, NoAnswer, is_passing, retrying
from minimind.runtime.object_cache import in_parallel
from minimind.runtime.urls import HUB_PREFIX, ON_THE_HUB, masked, masked_text, without_query

DATASET, MODEL = "dataset", "model"
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin")
# Names of weights; the first form that a model has is fetched.
FORMS = (
    re.compile(r"(?:^|/)(?:adapter_)?model(?:-\d+-of-\d+)?\.safetensors$"),
    re.compile(r"(?:^|/)(?:pytorch|adapter)_model(?:-\d+-of-\d+)?\.bin$"),
)
CARD = "README.md"
BESIDE_WEIGHTS = (".json", ".model", ".jinja", ".txt", ".tiktoken")
NAMED = 3  # files in a message
THREADS = 8  # files at a time
MOST_DOWNLOADS = 2  # of a file whose content is not that of its hash
COMMIT = re.compile("[0-9a-f]{40}")
NO_ROUTE = (404, 405, 410, 501)  # statuses of a route that a server lacks
ELSEWHERE = "set HF_HOME to another place"

Sizes = Mapping[str, int]  # bytes by name
Choice = Callable[[Sequence[str]], Sequence[str]]
T = TypeVar("T")


@dataclass(frozen=True)
class Repository:
    """A data set or a model of the Hub."""

    kind: str
    name: str  # USER/NAME
    revision: str | None = None  # a branch, a tag or a commit; None: the newest commit
    inside: str = ""  # a path in it, or a part of a data set

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        inside = f"/{self.inside}" if self.inside else ""
        return f"{HUB_PREFIX}{self.name}{revision}{inside}"

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the functions of huggingface_hub."""
        return {"repo_id": self.name, "repo_type": self.kind, "revision": self.revision}

    @property
    def command(self) -> str:
        """The command that fetches all of it."""
        kind = "" if self.kind == MODEL else f" --repo-type {self.kind}"
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.name}{kind}{revision}"


def repository(place: str, kind: str) -> Repository | None:
    """What `place` names on the Hub; None for any other path."""
    if (match := ON_THE_HUB.fullmatch(place)) is None:
        return None
    return Repository(kind, match["name"], match["revision"], (match["inside"] or "").strip("/"))


def local_model(place: str | Path, weights: bool = True) -> Path:
    """The local path of a model: a path, hf:PATH, or the copy of hf:USER/NAME[/INSIDE].

    A local path comes first. A model or folder of the Hub is fetched without what is not needed:
    it has the configuration, the tokenizer and, with `weights`, one form of the weights. A file of
    weights comes with what is beside it. Raise UsageError if there is no such model, or several
    files may be its weights.
    """
    path = Path(str(place).removeprefix(HUB_PREFIX)).expanduser()
    found = repository(str(place), MODEL)
    if found is None or disk.exists(path):
        return path
    named = found.inside if found.inside.endswith(WEIGHTS) else ""
    folder = found.inside.rpartition("/")[0] if named else found.inside
    above = f"{folder}/" if folder else ""

    def wanted(names: Sequence[str]) -> list[str]:
        inside = [name for name in names if name.startswith(above)]
        top = [name for name in inside if "/" not in name[len(above) :]]
        beside = [name for name in top if name.endswith(BESIDE_WEIGHTS)]
        if named or not weights:
            return beside + [name for name in top if name == named]
        return beside + _weights_of(found, top)

    what = f"configuration, tokenizer{' and weights' if weights else ''}"
    return fetch(found, wanted, what, UsageError)[0] / found.inside


def _weights_of(model: Repository, names: Sequence[str]) -> list[str]:
    """Return the files of one form of the weights, by their names."""
    by_form = ([name for name in names if form.search(name)] for form in FORMS)
    if found := next(filter(None, by_form), []):
        return found
    found = [name for name in names if name.endswith(WEIGHTS) and not STATE.search(name)]
    if len(found) > 1:
        raise UsageError(
            f"{model}: has {len(found)} files of weights; name one, such as"
            f" {HUB_PREFIX}{model.name}/{found[0]}"
        )
    return found


def owned_model(name: str, private: bool, is_ours: Callable[[bytes], bool]) -> Repository:
    """Return the model USER/NAME, to which the token's user may upload an export; else UsageError.

    `is_ours` says whether an export wrote the README.md there. Weights beside another README.md are
    not replaced.
    """
    from huggingface_hub import HfApi, errors
    from huggingface_hub.utils import validate_repo_id

    found = repository(f"{HUB_PREFIX}{name.removeprefix(HUB_PREFIX)}", MODEL)
    if found is None or found.revision or found.inside:
        raise UsageError(f"--push_to_hub {name}: is not USER/NAME, such as ana/poems; write it so")
    try:
        validate_repo_id(found.name)
    except errors.HFValidationError as error:
        raise UsageError(f"--push_to_hub {name}: is not a name of a model ({error})") from error

    def look() -> tuple[dict[str, Any], Any, bytes]:
        try:
            user = HfApi().whoami()
        except errors.LocalTokenNotFoundError as error:
            raise UsageError(f"--push_to_hub {name}: has no token; {HUB.credentials}") from error
        try:
            there = HfApi().model_info(found.name)
        except errors.RepositoryNotFoundError:
            return user, None, b""
        return user, there, _card_of(found, [one.rfilename for one in there.siblings or ()])

    user, there, card = asking(found, UsageError, look)
    owner, token = found.name.partition("/")[0], user.get("auth", {}).get("accessToken", {})
    if owner not in (names := [user["name"], *(one["name"] for one in user.get("orgs", ()))]):
        raise UsageError(
            f"--push_to_hub {name}: the token belongs to {names[0]}, who is not a member of"
            f" {owner}; name one of {', '.join(names)}"
        )
    if token.get("role") == "read":
        raise UsageError(
            f"--push_to_hub {name}: the token of {names[0]} may only read; make one that may write"
        )
    if there is not None and private and not there.private:
        raise UsageError(
            f"--push_to_hub {name}: the model exists and is public, which --hub_private_repo"
            " does not change; remove --hub_private_repo, or give a new name"
        )
    files = [one.rfilename for one in (there and there.siblings) or ()]
    weights = [file for file in files if file.endswith((*WEIGHTS, ".gguf"))]
    if weights and not is_ours(card):
        raise UsageError(
            f"--push_to_hub {name}: the model there has {weights[0]}, which no export writes; name"
            " a new model"
        )
    return found


def _card_of(model: Repository, names: Sequence[str]) -> bytes:
    """The README.md of a model whose files have these names; empty if there is none."""
    from huggingface_hub import HfApi

    if CARD not in names:
        return b""
    return Path(HfApi().hf_hub_download(model.name, CARD)).read_bytes()


def push(
    model: Repository,
    folder: Path,
    private: bool,
    stale: Sequence[str],
    stays: Callable[[bytes], bool],
) -> tuple[str, bool]:
    """Commit all files of `folder` at once to a model, which is made if the Hub has none.

    Files there that match the patterns `stale` and that the folder lacks are deleted. A README.md
    that is there stays if `stays` says so of its content. Return the URL of the model, and whether
    it stays.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, names = HfApi(), sorted(path.name for path in disk.entries(folder))

    def work() -> tuple[str, bool]:
        url = api.create_repo(model.name, private=private or None, exist_ok=True)
        there = api.list_repo_files(model.name)
        is_kept = CARD in there and stays(_card_of(model, there))
        added = [name for name in names if name != CARD or not is_kept]
        changes: list[Any] = [CommitOperationAdd(name, str(folder / name)) for name in added]
        changes += [
            CommitOperationDelete(name)
            for name in there
            if name not in names and any(fnmatchcase(name, pattern) for pattern in stale)
        ]
        with _bars(shown=sys.stderr.isatty()):
            api.create_commit(model.name, changes, commit_message="Upload by minimind export")
        return str(url), is_kept

    return asking(model, UsageError, work)


def fetch(
    wanted: Repository, choose: Choice, what: str, missing: type[RunError]
) -> tuple[Path, list[str]]:
    """Return the local copy of a repository, and the names of the files that `choose` takes.

    What the cache lacks is fetched, and compared with its hash. Raise `missing` if the Hub has no
    such repository or revision, or nothing is chosen; without network, StorageError unless the
    cache has it all.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    folder, reason, found = Path(HF_HUB_CACHE), "", replace(wanted, inside="")
    with storing(f"{folder}: cannot be written", ELSEWHERE):
        try:
            sha, sizes = asking(wanted, missing, lambda: newest(found))
        except NoAnswer as error:
            reason = str(error).split("; ")[0]
            if (known := _known(wanted, folder)) is None:
                raise StorageError(
                    f"{reason}, and {folder} has no copy of its {what}; run `{wanted.command}`"
                    " where there is a network"
                ) from error
            sha, sizes = known
        if not (chosen := list(choose([*sizes]))):
            some = [name for name in sorted(sizes) if name[0] != "." and name != CARD][:NAMED]
            shown = f"has {', '.join(some)}" if some else "is empty"
            raise missing(f"{wanted}: has no {what}; it {shown}; correct the name")
        folder = _snapshot(folder, wanted, sha)
        absent = {name: sizes[name] for name in chosen if not disk.is_file(folder / name)}
        if absent:
            _fill(replace(found, revision=sha), folder, absent, reason, missing)
        elif reason:
            print(f"{reason}; using the copy in the cache, {folder}", file=sys.stderr)
    return folder, chosen


def asking(wanted: Repository, missing: type[RunError], work: Callable[[], T]) -> T:
    """Return `work()`, which asks the Hub, tried again as `retrying` does.

    Raise NoAnswer without network, `missing` for what the Hub does not have or give.
    """
    from huggingface_hub import errors
    from huggingface_hub.constants import ENDPOINT

    refusals = {  # the first that fits: a gated repository is one that was not found
        errors.GatedRepoError: "is given to those who accept its terms; accept them on its page,"
        f" and {HUB.credentials}",
        errors.RepositoryNotFoundError: f"the Hub has no such {wanted.kind}, or it is private;"
        f" correct the name, or {HUB.credentials}",
        errors.RevisionNotFoundError: f"the Hub has no revision {wanted.revision} of it;"
        " correct it",
    }
    # Of an upload; of a name of a commit; of a file whose head was refused.
    wrappers = RuntimeError, errors.RevisionResolutionError, errors.LocalEntryNotFoundError

    def ask() -> T:
        try:
            return work()
        except Exception as raised:  # others are raised again
            error = (raised.__cause__ or raised) if isinstance(raised, wrappers) else raised
            if isinstance(error, errors.OfflineModeIsEnabled):
                raise NoAnswer(f"{wanted}: HF_HUB_OFFLINE is set; unset it") from error
            reason = next((text for kind, text in refusals.items() if isinstance(error, kind)), "")
            if reason or is_passing(error):
                pass
            elif isinstance(error, errors.HfHubHTTPError) and error.response is not None:
                reason = _answer_of(error.response, ENDPOINT)
            elif isinstance(error, json.JSONDecodeError):  # a page that stands in for a route
                reason = (
                    f"{_server(ENDPOINT)} answers with something that is not JSON; {_elsewhere()}"
                )
            elif isinstance(error, OSError) and error.filename is not None:  # of the cache
                raise StorageError(f"{error.filename}: {error.strerror}; {ELSEWHERE}") from error
            if reason:
                raise missing(f"{wanted}: {reason}") from error
            raise error  # noqa: B904 (it has a cause of its own)

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # its warnings have signed URLs; what fails is raised
    try:
        return retrying(str(wanted), ask, permanent=missing)
    finally:
        logger.setLevel(level)


def _answer_of(response: Any, endpoint: str) -> str:
    """What a server answered, to which route, and the remedy; a mirror may lack a route."""
    request, status = response.request, response.status_code
    url, server = without_query(str(request.url))[0], _server(endpoint)
    if not url.startswith(f"{endpoint}/"):  # where the Hub sends a request on to
        endpoint = f"{request.url.scheme}://{request.url.netloc.decode()}"
        server = masked(endpoint)
    route = masked_text(url.removeprefix(endpoint))
    reason = masked_text(response.headers.get("X-Error-Message") or response.reason_phrase)
    answer = f"{server} answers {status} ({reason}) to {request.method} {route}"
    if status in (401, 403):
        return f"access is refused: {answer}; {HUB.credentials}"
    remedy = "correct the name, or " if status in NO_ROUTE else ""
    return f"cannot be used: {answer}; {remedy}{_elsewhere()}"


def _server(endpoint: str) -> str:
    """The server of the Hub in a sentence, with the variable that names it."""
    return f"HF_ENDPOINT={endpoint}" if os.environ.get("HF_ENDPOINT") else endpoint


def _elsewhere() -> str:
    drop = ", or unset it" if os.environ.get("HF_ENDPOINT") else ""
    return f"set HF_ENDPOINT to another server of the Hub{drop}"


@cache
def newest(wanted: Repository) -> tuple[str, Sizes]:
    """Return the commit of the revision, and its files.

    A commit whose files are known needs no request. A process asks once, so that all it reads is of
    one commit.
    """
    from huggingface_hub import HfApi, RepoFile, errors, get_cached_repo_tree, snapshot_download

    if not COMMIT.fullmatch(wanted.revision or ""):
        HfApi().repo_info(**wanted.options)  # raises where the next would take a copy of before
    commit = replace(wanted, revision=HfApi().resolve_revision(**wanted.options).resolved)
    try:
        files = get_cached_repo_tree(**commit.options)
    except errors.CachedRepoTreeNotFoundError:
        entries = HfApi().list_repo_tree(**commit.options, recursive=True)
        files = [entry for entry in entries if isinstance(entry, RepoFile)]
        with _bars(shown=False):
            snapshot_download(**commit.options, allow_patterns=[])  # the list stays in the cache
    return str(commit.revision), {file.path: file.size for file in files}


def _known(wanted: Repository, cache: Path) -> tuple[str, Sizes] | None:
    """The commit of the revision that the cache has, and its files; None if it has none.

    Other programs may keep files without their list.
    """
    from huggingface_hub import HfApi, errors, get_cached_repo_tree

    try:
        sha = HfApi().resolve_revision(**wanted.options, local_files_only=True).resolved
    except errors.RevisionResolutionError:
        return None
    try:
        return sha, {file.path: file.size for file in get_cached_repo_tree(**wanted.options)}
    except errors.CachedRepoTreeNotFoundError:
        folder = _snapshot(cache, wanted, sha)
        found = disk.files_below(folder)
        sizes = {str(path.relative_to(folder)): disk.stat(path).st_size for path in found}
        return (sha, sizes) if sizes else None  # else a start whose list of files did not arrive


def _snapshot(cache: Path, wanted: Repository, sha: str) -> Path:
    """Where the cache has the files of a commit."""
    return cache / "--".join((f"{wanted.kind}s", *wanted.name.split("/"))) / "snapshots" / sha


def _fill(
    commit: Repository, folder: Path, absent: Sizes, reason: str, missing: type[RunError]
) -> None:
    """Fetch the files that the copy of a commit lacks; what arrives damaged, again."""
    names, size = [*absent], sum(absent.values())
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    files = f"{', '.join(names[:NAMED])}{more}, {size:,} bytes ({mebibytes(size)})"
    if reason:
        raise StorageError(
            f"{reason}, and {folder} lacks {files}; run `{commit.command}` where there is a network"
        )
    if size > (free := free_bytes(folder)):
        raise StorageError(
            f"{folder}: {files}, do not fit in the {free:,} that are free; free some space, or"
            f" {ELSEWHERE}"
        )
    if rank_of(os.environ) == 0:
        many = f"{len(names)} file{'s' if len(names) > 1 else ''}"
        print(f"fetching {many} of {commit}, {mebibytes(size)}", file=sys.stderr)
    for _ in range(MOST_DOWNLOADS):
        asking(commit, missing, partial(_download, commit, names))
        names = [name for name in names if _is_damaged(folder / name)]
        if not names:
            return
        for name in names:
            print(f"{commit}/{name}: is damaged; fetching it again", file=sys.stderr)
            disk.resolve(folder / name).unlink()
    raise StorageError(
        f"{commit}/{names[0]}: arrives with a wrong hash, fetched {MOST_DOWNLOADS} times; check the"
        " network, or upload it again"
    )


def _download(commit: Repository, names: Sequence[str]) -> None:
    """Fetch the files, some at a time; Ctrl-C does not wait for them."""
    from huggingface_hub import hf_hub_download

    def work(name: str, _: Event) -> None:
        hf_hub_download(**commit.options, filename=name)

    with _bars(shown=sys.stderr.isatty()):
        for _ in in_parallel(work, names, THREADS):
            pass


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Show the progress bars of huggingface_hub, or none."""
    from huggingface_hub import utils

    silences = not (shown or utils.are_progress_bars_disabled())
    if silences:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        if silences:
            utils.enable_progress_bars()


def _is_damaged(path: Path) -> bool:
    """Whether the content of a file is not that of its blob's name, which is a hash."""
    blob = disk.resolve(path)
    if len(blob.name) == len(hashlib.sha256().hexdigest()):
        return blob.name != sha256_of(blob)
    content = blob.read_bytes() if len(blob.name) == len(hashlib.sha1().hexdigest()) else None
    if content is None:  # a cache without links, or a server with hashes of its own
        return False
    return blob.name != hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()
