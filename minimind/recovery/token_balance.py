"""Where every token of the text goes: the event `token_balance` and its line of the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minimind.data.prepare.prepared import Prepared
from minimind.data.rows.order import Mixture, Order
from minimind.data.shards.conversation_shards import ConversationShards


def token_balance(prepared: Prepared, order: Order, row_tokens: int) -> dict[str, Any]:
    """Count the tokens of a folder of text as `order` reads them in an epoch.

    With weights, an epoch has as many rows as the sources together. A row may be in it several
    times, and another not at all: `sources` has the balance of each.
    """
    train, held_out = len(prepared.train), len(prepared.val)
    rows = order.steps_per_epoch * order.rows_per_step
    mixture = order.mixture
    return {
        "text": train + held_out,
        "held_out": held_out,
        "trained": rows * row_tokens,  # in the complete steps of an epoch
        "first_of_row": rows,  # of these, only inputs
        "tail_of_epoch": (order.rows_per_epoch - rows) * row_tokens,  # after the last complete step
        "tail_of_source": train - order.n_rows * row_tokens,  # after the last row of each source
        "left_out": (order.n_rows - order.rows_per_epoch) * row_tokens,  # rows of --skip_rows
        "is_weighted": mixture is not None,
        "sources": _sources(prepared, mixture, row_tokens) if mixture else [],
    }


def _sources(prepared: Prepared, mixture: Mixture, row_tokens: int) -> list[dict[str, Any]]:
    """The training tokens of each source: `text` = read + not_read + left_out + tail."""
    return [
        {
            "name": source["name"],
            "text": source["tokens"]["train"],
            "read": min(quota, kept) * row_tokens,  # in rows that an epoch has, once or more
            "not_read": max(kept - quota, 0) * row_tokens,  # the next epoch begins with them
            "tail": source["tokens"]["train"] - size * row_tokens,  # after the last complete row
            "left_out": (size - kept) * row_tokens,  # in the rows of --skip_rows
            "epoch": quota * row_tokens,  # read in an epoch, repetitions counted
        }
        for source, size, kept, quota in zip(
            prepared.manifest["sources"], mixture.sizes, mixture.kept, mixture.quotas, strict=True
        )
    ]


def staged_balance(prepared: Prepared, stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count the tokens of a folder of text, and those that the stages of a run train on."""
    held_out = len(prepared.val)
    return {
        "text": len(prepared.train) + held_out,
        "held_out": held_out,
        "trained": sum(stage["tokens"] for stage in stages),
        "stages": stages,
    }


def conversation_balance(
    prepared: Prepared, shards: ConversationShards, row_tokens: int, mixture: Mixture | None = None
) -> dict[str, Any]:
    """Count the tokens of a folder of conversations, whose training split is `shards`.

    `cut` and `dropped` count conversations: longer than a row, and without a target within one.
    With weights `sources` has the rows of each source, and those that an epoch reads.
    """
    sources = []
    if mixture:
        columns = (prepared.manifest["sources"], mixture.kept, mixture.quotas)
        for source, rows, quota in zip(*columns, strict=True):
            sources.append({"name": source["name"], "rows": rows, "epoch": quota})
    packing, train, val = shards.packing(row_tokens), len(shards), len(prepared.val)
    assert isinstance(prepared.val, ConversationShards)
    held_out = prepared.val.packing(row_tokens)
    return {
        "text": train + val,
        "held_out": val,
        "held_out_cut": held_out.cut,
        "held_out_dropped": held_out.dropped,
        "in_rows": packing.tokens,
        "targets": shards.targets(row_tokens),
        "cut_off": train - packing.tokens,
        "conversations": packing.conversations,
        "held_out_conversations": held_out.conversations,
        "cut": packing.cut,
        "dropped": packing.dropped,
        "padding": len(packing.starts) * row_tokens - packing.tokens,
        "sources": sources,
    }


def sentence(balance: dict[str, Any]) -> str:
    """The line of the start summary of one of the balances, without its label."""
    if "conversations" in balance:
        return _of_conversations(balance)
    text, held_out, trained = (balance[name] for name in ("text", "held_out", "trained"))
    held_out_text = f"{held_out:,} held out"
    if stages := balance.get("stages"):
        items = [held_out_text, f"{text - held_out:,} to train on"]
        return (
            f"{text:,} in the text: {', '.join(items)}; {trained:,} trained on in {len(stages)}"
            " stages"
        )
    sources = balance["sources"]
    steps = [f"{trained:,} trained on" + " per epoch" * (not sources)]
    if tail := balance["tail_of_epoch"]:
        steps.append(f"{tail:,} dropped after the last whole step")
    read, not_read, epoch = (
        sum(source[name] for source in sources) for name in ("read", "not_read", "epoch")
    )
    first, *rest = [f"{read:,} read per epoch"] if sources else steps
    items = [first, held_out_text, *rest]
    if not_read:
        items.append(f"{not_read:,} not read in the first epoch")
    if left_out := balance["left_out"]:
        items.append(f"{left_out:,} left out (--skip_rows)")
    if tail := balance["tail_of_source"]:
        items.append(f"{tail:,} dropped after the last whole row")
    line = f"{text:,} in the text: {', '.join(items)}"
    if sources:
        shares = " + ".join(map(_share, sources))
        line += f"; an epoch by weight: {read:,} + {epoch - read:,} repeated = {shares}"
        line += f" = {' + '.join(steps)}"
    return line


def _share(source: dict[str, Any]) -> str:
    text = f"{source['epoch']:,} of {source['name']}"
    if source["not_read"]:
        return f"{text} ({source['not_read']:,} not read)"
    times = source["epoch"] / max(1, source["read"])
    return text + f" ({source['read']:,} {times:.3g} times)" * (times > 1)


def _of_conversations(balance: dict[str, Any]) -> str:
    in_rows, padding, cut_off = (balance[name] for name in ("in_rows", "padding", "cut_off"))
    number = balance["conversations"] + balance["held_out_conversations"]
    held_out = [f"{balance['held_out_conversations']:,}"]
    if what := _cut_or_dropped(balance["held_out_cut"], balance["held_out_dropped"]):
        held_out.append(f"of them {what}")
    items = [
        f"{in_rows:,} in the rows ({balance['conversations'] - balance['dropped']:,})",
        f"{balance['held_out']:,} held out ({', '.join(held_out)})",
    ]
    if cut_off:
        items.append(f"{cut_off:,} lost ({_cut_or_dropped(balance['cut'], balance['dropped'])})")
    line = f"{balance['text']:,} in {number:,} conversations: {', '.join(items)}"
    share = padding / max(1, padding + in_rows)
    line += f"; {balance['targets']:,} are targets; {share:.0%} of the rows is padding"
    shares = [
        f"{one['epoch']:,} rows of {one['name']} ({one['epoch'] / one['rows']:.3g} times)"
        for one in balance["sources"]
    ]
    return f"{line}; an epoch by weight: {' + '.join(shares)}" if shares else line


def _cut_or_dropped(cut: int, dropped: int) -> str:
    """Numbers of conversations that are longer than a row; "" if there are none."""
    what = [f"{cut:,} cut at the end of a turn"] if cut else []
    if dropped:
        what.append(f"{dropped:,} dropped, as nothing to train on ends within a row")
    return " and ".join(what)
