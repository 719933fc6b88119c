"""`minimind report`: a run as a few lines of text, or as one HTML page with plotly charts.

May import `minimind.telemetry` and below, but no torch. A new figure starts in `summary.py`, a
chart in `charts.py`. `page.html` has the page's styles, its script and the layout of the charts.

charts           plotly figures
downsample       long columns in fewer points
formats          numbers as text
page             tables; the HTML file
palette          colors
records          metrics.jsonl: the starts of a run
runs             a run as one history; its configuration
summary          figures of a run; the text summary
verdict          what held a run back
"""
