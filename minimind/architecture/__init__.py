"""Which model a run trains: our decoder by the flags, or one of transformers by its config.json.

May import `minimind.estimate` and below. A key of config.json that is refused begins in
`hf_config.py`.

hf_config        a config.json, read without running its code
hf_models        models of transformers behind the interface of ours
select           the architecture of a run
"""
