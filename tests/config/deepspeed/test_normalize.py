"""A rule judges the value that DeepSpeed reads, whichever way the file spells it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from minimind.config.deepspeed.document import MISSING, get, put
from minimind.config.deepspeed.key_checks import is_one_of, normalize_config
from minimind.config.deepspeed.keys import FIELD_NAMES, KEYS, Facts
from minimind.config.deepspeed.resolve import _resolved, collected
from minimind.config.deepspeed.rules import RULES, keys_without_effect
from minimind.config.launcher_env import Launch
from minimind.config.parse import parse_flags
from minimind.config.rules import with_dtype
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.errors import UsageError
from tests.config.deepspeed.test_incompatible import ZERO, resolved
from tests.config.notices import notices_of
from tests.refusals.rows import FOLDER, Row, rows_of

TRUE, FALSE = ("true", "True", "TRUE", "t", "yes", "Y", "on", "1", 1, 1.0), ("false", "OFF", 0)


def spellings(value: Any) -> Iterator[Any]:
    """Other ways to write a literal that some reader of JSON takes for the same."""
    if value is True or value is False:
        yield from TRUE if value else FALSE
    elif isinstance(value, str):
        yield from (value.upper(), value.lower(), value.capitalize())
    elif isinstance(value, int | float):
        yield from (str(value), float(value), f" {value} ")
        if value in (0, 1):
            yield bool(value)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every literal in `value`, with the keys that lead to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path, value


def replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    return {k: replaced(v, path[1:], other) if k == path[0] else v for k, v in value.items()}


def wrong_settings() -> Iterator[tuple[str, dict[str, Any]]]:
    """A refused setting of every rule, and of every key that has no effect."""
    for row in rows_of(FOLDER / "deepspeed_rules.yaml"):
        if row.near and not row.argv:
            yield row.where, row.json
    for path, key in KEYS.items():
        if key.why and key.kind in ("", "bool"):
            value = 7 if path.endswith(("_size", "aio")) else True
            value = False if True in key.only else value
            yield path, {path: value}


def verdict(edits: dict[str, Any]) -> str:
    try:
        resolved("", edits)
    except UsageError as error:
        return str(error)
    return ""


WRONG = [(name, edits) for name, edits in wrong_settings() if verdict(edits)]


def test_every_key_without_effect_has_a_refused_setting():
    refused = {name for name, _ in WRONG}
    assert {path for path, key in KEYS.items() if key.why and key.kind in ("", "bool")} <= refused


def broken_rules(row: Row) -> set[int]:
    """Places in RULES of the rules that a row breaks."""
    document = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
    for key, value in row.json.items():
        put(document, key, value)
    config, device = normalize_config(document), "cuda" if row.gpus else "cpu"
    try:
        run = with_dtype(parse_flags(row.argv.split()), device, has_bf16=True)
        facts = collected(_resolved(config, Facts(config, run, 2, device), Launch()))[0]
    except UsageError:  # of the flags alone
        return set()
    if not facts.sources or not is_one_of(facts.stage, (0, 1, 2, 3)):
        return set()
    return {n for n, rule in enumerate(RULES) if [*rule(facts)]}


def test_every_rule_is_broken_by_a_row():
    rows = [row for path in FOLDER.glob("deepspeed_*.yaml") for row in rows_of(path)]
    broken = {n for row in rows for n in broken_rules(row)}
    assert [rule.keys for n, rule in enumerate(RULES) if n not in broken] == []


@pytest.mark.parametrize(("name", "edits"), WRONG, ids=[name for name, _ in WRONG])
def test_what_is_refused_is_refused_in_every_spelling(name: str, edits: dict[str, Any]):
    for path, value in leaves(edits):
        for other in spellings(value):
            if other == value and type(other) is type(value):
                continue
            assert verdict(replaced(edits, path, other)), f"{name}: {path} = {other!r} is accepted"


CHOICES = {path: key.kind for path, key in KEYS.items() if isinstance(key.kind, tuple)}


@pytest.mark.parametrize(("key", "names"), CHOICES.items())
def test_a_choice_in_another_case_is_the_choice_or_is_refused(key: str, names: tuple[Any, ...]):
    for name in (name for name in names if isinstance(name, str)):
        config: dict[str, Any] = {}
        put(config, key, name.upper())
        found = get(normalize_config(config), key)
        if found != name:  # left as it stands, and refused
            assert found == name.upper() != name
            assert verdict({key: name.upper()})


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"gradient_allreduce_op": "MEAN"}, {"gradient_allreduce_op": "mean"}),
        ({"optimizer": {"type": "adamw"}}, {"optimizer": {"type": "AdamW"}}),
        ({"bf16": {"enabled": "On"}}, {"bf16": {"enabled": True}}),
        ({"zero_optimization": {"stage": "2"}}, {"zero_optimization": {"stage": 2}}),
        (
            {"zero_optimization": {"reduce_bucket_size": 5e8, "overlap_comm": "no"}},
            {"zero_optimization": {"reduce_bucket_size": 500_000_000, "overlap_comm": False}},
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"ratio": "0.5"}}},
            {"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}},
        ),
        # DeepSpeed takes these as they are: any text is true, and a text is no number.
        ({"prescale_gradients": "false"}, {"prescale_gradients": "false"}),
        ({"gradient_clipping": "1.0"}, {"gradient_clipping": "1.0"}),
        ({"zero_optimization": {"stage": True}}, {"zero_optimization": {"stage": True}}),
        ({"bf16": {"enabled": "auto"}}, {"bf16": {"enabled": "auto"}}),
    ],
)
def test_a_literal_is_the_value_that_deepspeed_reads(written: dict, read: dict):
    found = normalize_config(written)
    assert json.dumps(found) == json.dumps(read)


def test_the_shipped_file_is_in_that_spelling():
    shipped = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
    assert normalize_config(shipped) == shipped


HARMLESS = [
    {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
    {"compile": {"deepcompile": False}},
    {"checkpoint": {"load_universal": False}},
    {"pipeline": {}},
    {"tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}}},
    {"data_efficiency": {"enabled": False, "seed": 7}},
    {"hybrid_engine": {"enabled": "off"}},
    {f"{ZERO}allgather_partitions": True, f"{ZERO}stage3_gather_16bit_weights_on_model_save": True},
    {f"{ZERO}stage": 3, f"{ZERO}zero_hpz_partition_size": 2},
]


@pytest.mark.parametrize("edits", HARMLESS, ids=json.dumps)
def test_what_requests_nothing_is_taken(edits: dict[str, Any]):
    assert verdict(edits) == ""


def test_keys_of_another_stage_are_listed():
    edits = {f"{ZERO}stage": 3, f"{ZERO}sub_group_size": 7, f"{ZERO}round_robin_gradients": False}
    edits[f"{ZERO}offload_optimizer"] = {"device": "cpu", "buffer_count": 5}
    found = resolved("", edits)
    passed = keys_without_effect(found.config, found.sources)
    assert set(passed) == {
        "reduce_scatter",
        "round_robin_gradients",
        "offload_optimizer.buffer_count",
    }


def test_a_start_lists_the_keys_without_effect():
    found = resolved("", {f"{ZERO}stage": 3, f"{ZERO}round_robin_gradients": False})
    line = "no effect at ZeRO stage 3: reduce_scatter, round_robin_gradients"
    assert line in notices_of(found, "cpu").splitlines()
    assert "no effect" not in notices_of(resolved("", {}), "cpu")


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_the_name_of_a_field_of_deepspeeds_is_its_key(name: str):
    field, key = name.partition(".")[2], FIELD_NAMES[name]
    value = KEYS[f"{ZERO}{key}"].kind != "whole" or 7
    for written in (field, key):
        found = resolved("", {"zero_optimization": {"stage": 3, written: value}}, "cuda")
        assert get(found.config, f"{ZERO}{key}") == value
        assert get(found.config, f"{ZERO}{field}") is MISSING
        assert found.sources[f"{ZERO}{key}"] == "ds.json"
    for both in ({field: value, key: value}, {key: value, field: value}):
        with pytest.raises(UsageError) as caught:
            resolved("", {"zero_optimization": {"stage": 3, **both}}, "cuda")
        clause = f"{name} is another name of {key}, which is also there; remove one of them"
        assert str(caught.value) == f"ds.json: {clause}"


def test_the_name_of_a_field_is_filled_and_checked_as_its_key():
    zero = {"stage": 3, "prefetch_bucket_size": "auto", "max_live_parameters": 1e9}
    found = resolved("", {"zero_optimization": zero})
    assert get(found.config, f"{ZERO}stage3_prefetch_bucket_size") == found.run.dim**2 * 9 // 10
    assert get(found.config, f"{ZERO}stage3_max_live_parameters") == 10**9
    with pytest.raises(UsageError, match=r"stage3_max_live_parameters is \"many\", not a whole"):
        resolved("", {"zero_optimization": {**zero, "max_live_parameters": "many"}})
    low = resolved("", {"zero_optimization": {"stage": 2, "max_reuse_distance": 1}})
    assert keys_without_effect(low.config, low.sources) == ["stage3_max_reuse_distance"]
