"""Text at http:// and https:// URLs, from a real server that cuts, truncates and refuses."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

import minimind.train as training
from minimind.cli.main import main
from minimind.data.prepare.remote import local_data, local_text
from minimind.errors import DataError, StorageError, UsageError
from minimind.launch import train_pretrain
from minimind.runtime import filesystem
from minimind.runtime.exit import Ending
from minimind.runtime.object_cache import open_cache
from tests.conftest import sentences

TEXT = b"".join(b'{"text": "line %d"}\n' % number for number in range(20_000))


@dataclass
class Web:
    """What a server answers to every path that ends in .jsonl."""

    url: str = ""
    content: bytes = TEXT
    headers: dict[str, str] = field(default_factory=lambda: {"ETag": '"1"'})
    has_length: bool = True
    status: int = 0  # instead of an answer
    cuts: int = 0  # answers to GET that end in the middle
    part: tuple[str, bytes] | None = None  # Content-Range and body of a 206
    asked: list[str] = field(default_factory=list)  # methods

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Send head and body, or a part of it."""
        self.asked.append(handler.command)
        if self.status:
            handler.send_error(self.status)
            return
        status, headers, body = 200, self.headers, self.content
        if self.part:
            status, (span, body) = 206, self.part
            headers = {**headers, "Content-Range": span}
        handler.send_response(status)
        for name, value in headers.items():
            if value:
                handler.send_header(name, value)
        if self.has_length and "Content-Length" not in headers:
            handler.send_header("Content-Length", str(len(body)))
        handler.send_header("Connection", "close")
        handler.end_headers()
        if handler.command == "HEAD":
            return
        if self.cuts:
            self.cuts -= 1
            body = body[: len(body) // 2]
        handler.wfile.write(body)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """A server on a loopback port."""
    monkeypatch.setattr(filesystem, "WAITS", (0.0,) * 5)
    yield from _serving(None)


def _serving(context: ssl.SSLContext | None) -> Iterator[Web]:
    state = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    scheme = "http"
    if context is not None:
        server.socket, scheme = context.wrap_socket(server.socket, server_side=True), "https"
    state.url = f"{scheme}://127.0.0.1:{server.server_port}/a.jsonl"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def fetched(url: str, cache_dir: Path) -> Path:
    with open_cache(cache_dir) as cache:
        return Path(local_text([url], cache)[0])


@pytest.mark.parametrize("cuts", [0, 3])
def test_text_arrives_also_over_connections_that_are_cut(web: Web, tmp_path: Path, cuts: int):
    web.cuts = cuts
    assert fetched(web.url, tmp_path).read_bytes() == TEXT
    # The last one tells whether the object was replaced meanwhile.
    assert web.asked == ["HEAD", *["GET"] * (1 + cuts), "HEAD"]


@pytest.mark.parametrize("span", [f"bytes 0-9/{len(TEXT)}", "bytes 0-9/*", ""])
def test_a_part_that_was_not_asked_for_is_refused(web: Web, tmp_path: Path, span: str):
    web.part = span, TEXT[:10]
    with pytest.raises(StorageError, match="a part arrived"):
        fetched(web.url, tmp_path)


def test_text_of_unknown_length_arrives(web: Web, tmp_path: Path):
    web.has_length = False
    assert fetched(web.url, tmp_path).read_bytes() == TEXT


def test_a_body_that_stays_too_short_is_an_error_of_storage(web: Web, tmp_path: Path):
    web.cuts = 99
    with pytest.raises(StorageError, match=r"a.jsonl: does not answer .*, tried 6 times"):
        fetched(web.url, tmp_path)


def test_an_object_is_not_held_in_memory(web: Web, tmp_path: Path):
    web.content = TEXT * 40  # 15 MB
    fetched(web.url, tmp_path / "first")  # with what is imported and opened once
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    path = fetched(web.url, tmp_path / "second")
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert path.stat().st_size == len(web.content)
    assert peak < len(web.content) / 4


@pytest.mark.parametrize("name", ["ETag", "Last-Modified"])
def test_a_changed_object_is_fetched_again(web: Web, tmp_path: Path, name: str):
    values = {"ETag": ('"1"', '"2"')}.get(
        name, ("Wed, 01 Jul 2026 10:00:00 GMT", "Wed, 01 Jul 2026 10:00:07 GMT")
    )
    web.headers = {name: values[0]}
    path = fetched(web.url, tmp_path)
    web.content, web.headers = TEXT[::-1], {name: values[1]}
    web.asked.clear()
    assert fetched(web.url, tmp_path) == path
    assert path.read_bytes() == TEXT[::-1]
    web.asked.clear()
    fetched(web.url, tmp_path)
    assert web.asked == ["HEAD"]


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (403, DataError, "access is refused .*; use a URL that needs none"),
        (404, DataError, "there is no such bucket, object or file; correct the URL"),
        (410, DataError, r"cannot be used \(410.*; correct the URL"),
        (503, StorageError, r"does not answer \(503.*, tried 6 times; check the network"),
    ],
)
def test_refusals_are_told_as_they_are(
    web: Web, tmp_path: Path, status: int, kind: type[Exception], message: str
):
    web.status = status
    with pytest.raises(kind, match=f"^{web.url}: {message}"):
        fetched(web.url, tmp_path)


