"""A tokenizer that its library panics or fails on is named, with the text: status 3."""

import json
import re

import pytest

from minimind.cli.main import main
from minimind.data.prepare.prepare import PrepareRequest, prepare_for_run
from minimind.data.shards.manifest import Options
from minimind.data.text.inputs import Source
from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer
from minimind.data.tokenizer.load import load_tokenizer
from minimind.errors import DataError
from tests.data.tokenizer.failing import ON_LOADING, ON_TEXT, ON_TOKENS, TEXT, failing

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '</s>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("name", ON_LOADING)
def test_one_that_cannot_be_loaded(tmp_path, name):
    folder = failing(tmp_path, ON_LOADING[name])
    with pytest.raises(
        DataError, match=r"tokenizer\.json: is not a tokenizer of Hugging Face \(.*; "
    ):
        load_tokenizer(folder)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ON_TEXT)
def test_one_that_fails_on_a_text(tmp_path, name, threads):
    tokenizer = load_tokenizer(failing(tmp_path, ON_TEXT[name]))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    said = re.escape(f"{tokenizer.path}: the tokenizer fails on the text 'aaaaaaaaaa")
    for fails in (
        lambda: tokenizer.encode_arrays(["", TEXT], threads),
        lambda: tokenizer.encode_written(TEXT),
    ):
        with pytest.raises(DataError, match=rf"^{said}.{{40,300}}; give another tokenizer$"):
            fails()


@pytest.mark.parametrize("name", ON_TOKENS)
def test_one_that_fails_on_tokens(tmp_path, name):
    tokenizer = load_tokenizer(failing(tmp_path, ON_TOKENS[name]))
    with pytest.raises(DataError, match=r"tokenizer\.json: the tokenizer fails to decode its"):
        tokenizer.decode([1] * 30_000 + [2])


@pytest.mark.parametrize("name", [*ON_LOADING, *ON_TEXT, *ON_TOKENS])
def test_prepare_names_the_tokenizer_and_the_document(tmp_path, name, capsys):
    """A decoder fails where the tokens are compared with the text."""
    folder = failing(tmp_path / "tokenizer", {**ON_LOADING, **ON_TEXT, **ON_TOKENS}[name])
    lines = [json.dumps({"text": text}) + "\n" for text in ("", "b", TEXT)]
    (tmp_path / "a.jsonl").write_text("".join(lines[1:]))
    flags = ["--tokenizer", str(folder), "--out", str(tmp_path / "out")]
    assert main(["prepare", str(tmp_path / "a.jsonl"), *flags]) == DataError.status
    report = capsys.readouterr().err.splitlines()[-1]
    assert report.startswith("minimind: error[E_DATA]: ")
    assert f"{folder}/tokenizer.json: " in report
    if name.startswith("a slow") and name in ON_TEXT:
        assert f"{tmp_path}/a.jsonl:2 (byte 14): {folder}" in report
    elif name in ON_TEXT:
        assert f"{tmp_path}/a.jsonl:1 (byte 0): {folder}" in report
    if name in ON_TEXT:
        assert report.endswith("; give another tokenizer, or leave the document out")


def test_a_conversation_is_named_too(tmp_path):
    folder = failing(tmp_path / "tokenizer", ON_TEXT["a slow pattern that splits"])
    talk = [{"prompt": "b", "completion": text} for text in ("a", TEXT)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in talk))
    source = Source("data", (str(tmp_path / "a.jsonl"),))
    options = Options(chat_template=TEMPLATE, train_on="assistant", val_fraction=0)
    with pytest.raises(DataError, match=r"a\.jsonl:2 \(byte 35\): .*json: the tokenizer fails on"):
        prepare_for_run(PrepareRequest((source,), str(folder), options=options), tmp_path / "cache")


def test_statistics_quote_the_text(tmp_path, capsys):
    folder = failing(tmp_path / "tokenizer", ON_TEXT["a slow pattern that splits"])
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    words = ["tokenizer", "inspect", str(folder), "--data_path", str(tmp_path / "a.jsonl")]
    assert main(words) == DataError.status
    assert "the tokenizer fails on the text 'aaaa" in capsys.readouterr().err
