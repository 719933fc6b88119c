"""Register MiniMind with the Auto classes of transformers.

Importing `minimind` registers nothing, as the registry belongs to the process and training does not
need it. Tools that load a directory by name without trust_remote_code do.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from minimind.model.configuration import MiniMindConfig
from minimind.model.decoder import MiniMindForCausalLM


def register() -> None:
    """Register model_type "minimind" with AutoConfig and AutoModelForCausalLM; may be repeated.

    From then on they use these classes instead of the code in a directory.
    """
    AutoConfig.register(MiniMindConfig.model_type, MiniMindConfig, exist_ok=True)
    AutoModelForCausalLM.register(MiniMindConfig, MiniMindForCausalLM, exist_ok=True)
