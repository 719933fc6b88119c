"""`minimind COMMAND`: one module per command parses, calls, prints and returns the exit status.

May import everything below. A new command starts in `main.py`.

chat         minimind chat
checkpoint   minimind checkpoint
data         minimind prepare, minimind data inspect
environment  minimind env
evaluate     minimind eval
export       minimind export, minimind import
generate     minimind generate
main         the table of commands
provenance   minimind data at, minimind data where
report       minimind report, minimind scaling
tokenizer    minimind tokenizer
train        minimind train, minimind launch, minimind sweep, minimind coord_check
"""
