"""Validation bits per byte after a given time: this project beside other training loops.

    OMP_NUM_THREADS=1 python -m benchmarks.time_to_loss TEXT.jsonl [TEXT.jsonl ...] --folder DIR
        [--minutes 10] [--search_minutes 2] [--rates 5e-4 1e-3 ...] [--rates_of NAME=5e-4,1e-3 ...]
        [--seeds 3] [--jobs 2] [--model tiny] [--rows 4] [--rows_of NAME=8 ...]
        [--pieces CHARACTERS] [--only NAME ...]
        [--variant NAME=FLAGS ...] [--peer nanochat|minimind PATH] [--reference NAME]
        [--out FILE.json] [--page FILE.html]

Every contender (benchmarks/racers.py) trains the same shape on the same text in one process and
thread. All times are CPU seconds of the process, so they depend little on other load. Those of a
step are measured first, in rounds in which every contender takes some steps alone; a contender then
takes as many steps as fit in --minutes, with what the first step takes longer (caches of compiled
code are warm), and its learning rate falls over them. Times to start, to prepare data and to save
are not counted, but that of --embedding_init bigrams is. Tokens are those with a loss: padding is
none. CPU seconds of the tables are those of the run itself, with its first steps.

A step has --rows, or those of --rows_of. This project takes rates by its own rules by default and
with its recipe, and the rows of its rule for the tokens that fit; with its defaults of before the
rules 8 rows and 5e-4. For the others --learning_rate is searched at --search_minutes, for the
contenders of --rates_of over fewer rates than --rates (not at all with one); a best rate at an end
of them is reported. Then every contender trains --minutes with each seed. `minimind eval` judges
ten points of each run on the held-out documents, each document by itself. A variant is the
contender with Muon with further flags, which do not change rows. --pieces cuts the texts at white
space: loaders that begin each row with a document read little of long ones. What is done is kept in
DIR, and not done again while its command, data and checkout stay the same.

--peer, once per project, adds the contenders of its checkout (benchmarks/peers.py): "MiniMind,
padded" and "MiniMind, packed", or "nanochat", whose rate is a multiple of those of its script, 1 to
64 where --rates_of does not name it; --only names them, too. What is printed ends with the seconds
until the final value of --reference (the first contender unless given): medians over the seeds, and
ranges.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import PEER_OF, PEERS
from benchmarks.race_page import rate_text, write_page
from benchmarks.racers import BEFORE, DEFAULT, MUON, PADDED, RACERS, RECIPE
from benchmarks.record import arguments, record
from minimind.config.parse import RECIPES, parse_flags
from minimind.config.rules import suited_rows
from minimind.config.yaml_files import load_yaml_texts

SHIPPED = 5e-4  # learning rate of MiniMind's pretraining
POINTS = 10
PACE_STEPS, PACE_POINTS, PACE_ROUNDS = 40, 8, 3
RATES = [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]
AS_SHIPPED = f"{PADDED}, as shipped"
BY_RULE = (DEFAULT, RECIPE)
RATE_OF = {AS_SHIPPED: SHIPPED, BEFORE: SHIPPED, **dict.fromkeys(BY_RULE)}  # not searched
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Race:
    """A folder with the data, and everything measured so far."""

    folder: Path
    model: str
    rows: int
    variants: Mapping[str, str]  # further flags of the one with Muon, by name
    peers: Mapping[str, Path]  # checkouts of other projects, by contender
    rows_of: Mapping[str, int]  # by contender, in place of `rows`

    @property
    def data(self) -> Path:
        """The prepared text."""
        return self.folder / "data"

    def command(self, name: str, *more: str) -> list[str]:
        """The command line of a contender, without its folder."""
        racer = {AS_SHIPPED: PADDED}.get(name, MUON if name in self.variants else name)
        command = [sys.executable, "-m", "benchmarks.racers", racer, str(self.data)]
        rows = self.rows_of.get(name, self.rows)
        command += ["--model", self.model, "--rows", str(rows), *more]  # the last one counts
        if name in self.peers:
            command += ["--peer", str(self.peers[name])]
        return command + shlex.split(self.variants.get(name, ""))

    def key(self, name: str, *more: str) -> str:
        """Name of what a command finds; another for another command or data."""
        command = self.command(name, *more)
        content = [command[3], *command[5:], (self.data / "manifest.json").read_text()]
        if name in self.peers:
            content.append(PEER_OF[name].digest(self.peers[name]))
        if command[3] == RECIPE:
            recipe = load_yaml_texts(str(RECIPES / "strong.yaml"), "--config")
            content.append(json.dumps(recipe))
        digest = hashlib.sha256("\0".join(content).encode()).hexdigest()[:12]
        return f"{re.sub('[^a-zA-Z0-9]+', '-', name)}-{digest}"

    def train(self, name: str, *more: str) -> list[dict[str, float]]:
        """Train a contender; return points.json. SystemExit with the end of its log if it fails."""
        out = self.folder / "runs" / self.key(name, *more)
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(exist_ok=True)
        log = out.with_name(f"{out.name}.log")
        command = self.command(name, *more)
        command.insert(5, str(out))
        with log.open("w") as file:
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=ONE_THREAD)
        if done.returncode:
            raise SystemExit(f"{name} ended with {done.returncode}:\n{log.read_text()[-3000:]}")
        marks: list[dict[str, float]] = json.loads((out / "points.json").read_text())
        shutil.rmtree(out)
        return marks

    def pace(self, names: Sequence[str], rows: Mapping[str, int]) -> dict[str, Pace]:
        """CPU seconds per step, and of the first steps beyond that, by contender."""
        flags = ["--steps", str(PACE_STEPS), "--points", str(PACE_POINTS), "--lr", str(SHIPPED)]
        more = {name: [*flags, "--rows", str(rows.get(name, self.rows))] for name in names}
        places = {name: self.folder / f"pace-{self.key(name, *more[name])}.json" for name in names}
        part = PACE_STEPS // PACE_POINTS
        found: dict[str, list[tuple[float, float]]] = {
            name: [] for name, place in places.items() if not place.exists()
        }
        for number in range(PACE_ROUNDS + 1):  # the first one fills caches
            for name, pairs in found.items():
                at = [mark["cpu_seconds"] for mark in self.train(name, *more[name])]
                each = statistics.median(np.diff(at)) / part
                if number:
                    pairs.append((each, at[0] - each * part))
        for name, pairs in found.items():
            each, start = (statistics.median(values) for values in zip(*pairs, strict=True))
            pace = {"step": each, "start": max(start, 0.0), "steps": [pair[0] for pair in pairs]}
            places[name].write_text(json.dumps(pace))
            print(f"{name}: {each:.3f} s a step, {start:.1f} s more at the start", flush=True)
        return {name: json.loads(place.read_text()) for name, place in places.items()}

    def pace_by_rule(self, names: Sequence[str], minutes: float) -> dict[str, Pace]:
        """As `pace`, with the rows that the rule gives for what then fits in `minutes`."""
        length = parse_flags(["--model", self.model]).max_seq_len
        settled, rows = {}, dict.fromkeys(names, self.rows)
        while missing := [name for name in names if name not in settled]:
            for name, pace in self.pace(missing, rows).items():
                tokens = steps_in(minutes, pace) * rows[name] * length
                optimizer = "Muon" if name == RECIPE else "AdamW"
                by_rule = suited_rows(1, length, tokens, 64, optimizer)
                if by_rule == rows[name]:
                    settled[name] = {**pace, "rows": by_rule}
                rows[name] = by_rule
        return settled

    def run(
        self, name: str, rate: float | None, seed: int, minutes: float, pace: Pace
    ) -> dict[str, Any]:
        """Train and judge one run, unless that was done; return its curve."""
        steps = steps_in(minutes, pace)
        flags = ["--steps", str(steps), "--points", str(POINTS), "--seed", str(seed), "--judge"]
        flags += ["--rows", str(pace["rows"])] if name in BY_RULE else []
        flags += [] if rate is None else ["--lr", str(rate)]
        place = self.folder / "runs" / f"{self.key(name, *flags)}.json"
        if place.exists():
            return {**json.loads(place.read_text()), "minutes": minutes}
        marks = self.train(name, *flags)
        wall = marks[-1]["seconds"]  # with whatever else ran
        curve = [{**mark, "seconds": pace["start"] + mark["step"] * pace["step"]} for mark in marks]
        found = {"name": name, "rate": rate, "seed": seed, "minutes": minutes, "wall": wall}
        found["curve"] = curve
        place.write_text(json.dumps(found, indent=1))
        line = f"{name}, rate {rate_text(rate)}, seed {seed}, {minutes:g} min"
        print(f"{line}: {final(found):.4f}", flush=True)
        return found


Pace = Mapping[str, Any]


def steps_in(minutes: float, pace: Pace) -> int:
    """Steps that fit, a multiple of POINTS."""
    return max(round((60 * minutes - pace["start"]) / pace["step"]) // POINTS, 1) * POINTS


def prepare(race: Race, texts: Sequence[Path], characters: int | None) -> None:
    """Tokenize the texts with a tokenizer trained on them, unless that was done."""
    if not race.data.exists():
        size = parse_flags(["--model", race.model]).vocab_size
        if characters:
            texts = [in_pieces(text, race.folder / "pieces", characters) for text in texts]
        command = ["prepare", *map(str, texts), "--out", str(race.data), "--val_fraction", "0.01"]
        subprocess.run(
            [sys.executable, "-m", "minimind", *command, "--vocab_size", str(size)], check=True
        )


def in_pieces(text: Path, folder: Path, characters: int) -> Path:
    """Write the documents cut at white space, each piece at most so long where there is some."""
    folder.mkdir(parents=True, exist_ok=True)
    piece = re.compile(rf"(?s)\S.{{0,{characters - 1}}}(?=\s|$)|\S+")
    with text.open(encoding="utf-8") as lines, (folder / text.name).open("w") as out:
        for line in lines:
            for found in piece.findall(json.loads(line)["text"]):
                out.write(json.dumps({"text": found}) + "\n")
    return folder / text.name


def in_parallel(jobs: int, calls: Iterable[Any]) -> list[Any]:
    """Results of functions without arguments, `jobs` at a time; the first failure ends the rest."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            return [future.result() for future in futures]
        except BaseException:  # Ctrl-C, too: what is queued takes hours
            pool.shutdown(cancel_futures=True)
            raise


