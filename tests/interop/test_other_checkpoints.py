"""Folders of other software are told as what they are, with the way out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minimind.cli.main import main
from minimind.config.parse import parse_flags
from minimind.errors import CheckpointError, UsageError
from minimind.interop.weights import load_weights_from
from minimind.train.inputs import require_resume_path
from tests.interop.hostile import good_folder
from tests.train.starts import read_initial

ZERO_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
ZERO = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
WHOLE = "mp_rank_00_model_states.pt"
SCRIPT = ("latest", "zero_to_fp32.py")
# What is in a folder -> what is said of it.
FOLDERS: dict[str, tuple[tuple[str, ...], str]] = {
    "DeepSpeed": (
        (f"global_step10/{ZERO}", f"global_step10/{WHOLE}", "global_step9/" + ZERO, *SCRIPT),
        "is a checkpoint of DeepSpeed; write its weights with `python -m"
        " deepspeed.utils.zero_to_fp32 DIR OUT`, put its config.json and tokenizer there, and name"
        " OUT",
    ),
    "DeepSpeed beside a Trainer's state": (
        (f"global_step10/{ZERO}", *SCRIPT, "config.json", "rng_state_0.pth", "training_args.bin"),
        "is a checkpoint of DeepSpeed; write its weights",
    ),
    "DeepSpeed of Lightning": ((f"checkpoint/{ZERO}", "latest"), "is a checkpoint of DeepSpeed; "),
    "one step of DeepSpeed": (
        (ZERO, WHOLE),
        "deepspeed.utils.zero_to_fp32 ABOVE OUT --tag DIR_NAME`, put",
    ),
    "DeepSpeed without a tag": ((f"a b/{ZERO}",), "DIR OUT --tag 'a b'`, put"),
    "ZeRO stage 3": ((f"global_step10/{ZERO_3}", f"global_step10/{ZERO}"), "DIR OUT --tag"),
    "DeepSpeed at stage 0": (
        (f"global_step10/{WHOLE}", "latest"),
        f"is a checkpoint of DeepSpeed without ZeRO; save what DIR/global_step10/{WHOLE} has under"
        " 'module' with torch.save, and name that file",
    ),
    "what is left of DeepSpeed": (SCRIPT, "is a checkpoint of DeepSpeed without its files; get it"),
    "a universal checkpoint": (
        ("latest_universal", f"global_step10_universal/{WHOLE}", "latest"),
        "is a universal checkpoint of DeepSpeed; name the one that it was made from",
    ),
    "FSDP of Accelerate": (
        (
            *("optimizer_0/__0_0.distcp", "pytorch_model_fsdp_0/__0_0.distcp"),
            *("pytorch_model_fsdp_0/.metadata", "random_states_0.pkl", "scheduler.bin"),
        ),
        "has its weights in shards of torch.distributed; write them with `accelerate merge-weights"
        " DIR/pytorch_model_fsdp_0 OUT`, put its config.json and tokenizer there, and name OUT",
    ),
    "shards of torch.distributed": (
        ("__0_0.distcp", "__1_0.distcp", ".metadata"),
        "`accelerate merge-weights DIR OUT`, put",
    ),
    "Megatron": (
        ("latest_checkpointed_iteration.txt", "iter_0000010/mp_rank_00/model_optim_rng.pt"),
        "is a checkpoint of Megatron (DIR/latest_checkpointed_iteration.txt); convert it to Hugging"
        " Face's layout (Megatron Bridge does), and name the folder that this writes",
    ),
    "a step of Megatron": (
        ("common.pt", "metadata.json", "__0_0.distcp"),
        "is a checkpoint of Meg",
    ),
    "GGUF": (("model-q4.gguf", "config.json"), "has DIR/model-q4.gguf; it is GGUF, which is wr"),
    "ONNX": (
        ("onnx/model.onnx", "config.json", "tokenizer.json"),
        "has a model for inference alone (DIR/onnx/model.onnx); name the safetensors that it was",
    ),
    "TensorFlow": (
        ("tf_model.h5", "config.json"),
        "has weights of TensorFlow or Flax (DIR/tf_model.h5); write them with transformers 4"
        " (from_pretrained with from_tf or from_flax, then save_pretrained), and name that folder",
    ),
    "Flax": (("flax_model.msgpack", "config.json"), "has weights of TensorFlow or Flax (DIR/flax_"),
    "Lightning": (
        ("last.ckpt", "hparams.yaml"),
        "has checkpoints of Lightning; save what DIR/last.ckpt has under 'state_dict' with torch",
    ),
    "Mistral's layout": (
        ("consolidated.safetensors", "params.json", "tekken.json"),
        "has weights in the layout of Meta or Mistral (DIR/consolidated.safetensors); get the",
    ),
    "a Trainer's folder": (
        ("checkpoint-10/config.json", "checkpoint-10/model.safetensors", "runs/events"),
        "has no weights itself; name a model in it, such as DIR/checkpoint-10",
    ),
    "a cache of the Hub": (
        ("refs/main", "snapshots/abc/config.json", "blobs/x"),
        "has no weights itself; name a model in it, such as DIR/snapshots/abc",
    ),
    "an optimizer's state": (
        ("optimizer.pt", "config.json"),
        "has the state of training alone (optimizer.pt); name the model",
    ),
    "a Trainer's state": (
        ("scheduler.pt", "rng_state.pth", "training_args.bin"),
        "has the state of training alone (rng_state.pth, scheduler.pt, training_args.bin); name",
    ),
    "weights of another name beside other forms": (
        ("weights.safetensors", "model.gguf", "onnx/model.onnx", "notes.h5", "config.json"),
        "has neither model.safetensors nor pytorch_model.bin, nor an index of either, and no .pth"
        " or .pt; name the file itself",
    ),
    "two models beside other forms": (
        ("a.pth", "b.pth", "last.ckpt", "model.onnx", "config.json"),
        "and 2 files .pth or .pt; name the file itself",
    ),
    "Meta's layout": (
        ("consolidated.00.pth", "consolidated.01.pth", "params.json"),
        "has weights in the layout of Meta or Mistral (DIR/consolidated.00.pth); get the",
    ),
    "nothing": (("config.json",), "has neither model.safetensors nor pytorch_model.bin, nor an"),
}


def made(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


def told(text: str, folder: Path) -> str:
    places = {"DIR_NAME": folder.name, "ABOVE": str(folder.parent), "DIR": str(folder)}
    for name, place in places.items():
        text = text.replace(name, place)
    return text


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_is_told_as_what_it_is(kind: str, tmp_path: Path):
    names, expected = FOLDERS[kind]
    folder = made(tmp_path / "other", names)
    with pytest.raises(CheckpointError) as caught:
        load_weights_from(folder)
    assert str(caught.value).startswith(f"{folder}: ")
    assert told(expected, folder) in str(caught.value)


@pytest.mark.parametrize("file", [ZERO, WHOLE])
def test_a_file_of_it_is_told_too(file: str, tmp_path: Path):
    folder = made(tmp_path / "global_step10", (ZERO, WHOLE))
    with pytest.raises(CheckpointError, match=f"{file}: is a checkpoint of DeepSpeed; write its"):
        load_weights_from(folder / file)


@pytest.mark.parametrize("name", ["state_dict", "model", "module"])
def test_weights_beside_other_state_are_told(name: str, tmp_path: Path):
    state = {"epoch": 3, "optimizer": {"state": {}}, name: {"a.weight": torch.zeros(2)}}
    torch.save(state, tmp_path / "model.pth")
    with pytest.raises(CheckpointError) as caught:
        load_weights_from(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/model.pth: has weights under {name!r}, beside what else training saved; save"
        f" these alone (torch.save(torch.load(FILE)[{name!r}], 'model.pth')), and name that file"
    )


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_shards_that_an_index_lists_and_that_are_missing(index: str, tmp_path: Path):
    folder = good_folder(tmp_path / "folder")
    (folder / "model.safetensors").rename(folder / "part-1")
    weight_map = {"lm_head.weight": "part-1", "model.norm.weight": "part-2", "a": "part-3"}
    (folder / index).write_text(json.dumps({"weight_map": weight_map}))
    match = f"{index}: has 2 of its 3 files not beside it \\(part-2 for one\\); get the file again"
    with pytest.raises(CheckpointError, match=match):
        load_weights_from(folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "more"), [(2, ()), (2, ("--max_shard_size", "100KB")), (0, ()), ("dcp", ())]
)
def test_the_way_out_gives_the_weights(stage: int | str, more: tuple[str, ...], tmp_path: Path):
    source, out = good_folder(tmp_path / "source"), tmp_path / "out"
    written, whole = tmp_path / "written", 0 if stage == "dcp" else stage
    made = [sys.executable, "-m", "tests.interop.write_deepspeed", source, written, str(whole)]
    subprocess.run([*map(str, made)], check=True, capture_output=True, timeout=600)
    with pytest.raises(CheckpointError) as caught:
        load_weights_from(written / ("dcp" if stage == "dcp" else "deepspeed"))
    if stage == 0:
        name = str(caught.value).split("save what ")[1].split(" has under")[0]
        out.mkdir()
        torch.save(torch.load(name)["module"], out / "model.pth")
    else:
        command = str(caught.value).split("`")[1].replace("OUT", str(out)).split()
        bin_of = Path(sys.executable).parent
        subprocess.run([bin_of / command[0], *command[1:], *more], check=True, timeout=600)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((source / name).read_bytes())
    found, expected = load_weights_from(out).tensors, load_weights_from(source).tensors
    assert {*found.shapes} == {*expected.shapes}
    for name in expected.shapes:
        assert torch.equal(found.read(name), expected.read(name))


@pytest.mark.parametrize(
    "words",
    [
        ["import", "--from", "llama", "DIR", "--out", "X"],
        ["import", "--from", "minimind2", "DIR", "--out", "X"],
        ["export", "--checkpoint", "DIR", "--format", "llama", "--out", "X"],
        ["generate", "--model", "DIR", "--prompt", "a"],
        ["generate", "--checkpoint", "DIR", "--prompt", "a"],
        ["chat", "--model", "DIR", "--once", "a"],
        ["serve", "--model", "DIR", "--port", "0"],
        ["eval", "--model", "DIR", "--data", "TEXT"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_every_reader_of_a_model_says_it(words: list[str], tmp_path: Path, capsys):
    folder = made(tmp_path / "other", FOLDERS["DeepSpeed"][0])
    (tmp_path / "text.jsonl").write_text('{"text": "some words"}\n' * 40)
    places = {"DIR": folder, "TEXT": tmp_path / "text.jsonl", "X": tmp_path / "x"}
    assert main([str(places.get(word, word)) for word in words]) == CheckpointError.status
    assert told(FOLDERS["DeepSpeed"][1], folder) in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--init_from", "--resume", "--model"])
def test_a_run_says_it(flag: str, tmp_path: Path):
    folder = made(tmp_path / "other", FOLDERS["DeepSpeed"][0])
    readers = {
        "--init_from": read_initial,
        "--resume": require_resume_path,
        "--model": read_initial,
    }
    place = f"hf:{folder}" if flag == "--model" else str(folder)
    run = parse_flags([flag, place, "--out_dir", str(tmp_path / "x")])
    with pytest.raises(UsageError if flag == "--model" else CheckpointError) as caught:
        readers[flag](run)
    assert told(FOLDERS["DeepSpeed"][1], folder) in str(caught.value)
