"""Where every token of the text goes: the balance that a start prints and logs."""

from __future__ import annotations

from dataclasses import dataclass

from minimind.data.loader.conversation_shards import ConversationShards
from minimind.data.loader.row_order import Order
from minimind.data.prepare.prepare import Prepared


@dataclass(frozen=True)
class TokenBalance:
    """Tokens of the text: held out, and trained on or dropped in an epoch.

    With weights, an epoch has as many rows as the sources together, some of them repeated.
    """

    text: int
    held_out: int
    trained: int  # in the complete steps of an epoch
    first_of_row: int  # of these, the ones that are only inputs
    tail_of_epoch: int  # in the rows after the last complete step
    tail_of_source: int  # after the last complete row of each source
    left_out: int  # in the rows of --skip_rows
    is_weighted: bool

    def __str__(self) -> str:
        """A line for the start summary, without its label."""
        how = ", sources repeated by weight" if self.is_weighted else ""
        items = [f"{self.held_out:,} held out", f"{self.trained:,} trained on in an epoch{how}"]
        if self.tail_of_epoch:
            items.append(f"{self.tail_of_epoch:,} dropped in its last rows")
        if self.left_out:
            items.append(f"{self.left_out:,} left out (--skip_rows)")
        if self.tail_of_source:
            items.append(f"{self.tail_of_source:,} dropped at the end of a source")
        return f"{self.text:,} of the text = {' + '.join(items)}"


@dataclass(frozen=True)
class ConversationBalance:
    """Tokens of conversations: held out, and in rows, cut off or dropped."""

    text: int
    held_out: int
    held_out_cut: int  # conversations of these, as `cut` and `dropped`
    held_out_dropped: int
    in_rows: int
    targets: int  # of these, what is trained on
    cut_off: int  # of conversations longer than a row, and of those that are dropped
    conversations: int  # to train on
    cut: int
    dropped: int  # in which nothing to train on ends within a row
    padding: int  # in rows, beside the tokens

    def __str__(self) -> str:
        """A line for the start summary, without its label."""
        items = [f"{self.held_out:,} held out", f"{self.in_rows:,} in rows"]
        if what := _cut_or_dropped(self.held_out_cut, self.held_out_dropped):
            items[0] += f" (of them {what})"
        if self.cut_off:
            items.append(f"{self.cut_off:,} of {_cut_or_dropped(self.cut, self.dropped)}")
        share = self.padding / max(1, self.padding + self.in_rows)
        text = f"{self.text:,} of {self.conversations:,} conversations = {' + '.join(items)}"
        return f"{text}; {self.targets:,} are targets; {share:.0%} of the rows is padding"


def _cut_or_dropped(cut: int, dropped: int) -> str:
    """Conversations that are longer than a row, in words; "" if there are none."""
    what = [f"{cut:,} cut at the end of a turn"] if cut else []
    if dropped:
        what.append(f"{dropped:,} dropped, as nothing to train on ends within a row")
    return f"conversations {' and '.join(what)}" if what else ""


def token_balance(prepared: Prepared, order: Order, row_tokens: int) -> TokenBalance:
    """Count the tokens of a folder of text as `order` reads them in an epoch."""
    train, val = len(prepared.train), len(prepared.val)
    rows = order.steps_per_epoch * order.rows_per_step
    return TokenBalance(
        text=train + val,
        held_out=val,
        trained=rows * row_tokens,
        first_of_row=rows,
        tail_of_epoch=(order.rows_per_epoch - rows) * row_tokens,
        tail_of_source=train - order.n_rows * row_tokens,
        left_out=(order.n_rows - order.rows_per_epoch) * row_tokens,
        is_weighted=order.mixture is not None,
    )


def conversation_balance(
    prepared: Prepared, shards: ConversationShards, row_tokens: int
) -> ConversationBalance:
    """Count the tokens of a folder of conversations, whose training split is `shards`."""
    packing, train, val = shards.packing(row_tokens), len(shards), len(prepared.val)
    assert isinstance(prepared.val, ConversationShards)
    held_out = prepared.val.packing(row_tokens)
    return ConversationBalance(
        text=train + val,
        held_out=val,
        held_out_cut=held_out.cut,
        held_out_dropped=held_out.dropped,
        in_rows=packing.tokens,
        targets=shards.targets(row_tokens),
        cut_off=train - packing.tokens,
        conversations=packing.conversations,
        cut=packing.cut,
        dropped=packing.dropped,
        padding=len(packing.starts) * row_tokens - packing.tokens,
    )