def final(run: Mapping[str, Any]) -> float:
    """Bits per byte at the end of a run."""
    return run["curve"][-1]["bits"]


def bits_at(run: Mapping[str, Any], seconds: float) -> float:
    """Bits per byte after `seconds`, interpolated between the points."""
    points = run["curve"]
    return float(np.interp(seconds, [p["seconds"] for p in points], [p["bits"] for p in points]))


def needed(run: Mapping[str, Any], bits: float, axis: str = "seconds") -> float:
    """Seconds or tokens until a run is at `bits`, interpolated; infinity if it never is."""
    points = run["curve"]
    for before, after in zip([None, *points[:-1]], points, strict=True):
        if after["bits"] <= bits:
            if before is None:
                return after[axis]
            share = (before["bits"] - bits) / (before["bits"] - after["bits"])
            return before[axis] + share * (after[axis] - before[axis])
    return float("inf")


def best_rate(runs: Sequence[Mapping[str, Any]]) -> float:
    """Learning rate of the run that ends lowest; prints if it is at an end of the grid."""
    best, rates = min(runs, key=final), [run["rate"] for run in runs]
    if best["rate"] in (min(rates), max(rates)):
        print(f"{best['name']}: {best['rate']:g} is best, at an end of --rates", flush=True)
    return best["rate"]


