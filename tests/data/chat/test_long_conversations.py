"""Conversations longer than a row, of both splits: cut after a turn, or dropped, and counted."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from minimind.data.chat.conversations import Message, canonical_text
from minimind.data.chat.template import DEFAULT_TEMPLATE, ChatTemplate
from minimind.data.prepare.encode import split_of
from minimind.data.prepare.prepare import PrepareRequest, prepare_for_run
from minimind.data.shards.conversation_shards import ConversationShards
from minimind.data.text.inputs import Source
from minimind.recovery.token_balance import conversation_balance, sentence
from tests.data.chat.test_malformed import OPTIONS

ROW_TOKENS = 60
VAL_FRACTION = 0.3


def conversations() -> list[list[Message]]:
    """Some within a row, some longer, some with a first answer longer than a row."""
    draw, found = random.Random(29), []
    for _ in range(120):
        turns = []
        for _ in range(draw.choice([1, 1, 2, 5])):
            ask, say = (
                " ".join(draw.choices("abcdefgh", k=n)) for n in draw.choices([2, 6, 40], k=2)
            )
            turns += [Message("user", ask), Message("assistant", say)]
        found.append(turns)
    return found


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_long_conversations_of_both_splits_are_counted(
    train_on: Any, tokenizer: Any, folder: Path, tmp_path: Path
):
    made, template = conversations(), ChatTemplate(DEFAULT_TEMPLATE, tokenizer)
    expected = {"train": {"cut": 0, "dropped": 0}, "val": {"cut": 0, "dropped": 0}}
    for messages in made:
        lengths = [len(template.encode(messages[:n])[0]) for n in range(2, len(messages) + 1, 2)]
        if lengths[-1] + 1 > ROW_TOKENS:  # with the token that ends it
            digest = sha256(canonical_text(messages).encode()).digest()
            is_cut = train_on == "assistant" and lengths[0] <= ROW_TOKENS
            expected[split_of(digest, VAL_FRACTION)]["cut" if is_cut else "dropped"] += 1
    lines = ({"messages": [asdict(one) for one in messages]} for messages in made)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = OPTIONS.model_copy(update={"val_fraction": VAL_FRACTION, "train_on": train_on})
    source = Source("data", (str(tmp_path / "a.jsonl"),))
    prepared = prepare_for_run(PrepareRequest((source,), str(folder), 0, options), tmp_path)
    assert isinstance(prepared.train, ConversationShards)
    found = conversation_balance(prepared, prepared.train, ROW_TOKENS)
    assert {"cut": found["cut"], "dropped": found["dropped"]} == expected["train"]
    held_out = {"cut": found["held_out_cut"], "dropped": found["held_out_dropped"]}
    assert held_out == expected["val"]
    assert found["dropped"] > 10
    assert found["held_out_dropped"] > 2
    assert (found["cut"] > 10) == (found["held_out_cut"] > 2) == (train_on == "assistant")
    assert found["text"] == found["held_out"] + found["in_rows"] + found["cut_off"]
    of_val = sentence(found).partition(" held out (")[2].partition(")")[0]
    for counts, said in ((found["held_out_dropped"], of_val), (found["dropped"], sentence(found))):
        assert f"{counts} dropped, as nothing to train on ends within a row" in said
    assert (f"{found['held_out_cut']} cut at the end" in of_val) == (train_on == "assistant")
