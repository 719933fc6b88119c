"""That all ranks train one run: versions, flags, files, environment and text are alike on all."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minimind.checkpoint.identity import versions
from minimind.config.deepspeed.backend_choice import Setup
from minimind.config.deepspeed.document import leaves
from minimind.config.flags import AUTO, FLAGS, RULED
from minimind.config.launcher_env import set_rendezvous_defaults
from minimind.config.origin import Origin, Rank
from minimind.config.rules import divided
from minimind.config.run_config import PACKAGE, RunConfig
from minimind.engine.build import Engine
from minimind.errors import DataError, RunError, StorageError, UsageError
from minimind.runtime import disk
from minimind.runtime.agreement import (
    Difference,
    Told,
    first_difference,
    first_other,
    of_rank_0,
    smallest,
)
from minimind.runtime.collectives import collective_backend, meeting_store, rendezvous
from minimind.runtime.durable_files import fingerprint, sha256_of
from minimind.runtime.environment import allow_connections
from minimind.train.evaluate import read_sample_prompts
from minimind.train.start import Plan

# Flags that need not be alike on all ranks, and why.
_BY_CONTENT = "a place, which hosts may mount elsewhere: what is read there is compared"
_BY_RANK_0 = "read by rank 0 alone"
MAY_DIFFER = {
    **dict.fromkeys(("data_path", "val_path", "source", "tokenizer", "skip_rows"), _BY_CONTENT),
    **dict.fromkeys(("stages", "chat_template", "sample_prompts", "config"), _BY_CONTENT),
    "teacher": _BY_CONTENT,
    "deepspeed_config": "the values of the file are compared",
    "out_dir": "a place, which hosts may mount elsewhere: all must see a file of rank 0 there",
    **dict.fromkeys(("report_to", "wandb_project", "wandb_run_name"), _BY_RANK_0),
    "peak_tflops": _BY_RANK_0,
    **dict.fromkeys(("cache_dir", "max_cache_gib"), "a disk of the host"),
    "num_workers": "threads of the host; rows and their order do not depend on them",
    "local_rank": "another one for every rank of a host",
    **dict.fromkeys(("debug", "verbose"), "what is printed"),
    "dry_run": "ends before the ranks meet",
}
# Likewise of the keys of a DeepSpeed file.
KEYS_MAY_DIFFER = re.compile(
    r".*nvme_path"  # a disk of the host
    r"|(tensorboard|wandb|comet|csv_monitor)\..*"  # read by rank 0 alone
)
SHOWN_OF_DIGEST = 12  # hexadecimal digits
# Variables that change what is computed: kernels, their precision and the order of their sums.
# OMP_NUM_THREADS and its like may differ: cores are those of a host, as its CPU is.
NUMBERS = re.compile(
    r"NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|CUBLAS(?!_LOG|LT_LOG).*"
    r"|(ROCBLAS|HIPBLAS|HIPBLASLT|MIOPEN)_(?!LOG|LAYER).*|HSA_OVERRIDE_GFX_VERSION"
    r"|CUDNN_(?!LOG|FRONTEND_LOG).*|TORCH_(BLAS|CUDNN|ROCM|LINALG|NCCL_USE|COMPILE).*"
    r"|DISABLE_ADDMM_(CUDA|HIP)_LT|PYTORCH_(TUNABLEOP|MIOPEN|JIT).*|PYTORCH_ENABLE_MPS_FALLBACK"
    r"|ATEN_CPU_CAPABILITY|MKL_(CBWR|ENABLE_INSTRUCTIONS|DEBUG_CPU_TYPE)|OPENBLAS_CORETYPE"
    r"|(ONEDNN|DNNL)_(DEFAULT_FPMATH_MODE|MAX_CPU_ISA|CPU_ISA_HINTS)"
    r"|TORCHDYNAMO_DISABLE|TORCHDYNAMO_SUPPRESS_ERRORS|TRITON_(F32_DEFAULT|INTERPRET|ALLOW).*"
    r"|TORCHINDUCTOR_(?!CACHE|COMPILE_THREADS|WORKER|LOG|TRACE|PROFILE|BENCHMARK).*"
    r"|NCCL_(ALGO|PROTO|NTHREADS|(MIN|MAX)_N?CHANNELS|(MIN|MAX)_CTAS|NVLS_ENABLE|CROSS_NIC)"
    r"|DS_(SDMA_.*|ALLOW_DEPRECATED_FP)|USE_MKL_GEMM"
)
# Of these, what hosts may have otherwise: places, caches, what is printed, and what an image says
# of itself. On clusters of AMD GPUs MIOPEN_USER_DB_PATH is another folder on every host.
NO_NUMBERS = re.compile(
    r".*_(PATH|LIBPATH|DIR|HOME|ROOT|FILE|FILENAME|LIBRARY|CACHES?|DEBUG|VERBOSE|LOGGING(_CMD)?|URL)"
    r"|(CUDNN|CUBLAS)_VERSION"
)


def meet(setup: Setup, timeout: int) -> Any:
    """Return a store of all ranks, to keep until the process group is there; None for one rank.

    `timeout` is --dist_timeout, in seconds.
    """
    world_size = setup.launch.world_size
    if world_size == 1:
        return None
    set_rendezvous_defaults(os.environ)
    allow_connections(world_size)
    with rendezvous():
        return meeting_store(os.environ, collective_backend(setup.device, timeout)[1])


def with_common_dtype(store: Any, plan: Plan) -> Plan:
    """Plan float32 where the devices of ranks chose different dtypes for "auto"; collective."""
    run, launch = plan.run, plan.setup.launch
    if store is None:
        return plan
    with rendezvous():
        other = first_other(store, launch.rank, launch.world_size, "dtype", run.dtype)
    if other is None or run.is_explicit("dtype"):
        return plan
    source = f"{AUTO}: a rank has no bf16 instructions"
    run = run.with_values(Origin(source, Rank.RULE), dtype="float32")
    return replace(plan, resolved=plan.setup.complete(plan.resolved, run, plan.schedule))


def with_common_fit(store: Any, plan: Plan) -> Plan:
    """Plan the largest micro-batch that fits the devices of all ranks; collective.

    All ranks have the facts of rank 0, which reads the records that are compared with them.
    """
    launch, fit = plan.setup.launch, plan.fit
    if store is None:
        return plan
    place = (launch.rank, launch.world_size)
    with rendezvous():
        rows = smallest(store, *place, "fit", fit.rows if fit else 0)
        facts = of_rank_0(store, *place, "facts", json.dumps(fit and fit.facts))
    if fit is None or rows == 0:  # `require_agreement` names what differs
        return plan
    plan = replace(plan, fit=replace(fit, facts=json.loads(facts) or fit.facts))
    if rows == fit.rows:
        return plan
    fit = replace(plan.fit or fit, rows=rows, why="as on the rank with the least")
    run = divided(plan.run, launch.world_size, fit.rows, fit.why)
    resolved = plan.setup.complete(plan.resolved, run, plan.schedule)
    return replace(plan, resolved=resolved, fit=fit)


def require_agreement(store: Any, given: RunConfig, plan: Plan) -> None:
    """Raise the same error on every rank if one trains another run than rank 0; collective.

    `given` has the flags as parsed; `store` is that of `meet`.
    """
    if store is None:
        return
    launch, kinds = plan.setup.launch, all_told(given, plan, os.environ)
    with rendezvous():
        found = first_difference(store, launch.rank, launch.world_size, kinds)
    if found:
        raise error_of(found, given)


def all_told(
    given: RunConfig, plan: Plan, environ: Mapping[str, str]
) -> dict[str, dict[str, Told]]:
    """All that must be alike, by name and by kind; what decides others comes first."""
    launch, decided = plan.setup.launch, _decided(plan)
    of_rules = (*RULED, "accumulation_steps")
    return {
        "version": _versions(),
        "flag": flags_told(given),
        "launcher": {"WORLD_SIZE in the environment": Told(launch.world_size)}
        | {
            f"{field} of the launcher": Told(value, launch.source)
            for value, field in (*launch.flags.values(), *launch.deepspeed.values())
        },
        "DeepSpeed": _deepspeed(plan.setup),
        "environment": _environment(environ),
        "file": _files(given, plan),
        "text": _text(given, plan),
        "rules": {name: one for name, one in decided.items() if name in of_rules},
        "decided": decided,
    }


def error_of(found: Difference, given: RunConfig) -> RunError:
    """The error that names a difference."""
    if found.kind == "text":
        return DataError(
            f"{found.name} is different: {found}; give all ranks the same text", cause_rank=0
        )
    if found.kind == "rules":
        return StorageError(
            f"out_dir {given.out_dir}: {found.name} is decided by other checkpoints there: {found};"
            " give a folder on a file system that all hosts share",
            cause_rank=0,
        )
    remedies = {
        "version": "install the same on all hosts",
        "decided": "make the hosts alike in what decides it, or give a value",
    }
    remedy = remedies.get(found.kind, "give the same on all")
    return UsageError(f"{found.name} is not the same on all ranks: {found}; {remedy}", cause_rank=0)


def _versions() -> dict[str, Told]:
    found = versions() | {"numpy": np.__version__}
    del found["python"]  # its patch level changes no number
    build = torch.version.cuda or torch.version.hip or "no GPU"
    code = fingerprint(
        [sha256_of(path) for path in sorted(disk.files_below(PACKAGE)) if path.suffix == ".py"]
    )
    found["torch"] += f", imported {torch.__version__}, built for {build}"
    found["minimind"] += f", code {_brief(code)}"
    return {f"version of {name}": Told(version) for name, version in found.items()}


def flags_told(run: RunConfig) -> dict[str, Told]:
    """The flags that must be alike, as parsed."""
    return {
        f"--{name}": Told(getattr(run, name), run.sources[name])
        for name in FLAGS
        if name not in MAY_DIFFER
    }


def _deepspeed(setup: Setup) -> dict[str, Told]:
    """Whether DeepSpeed trains, and the values of its file."""
    values = leaves(setup.document)
    return {
        "--deepspeed_config": Told(setup.backend, setup.path),
        "--device": Told(setup.device),
    } | {
        f"{key} of --deepspeed_config": Told(value, setup.path)
        for key, value in values.items()
        if not KEYS_MAY_DIFFER.fullmatch(key)
    }


def _environment(environ: Mapping[str, str]) -> dict[str, Told]:
    """The variables that change what is computed."""
    return {
        f"{name} in the environment": Told(ascii(value))
        for name, value in sorted(environ.items())
        if NUMBERS.fullmatch(name) and not NO_NUMBERS.fullmatch(name)
    }


def _files(given: RunConfig, plan: Plan) -> dict[str, Told]:
    """Digests of small files that are no text."""
    found = {}
    if given.chat_template:
        content = _brief(fingerprint(plan.rows()[0].tokenizer.chat_template))
        found["--chat_template"] = Told(content, given.chat_template)
    if given.own_loss:
        from minimind.model.own_loss import OwnLoss

        content = _brief(OwnLoss.imported(given.own_loss).digest())
        found["--loss"] = Told(content, given.own_loss)
    if plan.teacher:
        found["--teacher"] = Told(_brief(plan.teacher.digest), plan.teacher.place)
    if given.sample_prompts:
        content = _brief(fingerprint(read_sample_prompts(given)))
        found["--sample_prompts"] = Told(content, given.sample_prompts)
    return found


def _brief(digest: str) -> str:
    return digest[:SHOWN_OF_DIGEST]


def _text(given: RunConfig, plan: Plan) -> dict[str, Told]:
    """Digests of the text, and of what is read of it."""
    prepared, order, _ = plan.rows()
    pieces = {
        "--tokenizer": Told(_brief(prepared.tokenizer.fingerprint), given.tokenizer or "trained")
    }
    text = {
        plan.text.flag.split()[0]: Told(_brief(prepared.manifest["fingerprint"]), str(plan.text)),
        "--skip_rows": Told(_brief(fingerprint(order.left_out)), given.skip_rows or "none"),
        "--stages": Told(_brief(fingerprint(order.stages_json())), given.stages or "none"),
        "the mixture of sources": Told(order.mixture_json()),
    }
    # A tokenizer that is trained on the text is another one because of it.
    return pieces | text if given.tokenizer else text | pieces


def _decided(plan: Plan) -> dict[str, Told]:
    """What the start has decided by rules, the host, the text or a checkpoint."""
    run, resolved = plan.run, plan.resolved
    found = {
        name: Told(getattr(run, name), run.sources[name])
        for name in FLAGS
        if name not in MAY_DIFFER
    }
    found |= {
        f"{name} of the model": Told(value) for name, value in plan.model.identity(run).items()
    }
    schedule = vars(plan.rows()[2])
    found |= {f"{name} of the schedule": Told(value) for name, value in schedule.items()}
    return found | {
        f"{key} for DeepSpeed": Told(value, resolved.sources[key])
        for key, value in leaves(resolved.config).items()
        if not KEYS_MAY_DIFFER.fullmatch(key)
    }


def require_shared_folder(engine: Engine, out_dir: Path) -> None:
    """Raise the same StorageError on every rank if hosts see different folders as out_dir.

    Rank 0 creates a probe file that the others must see.
    """
    probe = out_dir / f".probe-{engine.from_rank_0(secrets.token_hex(8))}"
    problem = None
    if engine.rank == 0:
        try:
            probe.touch()
        except OSError as error:  # raised by all ranks below: the others would wait for rank 0
            problem = (
                f"out_dir {out_dir}: {error.strerror}; correct its permissions, or give another"
            )
    if problem := engine.from_rank_0(problem):
        raise StorageError(problem, cause_rank=0)
    views = engine.gather((socket.gethostname(), disk.exists(probe)))
    if engine.rank == 0:
        probe.unlink(missing_ok=True)
    if hosts := sorted({host for host, sees_probe in views if not sees_probe}):
        raise StorageError(
            f"out_dir {out_dir} is a different folder on {', '.join(hosts)} than on {views[0][0]};"
            " give one on a file system that all hosts share",
            cause_rank=0,
        )