def test_a_signature_is_sent_and_not_shown(
    web: Web, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    url = f"{web.url}?sig=secret"
    path = fetched(url, tmp_path)
    web.status = 403
    with pytest.raises(DataError) as caught:
        fetched(url, tmp_path)
    texts = [str(caught.value), str(path), capsys.readouterr().err]
    texts += [one.read_text() for one in path.parent.glob(".*") if one.is_file()]
    texts += [one.read_text() for one in (tmp_path / "by-url").glob("*.json")]
    assert not [text for text in texts if "secret" in text]


def test_urls_that_differ_in_their_query_alone_are_all_evaluated(web: Web, tmp_path: Path):
    urls = [f"{web.url}?file={name}" for name in "abc"]
    with open_cache(tmp_path) as cache:
        data = local_data([*urls, f"{web.url}?"], cache)
    shown = f"{web.url}?***"
    assert [*data] == [shown, f"{shown} (2)", f"{shown} (3)", f"{web.url}?"]
    assert len({path for paths in data.values() for path in paths}) == 4


def test_a_url_whose_query_was_left_out_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"is recorded without its query, .*; give the whole URL"):
        fetched("https://host/a.jsonl?***", tmp_path)


@pytest.fixture
def secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """A server of https with a certificate that SSL_CERT_FILE trusts."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1))
    builder = builder.not_valid_after(now + timedelta(days=1))
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    certificate = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    place = tmp_path / "server.pem"
    place.write_bytes(certificate.public_bytes(pem) + key.private_bytes(pem, *form))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place)
    monkeypatch.setenv("SSL_CERT_FILE", str(place))
    yield from _serving(context)


def test_https_with_a_certificate_of_ones_own(secure: Web, tmp_path: Path):
    with pytest.raises(DataError, match=r"cannot be used .*certificate verify failed"):
        fetched(secure.url, tmp_path / "refused")
    secure.cuts = 1
    # The library reads SSL_CERT_FILE when it is imported.
    code = "import sys; from pathlib import Path; from tests.runtime.test_web_text import fetched;"
    code += " fetched(sys.argv[1], Path(sys.argv[2]))"
    place = tmp_path / "cache"
    subprocess.run([sys.executable, "-c", code, secure.url, str(place)], check=True, timeout=120)
    (path,) = place.rglob("a.jsonl")
    assert path.read_bytes() == TEXT


# What signed URLs look like after host and port; SECRET is the secret.
SIGNED = [
    "/a(1).jsonl?X-Amz-Signature=SECRET",
    "/it's.jsonl?X-Goog-Signature=SECRET",
    "/my file.jsonl?sig=SECRET",
    '/say "a".jsonl?sv=1&sig=SECRET',
    "/[1]/a.jsonl?Expires=1&Signature=SECRET&Key-Pair-Id=SECRET",
    "/春/a%20b.jsonl?token=SECRET",
    "/a.jsonl?response-content-disposition=filename(1)&X-Amz-Signature=SECRET",
    '/a.jsonl?response-content-disposition=attachment; filename="b c"&se=1&e=SECRET\'SECRET',
    "/a.jsonl?SECRET",
    "/a.jsonl?a=b#SECRET",
    "/a.jsonl;jsessionid=SECRET",
    "/http://me:SECRET@host/a.jsonl",
    "/get/a.jsonl?url=https%3A%2F%2Fh%2Fb%3Fsig%3DSECRET",
]
SECRET = "Zq7mV2xW9k"
train: Any = training  # a package that is called like a function
RUN: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "device": "cpu", "max_steps": 2, "eval_rows": 0},
    **{"deepspeed_config": "none", "dtype": "float32", "log_interval": 1},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("end", SIGNED)
def test_no_secret_of_a_url_is_printed_or_stored_by_a_run(
    end: str,
    web: Web,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(Ending, "watch", lambda self: None)  # a thread without end
    text = (json.dumps({"text": one}) + "\n" for one in sentences(1, 100))
    web.content = "".join(text).encode()
    url = web.url.removesuffix("/a.jsonl") + end.replace("SECRET", SECRET)
    flags = {**RUN, "data_path": [url], "cache_dir": str(tmp_path / "cache")}
    words = [f"--{name}={value}" for name, value in RUN.items()]
    words += ["--data_path", url, "--cache_dir", str(tmp_path / "cache"), "--out_dir"]
    is_refused = "@" in url
    if not is_refused:
        assert train(flags, out_dir=str(tmp_path / "run"), verbose=True) == 0
        page = ["--out", str(tmp_path / "report.html")]
        assert main(["report", str(tmp_path / "run"), *page]) == 0
        assert train_pretrain.main([*words, str(tmp_path / "dry"), "--dry_run"]) == 0
    web.content, web.headers = b"no JSON\n", {"ETag": '"2"'}
    assert train_pretrain.main([*words, str(tmp_path / "bad")]) == (2 if is_refused else 3)
    web.status = 403
    words += [str(tmp_path / "refused"), "--cache_dir", str(tmp_path / "another"), "--debug"]
    assert train_pretrain.main(words) == (2 if is_refused else 3)

    out, err = capfd.readouterr()
    texts = {"stdout": out, "stderr": err}
    for path in tmp_path.rglob("*"):
        name = str(path.relative_to(tmp_path))
        texts[name] = path.read_bytes().decode(errors="replace") if path.is_file() else ""
    assert not [name for name, text in texts.items() if SECRET in name + text]
    shown = url.partition("http://me:")[0] if is_refused else url.partition("?")[0]
    assert shown.partition(";")[0] in err
    assert is_refused or {"run/config.yaml", "report.html"} < {*texts}
