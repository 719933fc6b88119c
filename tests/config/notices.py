"""The notices of a start."""

from __future__ import annotations

from minimind.config.deepspeed.backend_choice import Setup, advice
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.launcher_env import Launch
from minimind.config.run_config import RunConfig


def notices_of(of: RunConfig | ResolvedConfig, device: str, launch: Launch | None = None) -> str:
    found = of if isinstance(of, ResolvedConfig) else ResolvedConfig(of, "single")
    setup = Setup(found.run, launch or Launch(), device, found.backend, {}, found.path)
    return "\n".join(advice(setup, found))
