"""Malformed requests, drawn from valid ones: also for benchmarks/serve_load.py."""

from __future__ import annotations

import json
import random
from typing import Any

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 0.5, 1e308, 2**63, 10**40, float("nan"), float("inf")),
    *("", "ab", "\ud800", "\0", "<|end|>", "<think>", "春" * 50, "\u202e", "a" * 3000),
    *([], {}, [[]], [{}], [None], {"a": {"b": [1]}}, [1, 2, 3], ["a", 1]),
    *([{"role": "user", "content": "ab"}], {"type": "text"}, [{"type": "text", "text": 1}]),
]
FIELDS = (
    "model messages prompt max_tokens max_completion_tokens temperature top_p top_k seed n stop"
    " stream stream_options logprobs top_logprobs echo tools tool_choice functions response_format"
    " truncation chat_template_kwargs frequency_penalty logit_bias suffix best_of"
    " repetition_penalty unknown"
).split()
TURN = "role content name tool_calls tool_call_id reasoning_content weight function_call".split()


def malformed(draw: random.Random) -> tuple[str, bytes]:
    """A path and a body; most of them are refused, and a few are valid."""
    turn = {"role": draw.choice(["user", "assistant", "tool", "system"]), "content": "ab"}
    chat = {"messages": [turn, {"role": "user", "content": "ab"}], "max_tokens": 2}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    body: Any = draw.choice([chat, {"prompt": "ab", "max_tokens": 2}, {**chat, "tools": [tool]}])
    for _ in range(draw.randint(0, 3)):
        body[draw.choice(FIELDS)] = draw.choice(VALUES)
    if draw.random() < 0.5:
        turn[draw.choice(TURN)] = draw.choice(VALUES)
    if draw.random() < 0.2:
        tool["function"] = draw.choice(VALUES)
    text = json.dumps(body).encode()
    if draw.random() < 0.2:
        at, size = draw.randrange(len(text)), draw.randint(0, 5)
        text = text[:at] + draw.randbytes(size) + text[at + draw.randint(0, 5) :]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return path, text
