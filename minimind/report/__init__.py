"""`minimind report`: what a run did, as a few lines or as one HTML page that needs no network.

May import `minimind.runtime` and `minimind.errors`; no torch. Begin in `records.py` for what is
read, in `page.py` for what the page shows.

charts           a chart: axes, curves, bars
configuration    config.yaml and ds_config.resolved.json with their sources
drawing          SVG elements
figures          the figures of a run: best loss, tokens/s, shares of the time
labels           marks and labels that do not cover one another
moments          crashes, resumes and changes on a curve
numbers          numbers as text, ticks
page             the page
panels           which charts a page has
ranks            least, median and largest of the ranks
records          metrics.jsonl, tolerant of damage
runs             starts, lost steps and columns of a run
script           the pointer's script
style            colours and layout
tables           tables as HTML
thin             columns of a long run in fewer points
words            the text summary
write            a report as a file
"""
