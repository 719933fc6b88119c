"""Flags, YAML, presets and the launcher's environment as one `RunConfig` with a source per value.

Imports no deepspeed; torch is imported only by `backend_choice.py` and `compiled_ops.py` of
`minimind.config.deepspeed`, which read the device, so mistakes in flags are reported at once. A new
flag starts in `training_flags.py`, `optimizer_flags.py`, `model_flags.py` or `report_flags.py`.
"""
