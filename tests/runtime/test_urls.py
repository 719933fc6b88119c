"""What is shown and stored of URLs: 10,000 made ones, whose secrets are in no text."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from minimind.checkpoint.run_folder import write_reference
from minimind.config.deepspeed.resolve import resolve
from minimind.config.origin import Origin, Rank
from minimind.config.parse import parse_flags
from minimind.errors import DataError, RunError, StorageError
from minimind.report.page import write_report
from minimind.runtime import filesystem
from minimind.runtime.download import RemoteObject
from minimind.runtime.exit import Ending
from minimind.runtime.filesystem import open_filesystem, reason_of, retrying
from minimind.runtime.object_cache import naming_urls, open_cache
from minimind.runtime.process import Progress
from minimind.runtime.urls import has_credentials, is_url, masked, masked_text, named
from minimind.sweep.trial import command_line
from minimind.train.run_start import changed_settings, settings_tables
from tests.report.made import run_start
from tests.runtime.signed_urls import INSIDE, MARKER, NAME, TEXTS, Signed, signed_urls

NUMBER = 10_000
END = ("end", "; correct the URL")  # of texts


def leaks(made: Signed, text: str) -> bool:
    return any(part in text for part in made.secrets)


@pytest.mark.sample(1)
@pytest.mark.parametrize("inside", [INSIDE, (*INSIDE, " ", "?", "#", "\n")])
def test_a_value_that_is_a_url_is_shown_up_to_its_secret(inside: tuple[str, ...]):
    for made in signed_urls(len(inside), NUMBER, inside):
        shown = masked(made.url)
        assert not leaks(made, shown), (made.url, shown)
        assert not leaks(made, masked(f"web={made.url}")), made.url
        assert not leaks(made, named(made.url)), made.url
        sentence = masked_text(f"{masked(shown)}: there is no such object; correct the URL")
        assert sentence.endswith(": there is no such object; correct the URL"), made.url
        if made.outer:
            assert made.outer in shown, (made.url, shown)
        elif not made.has_user or not re.search(r"[?#\n=]|%3D|a@b", made.url):
            assert made.host in shown, (made.url, shown)
            assert NAME in shown, (made.url, shown)


@pytest.mark.parametrize("form", TEXTS)
def test_no_secret_is_in_a_text_with_urls(form: str):
    for made in signed_urls(len(form), NUMBER // 5):
        if form == "as requests writes it" and made.has_user:
            continue
        text = TEXTS[form](made.url)
        shown = masked_text(text)
        assert not leaks(made, shown), (text, shown)
        for end in END:
            assert not text.endswith(end) or shown.endswith(end), (text, shown)


FLAGS = "--max_steps 3 --dim 64 --vocab_size 600 --device cpu --deepspeed_config none"
PLACES = ("tokenizer", "init_from", "chat_template", "wandb_project", "wandb_run_name", "resume")


class Refused(OSError):
    """As a library of storage raises it."""

    status = 403


class Busy(Refused):
    status = 503


def print_settings(made: list[Signed], folder: Path) -> None:
    """Print what a run prints of its flags and a sweep of a trial's; write the run's files."""
    run = parse_flags(FLAGS.split())
    places: dict[str, Any] = dict(zip(PLACES, (one.url for one in made), strict=False))
    urls = tuple(one.url for one in made)
    run = run.with_values(Origin("signed", Rank.DATA), data_path=urls, **places)
    config = {"wandb": {"enabled": True, "project": made[0].url, "team": made[1].url}}
    resolved = resolve(config, "ds.json", run, 1, "cpu")
    write_reference(folder, resolved)
    print(*settings_tables(resolved), command_line({"data_path": urls}), changed_settings(resolved))


def print_ends(made: list[Signed], folder: Path) -> None:
    """Print and record the end of a run by errors that have URLs in them."""
    for number, one in enumerate(made):
        text = [*TEXTS.values()][number % (len(TEXTS) - 1)](one.url)
        if number % 3 == 0:
            error: Exception = KeyError(text)
        elif number % 3 == 1:
            error = StorageError(f"{masked(one.url)}: {reason_of(OSError(text), one.url)}")
        else:
            error = DataError(text, None, [text])
        Ending(Progress(out_dir=folder, step=number), debug=number % 2 == 0).report(error)


def print_refusals(made: list[Signed]) -> None:
    """Print the lines of storage that refuses, or that is down, and says so with the URL."""
    for number, one in enumerate(made):
        kind = (Refused, Busy, OSError)[number % 3]

        def work(kind: type[Exception] = kind, one: Signed = one, number: int = number) -> None:
            raise kind([*TEXTS.values()][number % (len(TEXTS) - 1)](one.url))

        if is_url(one.url):
            with pytest.raises(RunError) as caught:
                retrying(one.url, work)
            print(caught.value)
            with pytest.raises(RunError) as caught:
                open_filesystem(f"{one.url}?***")
            print(caught.value)


def print_cached(made: list[Signed], cache_dir: Path) -> None:
    """Store some URLs in a cache, and print errors that name files of it."""
    with open_cache(cache_dir) as cache:
        ours = [one for one in made if is_url(one.url) and not has_credentials(one.url)]
        for number, one in enumerate(ours):
            try:
                path = cache.path(one.url)
            except DataError as error:  # names that no file has
                print(error)
                continue
            print(named(str(path)), path)
            if number % 100 == 0:
                cache.put(RemoteObject(one.url, "", 4, f"etag {number}"), b"text", "")
            with pytest.raises(DataError) as caught, naming_urls(cache.folder):
                raise DataError(f"{path}: line 3 is no JSON; correct it")
            print(caught.value)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(10))
def test_no_secret_is_in_what_is_written_and_printed(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(filesystem, "WAITS", (0.0,))
    made, run_dir = [*signed_urls(seed, NUMBER // 10)], tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text(json.dumps(run_start()) + "\n")
    print_settings(made, run_dir)
    print_ends(made, run_dir)
    print_refusals(made)
    print_cached(made, tmp_path / "cache")
    write_report([run_dir], tmp_path / "report.html", "")
    page = (tmp_path / "report.html").read_text()
    (tmp_path / "report.html").write_text(re.sub("(?s)<script.*?</script>", "", page))
    out, err = capsys.readouterr()
    texts: dict[str, str] = {"stdout": out, "stderr": err}
    for path in tmp_path.rglob("*"):
        texts[str(path.relative_to(tmp_path))] = path.read_text() if path.is_file() else ""
    near = re.compile(f".{{,80}}{MARKER}.{{,20}}")
    found = {name: parts for name, text in texts.items() if (parts := near.findall(text))}
    found |= {name: [name] for name in texts if MARKER in name}
    assert not found, "\n".join(f"{name}: {part}" for name in found for part in found[name][:9])
    for name in ("stdout", "stderr", "run/config.yaml", "run/metrics.jsonl"):
        assert texts[name].count(NAME) > NUMBER // 20, name  # paths stay
    assert texts["report.html"].count(NAME) > 50


LONG = {
    "a word": "x" * 100_000,
    "beginnings": "https://" * 10_000,
    "a password": "https://u:" + "p" * 100_000,
    "words of passwords": "https://u:p " * 8_000,
    "percents": "https://h/" + "%25" * 30_000,
    "encoded names": "https://h/" + "%26a" * 25_000,
    "brackets": "https://h/" + ")" * 90_000,
    "quotes": "'https://h " * 9_000,
    "encoded beginnings": "https://h/" + "https%3A%2F%2F" * 2_000,
    "words of a secret": "?" + "sig" * 30_000,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_a_long_text_is_masked_in_a_time_of_its_length(text: str):
    began = time.process_time()
    masked(text)
    masked_text(text)
    assert time.process_time() - began < 5  # without limits of repeats, minutes
