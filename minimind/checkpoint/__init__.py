"""Checkpoints: written aside, hashed, renamed, verified before reading; elastic.

May import `minimind.engine` and below. The format is in `directory.py` and `tensor_files.py`; a
value that a resume compares starts in `identity.py`.

choose           the newest readable checkpoint, locked while it is read
directory        the protocol of a checkpoint directory
identity         values that must not change on resume
reader           whole tensors of a checkpoint, verified; the differences of two
resume           select a checkpoint and load its state
retention        which checkpoints are kept, and why
run_folder       out_dir: locked by one run at a time
saver            saves in the background, on all ranks
tensor_files     named flat slices <-> safetensors
tools            `minimind checkpoint list | verify | prune`
train_state      step and tokens
validation       checks of a checkpoint's JSON files
"""
