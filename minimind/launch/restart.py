"""Decide how a run starts again after status 7: with which hosts, processes and flags.

Flags are appended to the command, where the last value of a flag counts. The rows of a step stay
the same, so that the run is the same.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from minimind.checkpoint.directory import published_checkpoints
from minimind.errors import PeerError, Stopped
from minimind.launch.plan import count_gpus
from minimind.runtime import disk
from minimind.runtime.durable_files import storing, write_durably, write_whole
from minimind.runtime.heartbeat import Layout, read_layout
from minimind.runtime.process import NAME

FOLDER = ".restarts"  # folder in out_dir
DECISION, STOP = "decision", "stopped"
POLL = 0.5  # seconds
LONGEST_WAIT = 300  # seconds
SETTLE = 6  # times RESTART_WAIT: how long to wait for one more host
AGAIN = "run the same command again"


@dataclass(frozen=True)
class Host:
    """A host whose launch script is running."""

    rank: int  # MACHINE_RANK in the launch that was lost
    address: str  # becomes MAIN_IP if it is the first one that is left
    processes: int  # at most, in the next launch


class Meeting:
    """The hosts that are left after one lost launch; `folder` is of this launch only."""

    def __init__(self, folder: Path, me: Host, machines: int) -> None:
        self.folder = folder
        self.me = me
        self.machines = machines

    def agree(self, settle: float) -> list[Host]:
        """Return the same hosts, by rank, on all of them.

        Waits until all `machines` are there, or until no new one has come for `settle` seconds.
        Raise PeerError if this host came too late.
        """
        with storing(str(self.folder), "correct the path, and run the same command again"):
            self.folder.mkdir(parents=True, exist_ok=True)
            known, since = 0, time.monotonic()
            while not disk.exists(self.folder / DECISION):
                self.check()
                names = [path.name for path in disk.entries(self.folder)]
                ranks = sorted(int(name) for name in names if name.isdecimal())
                if len(ranks) > known:
                    known, since = len(ranks), time.monotonic()
                patience = 0.0 if known == self.machines else settle
                # Only the first host reads what all announced, unless it is lost meanwhile.
                patience += POLL * sum(rank < self.me.rank for rank in ranks)
                if time.monotonic() - since >= patience:
                    self._publish(ranks)
                else:
                    time.sleep(POLL)
            hosts = [Host(**host) for host in json.loads((self.folder / DECISION).read_text())]
        if self.me not in hosts:
            raise PeerError(
                f"the other hosts restarted without host {self.me.rank}, which came more than"
                f" {settle:g} s after them; run the same command again once that run has ended"
            )
        return hosts

    def wait(self, seconds: float) -> None:
        """Wait; raise Stopped if the script of another host was stopped meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.check()
            time.sleep(min(POLL, left))

    def stop(self) -> None:
        """Tell the other hosts that this one was stopped."""
        with suppress(FileNotFoundError):  # not announced yet: nobody counts on this host
            (self.folder / STOP).touch()

    def check(self) -> None:
        """Announce this host; raise Stopped if the script of another one was stopped.

        The file is written each time: a client of NFS that changes a folder reads its names anew.
        """
        write_whole(self.folder / str(self.me.rank), json.dumps(asdict(self.me)).encode())
        if disk.exists(self.folder / STOP):
            raise Stopped("another host was stopped; run the same command again to continue")

    def _publish(self, ranks: list[int]) -> None:
        """Write the decision unless another host has; then delete the folders of earlier ones."""
        hosts = [json.loads((self.folder / str(rank)).read_text()) for rank in ranks]
        draft = self.folder / f"draft-{self.me.rank}"
        write_durably(draft, json.dumps(hosts).encode())
        try:
            os.link(draft, self.folder / DECISION)  # atomic: the first one wins
        except FileExistsError:
            return
        finally:
            draft.unlink()
        for other in disk.entries(self.folder.parent):
            if other != self.folder:
                shutil.rmtree(other)


