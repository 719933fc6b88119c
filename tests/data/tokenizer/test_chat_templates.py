"""Which chat template a folder has: the one that AutoTokenizer of transformers finds in it."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from minimind.data.chat.template import named_tokens, own_template
from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer, train_tokenizer
from minimind.data.tokenizer.vocabulary import DEFAULT, MODEL_NAME, write_tokenizer
from minimind.errors import DataError, UsageError

CONFIG = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}


def listed(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "template": f"{name} of a list"} for name in names]


# Content by file; a dictionary is that of tokenizer_config.json, without the other keys.
JINJA = {"chat_template.jinja": "a file\n"}
MORE = {"additional_chat_templates/tool_use.jinja": "a tool\n"}
MORE_DEFAULT = {"additional_chat_templates/default.jinja": "another default"}
PROCESSOR = {"chat_template.json": json.dumps({"chat_template": "of a processor"})}
PLACES: dict[str, dict[str, Any]] = {
    "nowhere": {},
    "no config": {"tokenizer_config.json": None},
    "jinja": JINJA,
    "jinja without a config": {**JINJA, "tokenizer_config.json": None},
    "jinja of another system": {"chat_template.jinja": "one\r\ntwo\rthree\r\n"},
    "config": {"config": "in the config"},
    "named": {"config": listed("default", "tool_use", "rag")},
    "named twice": {"config": [*listed("default"), *listed("default")]},
    "one name": {"config": listed("default")},
    "no default": {"config": listed("tool_use", "rag")},
    "no names": {"config": []},
    "dictionary": {"config": {"default": "x", "tool_use": "y"}},
    "null": {"config": None},
    "empty": {"config": ""},
    "more": MORE,
    "more with a default": {**MORE, **MORE_DEFAULT},
    "only a default": MORE_DEFAULT,
    "jinja and config": {**JINJA, "config": "in the config"},
    "jinja and named": {**JINJA, "config": listed("default", "rag")},
    "jinja and more": {**JINJA, **MORE},
    "jinja and two defaults": {**JINJA, **MORE_DEFAULT},
    "config and more": {**MORE, "config": "in the config"},
    "named and more without a config": {**MORE, "tokenizer_config.json": None},
    "a folder by the name": {"chat_template.jinja/x": "no", "config": "in the config"},
    "processor and config": {**PROCESSOR, "config": "in the config"},
    "processor and jinja": {**PROCESSOR, **JINJA},
}


# Of special_tokens_map.json, of tokenizer_config.json, and the files beside them.
MAP_TEMPLATES: dict[str, dict[str, Any]] = {
    "no template": {},
    "a template": {"chat_template": "of the map"},
    "no template by null": {"chat_template": None},
    "an empty template": {"chat_template": ""},
    "a named template": {"chat_template": listed("default")},
    "named templates": {"chat_template": listed("default", "rag")},
    "no default": {"chat_template": listed("rag", "tool_use")},
    "no names": {"chat_template": []},
}
MAP_NAMES: dict[str, dict[str, Any]] = {
    "no names": {},
    "an end": {"eos_token": "<pad>"},
    "an end with flags": {"eos_token": {"content": "<pad>", "lstrip": False, "special": True}},
    "an end by null": {"eos_token": None, "bos_token": "</s>"},
}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "no config": None,
    "names": CONFIG,
    "a template": {**CONFIG, "chat_template": "in the config"},
    "other names": {**CONFIG, "eos_token": "<unk>", "pad_token": "<pad>"},
}
BESIDE: dict[str, dict[str, Any]] = {"nothing": {}, "jinja": JINJA, "more": MORE}


def added_tokens() -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    names = enumerate(("<unk>", "<s>", "</s>", "<pad>"))
    return {str(i): {"content": name, **flags, "special": True} for i, name in names}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The file of either kind of tokenizer."""
    place = tmp_path_factory.mktemp("model")
    train_tokenizer(["some text to learn from"] * 9, 512, place / MODEL_NAME)
    files = SentencePieceTokenizer(place).exported
    return {name: {name: files[name]} for name in (MODEL_NAME, "tokenizer.json")}