def searched(race: Race, names: Sequence[str], given: Any, pace: Any) -> list[dict[str, Any]]:
    """Short runs of every contender with every learning rate."""
    calls = [
        partial(race.run, name, rate, 0, given.search_minutes, pace[name])
        for name in names
        if name not in RATE_OF and len(given.rates_of.get(name, given.rates)) > 1
        for rate in given.rates_of.get(name, given.rates)
    ]
    return in_parallel(given.jobs, calls)


def raced(
    race: Race, rates: Mapping[str, float | None], given: Any, pace: Any
) -> dict[str, list[dict[str, Any]]]:
    """The long runs by contender, one of each seed."""
    pairs = [(name, seed) for seed in range(given.seeds) for name in rates]
    calls = [partial(race.run, n, rates[n], seed, given.minutes, pace[n]) for n, seed in pairs]
    runs = in_parallel(given.jobs, calls)
    return {name: [run for run in runs if run["name"] == name] for name in rates}


def summary(runs: Mapping[str, Sequence[Mapping[str, Any]]], minutes: float) -> dict[str, Any]:
    """By contender: bits per byte at a fifth, half and all of the time, and how much sooner it is.

    `sooner` has by contender the quotient of its time or tokens and the medians that this one needs
    for the same final bits per byte; 0 if it does not get there.
    """
    table: dict[str, Any] = {}
    for name, own in runs.items():
        at, sooner = {}, {}
        for moment in (minutes / 5, minutes / 2, minutes):
            values = sorted(bits_at(run, 60 * moment) for run in own)
            ends = [values[0], values[-1]]
            at[f"{moment:g}"] = {"median": statistics.median(values), "range": ends}
        for other, theirs in runs.items():
            goal = statistics.median(final(run) for run in theirs)
            sooner[other] = {
                axis: theirs[0]["curve"][-1][axis]
                / statistics.median(needed(run, goal, axis) for run in own)
                for axis in ("seconds", "tokens")
            }
        table[name] = {"rate": own[0]["rate"], "bits": at, "sooner": sooner}
    return table


def until(runs: Mapping[str, Sequence[Mapping[str, Any]]], reference: str) -> list[list[str]]:
    """As a table: time of each contender until the median final bits of another, and ranges."""
    goal = statistics.median(final(run) for run in runs[reference])
    head = f"until {goal:.4f}, of {reference}"
    lines = [[head, "s by pace", "range", "CPU s of the run", "range"]]
    for name, own in runs.items():
        line = [name]
        for axis in ("seconds", "cpu_seconds"):
            times = sorted(needed(run, goal, axis) for run in own)
            middle = statistics.median(times)
            line += [f"{middle:.0f}" if middle < math.inf else "not reached"]
            line += [f"{times[0]:.0f} to {times[-1]:.0f}"]
        lines.append(line)
    return lines


