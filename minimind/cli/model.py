"""What commands on a trained model share: its weights, and how to sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from minimind.cli.command import Command, OfPlace, argument, json_variables, non_empty
from minimind.config.flags import DEVICES
from minimind.config.names import no_run, not_there
from minimind.errors import CheckpointError
from minimind.runtime import disk

if TYPE_CHECKING:
    from pathlib import Path

    from minimind.config.launcher_env import Launch
    from minimind.inference.text import Sampling


# Defaults of an answer, where they are not those of a text.
ANSWER: dict[str, Any] = {"max_new_tokens": 512, "temperature": 0.7}


@dataclass(kw_only=True)
class OfWeights(Command):
    """A command that reads the weights of a checkpoint."""

    is_subject: ClassVar = True
    weights: str = argument("trained", choices=("trained", "ema"))
    """weights of a checkpoint: as trained, or the moving average of --ema"""


@dataclass(kw_only=True)
class OfModel(OfWeights, OfPlace):
    """A command that computes with a trained model."""

    is_subject: ClassVar = True
    other_than_place: ClassVar = "model"
    origins: ClassVar = {"model": CheckpointError}
    model: str | None = argument(None, metavar="DIR")
    """exported directory, or one with weights of a Llama or MiniMind2 model"""
    tokenizer: str | None = argument(None, parse=non_empty, metavar="PATH")
    """tokenizer of --model (default: the one in DIR)"""
    device: str = argument("auto", choices=DEVICES)
    """where the model computes; auto uses a GPU if there is one"""

    def chosen_device(self, launch: Launch | None = None) -> str:
        """The device of --device for this process; UsageError if it is not here."""
        from minimind.config.deepspeed.backend_choice import device_for
        from minimind.config.launcher_env import Launch

        return device_for(self.device, "--device", launch or Launch())

    def require_there(self) -> None:
        """Raise CheckpointError if there is no such place, before slow imports."""
        run, model = self.checkpoint or "", self.model or ""
        if fault := no_run(run, self.typed) or not_there(model, "--model "):
            raise CheckpointError(fault)

    def load(self) -> tuple[Any, Any, Path]:
        """The model, its tokenizer, and where they are."""
        from minimind.inference.load_model import load_model

        return load_model(self.checkpoint, self.model, self.tokenizer, self.weights)


@dataclass(kw_only=True)
class OfChat(OfModel):
    """A command that writes conversations by a chat template."""

    chat_template: str | None = argument(None, parse=non_empty, metavar="FILE")
    """Jinja template, or name of a shipped one, instead of the stored one"""
    chat_template_kwargs: dict[str, Any] | None = argument(
        None, parse=json_variables, metavar="JSON"
    )
    """variables of the template as a JSON object, such as {"enable_thinking": false}"""

    def require_there(self) -> None:
        """Raise also UsageError if there is no such chat template."""
        super().require_there()
        if self.chat_template is not None and disk.is_absent(self.chat_template):
            from minimind.data.prepare.chat_tokenizer import read_template

            read_template(self.chat_template)  # a shipped one, or none


@dataclass(kw_only=True)
class Sampled(OfModel):
    """A command that generates text."""

    max_new_tokens: int = argument(100, ge=1)
    """maximum tokens to generate"""
    temperature: float = argument(0.8, ge=0)
    """sampling temperature; 0: greedy"""
    top_k: int = argument(0, ge=0)
    """sample from the k most likely tokens; 0: from all"""
    top_p: float = argument(0.9, gt=0, le=1)
    """sample from the most likely tokens up to this total probability; 1: from all"""
    repetition_penalty: float = argument(1.0, ge=0.01, le=100)
    """above 1, repeated tokens become less likely; 1: off"""
    seed: int = argument(42, ge=0)
    """seed of the sampling"""

    def load_to_sample(self, stop: list[str]) -> tuple[Any, Any, Path, Sampling]:
        """The model on its device, its tokenizer, where they are, and how texts are sampled."""
        self.require_there()
        from minimind.inference.text import Sampling

        names = ("max_new_tokens", "temperature", "top_p", "seed", "top_k", "repetition_penalty")
        sampling = Sampling(*(getattr(self, name) for name in names), stop=tuple(stop))
        device = self.chosen_device()
        model, tokenizer, path = self.load()
        return model.to(device), tokenizer, path, sampling