def folder(place: Path, model: dict[str, bytes], files: dict[str, Any]) -> Path:
    contents: dict[str, Any] = {"config.json": '{"model_type": "llama"}', **files}
    contents.setdefault("tokenizer_config.json", json.dumps(CONFIG))
    if "config" in files:
        values = {**CONFIG, "chat_template": contents.pop("config")}
        contents["tokenizer_config.json"] = json.dumps(values)
    for name, content in {**model, **contents}.items():
        if content is not None:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return place


def exported(place: Path, source: Path) -> Path:
    """A folder with what is exported of the tokenizer of another."""
    write_tokenizer(place, load_tokenizer(source).exported)
    (place / "config.json").write_text('{"model_type": "llama"}')
    return place


def by_name(found: Any) -> dict[str, str]:
    """The templates that AutoTokenizer found."""
    return found if isinstance(found, dict) else {} if found is None else {DEFAULT: found}


@pytest.mark.parametrize("kind", [MODEL_NAME, "tokenizer.json"])
@pytest.mark.parametrize("place", PLACES)
def test_it_is_that_of_autotokenizer(kind: str, place: str, models: Any, tmp_path: Path):
    source = folder(tmp_path / "source", models[kind], PLACES[place])
    expected = by_name(AutoTokenizer.from_pretrained(source).chat_template)
    tokenizer = load_tokenizer(source)
    assert dict(tokenizer.templates.by_name) == expected
    write_tokenizer(tmp_path / "flat", tokenizer.files())  # as checkpoints and caches keep it
    again = load_tokenizer(tmp_path / "flat")
    assert dict(again.templates.by_name) == expected
    assert again.files() == tokenizer.files()
    if not expected:
        assert own_template(tokenizer) is None
    elif DEFAULT not in expected:
        with pytest.raises(UsageError, match=r"and none is named default; name a file .*--chat_te"):
            own_template(tokenizer)


@pytest.mark.long
@pytest.mark.parametrize("kind", [MODEL_NAME, "tokenizer.json"])
@pytest.mark.parametrize("is_listed", [False, True], ids=["", "with all added tokens"])
@pytest.mark.parametrize("config", CONFIGS)
def test_special_tokens_map_is_read_as_autotokenizer_reads_it(
    kind: str, is_listed: bool, config: str, models: Any, tmp_path: Path
):
    values = CONFIGS[config]
    if is_listed:
        values = {**(values or CONFIG), "added_tokens_decoder": added_tokens()}
    for number, (template, names, beside) in enumerate(product(MAP_TEMPLATES, MAP_NAMES, BESIDE)):
        if beside != "nothing" and names != "an end":
            continue  # names do not depend on the files of templates
        case, place = (template, names, beside), tmp_path / str(number)
        files = {
            **BESIDE[beside],
            "special_tokens_map.json": json.dumps(MAP_TEMPLATES[template] | MAP_NAMES[names]),
            "tokenizer_config.json": json.dumps(values) if values else None,
        }
        source = folder(place / "source", models[kind], files)
        expected = by_name(AutoTokenizer.from_pretrained(source).chat_template)
        tokenizer = load_tokenizer(source)
        assert dict(tokenizer.templates.by_name) == expected, case
        write_tokenizer(place / "flat", tokenizer.files())
        flat = load_tokenizer(place / "flat")
        assert dict(flat.templates.by_name) == expected, case
        assert flat.files() == tokenizer.files(), case
        (place / "flat" / "config.json").write_text('{"model_type": "llama"}')
        for copy in (place / "flat", exported(place / "out", source)):
            assert by_name(AutoTokenizer.from_pretrained(copy).chat_template) == expected, case
        ours = tokenizer.token_names
        for one in ("source", "flat", "out"):
            theirs = AutoTokenizer.from_pretrained(place / one).special_tokens_map
            assert {**theirs, **ours} == theirs, (case, one)
        if isinstance(tokenizer, HuggingFaceTokenizer) and "eos_token" in ours:
            assert tokenizer.piece_name(tokenizer.eos_id) == ours["eos_token"], case


