"""Processes, files and locks: what a run owes the machine and its launcher, whatever it trains.

May import `minimind.errors` alone. Begin in `exit.py` for how a run ends, in `durable_files.py` for
how a file is written.

checked_json     JSON objects that others wrote, bounded and typed
collectives      small facts that all ranks agree on, and errors that all of them raise
durable_files    writes that survive a power cut, hashes, and metrics.jsonl
environment      RANK, WORLD_SIZE and the like, checked before a library reads them
exit             one line and one exit status, from the main thread or the watching one
hardware         whether this CPU multiplies bfloat16
heartbeat        which ranks are alive, and which of them failed first
local_workers    the worker processes of this host
locks            locks beside a folder that several jobs fill, and of a checkpoint that is read
output_folder    the folder of an --out: complete or absent, never over another
process          a worker's stderr, signals and exit status
terminal         what a terminal shows: escapes, the line of an error, the phases of a start
"""
