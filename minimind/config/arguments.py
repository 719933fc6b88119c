"""Types of the arguments of `minimind SUBCOMMAND`, and arguments that several of them have."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from minimind.config.flags import DEVICES, FLAGS
from minimind.runtime.secret_keys import HIDDEN_VALUE, secrets_in

# What every template has besides its variables.
FIXED_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "namespace", "dict"}
FIXED_VARIABLES |= {"bos_token", "eos_token", "pad_token", "unk_token", "continue_final_message"}
FIXED_VARIABLES |= {"raise_exception", "strftime_now", "cycler", "joiner", "range"}


class Number:
    """Argument type for numbers for which `is_valid` is true, as described by `limits`."""

    def __init__(self, kind: type, limits: str, is_valid: Callable[[float], bool], fault: str = ""):
        self.__name__ = "whole number" if kind is int else "number"  # used in argparse's messages
        self.metavar = "INT" if kind is int else "FLOAT"
        self.limits = limits
        self._kind, self._is_valid, self._fault = kind, is_valid, fault or f"not {limits}"

    def __call__(self, text: str) -> float:
        """Convert `text`; raise ArgumentTypeError outside the limits."""
        value = self._kind(text)
        if not self._is_valid(value):
            raise argparse.ArgumentTypeError(f"{text} is {self._fault}")
        return value


def at_least(bound: float) -> Number:
    """Argument type for numbers of at least `bound`."""
    return Number(type(bound), f"at least {bound}", lambda x: x >= bound, f"below {bound}")


share = Number(float, "above 0 and at most 1", lambda value: 0 < value <= 1)
fraction = Number(float, "from 0 to below 1", lambda value: 0 <= value < 1)
finite = Number(float, "0 or more and finite", lambda value: 0 <= value < float("inf"))
port = Number(int, "from 0 to 65535", lambda value: 0 <= value <= 65535)
penalty = Number(float, "from 0.01 to 100", lambda value: 0.01 <= value <= 100)
positive = Number(float, "above 0 and finite", lambda value: 0 < value < float("inf"))


def add_model(
    parser: argparse.ArgumentParser, checkpoint: str = "a run's out_dir, or a step_ directory"
) -> None:
    """Add the arguments of `minimind.inference.load_model`, and --debug."""
    add = parser.add_argument
    add("--checkpoint", metavar="PLACE", help=checkpoint)
    exported = "exported directory, or one with weights of a Llama or MiniMind2 model"
    add("--model", metavar="DIR", help=exported)
    tokenizer = "tokenizer of --model (default: the one in DIR)"
    add("--tokenizer", type=non_empty, metavar="PATH", help=tokenizer)
    add_weights(add)
    device = "auto uses a GPU if there is one"
    add("--device", choices=DEVICES, default="auto", help=device)
    add("--debug", action="store_true", help="show tracebacks")


def add_cache(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the arguments of `minimind.runtime.object_cache.open_cache`."""
    add = parser.add_argument
    add("--cache_dir", default=FLAGS["cache_dir"].default, help=what)
    text = "GiB of fetched objects that --cache_dir keeps; others are deleted, oldest first"
    add("--max_cache_gib", type=positive, help=text)


def add_sampling(
    parser: argparse.ArgumentParser, max_new_tokens: int, temperature: float, what: str
) -> None:
    """Add the arguments of `minimind.inference.generate`; `what` is a text or an answer."""
    add, text = parser.add_argument, "maximum tokens to generate"
    add("--max_new_tokens", type=at_least(1), default=max_new_tokens, help=text)
    text = "sampling temperature; 0: greedy"
    add("--temperature", type=finite, default=temperature, help=text)
    text = "sample from the k most likely tokens; 0: from all"
    add("--top_k", type=at_least(0), default=0, help=text)
    text = "sample from the most likely tokens up to this total probability; 1: from all"
    add("--top_p", type=share, default=0.9, help=text)
    text = "above 1, repeated tokens become less likely; 1: off"
    add("--repetition_penalty", type=penalty, default=1.0, help=text)
    text = f"seed; each {what} is sampled independently"
    add("--seed", type=at_least(0), default=42, help=text)


