"""Starts models of transformers beside a stub of the package `kernels`, and counts its calls.

transformers looks once for that package, when it is first imported, so the stub needs a process of
its own. Prints a JSON object: how each start ended, and every repository that was asked for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

STUB = '''
"""What transformers 5.23 imports of `kernels`; whatever would fetch code is recorded instead."""
ASKED = []


def get_kernel(repo_id, **options):
    ASKED.append(repo_id)
    raise FileNotFoundError(repo_id)


class LayerRepository:
    def __init__(self, **options):
        self.options = options

    def load(self):
        return get_kernel(str(self.options))


LocalLayerRepository = LayerRepository
CUDAProperties = ROCMProperties = Device = use_kernel_mapping = dict
replace_kernel_forward_from_hub = kernelize = register_kernel_mapping = get_kernel


class Mode:
    TRAINING = INFERENCE = 1


class KernelizeFallback:
    ALL = 1


def use_kernel_forward_from_hub(name):
    return lambda cls: cls


def use_kernelized_func(*functions):
    return lambda cls: cls
'''
REPOSITORY = "evil/evil"
SHAPE = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 640},
    **{"max_position_embeddings": 48, "intermediate_size": 64},
}
LLAMA: dict[str, Any] = {"model_type": "llama", **SHAPE}
REFUSED: dict[str, dict[str, Any]] = {
    "private": {**LLAMA, "_attn_implementation": REPOSITORY},
    "public": {**LLAMA, "attn_implementation": f"{REPOSITORY}@main:forward"},
    "internal": {**LLAMA, "_attn_implementation_internal": REPOSITORY},
    "flash": {**LLAMA, "attn_implementation": "flash_attention_2"},
    "paged": {**LLAMA, "attn_implementation": f"paged|{REPOSITORY}"},
    "by part": {**LLAMA, "attn_implementation": {"": "sdpa", "text_config": REPOSITORY}},
    "alias": {**LLAMA, "attribute_map": {"x": "_attn_implementation_internal"}, "x": REPOSITORY},
    "experts": {**LLAMA, "experts_implementation": "deepgemm"},
    "nested": {
        "model_type": "gemma3_text",
        **SHAPE,
        "text_config": {"_attn_implementation": REPOSITORY},
    },
    "rwkv": {**LLAMA, "model_type": "rwkv", "attention_hidden_size": 32},
}
# Importing transformers' code of these asks for FlashAttention, whatever the file says.
ACCEPTED: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "attn_implementation": "sdpa"},
    "autoset": {**LLAMA, "_attn_implementation_autoset": True, "torch_dtype": "float8_e4m3fn"},
    "gptj": {"model_type": "gptj", **SHAPE, "rotary_dim": 8},
    "falcon": {"model_type": "falcon", **SHAPE},
    "gpt_neo": {"model_type": "gpt_neo", **SHAPE, "attention_types": [[["global"], 2]]},
}


def install_stub(folder: Path) -> None:
    """Write the stub and the metadata by which transformers finds its version."""
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text(STUB)
    metadata_dir = folder / "kernels-0.18.2.dist-info"
    metadata_dir.mkdir()
    (metadata_dir / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n"
    )


def main(folder: Path) -> None:
    """One dry run of each file below `folder`, and the plan of it."""
    install_stub(folder)
    sys.path.insert(0, str(folder))
    import kernels  # pyright: ignore[reportMissingImports] (the stub)

    import minimind.train
    from minimind.cli.main import main as minimind

    train: Any = sys.modules["minimind.train"]
    ended: dict[str, list[Any]] = {}
    for name, config in {**REFUSED, **ACCEPTED}.items():
        place = folder / name.replace(" ", "-")
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config))
        given = {"model": f"hf:{place}", "deepspeed_config": "none", "device": "cpu"}
        try:
            train({**given, "dry_run": True})
            status = 0
        except Exception as error:
            status = getattr(error, "status", repr(error))
        ended[name] = [status, minimind(["plan", "--model", f"hf:{place}"])]
    print(json.dumps({"ended": ended, "asked": kernels.ASKED}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
