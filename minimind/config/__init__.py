"""Flags, YAML, presets and the launcher's environment as one `RunConfig` with a source per value.

May import `minimind.runtime` and `minimind.errors`. Imports no deepspeed; torch is imported only by
`backend_choice.py` and `compiled_ops.py` of `minimind.config.deepspeed`, which read the device, so
mistakes in flags are reported at once. A new flag starts in `training_flags.py`,
`optimizer_flags.py`, `model_flags.py` or `report_flags.py`.

arguments        types of the arguments of `minimind SUBCOMMAND`
checks           flags that do not fit one another
foreign_flags    what other trainers call our flags
launcher_env     rank, world size and the Accelerate YAML, read from the environment
model_flags      flags that decide the model
optimizer_flags  flags of optimizer, learning rate and precision
parse            command line, --config and presets -> `RunConfig`
report_flags     flags of trackers and samples
run_config       `RunConfig`: one field per flag; the groups of ranks that share rows
schedule         learning rate and length of a run
training_flags   all other flags: default, limits, help
yaml_files       YAML with every scalar kept as text
"""
