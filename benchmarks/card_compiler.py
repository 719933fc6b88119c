"""Writes flex attention for one NVIDIA GPU that is not here, and assembles it.

    PRETENDED_CUDA=LIBRARY python -m benchmarks.card_compiler CAPABILITY DTYPE HEAD_DIM ...

Prints a line of JSON for each kernel. Started by benchmarks.other_cards. LIBRARY is that of
tools/pretended; this process begins with it, since torch has to be imported after it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from tools.pretended import device as pretended  # isort: skip

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.other_cards import CARDS
from minimind.model.kernels import document_attention, document_block_mask
from minimind.runtime.device import MIN_BF16_CAPABILITY, set_numerics

ROWS, LENGTH, HEADS, KEY_HEADS = 8, 1024, 8, 2
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)


def compile_for(capability: str, dtype: str, head_dims: list[int]) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel of flex attention, on a card of this capability.

    This process is the card's alone. float16 replaces bfloat16 where torch compiles none, and tf32
    is float32 with `--tf32`.
    """
    major, minor = (int(number) for number in capability.split("."))
    shared, processors = CARDS[capability]
    card = types.SimpleNamespace(
        **vars(pretended.PROPERTIES)
        | {
            "major": major,
            "minor": minor,
            "multi_processor_count": processors,
            "warp_size": 32,
            "max_threads_per_block": 1024,
            "max_threads_per_multi_processor": 1536 if minor else 2048,
            "regs_per_multiprocessor": 65536,
            "shared_memory_per_block": 48 * 2**10,
            "shared_memory_per_block_optin": shared * 2**10,
            "shared_memory_per_multiprocessor": (shared + 1) * 2**10,
            "L2_cache_size": 32 * 2**20,
            "gcnArchName": "",
            "uuid": "",
        }
    )
    if dtype == "bfloat16" and (major, minor) < MIN_BF16_CAPABILITY:
        dtype = "float16"
    set_numerics("cuda", deterministic=False, tf32=dtype == "tf32")
    of_tensors = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    sources = sources_of(card, of_tensors, head_dims)
    triton_helpers.set_driver_to_gpu = lambda: None
    # Its kernels have no assembly.
    StaticTritonCompileResult.can_statically_launch = lambda *_, **__: None  # pyright: ignore
    with tempfile.TemporaryDirectory() as folder:
        for head_dim, way, name, source in sources:
            path = Path(folder) / f"{name}_{head_dim}_{way}.py"
            path.write_text(source)
            spec = spec_from_file_location(path.stem, path)
            assert spec
            assert spec.loader
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            tuner = getattr(module, name)
            for config in tuner.configs:
                compiled = tuner._precompile_config(config).kernel
                found = assembled(compiled.asm["ptx"], Path(folder))
                yield {
                    "capability": capability,
                    "dtype": dtype,
                    "head_dim": head_dim,
                    "pass": way,
                    "warps": config.num_warps,
                    "stages": config.num_stages,
                    "shared": compiled.metadata.shared,
                    "fits": compiled.metadata.shared <= shared * 2**10,
                    **found,
                }


def assembled(text: str, folder: Path) -> dict[str, Any]:
    """Registers of a thread and bytes spilled, by the assembler of Triton's wheel."""
    spec = find_spec("triton")
    assert spec
    assert spec.origin
    target = re.search(r"\.target (\w+)", text)
    assert target
    tools = Path(spec.origin).parent / "backends" / "nvidia" / "bin"
    name = "ptxas-blackwell" if target[1].startswith("sm_1") else "ptxas"
    place = folder / "kernel.ptx"
    place.write_text(text)
    command = [tools / name, "-v", "--gpu-name", target[1], place, "-o", folder / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert registers
    return {"registers": int(registers[1]), "spilled": int(spilled[1]) if spilled else 0}


def sources_of(
    card: Any, dtype: torch.dtype, head_dims: list[int]
) -> list[tuple[int, str, str, str]]:
    """(head dim, pass, name, source) of the kernels of templates that inductor writes."""
    triton: Any = import_module("triton")
    target = import_module("triton.backends.compiler").GPUTarget
    number = 10 * card.major + card.minor
    for name, answer in {
        "get_device_properties": card,
        "get_device_capability": (card.major, card.minor),
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.set_rng_state = lambda *_, **__: None
    for name in ("is_available", "is_triton_capable"):
        setattr(CudaInterface, name, staticmethod(lambda *_, **__: True))
    worker = types.SimpleNamespace(
        get_device_properties=lambda *_: card, current_device=lambda: 0, set_device=lambda *_: None
    )
    for name, answer in {
        "raise_if_triton_unavailable": lambda *_, **__: None,
        "get_device_properties": lambda *_: card,
        "get_compute_capability": lambda *_: number,
        "current_device": lambda: 0,
    }.items():
        setattr(CudaInterface, name, staticmethod(answer))
    CudaInterface.Worker = worker  # pyright: ignore
    limits = {
        "max_shared_mem": card.shared_memory_per_block_optin,
        "multiprocessor_count": card.multi_processor_count,
        "max_num_regs": 65536,
        "warpSize": 32,
    }
    driver = types.SimpleNamespace(
        get_current_target=lambda: target("cuda", number, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda *_: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        utils=types.SimpleNamespace(get_device_properties=lambda _: limits),
    )
    triton.runtime.driver.set_active(driver)
    # These make real tensors on the device.
    joint_graph.lazy_init = post_grad.lazy_init = lambda *_, **__: None
    config.joint_graph_constant_folding = False
    config.force_disable_caches = True
    config.compile_threads = 1
    functorch_config.force_non_lazy_backward_lowering = True
    codes: list[str] = []

    class WrittenError(Exception):
        """Both passes are written; neither can run."""

    def keep(self: Any) -> Any:
        codes.append(self.codegen()[0].value)
        module: Any = types.ModuleType("written")
        module.__file__, module.key = "written.py", "written"

        def call(_: Any) -> None:
            raise WrittenError

        module.call = call
        return module

    GraphLowering.compile_to_module = keep
    found = []
    for head_dim in head_dims:
        codes.clear()
        with FakeTensorMode(allow_non_fake_inputs=True):
            starts = torch.empty(ROWS, LENGTH, dtype=torch.bool, device="cuda")
            blocks = document_block_mask(starts)
            parts = [
                torch.empty(ROWS, heads, LENGTH, head_dim, device="cuda", dtype=dtype)
                for heads in (HEADS, KEY_HEADS, KEY_HEADS)
            ]
            q, k, v = (part.requires_grad_() for part in parts)
            with suppress(WrittenError):
                document_attention(q, k, v, blocks)
        for way, code in zip(("forward", "backward"), codes, strict=True):
            kernels = [(n, s) for n, s in KERNEL.findall(code) if n.startswith("triton_tem")]
            found += [(head_dim, way, name, source) for name, source in kernels]
    return found


if __name__ == "__main__":
    capability, dtype, *head_dims = sys.argv[1:]
    for row in compile_for(capability, dtype, [int(word) for word in head_dims]):
        print(json.dumps(row), flush=True)
