"""The checkpoint protocol: written aside, hashed, renamed; verified before it is read; elastic.

May import `minimind.engine` and below. The format is in `directory.py` and `tensor_files.py`; a
fact that a resume compares begins in `identity.py`.

choose           the newest readable checkpoint, locked while it is read
compare          `minimind checkpoint diff`
directory        the protocol of a checkpoint directory
identity         the facts that make two runs the same run
reader           whole tensors of a checkpoint, verified
resume           which checkpoint a run resumes from, and its state
run_folder       out_dir: claimed by one run at a time
saver            saves in the background, all ranks together
tensor_files     named flat runs <-> safetensors
tools            `minimind checkpoint list | verify | prune`
train_state      step and tokens: all that a run has to remember
validation       the JSON files of a checkpoint, checked when read
"""
