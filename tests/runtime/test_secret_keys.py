"""Names that say their value is secret, names that do not, and what is left of values and texts."""

from __future__ import annotations

import json
import time

import pytest

from minimind.config.flags import FLAGS, SHAPE
from minimind.runtime.secret_keys import (
    HIDDEN_VALUE,
    is_secret,
    secrets_in,
    without_secrets_in_text,
    without_those_of,
)
from minimind.runtime.urls import masked, masked_text, masked_values
from tests.runtime.canaries import SECRET

INNOCENT = """
    tokenizer tokenizer_class eos_token bos_token pad_token unk_token eos_token_id bos_token_id
    pad_token_id max_tokens max_new_tokens tokens tokens_per_step tokens_per_param token_balance
    token_type total_tokens prompt_tokens completion_tokens keep_last keep_best key_value_heads
    n_kv_heads num_key_value_heads past_key_values key sort_key sort_keys key_field group_key
    primary_key public_key keyword keyboard monkey turkey author authority authors pass passes
    passed compass bypass secretary num_experts_per_token per_token image_token image_token_id
    additional_special_tokens added_tokens split_special_tokens key_dim keypoint_threshold
    clean_up_tokenization_spaces step_tokens token token_dropout ids credential_file token_path
    maxTokens eosToken padTokenId signature_columns_count author-name attention.key_length
    fim_prefix_token fim_middle_token fim_suffix_token target_token draft_token reasoning_token
    tool_call_token blank_token boi_token eoi_token assistant_token bot_id subtoken detokenize
    label_key text_key content_key role_key messages_key image_key answer_key split_key loss_key
    secretary passwordless bottoms keys signature_columns
""".split()
INNOCENT.remove("token")


@pytest.mark.parametrize("name", SECRET)
def test_a_name_that_says_so_is_of_a_secret(name: str):
    assert is_secret(name)


@pytest.mark.parametrize("name", INNOCENT)
def test_a_name_with_such_letters_is_not(name: str):
    assert not is_secret(name)


def test_no_flag_and_no_key_of_a_shape_is_secret():
    assert [name for name in (*FLAGS, *SHAPE) if is_secret(name)] == []


@pytest.mark.parametrize("name", SECRET)
def test_its_value_is_hidden_in_values_and_in_texts(name: str):
    nested = {"of": [{name: "CANARY", "n": {name: ["CANARY", {"a": 123456, "b": True}]}}], "x": 1}
    hidden = {name: HIDDEN_VALUE, "n": {name: [HIDDEN_VALUE, {"a": HIDDEN_VALUE, "b": True}]}}
    assert masked_values(nested) == {"of": [hidden], "x": 1}
    assert set(secrets_in(nested)) == {"CANARY", "123456"}
    assert without_those_of("input_value='CANARY'", nested) == f"input_value='{HIDDEN_VALUE}'"
    for text in (
        json.dumps(nested),
        repr(nested),
        f'ds.json: {name} is "CANARY", not a number' if name != "token" else "",
        f"a.{name} = 'CANARY': refused",
        f"config: {name}=CANARY, of {name} = CANARY;",
        f"unrecognized arguments: --{name} CANARY --{name}=CANARY",
        f"unexpected argument '{name}=CANARY'; values follow a --flag",
    ):
        shown = masked_text(text)
        assert "CANARY" not in shown, shown
        assert masked_text(shown) == shown
    assert "CANARY" not in masked(json.dumps({name: "CANARY"}))


@pytest.mark.parametrize("name", INNOCENT)
def test_what_is_not_secret_is_shown(name: str):
    values = {name: "shown", "x": [{name: 7}]}
    assert masked_values(values) == values
    for text in (json.dumps(values), f"{name} = 'shown'; give --{name} shown", f"'{name}: shown'"):
        assert masked_text(text) == text


def test_missing_and_empty_values_and_switches_are_shown():
    values = {"api_key": None, "use_secret": True, "password": "", "credentials": {}}
    assert masked_values(values) == values


@pytest.mark.parametrize(
    "text",
    [
        "unknown token: foo; give --tokenizer",
        "the password is too short",
        "a token is a piece of text, and its key is a number",
        "has no API key (run `wandb login`, or set WANDB_MODE=offline)",
        "Authorization failed: 403 Forbidden",
        "--api_key is empty, so that nobody could send it; give another, or none",
        "argument --api_key: expected one argument",
        "/data/token=abc/part.jsonl: no such file",
    ],
)
def test_sentences_stay_as_they_are(text: str):
    shown = masked(text) if text.startswith("/") else masked_text(text)
    assert shown == text


def test_headers_and_variables_are_hidden():
    for text in (
        "Authorization: Bearer CANARY",
        "WANDB_API_KEY=CANARY minimind train",
        "api_key: CANARY",
    ):
        assert "CANARY" not in without_secrets_in_text(text)


def test_a_long_text_takes_no_longer_than_its_length():
    began = time.process_time()
    for text in (
        "key" * 100_000,
        '"key": ' * 50_000,
        "a.key=" * 50_000,
        "'" * 300_000,
        '{"api_key": [' * 20_000,
    ):
        without_secrets_in_text(text)
    assert time.process_time() - began < 10
