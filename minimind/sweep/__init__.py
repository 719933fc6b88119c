"""`minimind sweep`: a search over flags on Optuna, each trial an ordinary run in its own folder.

`minimind scaling`: the scaling law of finished runs. May import everything but `minimind.cli`. A
new field of SWEEP.yaml starts in `sweep_file.py`. Only `study.py` imports optuna, and only `law.py`
scipy, which are extras.

coordinate_check  activations over widths after a few steps, with and without muP
coordinate_page   their plots
law               the scaling law: fit, intervals, optimum
page              sweep.html: history, parallel coordinates, the metric over each dimension
points            sizes, tokens and losses of finished runs
run               start, watch, prune and record the trials
scaling           which law the runs determine, and the optimum of each budget
scaling_output    the law and its optima as text, JSON and a page
study             Optuna's study in sweep.db: what to try next, and the record of every trial
sweep_file        SWEEP.yaml, checked against the flags
table             the trials as a table, and the best command line
trial             the process of a trial, and the validations it records
"""
