"""Leftovers of launchers in the environment end a start in one line, before torch is imported."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from minimind.config.launcher_env import read_launch, set_rendezvous_defaults
from minimind.errors import RendezvousError, RunError, StorageError
from minimind.runtime import environment
from minimind.runtime.environment import RANGES, allow_connections, rank_of, require_environment
from tests.conftest import ROOT
from tools.runs import MEETING

TWO = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **MEETING}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("value", ["", " ", "abc", "-1", "1.5", "1e3", "\u0661", str(2**31)])
def test_a_number_that_is_none_is_reported_by_name_and_value(name: str, value: str):
    with pytest.raises(RendezvousError) as caught:
        require_environment({name: value})
    assert f"{name} is {value!r} in the environment" in str(caught.value)
    assert "; unset it" in str(caught.value)
    assert rank_of({name: value}) == 0


@pytest.mark.parametrize(
    ("environ", "report"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'.*from 1 to"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is '0'.*from 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is '65536'"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is empty"),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR is empty"),
        ({"MASTER_ADDR": "[::1]"}, r"'\[::1\]'; write ::1, without .* brackets or a port$"),
        ({"MASTER_ADDR": "[fe80::1]:29500"}, "write fe80::1, .*, and 29500 as the port$"),
        ({"MASTER_ADDR": "localhost:29500"}, "write localhost, .*, and 29500 as the port$"),
        ({"MASTER_ADDR": "http://10.0.0.1/"}, "write 10.0.0.1, without a scheme"),
        ({"MASTER_ADDR": "tcp://[::1]:1"}, "write ::1, .*, and 1 as the port"),
        ({"MASTER_ADDR": " localhost"}, "MASTER_ADDR .*' localhost', no name and no IP"),
        ({"MASTER_ADDR": "a b"}, "'a b', no name and no IP address of a host; correct it"),
        ({"MASTER_ADDR": "a,b"}, "'a,b', no name"),
        ({"MASTER_ADDR": "$HOST"}, "no name and no IP"),
        ({"MASTER_ADDR": "::1::"}, "no name and no IP"),
        ({"MASTER_ADDR": "a/b"}, "no name and no IP"),
        ({"RANK": "5"}, "RANK is 5 in the environment and WORLD_SIZE is not set.*; unset RANK"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK is 1 .* WORLD_SIZE is not set"),
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE is 2 .*, without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; set",
        ),
        ({**TWO, "RANK": "2"}, "RANK is 2 .* WORLD_SIZE is 2"),
        ({**TWO, "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is 1 .* LOCAL_WORLD_SIZE is 1"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE is 2 .*more than the 1 processes"),
        ({**TWO, "LOCAL_RANK": "2"}, "LOCAL_RANK is 2 .* LOCAL_WORLD_SIZE is 2"),
        ({"GLOO_SOCKET_IFNAME": "nope0"}, "GLOO_SOCKET_IFNAME is 'nope0' .*name one of these"),
        ({"GLOO_SOCKET_IFNAME": "lo,nope0"}, "GLOO_SOCKET_IFNAME is 'lo,nope0'"),
        ({"NCCL_SOCKET_IFNAME": "=l"}, "NCCL_SOCKET_IFNAME is '=l'"),
        ({"NCCL_SOCKET_IFNAME": "nope,more"}, "NCCL_SOCKET_IFNAME is 'nope,more'"),
        ({"TORCH_DISTRIBUTED_DEBUG": "bogus"}, "TORCH_DISTRIBUTED_DEBUG is 'bogus' .* OFF, INFO"),
        ({"RANK": "9" * 5000}, "RANK is '9"),
        ({"TMPDIR": ""}, "TMPDIR is ''"),
        ({"TMPDIR": "/nonexistent"}, "TMPDIR is '/nonexistent' .*not a folder"),
        ({"TMPDIR": __file__}, "not a folder that can be written to"),
    ],
)
def test_what_is_out_of_range_or_contradicts_another_is_reported(
    environ: dict[str, str], report: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(environment, "GPU_DRIVERS", (Path("/dev/null"),))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    kind = StorageError if "TMPDIR" in environ else RendezvousError
    with pytest.raises(RunError, match=report) as caught:
        require_environment(environ)
    assert type(caught.value) is kind
    with pytest.raises(kind):
        read_launch(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        TWO,
        {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4", **MEETING},
        {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""},
        {"GLOO_SOCKET_IFNAME": "eth0,lo", "NCCL_SOCKET_IFNAME": "nope,et"},
        {"NCCL_SOCKET_IFNAME": "^nope"},
        {"NCCL_SOCKET_IFNAME": "=eth0"},
        {"TMPDIR": "/tmp"},
        {"MASTER_ADDR": "nobody.invalid"},  # one process meets nobody
        *({**TWO, "MASTER_ADDR": host} for host in ("::1", "127.1", "localhost")),
        *({"MASTER_ADDR": host} for host in ("fe80::1%lo", "node_1", "a.b-c", "::ffff:1.2.3.4")),
    ],
)
def test_what_launchers_and_libraries_take_passes(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(environment, "GPU_DRIVERS", (Path("/dev/null"),))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    require_environment(environ)


@pytest.mark.parametrize(
    ("host", "answers", "seconds", "report"),
    [
        ("300.1.1.1", [socket.EAI_NONAME], 0, "300.1.1.1"),
        ("fe80::1%gone", [socket.EAI_NONAME], 0, "fe80::1%gone"),
        ("x" * 70, [UnicodeError("label too long")], 0, "xxx"),
        ("nobody.invalid", [socket.EAI_NONAME] * 61, 60, "nobody.invalid"),
        ("late.svc", [socket.EAI_NONAME] * 5, 5, ""),  # a pod that starts
        ("late.svc", [socket.EAI_NONAME, socket.EAI_AGAIN], 1, ""),
        ("quiet", [socket.EAI_AGAIN], 0, ""),  # no server of names answers yet
    ],
)
def test_an_address_that_no_host_has_is_refused(
    host: str,
    answers: list[int | Exception],
    seconds: int,
    report: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def lookup(name: str, *more: object, **options: object) -> object:
        answer = answers.pop(0) if answers else None
        if isinstance(answer, int):
            raise socket.gaierror(answer, "Name or service not known")
        if answer:
            raise answer
        return [name]

    waited: list[float] = []
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(waited))
    with pytest.raises(RendezvousError) if report else nullcontext() as caught:
        require_environment({**TWO, "MASTER_ADDR": host})
    if caught:
        assert f"MASTER_ADDR is '{report}" in str(caught.value)
        assert "knows no such address" in str(caught.value)
    assert (answers, sum(waited)) == ([], seconds)
    told = f"no host of the name {host} (MASTER_ADDR) is known yet; asking for 60 s\n"
    assert capsys.readouterr().err == (told if seconds else "")


SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_NNODES": "2"}
STEP = {**JOB, "SLURM_STEP_ID": "0", "SLURM_STEPID": "0"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
OMPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
FLUX = {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0", "FLUX_TASK_LOCAL_ID": "0"}
JSRUN = {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_LOCAL_RANK": "0"}
PMIX = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-node7-81@1"}


@pytest.mark.parametrize(
    ("environ", "report"),
    [
        (
            {**JOB, **SRUN},
            r"Slurm \(srun\) \(SLURM_STEP_NUM_TASKS is '2', SLURM_PROCID is '0'.*"
            r" without WORLD_SIZE and RANK and LOCAL_RANK; .* WORLD_SIZE=\$SLURM_STEP_NUM_TASKS"
            r" RANK=\$SLURM_PROCID LOCAL_RANK=\$SLURM_LOCALID MASTER_ADDR",
        ),
        ({**STEP, "SLURM_PROCID": "1"}, r"Slurm .*SLURM_NTASKS is '2'.*=\$SLURM_NTASKS"),
        ({"SLURM_STEPID": "4", "SLURM_NPROCS": "2"}, "Slurm .*SLURM_NPROCS is '2'"),
        ({**JOB, "SLURM_PROCID": "1"}, r"Slurm .*SLURM_PROCID is '1'.* export WORLD_SIZE RANK="),
        ({**STEP, **SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "1"}, "Slurm"),
        ({**SRUN, "WORLD_SIZE": "2", **MEETING}, "Slurm .* without RANK and LOCAL_RANK; "),
        ({**SRUN, "WORLD_SIZE": "2", "RANK": "1"}, "Slurm .* without LOCAL_RANK; "),
        ({**SRUN, "RANK": "0", "LOCAL_RANK": "0"}, "Slurm .* without WORLD_SIZE; "),
        ({**SRUN, **PMIX}, "Slurm"),
        (OMPI, "Open MPI .*OMPI_COMM_WORLD_SIZE is '2'"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "Open MPI .*OMPI_COMM_WORLD_RANK is '1'"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "Open MPI .* export WORLD_SIZE RANK LOCAL_RANK "),
        ({**OMPI, **PMIX}, "Open MPI"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", **OMPI}, "Open MPI"),
        (HYDRA, "Intel MPI or MPICH .*PMI_SIZE is '2'"),
        ({"PMI_RANK": "1"}, "Intel MPI"),
        ({"PMI_SIZE": "two"}, "Intel MPI .*PMI_SIZE is 'two'"),
        ({"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}, "Intel MPI"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, "MVAPICH"),
        ({"PALS_RANKID": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}, r"PALS \(mpiexec\)"),
        ({**FLUX, "PMI_RANK": "0", "PMI_SIZE": "2"}, "Flux .*FLUX_JOB_SIZE is '2'"),
        ({"FLUX_TASK_RANK": "1"}, "Flux"),
        ({**JSRUN, **OMPI, **PMIX}, r"LSF \(jsrun\) .*JSM_NAMESPACE_SIZE is '2'"),
        ({"JSM_NAMESPACE_RANK": "1"}, "LSF"),
        (PMIX, "PMIx .*PMIX_RANK is '0', PMIX_NAMESPACE is 'prterun.*; .* export WORLD_SIZE RANK="),
        ({"PMIX_NAMESPACE": "a"}, "PMIx"),
        ({**JOB, **PMIX}, "PMIx"),
        ({**PMIX, "PMIX_RANK": "1"}, "PMIx"),
    ],
)
def test_one_of_several_tasks_without_the_variables_of_torch_names_its_launcher(
    environ: dict[str, str], report: str
):
    with pytest.raises(RendezvousError, match=f"^this process is one of several tasks of {report}"):
        require_environment(environ)
    require_environment({**environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})


ONE = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    "environ",
    [
        JOB,  # the shell of salloc
        {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},  # sbatch's script
        {**JOB, **SRUN, "SLURM_STEP_ID": "4294967291"},
        {**JOB, "SLURM_PROCID": "0", "SLURM_STEP_ID": "batch"},
        {**JOB, **ONE, "SLURM_STEP_ID": "4294967290", **PMIX},  # salloc's, as a step of its own
        {**STEP, **ONE},
        {**STEP, **ONE, **PMIX},
        {**OMPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_UNIVERSE_SIZE": "8", **PMIX},
        {**HYDRA, "PMI_SIZE": "1"},
        {**FLUX, "FLUX_JOB_SIZE": "1"},
        {**JSRUN, "JSM_NAMESPACE_SIZE": "1", **PMIX},
        {"LSB_DJOB_NUMPROC": "2", "LSB_MAX_NUM_PROCESSORS": "2", "LSB_HOSTS": "a a"},
        {"PBS_NP": "2", "PBS_TASKNUM": "1", "PBS_NODENUM": "0", "NSLOTS": "2"},
        {"SLURM_STEP_NUM_TASKS": "", "PMIX_RANK": ""},
        {**STEP, **SRUN, **OMPI, **TWO},  # a worker of a launcher that is a task
        {**STEP, **SRUN, "WORLD_SIZE": "1"},
    ],
)
def test_one_task_and_a_shell_of_several_and_a_launcher_in_each_pass(environ: dict[str, str]):
    require_environment(environ)


def test_an_interface_for_nccl_is_no_matter_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "GPU_DRIVERS", (Path("/nowhere"),))
    require_environment({"NCCL_SOCKET_IFNAME": "ib0"})


def test_a_port_without_an_address_is_that_of_this_host():
    environ = {"MASTER_PORT": "29500"}
    set_rendezvous_defaults(environ)
    assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert environ["MASTER_PORT"] == "29500"


@pytest.mark.parametrize(
    ("environ", "status", "output"),
    [
        ({"RANK": ""}, 9, "error[E_RENDEZVOUS] rank=0 step=0: RANK is '' in the environment"),
        ({"MINIMIND_SCRIPT_PID": "abc"}, 9, "MINIMIND_SCRIPT_PID is 'abc'"),
        ({"TMPDIR": "/nonexistent"}, 5, "error[E_STORAGE] rank=0 step=0: TMPDIR is"),
        (SRUN, 9, "is one of several tasks of Slurm (srun) (SLURM_STEP_NUM_TASKS is '2'"),
    ],
)
def test_the_script_ends_in_one_line_before_it_imports_torch(
    environ: dict[str, str], status: int, output: str
):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "train_pretrain.py"), "--dry_run"],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, done.stdout, len(lines)) == (status, "", 1)
    assert output in lines[0]
    assert "| torch\n" not in done.stderr


def test_the_launch_script_without_a_place_for_its_files_ends_with_5():
    done = subprocess.run(
        ["bash", str(ROOT / "run_accelerate.sh"), "--dry_run"],
        env={**os.environ, "PYTHON": sys.executable, "TMPDIR": "/nonexistent"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == (
        "run_accelerate.sh: error[E_STORAGE]: no folder can be made in /nonexistent"
        " (TMPDIR): No such file or directory; name another there\n"
    )


@pytest.mark.parametrize(
    ("limits", "processes", "raised"),
    [
        ((1024, 524_288), 8, None),
        ((1024, 524_288), 1024, (8704, 524_288)),
        ((1024, 4096), 1024, (4096, 4096)),  # of GPUs, whose collectives are not gloo's
        ((256, resource.RLIM_INFINITY), 2, (528, resource.RLIM_INFINITY)),  # macOS
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1024, None),
    ],
)
def test_ranks_may_open_the_files_that_their_connections_take(
    limits: tuple[int, int],
    processes: int,
    raised: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
):
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: calls.append(values))
    allow_connections(processes)
    assert calls == ([raised] if raised else [])


def test_a_hard_limit_of_open_files_that_is_too_low_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    with pytest.raises(RendezvousError, match=r"1,024 processes .* the hard limit .* is 1,024"):
        allow_connections(1024)


def test_the_peak_of_memory_is_not_that_of_the_process_that_started_it():
    code = "from minimind.runtime.environment import peak_bytes; print(peak_bytes())"
    large = bytearray(b"x") * 2**28
    peaks = list[int]()
    for more in ("", "held = bytearray(b'x') * 2**27; "):
        line = [sys.executable, "-c", more + code]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert 0 < peaks[0] < 2**27 < peaks[1] < len(large)
