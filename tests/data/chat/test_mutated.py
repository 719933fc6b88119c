"""Mutated lines of conversations: ids of transformers for what the line says, or refused."""

import json
import random

import pytest
from transformers import AutoTokenizer

from minimind.data.chat.conversations import conversation_of_line
from minimind.data.chat.template import ChatTemplate
from minimind.data.text.documents import DocumentError
from minimind.errors import UsageError
from tests.data.chat.made import EVERY_TOKEN
from tests.data.chat.templates import PLAIN
from tests.data.chat.test_turns import record

SEED = 461
VALUES = [None, "", " ", [], {}, 0, 1, 0.5, True, False, "x", "none", [1], {"a": 1}, ["x"], "[]"]
KEYS = ["role", "content", "reasoning_content", "thinking", "tool_calls", "tool_call_id", "name"]
KEYS += ["tools", "weight", "train", "id", "system", "messages", "conversations", "from", "value"]
KEYS += [
    "chat_template_kwargs",
    "prompt",
    "chosen",
    "type",
    "function",
    "arguments",
    "text",
    "note",
]
TEXTS = ["<think>", "</think>", "<tool_call>", "\n", "  ", "{}", "é", '"', "\\", *EVERY_TOKEN[:3]]


def nodes(value, found=None):
    """Every list and object within a value."""
    found = [] if found is None else found
    if isinstance(value, dict | list):
        found.append(value)
        for inner in value.values() if isinstance(value, dict) else value:
            nodes(inner, found)
    return found


def mutated(draw, given):
    """The same with one or two changes at any depth."""
    given = json.loads(json.dumps(given))
    for _ in range(draw.choice([1, 1, 2])):
        if not given:
            break
        node = draw.choice([one for one in nodes(given) if one])
        at = draw.choice([*node] if isinstance(node, dict) else range(len(node)))
        kind = draw.randrange(8)
        if kind == 0:
            del node[at]
        elif kind == 1:
            node[at] = draw.choice(VALUES)
        elif kind == 2:
            node[at] = json.dumps(node[at], ensure_ascii=False)
        elif kind == 3 and isinstance(node[at], str):
            cut = draw.randint(0, len(node[at]))
            node[at] = node[at][:cut] + draw.choice(TEXTS) + node[at][cut:]
        elif kind == 4:
            node[at] = [node[at]]
        elif isinstance(node, dict) and kind in (5, 6):
            node[draw.choice(KEYS)] = draw.choice([*VALUES, node[at]])
            if kind == 5:
                node.pop(at)
        elif isinstance(node, list):
            node.insert(draw.randint(0, len(node)), json.loads(json.dumps(node[at])))
            if kind == 7 and len(node) > 2:
                draw.shuffle(node)
    return given


def is_nothing(value):
    """Whether a value stands for none, as the columns of a table that a row does not use."""
    if isinstance(value, str):
        return value.strip() in ("", "null", "None", "[]", "{}", "[ ]", "{ }")
    if isinstance(value, list | dict):
        return all(map(is_nothing, value.values() if isinstance(value, dict) else value))
    return value is None


def decoded(value):
    return json.loads(value) if isinstance(value, str) else value


def meant(given):
    """(turns, tools, variables) of a record in OpenAI's form, for apply_chat_template."""
    lists = ("messages", "conversations", "chosen")
    key = next(name for name in lists if not is_nothing(given.get(name)))
    tools, variables, turns = None, {}, []
    if not is_nothing(given.get("tools")) and given["tools"] != "none":
        tools = decoded(given["tools"])
    if not is_nothing(given.get("chat_template_kwargs")):
        variables = decoded(given["chat_template_kwargs"])
    for turn in given[key]:
        turn = dict(turn)
        own = turn.pop("tools", None)
        if not is_nothing(own) and own != "none":
            tools = decoded(own)
        if isinstance(turn.get("content"), list):
            turn["content"] = "".join(part["text"] for part in turn["content"])
        if is_nothing(turn.get("content")) and not isinstance(turn.get("content"), str):
            turn["content"] = ""
        for name in ("tool_calls", "name", "thinking", "tool_call_id"):
            if is_nothing(turn.get(name)):
                turn.pop(name, None)
        if "tool_calls" in turn:
            calls = decoded(turn["tool_calls"])
            turn["tool_calls"] = calls if isinstance(calls, list) else [calls]
        if is_nothing(turn.get("reasoning_content")):
            if turn.get("reasoning_content") is None:
                turn.pop("reasoning_content", None)
            else:
                turn["reasoning_content"] = ""
        turns.append(turn)
    for name in ("system", "system_prompt", "system_message"):
        text = given.get(name)
        if isinstance(text, str) and not is_nothing(text) and text.lower() not in ("none",):
            if turns[0]["role"] == "system" and not turns[0]["content"].strip():
                turns.pop(0)
            if turns[0]["role"] != "system":
                turns.insert(0, {"role": "system", "content": text})
    keeps_first = tools is not None
    return (
        [
            turn
            for at, turn in enumerate(turns)
            if turn["role"] != "system" or turn["content"].strip() or (at == 0 and keeps_first)
        ],
        tools or None,
        variables,
    )


@pytest.mark.parametrize("name", ["qwen3", "minimind3", "hermes"])
def test_a_mutated_line_is_read_as_it_is_meant_or_refused(tokenizer, name, request):
    theirs = AutoTokenizer.from_pretrained(tokenizer.path.parent)
    theirs.split_special_tokens = False
    template, draw = ChatTemplate(PLAIN[name], tokenizer), random.Random(f"{SEED} {name}")
    number = 1000 if request.config.getoption("--long") else 150
    refused = 0
    for _ in range(number):
        given = mutated(draw, record(draw, name))
        line = json.dumps(given, ensure_ascii=False).encode()
        try:
            ids, _ = template.encode(conversation_of_line(line))
        except (DocumentError, UsageError):
            refused += 1
            continue
        turns, tools, variables = meant(given)
        expected = theirs.apply_chat_template(
            turns, tools=tools, chat_template=PLAIN[name], return_dict=True, **variables
        )
        assert ids.tolist() == expected["input_ids"], line.decode()
    assert number / 10 < refused < number * 0.8
