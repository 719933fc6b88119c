"""Where every token of the text goes: the balance that a start prints and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minimind.data.prepare.prepared import Prepared
from minimind.data.rows.order import Mixture, Order
from minimind.data.shards.conversation_shards import ConversationShards


@dataclass(frozen=True)
class SourceBalance:
    """Training tokens of a weighted source: `text` is the sum of the fields below.

    An epoch reads `epoch` tokens of it: those of `read`, some of them several times.
    """

    name: str
    text: int
    read: int  # tokens in rows that an epoch has, once or more
    not_read: int  # tokens in rows that the first epoch lacks; the next begins with them
    tail: int  # after the last complete row
    left_out: int  # tokens in the rows of --skip_rows
    epoch: int

    def __str__(self) -> str:
        if self.not_read:
            return f"{self.epoch:,} of {self.name} ({self.not_read:,} not read)"
        times = self.epoch / max(1, self.read)
        how = f" ({self.read:,} {times:.3g} times)" if times > 1 else ""
        return f"{self.epoch:,} of {self.name}{how}"


@dataclass(frozen=True)
class TokenBalance:
    """Tokens of the text: held out, and trained on or dropped in an epoch.

    With weights, an epoch has as many rows as the sources together. A row may be in it several
    times, and another not at all: `sources` has the balance of each.
    """

    text: int
    held_out: int
    trained: int  # tokens in the complete steps of an epoch
    first_of_row: int  # those of them that are only inputs
    tail_of_epoch: int  # tokens in the rows after the last complete step
    tail_of_source: int  # after the last complete row of each source
    left_out: int  # tokens in the rows of --skip_rows
    is_weighted: bool
    sources: tuple[SourceBalance, ...] = ()  # sources with weights

    def __str__(self) -> str:
        """A line for the start summary, without its label."""
        if self.sources:
            return self._by_source()
        items = [f"{self.held_out:,} held out", f"{self.trained:,} trained on in an epoch"]
        if self.tail_of_epoch:
            items.append(f"{self.tail_of_epoch:,} dropped in its last rows")
        if self.left_out:
            items.append(f"{self.left_out:,} left out (--skip_rows)")
        if self.tail_of_source:
            items.append(f"{self.tail_of_source:,} dropped at the end of a source")
        return f"{self.text:,} of the text = {' + '.join(items)}"

    def _by_source(self) -> str:
        read, not_read, repeated = (
            sum(count(one) for one in self.sources)
            for count in (lambda s: s.read, lambda s: s.not_read, lambda s: s.epoch - s.read)
        )
        items = [f"{self.held_out:,} held out", f"{read:,} in an epoch"]
        items += [f"{not_read:,} not read in the first epoch"] if not_read else []
        items += [f"{self.left_out:,} left out (--skip_rows)"] if self.left_out else []
        if self.tail_of_source:
            items.append(f"{self.tail_of_source:,} dropped at the end of a source")
        parts = [f"{self.trained:,} trained on"]
        if self.tail_of_epoch:
            parts.append(f"{self.tail_of_epoch:,} dropped in its last rows")
        return (
            f"{self.text:,} of the text = {' + '.join(items)}; an epoch by weight: {read:,} +"
            f" {repeated:,} repeated = {' + '.join(map(str, self.sources))} = {' + '.join(parts)}"
        )


@dataclass(frozen=True)
class StagedBalance:
    """Tokens of the text, and the targets that the stages of a run train on."""

    text: int
    held_out: int
    trained: int
    stages: tuple[dict[str, Any], ...]  # as `stages_table` has them

    def __str__(self) -> str:
        """A line for the start summary, without its label."""
        train = self.text - self.held_out
        return (
            f"{self.text:,} of the text = {self.held_out:,} held out + {train:,} to train on;"
            f" {self.trained:,} trained on in {len(self.stages)} stages"
        )


@dataclass(frozen=True)
class ConversationBalance:
    """Tokens of conversations: held out, and in rows, cut off or dropped."""

    text: int
    held_out: int
    held_out_cut: int  # conversations of these, as `cut` and `dropped`
    held_out_dropped: int
    in_rows: int
    targets: int  # those of them that are trained on
    cut_off: int  # tokens of conversations longer than a row, and of those that are dropped
    conversations: int  # conversations to train on
    held_out_conversations: int
    cut: int
    dropped: int  # conversations without a target within a row
    padding: int  # padding tokens in the rows

    def __str__(self) -> str:
        """A line for the start summary, without its label."""
        in_rows = self.conversations - self.dropped
        items = [
            f"{self.held_out:,} of {self.held_out_conversations:,} held out",
            f"{self.in_rows:,} of {in_rows:,} in rows",
        ]
        if what := _cut_or_dropped(self.held_out_cut, self.held_out_dropped):
            items[0] += f" (of them {what})"
        if self.cut_off:
            items.append(f"{self.cut_off:,} of {_cut_or_dropped(self.cut, self.dropped)}")
        share = self.padding / max(1, self.padding + self.in_rows)
        number = self.conversations + self.held_out_conversations
        text = f"{self.text:,} of {number:,} conversations = {' + '.join(items)}"
        return f"{text}; {self.targets:,} are targets; {share:.0%} of the rows is padding"


def _cut_or_dropped(cut: int, dropped: int) -> str:
    """Numbers of conversations that are longer than a row; "" if there are none."""
    what = [f"{cut:,} cut at the end of a turn"] if cut else []
    if dropped:
        what.append(f"{dropped:,} dropped, as nothing to train on ends within a row")
    return " and ".join(what)


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
        sources=_sources(prepared, order.mixture, row_tokens) if order.mixture else (),
    )


def _sources(prepared: Prepared, mixture: Mixture, row_tokens: int) -> tuple[SourceBalance, ...]:
    """The balance of each source of a mixture in its first epoch."""
    balances = []
    for source, size, kept, quota in zip(
        prepared.manifest["sources"], mixture.sizes, mixture.kept, mixture.quotas, strict=True
    ):
        text = source["tokens"]["train"]
        balances.append(
            SourceBalance(
                name=source["name"],
                text=text,
                read=min(quota, kept) * row_tokens,
                not_read=max(kept - quota, 0) * row_tokens,
                tail=text - size * row_tokens,
                left_out=(size - kept) * row_tokens,
                epoch=quota * row_tokens,
            )
        )
    return tuple(balances)


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
        held_out_conversations=held_out.conversations,
        cut=packing.cut,
        dropped=packing.dropped,
        padding=len(packing.starts) * row_tokens - packing.tokens,
    )