def test_a_template_that_is_written_to_a_run_wins_there(models: Any, tmp_path: Path):
    files = {"special_tokens_map.json": json.dumps({"chat_template": "of the map"})}
    source = load_tokenizer(folder(tmp_path / "source", models["tokenizer.json"], files))
    assert source.templates.origin == "special_tokens_map.json"
    write_tokenizer(tmp_path / "run", {**source.files(), "chat_template.jinja": b"another"})
    assert load_tokenizer(tmp_path / "run").chat_template == "another"
    (tmp_path / "run" / "config.json").write_text('{"model_type": "llama"}')
    assert AutoTokenizer.from_pretrained(tmp_path / "run").chat_template == "another"


@pytest.mark.parametrize("kind", [MODEL_NAME, "tokenizer.json"])
@pytest.mark.parametrize("place", ["config", "no default", "jinja and more", "named"])
def test_an_export_keeps_all(kind: str, place: str, models: Any, tmp_path: Path):
    source = folder(tmp_path / "source", models[kind], PLACES[place])
    places = (source, exported(tmp_path / "out", source))
    found = (AutoTokenizer.from_pretrained(one) for one in places)
    before, after = (by_name(one.chat_template) for one in found)
    assert before == after != {}


@pytest.mark.parametrize("kind", [MODEL_NAME, "tokenizer.json"])
def test_what_only_processors_read_is_taken_where_there_is_nothing_else(
    kind: str, models: Any, tmp_path: Path
):
    source = folder(tmp_path / "source", models[kind], PROCESSOR)
    tokenizer = load_tokenizer(source)
    assert tokenizer.chat_template == "of a processor"
    assert tokenizer.templates.origin == "chat_template.json"
    out = exported(tmp_path / "out", source)
    assert AutoTokenizer.from_pretrained(out).chat_template == "of a processor"


@pytest.mark.parametrize("kind", [MODEL_NAME, "tokenizer.json"])
def test_tokens_have_the_names_of_the_configuration(kind: str, models: Any, tmp_path: Path):
    bos = {"__type": "AddedToken", "content": "<pad>"}
    names = {"bos_token": bos, "eos_token": "</s>", "pad_token": "<unk>"}
    config = json.dumps({"tokenizer_class": "LlamaTokenizer", **names})
    source = folder(tmp_path / "source", models[kind], {"tokenizer_config.json": config})
    named = named_tokens(load_tokenizer(source))
    named_here = {"bos_token": "<pad>", "eos_token": "</s>", "pad_token": "<unk>"}
    assert named == {**named_here, "unk_token": "<unk>"}  # which the class has by default
    for place in (source, exported(tmp_path / "out", source)):
        theirs = AutoTokenizer.from_pretrained(place).special_tokens_map
        assert named == {name: theirs[name] for name in named}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"config": 7},
            "tokenizer_config.json: is not a configuration of a tokenizer (its chat_te",
        ),
        ({"config": ["text"]}, "neither a text nor a list of"),
        ({"config": [{"name": "default"}]}, "neither a text nor a list of"),
        ({"config": [{"name": "default", "template": None}]}, "neither a text nor a list of"),
        ({"chat_template.jinja": b"\xff\xfe"}, "chat_template.jinja: is not UTF-8"),
        ({"additional_chat_templates/a.jinja": b"\xff"}, "a.jinja: is not UTF-8"),
        ({"chat_template.jinja": "a" * (2**20 + 1)}, "cannot be read (larger than 1,048,576 byte"),
        (
            {"special_tokens_map.json": '{"chat_template": 7}'},
            "special_tokens_map.json: is not a configuration of a tokenizer (its chat_te",
        ),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json: is not JSON"),
        (
            {"tokenizer_config.json": '{"added_tokens_decoder": ["</s>"]}'},
            "tokenizer_config.json: 'added_tokens_decoder' is not an object of tokens by id",
        ),
        ({"chat_template.json": "[]"}, "chat_template.json: is not a JSON object"),
    ],
)
@pytest.mark.parametrize("kind", [MODEL_NAME, "tokenizer.json"])
def test_files_that_are_none_are_named(
    kind: str, files: dict[str, Any], words: str, models: Any, tmp_path: Path
):
    with pytest.raises(DataError) as caught:
        load_tokenizer(folder(tmp_path, models[kind], files))
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)
