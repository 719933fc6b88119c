"""Processes, signals, exit status, files and locks.

May import `minimind.errors` only. A new way for a run to end starts in `exit.py`, a new kind of
file in `durable_files.py`.

checked_json     untrusted JSON objects: bounded size and depth, checked types
collectives      small values gathered over ranks, errors raised on all of them
durable_files    durable writes, hashes, metrics.jsonl
environment      RANK, WORLD_SIZE and the like, checked before a library reads them
exit             the final message and exit status, by main or watch thread
file_kinds       what a file is that is not what its name says
hardware         GPUs, driver, compilers, bf16 support
heartbeat        liveness of the other ranks, and which one failed
limited          a function of a module in a process with limits of time and memory
local_workers    the worker processes of this host
locks            file locks of prepared folders and checkpoints
output_folder    the folder of --out, replaced atomically
panics           panics of Rust libraries as exceptions
process          a worker's stderr, signals and exit status
terminal         terminal output: escapes, error lines, phases of a start
urls             what may be shown of URLs
"""
