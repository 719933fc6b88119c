"""URLs of object storage, their file systems (fsspec), and retries of errors that pass.

Credentials and endpoints come from the environment, as the library of each scheme reads them. They
are in no message.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from traceback import walk_tb
from typing import Any, TypeVar
from urllib.request import proxy_bypass

from minimind.errors import DataError, RunError, StorageError, UsageError
from minimind.runtime.installed import install_extra, install_packages
from minimind.runtime.terminal import shorten_line
from minimind.runtime.urls import HIDDEN, has_credentials, masked, masked_text

# It logs tracebacks of errors that it raises as well.
logging.getLogger("aiobotocore.credentials").addHandler(logging.NullHandler())

CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 30  # without a byte


@dataclass(frozen=True)
class Scheme:
    """The library of a scheme, where it finds credentials, and its package if no extra has it."""

    module: str
    credentials: str
    package: str | None = None

    def install(self) -> str:
        """The command that installs it."""
        return install_packages(self.package) if self.package else install_extra("remote")


AWS = Scheme(
    "s3fs",
    "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; FSSPEC_S3_ANON=true reads"
    " public buckets without them",
)
GOOGLE = Scheme("gcsfs", "check GOOGLE_APPLICATION_CREDENTIALS", "gcsfs")
HUB = Scheme("huggingface_hub", "check HF_TOKEN, or run `hf auth login`")
WEB = Scheme("aiohttp", "use a URL that needs none")
LOCAL = Scheme("fsspec", "correct its permissions")
LIBRARY_OF = {"s3": AWS, "gs": GOOGLE, "hf": HUB, "http": WEB, "https": WEB, "file": LOCAL}

# Names, since the libraries are optional: errors of botocore, aiohttp, httpx and requests that say
# that a connection could not be made, was cut or was silent for too long.
PASSING = {"ConnectionError", "HTTPClientError", "IncompleteReadError", "FlexibleChecksumError"}
PASSING |= {"ResponseParserError", "ClientConnectionError", "ClientPayloadError", "TransportError"}
PASSING |= {"Timeout", "ChunkedEncodingError"}
PASSING |= {"NoSuchUpload"}  # of S3, of an upload in parts that has ended: it can begin again
PERMANENT = {"ClientConnectorCertificateError", "UnsupportedProtocol"}  # among them
# Names of errors of botocore and google.auth about the credentials of a user.
CREDENTIALS = re.compile(r"Credential|Profile|Token|SSO|Config(Parse|NotFound)|InvalidConfig")
# Variables that name a server, the first of them first.
SERVERS = {
    AWS: ("FSSPEC_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    HUB: ("HF_ENDPOINT",),
}
PARTIAL = 206  # HTTP status of an answer to a Range
PASSING_STATUS = (408, 409, 425, 429, 500, 502, 503, 504)
LIBRARIES = ("fsspec", "s3fs", "gcsfs", "huggingface_hub")
REASON = 200  # characters of a library's message
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each further attempt, at most
SILENT_S = 180  # without a new byte; a third attempt begins only before

T = TypeVar("T")


def scheme_of(url: str) -> Scheme:
    """The scheme of a URL, or of a repository of the Hub."""
    return LIBRARY_OF[url.partition(":")[0]]


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path of the URL in it.

    Its own retries are off and nothing is cached. Raise UsageError if its library is missing.
    """
    scheme = scheme_of(url)
    if has_credentials(url):  # it would be stored with the run
        raise UsageError(
            f"{masked(url)}: has credentials in it, which a run would store; {scheme.credentials}"
        )
    if not url.partition("://")[2].strip("/"):
        raise UsageError(f"{masked(url)}: names no bucket, host or file; complete the URL")
    if url.endswith(HIDDEN):
        raise UsageError(
            f"{masked(url)}: is recorded without its query, which may have a signature; give the"
            " whole URL"
        )
    try:
        import fsspec

        import_module(scheme.module)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{masked(url)}: is read with {scheme.module}, which is not installed;"
            f" {scheme.install()}"
        ) from error
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme is AWS:
        options["config_kwargs"] = {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "retries": {"total_max_attempts": 1},
        }
    elif scheme is WEB:
        from aiohttp import ClientTimeout

        limit = ClientTimeout(None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
        session = {"timeout": limit, "trust_env": True, "raise_for_status": _require_whole}
        options["client_kwargs"] = session
    # Not url_to_fs, which takes "::" in the name of an object for a chain of file systems.
    filesystem_class: Any = fsspec.get_filesystem_class(url.partition("://")[0])
    filesystem = filesystem_class(**filesystem_class._get_kwargs_from_urls(url), **options)
    path = filesystem_class._strip_protocol(url)
    if scheme is AWS:
        filesystem.retries = 1
        filesystem.loop.call_soon_threadsafe(filesystem.loop.set_exception_handler, _log_error)
    return filesystem, path


def _servers(url: str) -> str:
    """` and NAME=VALUE` of each variable that names the server of a URL, or a proxy to it."""
    scheme = scheme_of(url)
    if scheme is LOCAL:
        return ""
    names = [name for name in SERVERS.get(scheme, ()) if os.environ.get(name)][:1]
    server = url if scheme is WEB else os.environ[names[0]] if names else "https://"
    protocol = server.partition(":")[0].lower()
    proxies = (f"{protocol}_proxy", f"{protocol.upper()}_PROXY")
    if not proxy_bypass(server.partition("://")[2].partition("/")[0]):
        names += [name for name in proxies if os.environ.get(name)][:1]
    shown = (f" and {name}={masked(os.environ[name])}" for name in names)
    return shorten_line("".join(shown), REASON)


async def _require_whole(answer: Any) -> None:
    """Raise Truncated if a web server answers with a part: nothing here asks it for one."""
    if answer.status == PARTIAL:
        raise Truncated("a part arrived that nobody asked for")


def _log_error(loop: Any, context: dict[str, Any]) -> None:
    """Log an error of a task, but for a lost connection, which the request itself reports."""
    if not isinstance(context.get("exception"), ConnectionError):
        loop.default_exception_handler(context)


class Truncated(OSError):
    """A body is shorter or other than it should be."""


class NoAnswer(StorageError):
    """The storage failed at every attempt, as without a network."""


class Progress:
    """When bytes of a file last moved that no earlier attempt had moved."""

    def __init__(self) -> None:
        self._most, self.last = 0, time.monotonic()

    def callback(self, each: Callable[[], object] = lambda: None) -> Any:
        """What fsspec calls in one attempt; `each` is called, too, and may raise."""
        from fsspec.callbacks import Callback

        def moved(size: int | None, value: int, **_: object) -> None:
            each()
            if value > self._most:
                self._most, self.last = value, time.monotonic()

        return Callback(hooks={"": moved})


def retrying(
    url: str,
    work: Callable[[], T],
    permanent: type[RunError] = DataError,
    progress: Progress | None = None,
) -> T:
    """Return `work()`, called again after errors that pass, each reported as one line on stderr.

    Up to half of a wait, drawn at random, is left out, so that many processes do not come back at
    once. The libraries' own retries are off, but for files: they print nothing, and those of s3fs
    do not cover an endpoint that cannot be reached. As both together take long where a storage is
    silent, SILENT_S bounds that time. It counts from the last new byte that `progress` has seen,
    without `progress` from the first attempt.

    Raise `permanent` at once if the URL is missing or refused, and NoAnswer if the storage still
    fails at the last attempt, or stays silent. Other exceptions, as of a full local disk, pass
    unchanged.
    """
    attempts, progress = len(WAITS) + 1, progress or Progress()
    for attempt, longest in enumerate((*WAITS, None), 1):
        try:
            return work()
        except Exception as error:  # every file system has its own types; others are raised again
            if not is_of_storage(error):
                raise
            if not is_passing(error):
                raise permanent(f"{masked(url)}: {refusal(error, url)}") from error
            reason = reason_of(_cause(error), url)
            is_silent = attempt > 1 and time.monotonic() - progress.last > SILENT_S
            if longest is None or is_silent:
                raise NoAnswer(
                    f"{masked(url)}: does not answer ({reason}), tried {attempt} times; check the"
                    f" network{_servers(url)}, and run the same command again"
                ) from error
        wait = longest * random.SystemRandom().uniform(0.5, 1)  # not a generator of the run
        again = f"trying again in {wait:.1f} s ({attempt + 1} of {attempts})"
        print(f"{masked(url)}: {reason}; {again}", file=sys.stderr, flush=True)
        time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def is_of_storage(error: BaseException) -> bool:
    """Whether an error is the storage's, and neither of the local disk nor a bug."""
    if isinstance(error, OSError):
        return error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
    if isinstance(error, RunError | MemoryError):
        return False
    # Libraries raise errors of Python's own kinds, too, as for an endpoint that is no URL.
    names = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return any(name.split(".")[0] in LIBRARIES for name in names)


def is_passing(error: BaseException) -> bool:
    """Whether the same operation may succeed later."""
    error = _cause(error)
    names = {base.__name__ for base in type(error).__mro__}
    if isinstance(error, FileNotFoundError | PermissionError) or names & PERMANENT:
        return False
    # Before the status, which aiohttp gives the cause of a body that is cut.
    if isinstance(error, Truncated | ConnectionError | TimeoutError | EOFError) or names & PASSING:
        return True
    return _http_status(error) in PASSING_STATUS


def _cause(error: BaseException) -> BaseException:
    """The error itself, or its cause: fsspec calls whatever a web server answers a missing file."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return error.__cause__
    return error


def _http_status(error: BaseException) -> int | None:
    """The HTTP status that an error, or its cause, has."""
    for one in (error, error.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, dict):  # of botocore
            return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        for place, name in ((response, "status_code"), (one, "status"), (one, "code")):
            status = getattr(place, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                return status
    return None


def refusal(error: BaseException, url: str) -> str:
    """Why a URL can not be used, and the remedy."""
    error = _cause(error)
    scheme, status = scheme_of(url), _http_status(error)
    reason = reason_of(error, url)
    # The error is about a file of this host, such as a profile's credential_process.
    is_of_user = scheme is not LOCAL and isinstance(error, OSError) and error.filename is not None
    if not is_of_user and (isinstance(error, FileNotFoundError) or status == 404):
        return "there is no such bucket, object or file; correct the URL"
    is_refused = isinstance(error, PermissionError) or status in (401, 403)
    # S3 answers a HEAD with an expired token by 400.
    is_refused |= scheme is AWS and (status == 400 or getattr(error, "errno", 0) == errno.EINVAL)
    if is_refused or is_of_user or CREDENTIALS.search(type(error).__name__):
        return f"access is refused ({reason}); {scheme.credentials}"
    place = "AWS_DEFAULT_REGION" if "Region" in type(error).__name__ else "the URL"
    return f"cannot be used ({reason}); correct {place}{_servers(url)}"


def reason_of(error: BaseException, url: str) -> str:
    """A library's message, which may have the URL, as part of a sentence."""
    if isinstance(error, RecursionError):
        return "its folders are nested too deep"
    text = masked_text(str(error).replace(url, masked(url)))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    text = (lines or [type(error).__name__])[0].rstrip(".")
    return shorten_line(text, REASON)
