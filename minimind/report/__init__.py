"""`minimind report`: a run as a few lines of text, or as one HTML page with plotly charts.

`run_logger.py` writes metrics.jsonl, `history.py` reads it. A new figure starts in `summary.py`, a
chart in `charts.py`. `page.html` has the page's styles, its
script and the layout of the charts.
"""
