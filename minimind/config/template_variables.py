"""The variables that a user gives to a chat template."""

from __future__ import annotations

import json
from typing import Any

from minimind.runtime.secret_keys import HIDDEN_VALUE, secrets_in

# What every template has besides its variables.
FIXED_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "namespace", "dict"}
FIXED_VARIABLES |= {"bos_token", "eos_token", "pad_token", "unk_token", "continue_final_message"}
FIXED_VARIABLES |= {"raise_exception", "strftime_now", "cycler", "joiner", "range"}


def template_variables(text: str | None) -> dict[str, Any]:
    """The variables of --chat_template_kwargs; ValueError for no JSON object of names."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(map(str.isidentifier, found)):
        raise ValueError('is not a JSON object of names such as {"enable_thinking": false}')
    if HIDDEN_VALUE in [*secrets_in(found)]:
        raise ValueError(f"has {HIDDEN_VALUE} for a value that is secret and was not recorded")
    if reserved := FIXED_VARIABLES & found.keys():
        raise ValueError(f"has {min(reserved)}, which every template has")
    return found
