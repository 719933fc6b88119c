"""`minimind sweep`: a search over flags on Optuna, each trial an ordinary run in its own folder.

`minimind scaling`: the scaling law of finished runs; `minimind scaling run` trains them as a sweep.
A new field of SWEEP.yaml starts in `sweep_file.py`. Only `study.py` and `page.py` import optuna,
and only `law.py` scipy: extras.
"""
