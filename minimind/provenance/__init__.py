"""The text behind a step: which rows were read, and the documents and files they came from.

May import `minimind.report` and below. The commands are `minimind data at` and `data where`. The
row order is arithmetic (`minimind.data.loader.row_order`), so nothing is recorded while training.

documents         documents of the training tokens, and their place in the text
high_losses       documents of steps with a high loss
step_rows         rows of a step, and steps of a document, from the log of a run
token_balance     where every token of the text goes
"""
