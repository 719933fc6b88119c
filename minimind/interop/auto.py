"""MiniMind among the model types of transformers' Auto classes, on request.

Importing this package registers nothing: the table of model types belongs to the process, and who
only trains here has no use for an entry there. Hugging Face tools that are handed a directory by
name, without trust_remote_code, need it.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from minimind.model.configuration import MiniMindConfig
from minimind.model.decoder import MiniMindForCausalLM


def register() -> None:
    """Let AutoConfig and AutoModelForCausalLM know model_type "minimind"; twice does no harm.

    From then on they take these classes, and not the code that a directory brings along.
    """
    AutoConfig.register(MiniMindConfig.model_type, MiniMindConfig, exist_ok=True)
    AutoModelForCausalLM.register(MiniMindConfig, MiniMindForCausalLM, exist_ok=True)
