"""The manifests of docs/launching.md: their flags, variables, statuses and fields are there."""

from __future__ import annotations

import os
import re
import shutil
import string
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from minimind import errors
from minimind.config.parse import parse_flags
from minimind.config.run_config import CONFIGS
from minimind.launch.plan import RESTARTS, LaunchSettings, plan
from tests.conftest import PACE, ROOT, SHAPE, Launcher, Run
from tests.distributed.test_launchers import environment
from tests.docs.commands import check
from tests.docs.pages import PAGES, rows
from tests.examples.conftest import EXAMPLES
from tools.forking import free_port
from tools.runs import kill_all, wait_for

CLAIM, JOBSET = yaml.safe_load_all((EXAMPLES / "kubernetes" / "jobset.yaml").read_text())
(HOSTS,) = JOBSET["spec"]["replicatedJobs"]
JOB = HOSTS["template"]["spec"]
POD = JOB["template"]["spec"]
(CONTAINER,) = POD["containers"]
SKY = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
# Variables of run_accelerate.sh, as its table has them.
VARIABLES = {
    re.findall(r"`(\w+)`", row[0])[0] for row in rows(PAGES["launching.md"], "## run_accelerate.sh")
}
# No one presses Ctrl-C in a job.
STATUSES = {
    kind.status
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.RunError)
} - {errors.Interrupted.status}
COMES_AND_GOES = {
    kind.status for kind in (errors.PeerError, errors.RendezvousError, errors.Stopped)
}


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a container file and their arguments, continued lines joined."""
    whole = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    words = (line.split(" ", 1) for line in whole.splitlines() if line)
    return [(name, arguments) for name, arguments in words]


CONTAINERFILE = instructions((EXAMPLES / "Containerfile").read_text())


@pytest.mark.parametrize("index", [0, 1])
def test_each_pod_of_the_jobset_is_a_host_of_the_run(index: int):
    given = {entry["name"]: entry.get("value", str(index)) for entry in CONTAINER["env"]}
    assert given.keys() < VARIABLES
    settings = LaunchSettings(
        yaml.safe_load((CONFIGS / "accelerate_config.yaml").read_text()), "a.yaml", given
    )
    (gpus,) = CONTAINER["resources"]["limits"].values()
    launched = plan(settings, gpus)
    name = JOBSET["metadata"]["name"]
    expected = {"num_processes": 16, "num_machines": 2, "machine_rank": index}
    expected |= {"main_process_ip": f"{name}-{HOSTS['name']}-0-0.{name}"}
    assert {key: launched[key] for key in expected} == expected
    assert JOB["parallelism"] == JOB["completions"] == launched["num_machines"]
    (rank,) = (entry["valueFrom"] for entry in CONTAINER["env"] if "valueFrom" in entry)
    assert JOB["completionMode"] == "Indexed"
    assert "job-completion-index" in rank["fieldRef"]["fieldPath"]


def test_the_jobset_ends_after_the_errors_that_would_come_again_and_restarts_after_all_others():
    (rule,) = JOB["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == CONTAINER["name"]
    assert rule["onExitCodes"]["operator"] == "In"
    assert {*rule["onExitCodes"]["values"]} == STATUSES - COMES_AND_GOES
    (ends,) = JOBSET["spec"]["failurePolicy"]["rules"]
    assert (ends["action"], ends["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert POD["restartPolicy"] == "Never"  # else Kubernetes refuses a podFailurePolicy


def test_the_jobset_trains_on_a_volume_of_all_hosts():
    run = parse_flags(CONTAINER["args"])
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in map(dict, POD["volumes"])}
    assert mounts.keys() == volumes.keys()
    (shared,) = (name for name, volume in volumes.items() if "persistentVolumeClaim" in volume)
    assert volumes[shared]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]
    for path in (*run.data_path, run.cache_dir, run.out_dir):
        assert Path(path).is_relative_to(mounts[shared])
    (memory,) = (name for name, volume in volumes.items() if "emptyDir" in volume)
    assert mounts[memory] == "/dev/shm"


def test_the_jobset_has_no_field_that_its_schema_lacks():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="extra: examples")
    assert models.JobsetV1alpha2JobSet.from_dict(JOBSET).to_dict() == JOBSET


def test_the_user_of_the_pods_is_that_of_the_image():
    (user,) = (arguments for name, arguments in CONTAINERFILE if name == "USER")
    context = POD["securityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert context["fsGroup"] == context["runAsGroup"]


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.parametrize("stopped", [(0, 1), (1,)], ids=["both", "one"])
def test_term_to_pid_1_of_pods_saves_with_a_status_that_restarts(
    stopped: tuple[int, ...], launch: Launcher, tmp_path: Path
):
    """As the kubelet stops pods; each in a PID namespace of its own, on the loopback interface."""
    isolated = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*isolated, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespaces here")
    given = {entry["name"]: entry.get("value", "") for entry in CONTAINER["env"]}
    given |= {"MAIN_IP": "127.0.0.1", "MAIN_PORT": str(free_port()), "NUM_PROCESSES": "2"}
    command = [*isolated, *launch.command(tmp_path / "out", "--max_steps 90000")]
    pods = [
        subprocess.Popen(command, env=environment(**given | {"MACHINE_RANK": rank}), text=True)
        for rank in ("0", "1")
    ]
    try:
        wait_for(pods[0], tmp_path / "out", '"step": 5,')
        for rank in stopped:
            (pid_1,) = psutil.Process(pods[rank].pid).children()
            pid_1.terminate()
        grace = POD["terminationGracePeriodSeconds"]
        assert [pod.wait(timeout=grace) for pod in pods] == [errors.PREEMPTED] * 2
    finally:
        for pod in pods:
            if pod.poll() is None:
                kill_all(pod)
    (rule,) = JOB["podFailurePolicy"]["rules"]
    assert errors.PREEMPTED not in rule["onExitCodes"]["values"]
    run = Run(tmp_path / "out", errors.PREEMPTED, "", "")
    (saved,) = run.events("checkpoint_saved")
    assert saved["step"] == run.events("exit")[-1]["step"] >= 5


def test_skypilot_runs_commands_that_there_are_and_goes_on_after_a_stop():
    for script in (SKY["setup"], SKY["run"]):
        given = {**SKY["envs"], "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
        whole = string.Template(script.replace("\\\n", "")).safe_substitute(given)
        check(whole)
    set_in_run = set(re.findall(r"\b([A-Z_]+)=\$SKYPILOT", SKY["run"]))
    assert set_in_run == {"NUM_PROCESSES"}
    assert RESTARTS.keys() & SKY["envs"].keys() == {"MAX_RESTARTS"}
    assert {*SKY["envs"]} - RESTARTS.keys() <= {*re.findall(r"\$(\w+)", SKY["run"])}
    assert SKY["resources"]["job_recovery"]["recover_on_exit_codes"] == [errors.PREEMPTED]
    (mounted,) = SKY["file_mounts"]
    assert f'--out_dir "{mounted}/' in SKY["run"]
    assert "num_nodes" not in SKY  # nodes see a bucket through caches of their own


def built(place: Path) -> Path:
    """The project as the container file copies it, its pip step without a network."""
    (project,) = (a for name, a in CONTAINERFILE if name == "WORKDIR" and a.startswith("/opt"))
    copied = place / Path(project).name
    copied.mkdir()
    for name, arguments in CONTAINERFILE:
        if name == "COPY":
            *sources, target = arguments.split()
            for source in sources:
                there = copied / target / source if target.endswith("/") else copied / target
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, there)
    (install,) = (a for name, a in CONTAINERFILE if name == "RUN" and "pip install" in a)
    venv, _, pip = install.partition("&&")
    assert venv.split() == ["python3", "-m", "venv", ".venv"]
    subprocess.run([sys.executable, *venv.split()[1:]], cwd=copied, check=True)
    (site,) = copied.glob(".venv/lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    # The one of venv, if any, is too old for pyproject.toml; pip downloads another, or takes ours.
    subprocess.run([".venv/bin/pip", "uninstall", "--quiet", "--yes", "setuptools"], cwd=copied)
    offline = f"{pip} --quiet --no-deps --no-build-isolation --no-index"
    subprocess.run(["bash", "-c", offline], cwd=copied, check=True, timeout=120)
    return copied


@pytest.mark.launch
@pytest.mark.long
def test_what_the_container_file_copies_trains(corpus: Path, tmp_path: Path):
    copied = built(tmp_path)
    (entry,) = (arguments for name, arguments in CONTAINERFILE if name == "ENTRYPOINT")
    program, script = yaml.safe_load(entry)
    assert Path(script).parent.name == copied.name
    flags = f"{SHAPE} {PACE} --max_steps 1 --data_path {corpus} --out_dir run --cache_dir cache"
    environ: dict[str, Any] = {n: v for n, v in os.environ.items() if n != "PYTHON"}
    done = subprocess.run(
        [program, str(copied / Path(script).name), *flags.split()],
        env={**environ, "NUM_PROCESSES": "1", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step_00000001").is_dir()
