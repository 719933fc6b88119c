"""Flags, YAML, presets and the launcher's environment as one `RunConfig` with a source per value.

Imports no deepspeed; torch is imported only by `backend_choice.py` of `minimind.config.deepspeed`,
which reads the device, so mistakes in flags are reported at once. A new flag starts in `flags.py`,
a combination of flags that is refused in `checks.py`, an optimizer in `optimizers.py`.
"""
