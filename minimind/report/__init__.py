"""`minimind report`: a run as a few lines of text, or as one HTML page with plotly charts.

`run_logger.py` writes metrics.jsonl, `history.py` reads it. A new figure starts in `figures.py`, a
chart in `charts.py`, a finding in `findings.py`, a cause of slowness in `slowness.py`, a pause in
`formats.py`. `templates/` has the page's styles, its script and the layout of the charts.
"""
