"""`minimind SUBCOMMAND`: one module per command: parse, call, print, return the status.

May import everything below. A new command begins in `main.py`.

checkpoint        minimind checkpoint
data              minimind prepare, minimind data
evaluate          minimind eval
export            minimind export, minimind import
generate          minimind generate
main              the table of commands
report            minimind report
tokenizer         minimind tokenizer
tokenizer_tables  what `minimind tokenizer inspect` prints
train             minimind train, minimind launch
"""
