"""A run from its configuration to its last checkpoint: what the loop needs, built in order."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import torch

from minimind.config import DEFAULT_DATA, RunConfig
from minimind.data.batches import Batches, held_out_rows
from minimind.data.order import Order
from minimind.data.prepare import Prepared, prepare
from minimind.data.tokenizer import Tokenizer
from minimind.errors import CheckpointError, DataError, UsageError
from minimind.files import storing
from minimind.model.decoder import MiniMindConfig, MiniMindForCausalLM
from minimind.process import Progress, StopRequest
from minimind.train.deepspeed_config import Resolved, read_deepspeed_json, resolve
from minimind.train.engine import Engine, build_engine, choose_device, launched_world
from minimind.train.evaluate import HeldOut
from minimind.train.identity import facts, source_commit, versions
from minimind.train.loop import Desk, train
from minimind.train.out_dir import claim, write_reference
from minimind.train.report import Report
from minimind.train.saver import Saver
from minimind.train.schedule import Schedule, plan_schedule
from minimind.train.state import TrainState


def pretrain(run: RunConfig, progress: Progress) -> int:
    """Train `run` to its end or to a request to stop; 0 or 75."""
    rank, world_size = launched_world()
    device = choose_device(run)
    require_default_data(run)
    require_resume_path(run)
    document = read_deepspeed_json(run.deepspeed_config)
    resolve(document, run.deepspeed_config, run, world_size, device)  # mistakes before the work
    out_dir = Path(run.out_dir)
    lock = claim(out_dir) if rank == 0 and out_dir.exists() else None  # before the long work
    prepared = prepare_data(run)
    run = with_tokenizer(run, prepared.tokenizer)
    resolved = resolve(document, run.deepspeed_config, run, world_size, device)
    run = resolved.run
    order, schedule = plan(run, prepared, world_size)
    if rank == 0 and lock is None:
        lock = claim(out_dir)
    progress.out_dir = out_dir
    torch.manual_seed(run.seed)
    model = MiniMindForCausalLM(model_config(run, prepared.tokenizer))
    engine = build_engine(resolved, model, device)
    desk = build_desk(run, prepared, order, schedule, engine, progress)
    desk.report.say(f"resolved DeepSpeed configuration:\n{resolved.table()}")
    state = start(desk, prepared)
    if engine.rank == 0:
        with storing(str(out_dir), "free some space, or give another --out_dir"):
            write_reference(out_dir, run, resolved.config)
        prepared.tokenizer.save(out_dir / "tokenizer")
    state, status, reason = train(desk, state)
    finish(desk, state, status, reason)
    if lock:
        lock.close()
    return status


def build_desk(
    run: RunConfig,
    prepared: Prepared,
    order: Order,
    schedule: Schedule,
    engine: Engine,
    progress: Progress,
) -> Desk:
    """What the loop works with; from here on a request to stop is remembered."""
    out_dir = Path(run.out_dir)
    with storing(str(out_dir), "mend its rights, or give another --out_dir"):
        report = Report(
            out_dir,
            schedule.total_steps,
            engine.device,
            is_speaker=engine.rank == 0,
            is_profiling=run.profile,
        )
    return Desk(
        run=run,
        schedule=schedule,
        engine=engine,
        batches=batches_of(run, prepared, order, engine),
        held_out=held_out_of(run, prepared),
        saver=Saver(
            engine,
            out_dir / "checkpoints",
            run.keep_last,
            facts(run, prepared, schedule, order, engine),
            texts(run, prepared, engine),
        ),
        report=report,
        stop=StopRequest(),
        progress=progress,
    )


def require_default_data(run: RunConfig) -> None:
    """Nothing, or a UsageError with an example when no data was named and none is there."""
    if run.data_path == (DEFAULT_DATA,) and not Path(DEFAULT_DATA).exists():
        raise UsageError(
            f"no --data_path was given and {DEFAULT_DATA} is not here; give some text, for example:"
            " bash run_accelerate.sh --model tiny --data_path my_text.jsonl --out_dir out/mine"
        )


def require_resume_path(run: RunConfig) -> None:
    """Nothing, or a CheckpointError, told before anything is written, for a path not there."""
    if run.resume not in ("auto", "none") and not Path(run.resume).is_dir():
        raise CheckpointError(f"--resume {run.resume}: no such directory; name a step_ directory")


def prepare_data(run: RunConfig) -> Prepared:
    """The run's text as token shards, from the cache when they are there."""
    return prepare(
        run.data_path,
        tokenizer_path=run.tokenizer,
        vocab_size=run.vocab_size,
        val_fraction=run.val_fraction,
        max_document_bytes=run.max_document_bytes,
        cache_dir=Path(run.cache_dir).expanduser(),
        progress=True,
    )


