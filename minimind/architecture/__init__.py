"""The model a run trains: our decoder by its flags, or one of transformers by its config.json.

May import `minimind.estimate` and below. Refused config.json keys are in
`hf_config.py`.

hf_config        read a config.json without running its code
hf_models        models of transformers with the interface of ours
long_context     rotary scaling of a run, from flags and --init_from
select           the architecture of a run
"""
