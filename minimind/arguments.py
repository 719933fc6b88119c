"""What argparse is given to read a subcommand's words by."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from minimind.errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse, with a mistake told as every other one."""

    def error(self, message: str) -> NoReturn:
        """Raise it as a UsageError."""
        raise UsageError(f"{message}; see {self.prog} --help")


class Number:
    """What argparse reads a number by: those that `limits` describes and `holds` is true of."""

    def __init__(self, kind: type, limits: str, holds: Callable[[float], bool], told: str = ""):
        self.__name__ = "whole number" if kind is int else "number"  # as argparse's messages say
        self.limits = limits
        self._kind, self._holds, self._told = kind, holds, told or f"not {limits}"

    def __call__(self, text: str) -> float:
        """The number that `text` writes."""
        value = self._kind(text)
        if not self._holds(value):
            raise argparse.ArgumentTypeError(f"{text} is {self._told}")
        return value


def at_least(bound: float) -> Number:
    """Numbers from `bound` on."""
    limits, told = f"at least {bound}", f"below {bound}"
    return Number(type(bound), limits, lambda value: value >= bound, told)


share = Number(float, "above 0 and at most 1", lambda value: 0 < value <= 1)
fraction = Number(float, "from 0 to below 1", lambda value: 0 <= value < 1)
finite = Number(float, "0 or more and finite", lambda value: 0 <= value < float("inf"))
penalty = Number(float, "from 0.01 to 100", lambda value: 0.01 <= value <= 100)
positive = Number(float, "above 0 and finite", lambda value: 0 < value < float("inf"))


def add_model(added: argparse.ArgumentParser) -> None:
    """What `minimind.load_model` is given, and where the model is asked."""
    add = added.add_argument
    add("--checkpoint", metavar="PLACE", help="a run's out_dir, or a step_ directory")
    exported = "what export wrote, or another directory of a Llama's or MiniMind2's weights"
    add("--model", metavar="DIR", help=exported)
    add("--tokenizer", type=filled, metavar="PATH", help="of --model (default: the one in DIR)")
    told = "auto takes a GPU where there is one"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=told)
    add("--debug", action="store_true", help="show tracebacks")


def size_in_bytes(text: str) -> int:
    """Bytes of `24GiB`, `24GB`, `24G`; a bare number is taken for bytes from a million on."""
    if re.fullmatch(r"[1-9]\d{6,15}", text.strip()):
        return int(text)
    found = re.fullmatch(r"(\d{1,12}(?:\.\d+)?) *([KMGT])(i?B)?", text.strip(), re.IGNORECASE)
    if not found or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount such as 24GiB, 80G or 512MiB")
    base = 1000 if (found[3] or "").lower() == "b" else 1024
    return int(float(found[1]) * base ** ("KMGT".index(found[2].upper()) + 1))


def count_of_bytes(text: str) -> int:
    """Of a bare number, or of one with a unit."""
    return int(text) if text.isdecimal() and int(text) else size_in_bytes(text)


def is_utf8(text: str) -> bool:
    """Whether a word of the command line was; Python has halves of characters where it was not."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def filled(text: str) -> str:
    """The text itself; an empty one would be the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty, as of a variable that is not set")
    return text


def path_of(text: str) -> Path:
    """The path of a text that is not empty."""
    return Path(filled(text))


def utf8(text: str) -> str:
    """The text itself."""
    if not is_utf8(text):
        raise argparse.ArgumentTypeError(f"{text!a} is not UTF-8")
    return text
