"""`minimind sweep`: a search over flags, each trial an ordinary run in its own folder.

`minimind scaling`: the scaling law of finished runs; `minimind scaling run` trains them as trials.
A new field of SWEEP.yaml starts in `sweep_file.py`. Only `propose.py` and `page.py` import optuna,
and only `law.py` scipy: extras.
"""
