"""A directory with the model's own code, in a process that cannot import this package."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer, train_tokenizer
from minimind.interop.hf_folder import AUTO_MAP, remote_code
from tests.conftest import ROOT, sentences
from tests.model.references import build

STRANGER = """
import importlib.abc, json, sys

class Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "minimind":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusing())
try:
    import minimind
    raise SystemExit("minimind can be imported")
except ModuleNotFoundError:
    pass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache

place, ids = sys.argv[1], torch.tensor(json.loads(sys.argv[2]))
tokenizer = AutoTokenizer.from_pretrained(f"{place}/plain", trust_remote_code=True)
found = {"ids": tokenizer(sys.argv[3])["input_ids"]}
for name in ("plain", "variant"):
    model = AutoModelForCausalLM.from_pretrained(f"{place}/{name}", trust_remote_code=True)
    limits = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 3}
    with torch.no_grad():
        torch.save(model(ids).logits, f"{place}/{name}.pt")
    found[name] = {
        "class": f"{type(model).__module__}.{type(model).__name__}",
        "dynamic": model.generate(ids, **limits).tolist(),
        "static": model.generate(ids, cache_implementation="static", **limits).tolist(),
        "none": model.generate(ids, use_cache=False, **limits).tolist(),
    }
assert "minimind" not in sys.modules
print(json.dumps(found))
"""
TEXT = "the quick  fox, 春眠不覺曉\n"


def export(model: Any, place: Path) -> None:
    """What `minimind export --format minimind` writes of the model."""
    model.save_pretrained(place)
    path = place / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": AUTO_MAP}))
    for name, content in remote_code().items():
        (place / name).write_bytes(content)


def test_all_modules_are_included_and_none_imports_this_package():
    files = remote_code()
    assert {"configuration.py", "decoder.py", "causal_lm.py", "kernels.py", "rotary.py"} <= {*files}
    assert [*files] == sorted(files)
    for name, content in files.items():
        text = content.decode()
        assert "minimind." not in "".join(re.findall(r"^\s*(?:from|import) .*", text, re.M)), name
        for module in re.findall(r"^\s*from \.(\w+) import", text, re.M):
            assert f"{module}.py" in files
    for place in AUTO_MAP.values():
        module, name = place.split(".")
        assert f"\nclass {name}(" in files[f"{module}.py"].decode()


def test_model_loads_and_generates_without_this_package(tmp_path: Path):
    ids = torch.randint(4, 97, (2, 9), generator=torch.manual_seed(5))
    models = {
        "plain": build(),
        "variant": build(qk_norm=True, tie_word_embeddings=False, doc_mask=True, use_moe=True),
    }
    for name, model in models.items():
        export(model, tmp_path / name)
    train_tokenizer(sentences(1, 60), 600, tmp_path / "learnt.model")
    tokenizer = SentencePieceTokenizer(tmp_path / "learnt.model")
    tokenizer.save(tmp_path / "plain")
    (tmp_path / "stranger.py").write_text(STRANGER)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    words = [str(tmp_path), json.dumps(ids.tolist()), TEXT]
    done = subprocess.run(
        [sys.executable, "-I", str(tmp_path / "stranger.py"), *words],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ids"] == tokenizer.encode(TEXT)
    for name, model in models.items():
        seen = found[name]
        assert seen["class"].startswith("transformers_modules.")
        with torch.no_grad():
            expected = model(ids).logits
        assert torch.equal(torch.load(tmp_path / f"{name}.pt", weights_only=True), expected)
        assert seen["dynamic"] == seen["static"] == seen["none"]
        assert len(seen["dynamic"][0]) == 9 + 12
    assert str(ROOT) not in done.stdout
