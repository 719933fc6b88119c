"""`minimind report`: a run as a few lines of text, or as one HTML page with plotly charts.

Reads metrics.jsonl, config.yaml and ds_config.resolved.json; imports no torch. `page.html` holds
the page's styles and script.

charts           plotly figures
configuration    config.yaml and ds_config.resolved.json
formats          numbers as text
page             tables; the HTML file
records          metrics.jsonl
runs             the starts of a run as one history: kept and lost steps
summary          figures of a run, the text summary
"""
