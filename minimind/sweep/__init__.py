"""`minimind sweep`: a search over flags on Optuna, each trial an ordinary run in its own folder.

May import everything but `minimind.cli`. A new field of SWEEP.yaml starts in `sweep_file.py`. Only
`study.py` imports optuna, which is an extra.

coordinate_check  activations over widths after a few steps, with and without muP
coordinate_page   their plots
page              sweep.html: history, parallel coordinates, the metric over each dimension
run               start, watch, prune and record the trials
study             Optuna's study in sweep.db: what to try next, and the record of every trial
sweep_file        SWEEP.yaml, checked against the flags
table             the trials as a table, and the best command line
trial             the process of a trial, and the validations it records
"""