def add_weights(add: Callable[..., Any]) -> None:
    """Add --weights, of a checkpoint, by a parser's `add_argument`."""
    text = "weights of a checkpoint: as trained, or their moving average of --ema"
    add("--weights", choices=("trained", "ema"), default="trained", help=text)


def size_in_bytes(text: str) -> int:
    """Parse `24GiB`, `24GB` or `24G`; a bare number of a million or more counts bytes."""
    if re.fullmatch(r"[1-9]\d{6,15}", text.strip()):
        return int(text)
    match = re.fullmatch(r"(\d{1,12}(?:\.\d+)?) *([KMGT])(i?B)?", text.strip(), re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount such as 24GiB, 80G or 512MiB")
    base = 1000 if (match[3] or "").lower() == "b" else 1024
    return int(float(match[1]) * base ** ("KMGT".index(match[2].upper()) + 1))


def count_of_bytes(text: str) -> int:
    """Parse a number of bytes, bare or with a unit."""
    return int(text) if text.isdecimal() and int(text) else size_in_bytes(text)


def is_utf8(text: str) -> bool:
    """Whether an argument was valid UTF-8; Python decodes other bytes to surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def utf8_fault(text: str) -> str:
    """What is wrong with a text that `is_utf8` refuses, and the remedy, to follow its name."""
    if not is_of_other_locale(text):
        return "is not UTF-8; rename it, or give another one"
    return (
        f"is UTF-8, which this Python takes for {sys.getfilesystemencoding()}, by its locale; unset"
        " PYTHONUTF8, or set LC_ALL=C.UTF-8"
    )


def is_of_other_locale(text: str) -> bool:
    """Whether a text that `is_utf8` refuses is UTF-8 that was decoded as something else."""
    try:
        os.fsencode(text).decode()
    except UnicodeError:
        return False
    return not is_utf8(text)


def non_empty(text: str) -> str:
    """Return the text; raise if it is empty, which would mean the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty, as of a variable that is not set")
    return text


def template_variables(text: str | None) -> dict[str, Any]:
    """The variables of --chat_template_kwargs; ValueError for no JSON object of names."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(map(str.isidentifier, found)):
        raise ValueError('is no JSON object of names such as {"enable_thinking": false}')
    if HIDDEN_VALUE in [*secrets_in(found)]:
        raise ValueError(f"has {HIDDEN_VALUE} for a value that is secret and was not recorded")
    if reserved := FIXED_VARIABLES & found.keys():
        raise ValueError(f"has {min(reserved)}, which every template has")
    return found


def json_variables(text: str) -> dict[str, Any]:
    """The variables of a chat template, for argparse."""
    try:
        return template_variables(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from error


WEIGHTS = "a number from 2**-53 to 2**53"  # of sources; no sum or share of them is infinite or 0


def source_weight(text: str) -> float:
    """Parse the weight of a source, one of WEIGHTS; ValueError for another text."""
    value = float(text)
    if not 2**-53 <= value <= 2**53:
        raise ValueError(text)
    return value


def iso_date(text: str) -> str:
    """Return the date as YYYY-MM-DD; raise if the text is none."""
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!a} is no date such as 2024-07-26") from error


def non_empty_path(text: str) -> Path:
    """Convert a non-empty text to a Path."""
    return Path(non_empty(text))


def non_blank(text: str) -> str:
    """Return the text; raise if it is blank or not UTF-8."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is blank, as of a variable that is not set")
    return utf8(text)


def utf8(text: str) -> str:
    """Return the text; raise if it is not UTF-8."""
    if not is_utf8(text):
        raise argparse.ArgumentTypeError(f"{text!a} {utf8_fault(text)}")
    return text