def own_address(main_ip: str, port: int) -> str:
    """Return the address from which this host reaches `main_ip`, without sending anything."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(main_ip, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PeerError(
            f"MAIN_IP = {main_ip}: {error.strerror}, so no address of this host is known for a"
            " restart; run the same command again"
        ) from error


@dataclass(frozen=True)
class Launched:
    """The launch that was lost."""

    processes: int
    machines: int
    machine_rank: int
    ip: str
    port: int

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Launched:
        """From what the plan wrote for `accelerate launch`."""
        return cls(
            document["num_processes"],
            document["num_machines"],
            document["machine_rank"],
            document["main_process_ip"] or "",
            document["main_process_port"],
        )

    @property
    def each(self) -> int:
        """Processes of one host."""
        return self.processes // self.machines


@dataclass(frozen=True)
class Choice:
    """The next launch."""

    hosts: Sequence[Host]  # hosts by rank
    each: int  # processes of one host
    accumulation: int | None  # micro-batches of a process; None if no step was begun

    @property
    def processes(self) -> int:
        """Processes of all hosts."""
        return self.each * len(self.hosts)


def choose(layout: Layout | None, hosts: Sequence[Host], now: int) -> Choice:
    """Return the launch with the most processes that takes as many rows per step as before.

    If several have as many processes, take the one with the most hosts. `now` is the number of
    processes that were started last. Fewer processes take more micro-batches, but larger ones where
    stages have batches over all processes, which no flag changes. With --global_batch_size they
    need not divide the rows, and the run itself decides its micro-batches. Raise PeerError if there
    is none.
    """
    if layout is None:  # nothing is known of the batch
        processes = sum(host.processes for host in hosts)
        if processes == now:
            return Choice(hosts, hosts[0].processes, None)
        raise PeerError(
            f"{processes} of {now} processes are left, and the rows per step are not known, as no"
            f" step was begun; {AGAIN}"
        )
    group = layout.group_size
    micro_batches = layout.accumulation_steps * layout.world_size // group
    unit, most = layout.split_unit or micro_batches, layout.global_batch_size
    keeps = bool(layout.split_unit or most)  # --accumulation_steps as it is

    def can_divide(groups: int) -> bool:
        return groups <= most if most else unit % groups == 0

    by_size = sorted(hosts, key=lambda host: (-host.processes, host.rank))
    choices = [
        Choice(
            sorted(by_size[:count], key=lambda host: host.rank),
            each,
            layout.accumulation_steps if keeps else micro_batches * group // (count * each),
        )
        for count in range(1, len(hosts) + 1)
        for each in range(1, by_size[count - 1].processes + 1)
        if count * each % group == 0 and can_divide(count * each // group)
    ]
    if not choices:
        raise PeerError(
            f"no equal number of processes per host makes whole groups of the {group} that share a"
            f" row; {AGAIN}"
        )
    if layout.fixed_by:
        choices = [choice for choice in choices if choice.accumulation == layout.accumulation_steps]
        choices = [one for one in choices if not most or one.processes == layout.world_size]
    if not choices:
        any_number = f" (with --global_batch_size {layout.paddable_rows} any number can continue)"
        raise PeerError(
            f"fewer processes need more micro-batches each, and {layout.fixed_by} fixes"
            f' gradient_accumulation_steps = {layout.accumulation_steps}; write "auto" there, and'
            f" {AGAIN}{any_number * bool(layout.paddable_rows)}"
        )
    return max(choices, key=lambda choice: (choice.processes, len(choice.hosts)))


def added_flags(layout: Layout, choice: Choice, has_checkpoint: bool) -> dict[str, Any]:
    """Return the flags that differ in the next launch, by name."""
    flags: dict[str, Any] = {}
    if layout.resume != "auto" and has_checkpoint:  # it would begin anew
        flags["resume"] = "auto"
    if choice.accumulation != layout.accumulation_steps:
        flags["accumulation_steps"] = choice.accumulation
        # It counts over all processes, or "auto" may have decided it by their number.
        if layout.split_batches or not has_checkpoint:
            groups = choice.processes // layout.group_size if layout.split_batches else 1
            flags["batch_size"] = layout.micro_batch_rows * groups
    return flags


def back_off(restart: int, first: int) -> int:
    """Return the seconds before restart `restart`, from 1: doubled each time, to LONGEST_WAIT."""
    return min(first * 2 ** min(restart - 1, 9), LONGEST_WAIT)


def variables(
    launched: Launched, choice: Choice, me: Host, paddable_rows: int = 0
) -> dict[str, Any]:
    """Return the environment of the next launch on this host; raise PeerError if it is left out."""
    if me not in choice.hosts:
        any_number = f" (with --global_batch_size {paddable_rows} any number can continue)"
        raise PeerError(
            f"host {me.rank} is left out of the restart: {len(choice.hosts)} hosts with"
            f" {choice.each} processes each can divide the batch, and more cannot; {AGAIN} on them"
            f" once that run has ended{any_number * bool(paddable_rows)}"
        )
    variables: dict[str, Any] = {}
    if choice.processes != launched.processes:
        variables["NUM_PROCESSES"] = choice.processes
    if launched.machines > 1:
        variables["NUM_MACHINES"] = len(choice.hosts)
        variables["MACHINE_RANK"] = list(choice.hosts).index(me)
        variables["MAIN_IP"] = choice.hosts[0].address
        if len(choice.hosts) == 1:
            variables["MAIN_PORT"] = 0  # any free one: nobody else has to know it
    return variables


def this_host(launched: Launched) -> Host:
    """Return this host, with the GPUs that are there now; raise PeerError if none is left."""
    processes = launched.each
    if os.environ.get("DS_ACCELERATOR") != "cpu":  # exported without GPUs
        processes = min(processes, count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")))
        if not processes:
            raise PeerError(f"no GPU of this host is left; {AGAIN} where there is one")
    address = launched.ip
    if launched.machine_rank:  # host 0 is MAIN_IP itself
        address = own_address(launched.ip, launched.port)
    return Host(launched.machine_rank, address, processes)


def meeting_of(layout: Layout | None, launched: Launched, me: Host, restart: int) -> Meeting | None:
    """Return where the hosts meet; None for one host. Raise PeerError if they share no folder."""
    if launched.machines == 1:
        return None
    if layout is None:
        raise PeerError(
            "the hosts were not connected yet, so it is not known which of them are left;"
            f" {AGAIN} on those that are"
        )
    folder = Path(layout.out_dir) / FOLDER / f"{layout.launch}-{restart}"
    return Meeting(folder, me, launched.machines)


def what_was_lost(status_file: Path, launched: Launched) -> str:
    """Say which rank ended the launch, from the status that its workers claimed."""
    if not disk.exists(status_file):
        return "the launcher was lost (status 7)"
    rank = int(status_file.read_text(encoding="ascii").split()[1])
    host = f" on host {rank // launched.each}" if launched.machines > 1 else ""
    return f"rank {rank}{host} was lost (status 7)"


def next_launch(
    places: Sequence[Path], number: int, document: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Agree with the other hosts, and wait; return variables and flags of the next launch.

    `places` are the folders of the launches so far, `document` is the plan of the last one. A
    SystemExit in the wait stops the other hosts, too.
    """
    launched = Launched.of(document)
    layouts = map(read_layout, places)
    layout = next(filter(None, layouts), None)  # the earliest: of the command as it was given
    me = this_host(launched)
    meeting = meeting_of(layout, launched, me, number)
    lost = what_was_lost(places[-1] / "status", launched)
    try:
        return _prepare(number, launched, layout, me, meeting, lost)
    except SystemExit:
        if meeting:
            meeting.stop()
        raise


