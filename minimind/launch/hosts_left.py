"""After a lost host the launch scripts of the others agree, in a folder of out_dir, who goes on.

All hosts share out_dir, so this needs no connection: each script writes a file, and when all hosts
have, or no new one has for some seconds, one script publishes the list that counts for all.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from minimind.errors import PeerError, Stopped
from minimind.runtime.durable_files import storing, write_durably, write_whole

FOLDER = ".restarts"  # in out_dir
DECISION, STOP = "decision", "stopped"
POLL = 0.5  # seconds


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
        self._script = os.getppid()

    def agree(self, settle: float) -> list[Host]:
        """Return the same hosts, by rank, on all of them.

        Waits until all `machines` are there, or until no new one has come for `settle` seconds.
        Raise PeerError if this host came too late.
        """
        with storing(str(self.folder), "correct its permissions, and run the same command again"):
            self.folder.mkdir(parents=True, exist_ok=True)
            known, since = 0, time.monotonic()
            while not (self.folder / DECISION).exists():
                self.check()
                hosts = self._announced()
                if len(hosts) > known:
                    known, since = len(hosts), time.monotonic()
                if known == self.machines or time.monotonic() - since > settle:
                    self._publish(hosts)
                else:
                    time.sleep(POLL)
            hosts = [Host(**one) for one in json.loads((self.folder / DECISION).read_text())]
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

        Again each time: a client of NFS that changes a folder reads its names anew.
        """
        write_whole(self.folder / str(self.me.rank), json.dumps(asdict(self.me)).encode())
        if os.getppid() != self._script:
            (self.folder / str(self.me.rank)).unlink()
            raise PeerError("the launch script was ended; run the same command again")
        if (self.folder / STOP).exists():
            raise Stopped("another host was stopped; run the same command again to go on")

    def _announced(self) -> list[Host]:
        ranks = sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdecimal())
        return [Host(**json.loads((self.folder / str(rank)).read_text())) for rank in ranks]

    def _publish(self, hosts: list[Host]) -> None:
        """Write the decision unless another host has; then delete the folders of earlier ones."""
        draft = self.folder / f"draft-{self.me.rank}"
        write_durably(draft, json.dumps([asdict(host) for host in hosts]).encode())
        try:
            os.link(draft, self.folder / DECISION)  # atomic: the first one wins
        except FileExistsError:
            return
        finally:
            draft.unlink()
        for other in self.folder.parent.iterdir():
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
