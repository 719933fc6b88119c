"""`minimind serve`: a model in a browser, and behind OpenAI's interface."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
import re
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimind.cli.command import PLACE, argument, count_of_bytes, non_empty
from minimind.cli.model import ANSWER, OfChat
from minimind.errors import RendezvousError, UsageError
from minimind.runtime.installed import require_extra
from minimind.runtime.terminal import phase
from minimind.runtime.urls import HUB_PREFIX

if TYPE_CHECKING:
    from minimind.serve.answers import ServedModel
    from minimind.serve.readers import Readers

KEY = "MINIMIND_API_KEY"


def _origin(text: str) -> str:
    """Return an origin as browsers send it; raise for another text."""
    if text != "*" and not re.fullmatch(r"https?://[a-z0-9.\-\[\]:]+", text):
        raise argparse.ArgumentTypeError(
            f"{text!a} is not an origin such as https://example.org, or *"
        )
    return text


@dataclass(kw_only=True)
class Serve(OfChat):
    """Serve a model: a chat page, and OpenAI's interface.

    The page is at /, for a browser, and the interface at /v1. Needs the packages starlette and
    uvicorn.
    """

    example = "minimind serve --checkpoint out/sft --port 8000"
    place: Any = argument(None, **PLACE)
    """a run's out_dir, a step_ directory, an exported one, or hf:DIR"""
    host: str = argument("127.0.0.1", parse=non_empty)
    """address to listen on; give --api_key if others can reach it"""
    port: int = argument(8000, ge=0, le=65535)
    """port; 0: any that is free"""
    api_key: str | None = argument(None, metavar="KEY")
    """key that requests must have (default: the value of MINIMIND_API_KEY)"""
    max_batch: int = argument(16, ge=1)
    """maximum texts generated at once"""
    max_queue: int = argument(64, ge=1)
    """maximum texts that wait; more are refused with status 429"""
    batch_invariant: bool = argument(False)
    """compute each text by itself, so that its rounding does not depend on other requests;
    slower"""
    timeout: float = argument(300.0, gt=0)
    """maximum seconds from a request to the end of its answer"""
    max_new_tokens: int | None = argument(None, ge=1)
    """maximum tokens per answer (default: up to the model's context length)"""
    max_body: int = argument("1MiB", parse=count_of_bytes)
    """maximum size of a request's body; a bare number counts bytes"""
    allow_origin: list[str] = argument((), nargs="+", parse=_origin, metavar="ORIGIN")
    """web sites whose pages may call this server, such as https://example.org; *: all"""

    def execute(self) -> None:
        """Serve until a signal; the address goes to standard output."""
        key = api_key(self)
        self.require_there()
        listening = listen(self.host, self.port)
        with listening:
            require_extra("serve", "minimind serve", "starlette", "uvicorn")
            from minimind.serve.app import Limits, build_app, http_server
            from minimind.serve.scheduler import Scheduler

            with phase("loading the model"):
                model, served, readers = load(self)
            is_local = is_loopback(listening.getsockname()[0])
            if not (is_local or key):
                text = (
                    "anyone who can reach this address can use the model, as there is no --api_key"
                )
                print(f"--host {self.host}: {text}", file=sys.stderr)
            own = f"[{self.host}]" if ":" in self.host else self.host.lower()
            names = {"localhost", "127.0.0.1", "[::1]", own}
            limits = Limits(
                self.max_batch + self.max_queue,
                self.max_body,
                self.timeout,
                key,
                frozenset(names) if is_local else None,
                frozenset(self.allow_origin),
            )
            scheduler = Scheduler(model, self.max_batch, self.max_queue, self.batch_invariant)
            try:
                server = http_server(build_app(served, scheduler, readers, limits))
                # Uvicorn ends on a signal, and then raises it again for this handler, which also
                # has the signals that come before Uvicorn has its own.
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, lambda *_: setattr(server, "should_exit", True))
                print(f"{address(listening)} serves {served.name}; Ctrl-C ends it", flush=True)
                server.run(sockets=[listening])
            finally:
                scheduler.close()
                readers.close()


def load(args: Serve) -> tuple[Any, ServedModel, Readers]:
    """The model on its device, what its answers are written with, and what reads requests."""
    from minimind.inference.chat import source_of
    from minimind.inference.load_model import is_exported, load_model
    from minimind.inference.text import Sampling
    from minimind.serve.answers import ServedModel
    from minimind.serve.readers import Readers

    device = args.chosen_device()
    checkpoint, exported = args.checkpoint, args.model
    if (
        checkpoint
        and exported is None
        and (checkpoint.startswith(HUB_PREFIX) or is_exported(Path(checkpoint).expanduser()))
    ):
        checkpoint, exported = None, checkpoint
    model, tokenizer, path = load_model(checkpoint, exported, args.tokenizer, args.weights)
    model = model.to(device)
    variables, source, called = args.chat_template_kwargs, None, ""
    is_base = not tokenizer.templates.by_name
    if is_base and variables and args.chat_template is None:
        raise UsageError(
            "--chat_template_kwargs has no effect without a chat template; add --chat_template, or"
            " remove --chat_template_kwargs"
        )
    if args.chat_template is not None or not is_base:
        source, called = source_of(tokenizer, args.chat_template, path, variables)
    place = str(checkpoint or exported).removeprefix(HUB_PREFIX)
    name = Path(place).name or Path.cwd().name
    positions = model.config.max_position_embeddings
    most = min(args.max_new_tokens or positions, positions)
    defaults = Sampling(**ANSWER), Sampling()
    given = {
        "tokenizer": str(tokenizer.path),
        "template": source,
        "called": called,
        "variables": variables or {},
        "name": name,
        "positions": positions,
        "most_tokens": most,
        "usual_tokens": min(defaults[0].max_new_tokens, most),
        "most_texts": args.max_queue,
    }
    readers = Readers(given, args.max_batch + args.max_queue)
    served = ServedModel(name, model, tokenizer, readers.template, *defaults, most)
    return model, served, readers


def api_key(args: Serve) -> str | None:
    """The key of --api_key or the environment; raise UsageError for one that cannot be sent."""
    flag, key = ("--api_key", args.api_key) if args.api_key is not None else (KEY, None)
    key = os.environ.get(KEY) if key is None else key
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        state = "has other characters than visible ASCII" if key else "is empty"
        raise UsageError(f"{flag} {state}, so that nobody could send it; give another, or none")
    return key


def listen(host: str, number: int) -> socket.socket:
    """A socket that listens on an address, before gigabytes are loaded.

    Raise RendezvousError for a port that is taken, UsageError for an address that is not ours.
    """
    try:
        found = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "is not the name of a host"
        raise UsageError(f"--host {host}: {reason}; give an address of this machine") from error
    family, kind, protocol, _, place = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise RendezvousError(
                f"--port {number}: {error.strerror}; give another --port, or 0 for one that is free"
            ) from error
        raise UsageError(
            f"--host {host}: {error.strerror}; give an address of this machine"
        ) from error
    return listening


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def address(listening: socket.socket) -> str:
    """The URL of a socket."""
    host, number = listening.getsockname()[:2]
    return f"http://[{host}]:{number}" if ":" in host else f"http://{host}:{number}"