def with_tokenizer(run: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """The run with the vocabulary of a tokenizer that was given; a UsageError if a flag differs."""
    if run.tokenizer is None or tokenizer.vocab_size == run.vocab_size:
        return run
    if run.is_explicit("vocab_size"):
        raise UsageError(
            f"vocab_size = {run.vocab_size} ({run.sources['vocab_size']}), but --tokenizer"
            f" {run.tokenizer} has {tokenizer.vocab_size} pieces; drop one of the two"
        )
    return run.with_values(f"tokenizer {run.tokenizer}", vocab_size=tokenizer.vocab_size)


def plan(run: RunConfig, prepared: Prepared, world_size: int) -> tuple[Order, Schedule]:
    """Which rows each step reads and how many steps there are; a DataError for too little text."""
    rows_per_step = run.batch_size * run.accumulation_steps * world_size
    n_rows = prepared.train.rows(run.max_seq_len + 1)
    if n_rows < rows_per_step:
        raise DataError(
            f"{' '.join(run.data_path)}: {len(prepared.train):,} training tokens make {n_rows} rows"
            f" of {run.max_seq_len + 1}, fewer than the {rows_per_step} of one step"
            f" ({run.batch_size} x {run.accumulation_steps} x {world_size} processes); add text, or"
            " lower --batch_size, --accumulation_steps or --max_seq_len"
        )
    order = Order(n_rows, rows_per_step, run.seed)
    return order, plan_schedule(run, order.steps_per_epoch)


def model_config(run: RunConfig, tokenizer: Tokenizer) -> MiniMindConfig:
    """The decoder that the shape flags describe, with the tokenizer's special ids."""
    return MiniMindConfig(
        vocab_size=run.vocab_size,
        hidden_size=run.dim,
        intermediate_size=run.hidden_dim,
        num_hidden_layers=run.n_layers,
        num_attention_heads=run.n_heads,
        num_key_value_heads=run.n_kv_heads,
        max_position_embeddings=run.max_seq_len,
        rope_theta=run.rope_theta,
        use_flash_attn=run.use_flash_attn,
        bos_token_id=tokenizer.bos_id if tokenizer.bos_id >= 0 else None,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    )


def batches_of(run: RunConfig, prepared: Prepared, order: Order, engine: Engine) -> Batches:
    """This rank's micro-batches by step."""
    return Batches(
        prepared.train,
        order,
        run.max_seq_len + 1,
        run.batch_size,
        engine.rank,
        engine.world_size,
        pin=engine.device.type == "cuda",
    )


def held_out_of(run: RunConfig, prepared: Prepared) -> HeldOut:
    """The rows every validation reads."""
    row_tokens = run.max_seq_len + 1
    rows = held_out_rows(prepared.val, run.eval_rows, row_tokens)
    return HeldOut(prepared.val, rows, row_tokens, prepared.tokenizer.piece_bytes())


def texts(run: RunConfig, prepared: Prepared, engine: Engine) -> dict[str, bytes]:
    """Small files beside the tensors: enough to generate from a checkpoint alone."""
    return {
        "ds_config.resolved.json": json.dumps(engine.resolved.config, indent=2).encode(),
        "config.json": engine.model.config.to_json_string().encode(),
        "tokenizer.model": prepared.tokenizer.path.read_bytes(),
    }


def start(desk: Desk, prepared: Prepared) -> TrainState:
    """Resume or begin, and say so: the state of the first step to take."""
    run, engine, report, order = desk.run, desk.engine, desk.report, desk.batches.order
    state, path, rejected, manifest = desk.saver.resume(run.resume)
    for bad in rejected:
        report.event("checkpoint_rejected", path=str(bad.path), file=bad.file, reason=bad.reason)
        report.say(f"checkpoint {bad.path} is passed over: {bad.file} {bad.reason}")
    resolved: Resolved = engine.resolved
    report.event(
        "run_start",
        step=state.step,
        resume_from=str(path) if path else None,
        world_size=engine.world_size,
        backend=engine.backend,
        zero_stage=resolved.zero_stage,
        dtype=run.dtype,
        device=engine.device.type,
        parameters=engine.parameters,
        tokens_per_step=desk.batches.tokens_per_step,
        rows_per_epoch=order.n_rows,
        total_steps=desk.schedule.total_steps,
        versions=versions(),
        commit=source_commit(),
        rotary=engine.gather(str(engine.model.model.pos_cis.dtype)),
    )
    if path and (manifest["world_size"], manifest["zero_stage"]) != (
        engine.world_size,
        resolved.zero_stage,
    ):
        report.event(
            "checkpoint_resharded",
            **{
                "from": {k: manifest[k] for k in ("world_size", "zero_stage")},
                "to": {"world_size": engine.world_size, "zero_stage": resolved.zero_stage},
            },
        )
    report.say(opening(desk, prepared, state, path))
    return state


def opening(desk: Desk, prepared: Prepared, state: TrainState, path: Path | None) -> str:
    """The lines that say what is about to be trained, on what, and from where."""
    run, engine, order, schedule = desk.run, desk.engine, desk.batches.order, desk.schedule
    dropped = order.n_rows - order.steps_per_epoch * order.rows_per_step
    begun = (
        f"resuming at step {state.step} from {path} (verified)" if path else "starting at step 0"
    )
    return "\n".join(
        [
            f"backend deepspeed, ZeRO stage {engine.resolved.zero_stage}, {run.dtype}, on"
            f" {engine.world_size} x {engine.device.type}",
            f"model    {engine.parameters:,} parameters, vocabulary {run.vocab_size}"
            f" ({prepared.tokenizer.unused} of it unused)",
            f"data     {len(prepared.train):,} training tokens in {order.n_rows:,} rows of"
            f" {run.max_seq_len + 1}; {len(desk.held_out.rows)} rows held out for validation",
            f"step     {run.batch_size} rows x {run.accumulation_steps} micro-batches x"
            f" {engine.world_size} processes = {order.rows_per_step} rows,"
            f" {desk.batches.tokens_per_step:,} tokens",
            f"length   {schedule.total_steps} steps, {schedule.warmup_steps} of them warm-up;"
            f" {order.steps_per_epoch} steps an epoch, {dropped} rows of each epoch left over",
            begun,
        ]
    )


def finish(desk: Desk, state: TrainState, status: int, reason: str) -> None:
    """Tell the end, on every rank at the same moment."""
    desk.batches.close()
    code = "DONE" if status == 0 else "PREEMPTED"
    desk.report.event("exit", code=code, status=status, reason=reason, step=state.step)
    desk.report.close()
    if status:
        desk.report.say(f"{reason} at step {state.step}; run the same command again to go on")
    else:
        command = os.path.relpath(Path(sys.executable).parent / "minimind")
        place = shlex.quote(desk.run.out_dir)
        desk.report.say(
            f"done: {state.step} steps, {state.tokens:,} tokens; try\n"
            f'  {command} generate --checkpoint {place} --prompt "..."'
        )
    sys.stdout.flush()
    desk.engine.barrier()
    desk.engine.close()
