"""`minimind.train(...)` on the workers of Ray Train's TorchTrainer, started again after a lost one.

    pip install -e ".[data,ray]"
    python examples/ray_train.py --workers 2 --config my_run.yaml

    | status 0

my_run.yaml has flags of train_pretrain.py, `name: value`, with data_path and out_dir; its relative
paths begin where this is started, and every node sees the same files. Exit status: that of the run.
A lost worker and statuses 7 and 9 raise in the worker, so that FailureConfig starts all workers
again and the run resumes from out_dir. An error that would come again ends the training.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from typing import Any

RETRIED = (7, 9)  # a lost peer, a failed rendezvous; a killed worker is Ray's to notice


def parsed() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, help="flags of train_pretrain.py, .yaml")
    parser.add_argument("--workers", type=int, default=2, help="processes over all nodes")
    parser.add_argument("--use_gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--max_failures", type=int, default=3, help="restarts of all workers")
    return parser.parse_args()


def run(asked: dict[str, Any]) -> int:
    """Train in one of the workers; return the exit status of the run."""
    import minimind
    from minimind.errors import RunError

    train: Any = minimind.train  # a package that is called like a function

    os.chdir(asked["folder"])  # Ray Train starts workers in a folder of its own
    os.environ |= rendezvous()
    try:
        return train(config=asked["config"])
    except RunError as error:
        if error.status in RETRIED:
            raise
        print(*error.table, f"error[{error.code}] {error}", sep="\n", file=sys.stderr)
        return error.status


def rendezvous() -> dict[str, str]:
    """The variables from which the run creates its process group."""
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    context = ray.train.get_context()
    with socket.socket() as free:
        free.bind(("", 0))
        own = (ray.util.get_node_ip_address(), free.getsockname()[1])
    address, port = broadcast_from_rank_zero(own)
    found = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in found.items()}


def main() -> int:
    """Train on Ray's workers; return the exit status of the run."""
    args = parsed()
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig, TorchTrainer

    class AllDevices(Backend):
        """Creates no process group, which the run does; all GPUs of a node are visible."""

        share_cuda_visible_devices = True

    class NoProcessGroup(TorchConfig):
        @property
        def backend_cls(self) -> Any:
            return AllDevices

    trainer = TorchTrainer(
        run,
        train_loop_config={"config": os.path.abspath(args.config), "folder": os.getcwd()},
        torch_config=NoProcessGroup(),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.use_gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=args.max_failures)),
    )
    try:
        returned: Any = trainer.fit().return_value
        status = int(returned)
    except TrainingFailedError as error:  # no restart is left
        print(error, file=sys.stderr)
        status = 7
    print(f"status {status}")
    return status


if __name__ == "__main__":
    sys.exit(main())