def _prepare(
    number: int,
    launched: Launched,
    layout: Layout | None,
    me: Host,
    meeting: Meeting | None,
    lost: str,
) -> tuple[dict[str, Any], list[str]]:
    most, first = (int(os.environ[name]) for name in ("MAX_RESTARTS", "RESTART_WAIT"))
    if meeting:
        _say(f"{lost}; waiting for the other hosts, up to {SETTLE * first} s for each")
    hosts = meeting.agree(SETTLE * first) if meeting else [me]
    choice = choose(layout, hosts, launched.processes)
    paddable = layout.paddable_rows if layout else 0
    found, flags, changes = variables(launched, choice, me, paddable), {}, []
    if layout:
        saved = published_checkpoints(Path(layout.out_dir) / "checkpoints")
        flags = added_flags(layout, choice, has_checkpoint=bool(saved))
        changes = [f", --{n} {v} instead of {getattr(layout, n)}" for n, v in flags.items()]
        if layout.split_unit and choice.processes != layout.world_size:
            times = layout.world_size / choice.processes
            changes.append(f", with {times:.3g} times the rows in a micro-batch")
        if rows := layout.paddable_rows:
            padded = choose(replace(layout, global_batch_size=rows), hosts, launched.processes)
            if padded.processes > choice.processes:
                more = f"{padded.processes} could continue with --global_batch_size {rows}"
                changes.append(f"; {more}")
    wait = back_off(number, first)
    _say(
        f"{lost}; restart {number} of {most} in {wait} s on {choice.processes} of"
        f" {launched.processes} processes{''.join(changes)}"
    )
    if meeting:
        meeting.wait(wait)
    else:
        time.sleep(wait)
    return found, [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def _say(text: str) -> None:
    print(f"{NAME}: {text}", file=sys.stderr, flush=True)