def shown(table: Mapping[str, Any], against: Sequence[str]) -> str:
    """Return the table as text."""
    moments = list(next(iter(table.values()))["bits"])
    head = "".join(f"{moment + ' min':>10}" for moment in moments)
    lines = [f"{'bits per byte':34}{'rate':>8}{head}{'range':>18}"]
    for name, row in table.items():
        bits = "".join(f"{row['bits'][moment]['median']:10.4f}" for moment in moments)
        low, high = row["bits"][moments[-1]]["range"]
        lines.append(f"{name:34}{rate_text(row['rate']):>8}{bits}{f'{low:.4f} to {high:.4f}':>18}")
    for name, other in ((name, other) for name in (MUON, RECIPE) for other in against):
        if name in table and other in table and name != other:
            quotients = table[name]["sooner"][other]
            times, fewer = quotients["seconds"], quotients["tokens"]
            lines.append(
                f"{name} is {times:.2f} times sooner at the final value of {other}, with"
                f" {fewer:.2f} times fewer tokens"
            )
    return "\n".join(lines)


def rates_of(text: str) -> tuple[str, list[float]]:
    """Return the name and the rates of NAME=RATE,RATE,..."""
    name, rates = text.split("=", 1)
    return name, [float(rate) for rate in rates.split(",")]


def main() -> None:
    """Measure, search, race; print the table, write JSON and page."""
    parser = arguments(__doc__)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--search_minutes", type=float, default=2.0)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--rates_of", type=rates_of, nargs="+", default=[], metavar="NAME=RATES")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rows_of", nargs="+", default=[], metavar="NAME=ROWS")
    parser.add_argument("--pieces", type=int, metavar="CHARACTERS")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--variant", nargs="+", default=[], metavar="NAME=FLAGS")
    parser.add_argument("--peer", nargs=2, action="append", default=[], metavar=("NAME", "PATH"))
    parser.add_argument("--reference", metavar="NAME")
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    peers = {}
    for name, path in given.peer:
        if name not in PEERS:
            parser.error(f"--peer {name} is unknown; give one of {', '.join(PEERS)}")
        PEERS[name].digest(checkout := Path(path).resolve())  # all files are there
        peers |= dict.fromkeys(PEERS[name].contenders, checkout)
    rates = {name: peer.rates for name, peer in PEER_OF.items() if peer.rates}
    given.rates_of = {**rates, **dict(given.rates_of)}
    before = os.getloadavg()
    variants = dict(one.split("=", 1) for one in given.variant)
    names = [*(given.only or [AS_SHIPPED, *RACERS, *peers]), *variants]
    known, reference = [AS_SHIPPED, *RACERS, *peers, *variants], given.reference or names[0]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--only {unknown[0]} is no contender; give --peer, or one of {known}")
    if reference not in names:
        parser.error(f"--reference {reference} takes no part; give one of {names}")
    rows_of = {name: int(rows) for name, rows in (one.split("=", 1) for one in given.rows_of)}
    race = Race(given.folder, given.model, given.rows, variants, peers, rows_of)
    prepare(race, given.text, given.pieces)
    by_rule = [name for name in names if name in BY_RULE]
    pace = race.pace([name for name in names if name not in BY_RULE], {BEFORE: 8, **rows_of})
    pace |= race.pace_by_rule(by_rule, given.minutes)
    search = searched(race, names, given, pace)
    chosen: dict[str, float | None] = {name: only for name, (only, *_) in given.rates_of.items()}
    for name in {run["name"]: None for run in search}:
        chosen[name] = best_rate([run for run in search if run["name"] == name])
    rates = {name: {**chosen, **RATE_OF}[name] for name in names}
    runs = raced(race, rates, given, pace) if given.seeds else {}
    if runs:
        table = summary(runs, given.minutes)
        print(shown(table, names))
        reached = until(runs, reference)
        for line in reached:
            print(f"{line[0]:34}" + "".join(f"{cell:>18}" for cell in line[1:]))
        if given.page:
            lead = f"{given.model}, {given.seeds} seeds, CPU time of one thread."
            write_page(given.page, runs, table, reached, lead)
    else:
        table = {}
        for name in names:
            own = sorted((run["rate"], final(run)) for run in search if run["name"] == name)
            print(f"{name:34}" + "".join(f"{rate:9g}: {bits:.4f}" for rate, bits in own))
    record(given.out, "time_to_loss", before, table=table, pace=pace, search=search, runs=runs)


if __name__ == "__main__":
    main()
