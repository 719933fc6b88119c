"""`minimind report --watch`: what the server sends and refuses, and a browser that follows it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import expect
from uvicorn import Server

from minimind.cli.main import main
from minimind.errors import StorageError
from minimind.report import watch
from minimind.report.history import Run
from minimind.report.watch import LiveReport, server_of, state_of
from tests.browser import opened
from tests.report.made import (
    NOW,
    Drawn,
    crashed_and_resumed,
    end,
    evaluation,
    made_run,
    run_start,
    step_line,
    write_run,
)


@contextmanager
def serving(*places: Path, port: int = 0) -> Iterator[int]:
    """The port of a server, which has ended afterwards whatever its readers do."""
    with socket.create_server((watch.HOST, port)) as listening:
        server = server_of(LiveReport(places))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        until(lambda: server.started)
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "INTERVAL", 0.05)
    monkeypatch.setattr(watch, "POLL", 0.02)


def ask(
    port: int, path: str = "/", method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read().decode()


class Reader:
    """Follows the events as a page does."""

    def __init__(self, port: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), 20)
        self.connection.sendall(b"GET /events HTTP/1.0\r\nHost: localhost\r\n\r\n")
        self.file = self.connection.makefile("rb")
        while self.file.readline().strip():
            pass

    def event(self, name: str = "report") -> Any:
        """The data of the next event of that name."""
        while True:
            found, data, _ = (self.file.readline().decode() for _ in range(3))
            assert found, "the server closed the stream"
            if found == f"event: {name}\n":
                return json.loads(data.removeprefix("data: "))

    def close(self) -> None:
        self.file.close()
        self.connection.close()


def append(place: Path, *lines: dict[str, Any] | str) -> None:
    with open(place / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.writelines(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines)


def until(condition: Callable[[], bool]) -> None:
    last = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.02)


def test_lines_are_read_on_from_where_the_last_reading_ended(tmp_path):
    place = tmp_path / "run"
    history = Run(place)
    assert not history.read()
    write_run(place, [run_start(), step_line(1), '{"event": "st'])
    assert history.read()
    assert not history.read()
    assert [start.last_step for start in history.starts] == [1]
    append(place, "\n", run_start(1), step_line(2))  # after a crash the torn line is closed
    assert history.read()
    assert [start.last_step for start in history.starts] == [1, 2]
    assert (history.unread_lines, history.starts[0].cutoff) == (1, 1)
    append(place, json.dumps(step_line(3)))  # all but its newline
    assert history.read()
    append(place, "\n")
    history.read()
    assert history.starts[1].lines == 2
    (place / "metrics.jsonl").unlink()
    write_run(place, [run_start()])  # another run in the same folder
    assert history.read()
    assert [start.last_step for start in history.starts] == [-float("inf")]


def test_a_long_file_is_not_read_again(tmp_path, monkeypatch):
    place = write_run(tmp_path / "run", [run_start(), *(step_line(n) for n in range(1, 2000))])
    history, parsed, loads = Run(place), [], json.loads
    history.read()
    monkeypatch.setattr(json, "loads", lambda raw: parsed.append(raw) or loads(raw))
    append(place, step_line(2000))
    assert history.read()
    assert len(parsed) == 1


def test_the_page_is_the_report_and_may_ask_its_server_alone(tmp_path):
    place = write_run(tmp_path / "run", crashed_and_resumed())
    with serving(place) as server:
        response, page = ask(server)
    assert response.status == 200
    assert "crash" in page
    assert "connect-src 'self'" in page
    assert "default-src 'none'" in page
    assert "'unsafe-inline'; script-src 'nonce-" in page
    assert {"loss", "phases"} <= set(Drawn(page).charts)
    headers = response.headers
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")


def test_events_follow_a_crash_and_a_resume_and_runs_that_begin_later(tmp_path):
    place, later = tmp_path / "run", tmp_path / "later"
    with serving(place, later) as server:
        reader = Reader(server)
        assert "nothing recorded" in reader.event()["body"]
        write_run(place, [run_start(time=time.time()), step_line(1, time=time.time())])
        content = reader.event()
        assert content["state"]["kind"] == "running"
        assert content["line_age"] < 20
        append(place, step_line(2), '{"event": "step", "st')
        assert reader.event()["charts"]["loss"]["layout"]["xaxis"]["range"][1] == 2
        append(place, "\n", run_start(1), step_line(2), step_line(3))
        body = reader.event()["body"]
        assert "crashed: no end recorded" in body
        assert "could not be read" in body
        write_run(later, [run_start(), end(0)])
        assert "done" in reader.event()["body"]
        reader.close()


@pytest.mark.parametrize(
    ("lines", "kind", "words"),
    [
        ([], "waiting", "Waiting for {}: no run has started there."),
        ([run_start(time=NOW), step_line(1, time=NOW)], "running", "Running."),
        ([run_start(), step_line(1), end(1)], "ended", "Ended: done."),
        ([run_start(), step_line(1)], "ended", "Ended: no end recorded."),
        (
            [run_start(), end(1, 3, "E_DATA", "a.jsonl:3: no object; correct it")],
            *("failed", "Failed: status 3, E_DATA: a.jsonl:3: no object; correct it."),
        ),
    ],
)
def test_the_state_of_a_run_is_a_sentence(tmp_path, lines, kind, words):
    run = made_run(tmp_path, lines)
    state = state_of([run], NOW)
    assert (state["kind"], state["text"]) == (kind, words.format(tmp_path))
    assert state.get("stale") == (30 if kind == "running" else None)
    other = made_run(tmp_path / "other", [run_start(), step_line(1), end(1)])
    several = {"waiting": "waiting", "running": "running", "failed": "failed"}
    assert state_of([run, other], NOW)["kind"] == several.get(kind, "ended")


def test_a_slow_run_is_stale_after_three_times_its_pace(tmp_path):
    lines = [run_start(time=NOW - 200), *(step_line(n, time=NOW - 100 / n) for n in (1, 2))]
    assert state_of([made_run(tmp_path, lines)], NOW)["stale"] == 150


def test_a_browser_is_told_of_a_run_that_waits_begins_goes_quiet_and_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "STALE", 1.0)
    place = tmp_path / "run"
    with serving(place) as server, opened(f"http://127.0.0.1:{server}/") as page:
        live = page.locator("#live")
        expect(live).to_contain_text(f"Waiting for {place}: no run has started there.")
        expect(page.locator(".plot")).to_have_count(0)
        now = time.time()
        write_run(place, [run_start(time=now), step_line(1, time=now), step_line(2, time=now)])
        (place / "console.log").write_text("first line\n")
        expect(live).to_contain_text("Running.")
        expect(page.locator("#loss .plot .trace").first).to_be_attached()
        expect(page.locator(".console")).to_have_text("first line")
        expect(live).to_contain_text("No new event for")
        (place / "console.log").write_text("first line\nsecond line\n")
        expect(page.locator(".console")).to_contain_text("second line")
        page.locator("#loss summary").click()
        page.get_by_label("x axis").select_option("tokens")
        append(place, step_line(3, time=now), end(3, 3, "E_DATA", "no object"))
        expect(live).to_contain_text("Failed: status 3, E_DATA: no object.")
        assert page.evaluate("document.querySelector('#loss details').open")
        assert page.evaluate("document.querySelector('#loss .plot').data[0].x.at(-1)") == 300


def test_several_readers_share_a_report_and_leave_nothing_behind(tmp_path, monkeypatch):
    place, rendered = write_run(tmp_path / "run", [run_start(), step_line(1)]), []
    render = watch.render_parts
    monkeypatch.setattr(watch, "render_parts", lambda *args: rendered.append(1) or render(*args))
    with serving(place) as server:
        readers = [Reader(server) for _ in range(8)]
        assert all("step 1 of" in reader.event()["body"].lower() for reader in readers)
        append(place, step_line(2))
        assert all("step 2 of" in reader.event()["body"].lower() for reader in readers)
        assert len(rendered) == 2
        for reader in readers:
            reader.close()
        append(place, step_line(3))
        time.sleep(0.5)
        assert len(rendered) == 2  # nobody reads


def test_a_quiet_stream_has_beats_and_ends_with_the_server(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "BEAT", 0.1)
    with serving(write_run(tmp_path / "run", [run_start(), end(0)])) as server:
        reader = Reader(server)
        reader.event()
        assert reader.event("beat") is None
    until(lambda: not reader.file.read())
    reader.close()


def test_a_reader_that_never_reads_does_not_keep_the_server_from_ending(tmp_path):
    place = write_run(tmp_path / "run", [run_start(), step_line(1)])
    with serving(place) as server, socket.create_connection(("127.0.0.1", server), 20) as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        reader.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")  # more than buffers hold
        assert reader.recv(9)
        began = time.monotonic()
    assert time.monotonic() - began < 10


def test_a_long_first_reading_does_not_put_off_the_next(tmp_path, monkeypatch):
    place = write_run(tmp_path / "run", [run_start(), step_line(1)])
    clock, seconds, read = [0.0], [60.0], Run.read

    def slow(self: Run) -> bool:
        clock[0] += seconds[0]
        return read(self)

    monkeypatch.setattr(Run, "read", slow)
    monkeypatch.setattr(watch, "INTERVAL", 1.0)
    clocks = {"monotonic": lambda: clock[0], "thread_time": lambda: clock[0], "time": time.time}
    monkeypatch.setattr(watch, "time", SimpleNamespace(**clocks))
    report = LiveReport([place])
    assert report.refresh()[0] == 1
    append(place, step_line(2))
    seconds[0] = 2.0
    clock[0] += 1.5
    assert report.refresh()[0] == 2
    append(place, step_line(3))
    clock[0] += 10.0
    assert report.refresh()[0] == 2  # at most a tenth of the time
    clock[0] += 10.0
    assert report.refresh()[0] == 3


def test_what_cannot_be_read_is_told(tmp_path, monkeypatch):
    def denied(self: Run) -> bool:
        raise StorageError("metrics.jsonl: Permission denied; correct its permissions")

    with serving(write_run(tmp_path / "run", [run_start()])) as server:
        reader = Reader(server)
        reader.event()
        monkeypatch.setattr(Run, "read", denied)
        assert "Permission denied" in reader.event("problem")
        assert ask(server)[0].status == 200  # the report up to then
        monkeypatch.undo()
        assert "Nothing" not in reader.event()["body"]
        reader.close()


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/", "POST", {}, 405),
        ("/events", "DELETE", {}, 405),
        ("/", "BREW", {}, 405),
        ("/report.html", "GET", {}, 404),
        ("/../metrics.jsonl", "GET", {}, 404),
        ("/", "GET", {"Host": "evil.example"}, 400),
        ("/", "GET", {"Host": "[::1"}, 400),
        ("/events", "GET", {"Host": "evil.example:80"}, 400),
        ("/events", "GET", {"Origin": "http://evil.example"}, 403),
        ("/", "GET", {"Host": "localhost:80:90"}, 400),
        ("/", "GET", {"Host": "[::1]:80:90"}, 400),
        ("/", "GET", {"Host": "localhost:x"}, 400),
        ("/", "GET", {"Host": "user@localhost"}, 400),
        ("/", "GET", {"Host": "localhost/evil.example"}, 400),
        ("/", "GET", {"Host": "[::1]evil.example"}, 400),
        ("/", "GET", {"Host": "[::1]:9999"}, 200),
        ("/", "GET", {"Host": "LocalHost"}, 200),
        ("/", "GET", {"Host": "localhost:9999"}, 200),  # through a tunnel
    ],
)
def test_only_this_host_reads_and_nothing_else(tmp_path, path, method, headers, status):
    with serving(write_run(tmp_path / "run", [run_start()])) as server:
        assert ask(server, path, method, **headers)[0].status == status


def test_a_port_in_use_ends_with_9(capsys, tmp_path):
    place = str(write_run(tmp_path / "run", [run_start()]))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["report", place, "--watch", "--port", port]) == 9
    assert f"--port {port}: Address already in use; give another" in capsys.readouterr().err


def test_without_its_packages_the_command_says_what_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("minimind.runtime.installed.find_spec", lambda name: None)
    assert main(["report", str(write_run(tmp_path / "run", [run_start()])), "--watch"]) == 2
    error = capsys.readouterr().err
    assert "--watch needs the package starlette, which is not installed; " in error
    assert "-m pip install -e '.[serve]'" in error


def test_the_command_says_where_and_what_it_waits_for_and_ends_on_ctrl_c(
    capsys, monkeypatch, tmp_path
):
    def interrupted(self: Server, sockets: list[socket.socket]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "run", interrupted)
    assert main(["report", str(tmp_path / "later"), "--watch", "--port", "0"]) == 130
    output = capsys.readouterr().out
    assert "http://127.0.0.1:" in output
    assert "later holds no metrics.jsonl yet" in output


NAMES = ("50% (best), 3.3", "#a .b > c", 'it\'s "<b>" & $x$', "\u8bd7 1", "\\", "{x}:[y]")


@pytest.mark.parametrize("names", [("run",), NAMES], ids=["one run", "runs"])
def test_ids_and_selectors_have_letters_digits_and_dashes(tmp_path, names):
    places = [write_run(tmp_path / name, crashed_and_resumed()) for name in names]
    report = LiveReport(places)

    def identities(message: bytes) -> dict[str, list[str]]:
        charts = json.loads(message.decode().split("data: ", 1)[1])["charts"]
        return {key: [one["uid"] for one in chart["data"]] for key, chart in charts.items()}

    before = identities(report.refresh()[1])
    for key, uids in before.items():
        assert re.fullmatch("[a-z][a-z0-9_]*", key)
        assert all(re.fullmatch("trace-[a-z-]*-[0-9]+", uid) for uid in uids)
        assert len({*uids}) == len(uids)
    for place in places:  # other shares of clipped lines, more checkpoints
        saved = {"event": "checkpoint_saved", "time": 1.0, "step": 41, "path": "p"}
        append(place, *(step_line(n, clipped=n % 2 > 0) for n in range(41, 60)), saved)
    until(lambda: report.refresh()[0] == 2)
    assert identities(report.message) == before


@pytest.mark.parametrize(
    "names",
    [pytest.param(("run",), id="one run"), pytest.param(NAMES, id="runs", marks=pytest.mark.long)],
)
def test_a_browser_draws_every_chart_of_a_live_page(tmp_path, names):
    places = [write_run(tmp_path / name, crashed_and_resumed()) for name in names]
    drawn = """[...document.querySelectorAll(".plot")].map(plot =>
        [plot.closest("figure").id, plot.querySelectorAll(".trace").length > 0])"""
    steps = "document.querySelector('#loss .plot').calcdata.flat().map(point => point.x || 0)"
    with serving(*places) as server, opened(f"http://127.0.0.1:{server}/") as page:
        page.evaluate("window.lossPlot = document.querySelector('#loss .plot')")
        ended = "Ended: done." if len(names) == 1 else "All runs have ended."
        expect(page.locator("#live")).to_contain_text(ended)
        charts = page.evaluate(drawn)
        assert len(charts) >= 5
        assert all(has_traces for _, has_traces in charts)
        assert page.evaluate("lossPlot.isConnected")  # not drawn anew
        for place in places:
            append(place, run_start(40, total_steps=90))
            append(place, *(step_line(n, clipped=n % 2 > 0) for n in range(41, 60)))
            append(place, evaluation(59, 4.0))
        until(lambda: max(page.evaluate(steps)) == 59)
        assert page.evaluate(drawn) == charts
        assert page.evaluate("lossPlot.isConnected")


def test_a_browser_follows_the_run_keeps_its_view_and_finds_the_server_again(tmp_path):
    place = write_run(tmp_path / "run", [run_start(total_steps=100), step_line(1), step_line(2)])
    last = "document.querySelector('#loss .plot').calcdata.at(-1).length"
    ranges = "['loss', 'lr'].map(id => document.querySelector(`#${id} .plot`).layout.xaxis.range)"
    with serving(place) as server:
        port = server
        stack = opened(f"http://127.0.0.1:{server}/")
        page = stack.__enter__()
        live = page.locator("#live")
        expect(live).to_contain_text("Running.")
        page.evaluate("window.isSame = true; scrollTo(0, 300)")
        append(place, *(step_line(n) for n in range(3, 31)))
        expect(page.locator(".lead")).to_contain_text("Step 30 of 100")
        until(lambda: page.evaluate(last) == 30)
        expect(page.locator(".progress b")).to_have_text("30%")
        page.evaluate(
            "Plotly.relayout(document.querySelector('#loss .plot'), {'xaxis.range': [5, 10]})"
        )
        until(lambda: page.evaluate(ranges) == [[5, 10], [5, 10]])
        append(place, step_line(31))
        until(lambda: page.evaluate(last) == 31)
        assert page.evaluate(ranges) == [[5, 10], [5, 10]]
    expect(live).to_contain_text("Not up to date.")
    append(place, step_line(32))
    with serving(place, port=port):
        expect(page.locator(".lead")).to_contain_text("Step 32 of 100")
        expect(live).to_contain_text("Running.")
        assert page.evaluate("window.isSame && scrollY === 300")
        assert page.evaluate(ranges) == [[5, 10], [5, 10]]
        stack.__exit__(None, None, None)
