"""The parts by name, in the order in which they run, with their weights.

What takes longest comes last: of 20 minutes, `speed` and `profile` keep nearly five.
"""

from __future__ import annotations

from tools.gpu.kernels import kernels
from tools.gpu.losses import compiled, losses
from tools.gpu.memory import memory, out_of_memory, saves
from tools.gpu.ranks import ranks
from tools.gpu.resume import elastic, resume
from tools.gpu.runner import Part
from tools.gpu.speed import profile, speed
from tools.gpu.updates import updates
from tools.gpu.waits import marked, waits

ZERO = "DeepSpeed does not run on it"
PARTS = {
    "losses": Part(losses, 2),
    "updates": Part(updates, 2, ZERO),
    "kernels": Part(kernels, 1),
    "tests": Part(marked, 1, is_for_cuda=True),
    "waits": Part(waits, 1, ZERO),
    "resume": Part(resume, 2),
    "elastic": Part(elastic, 2, ZERO),
    "ranks": Part(ranks, 3, "torch has no collectives for it"),
    "out_of_memory": Part(out_of_memory, 1, "the memory is the host's, which would swap"),
    "saves": Part(saves, 1),
    "memory": Part(memory, 3, "torch keeps no peak of its memory"),
    "compiled": Part(compiled, 3, is_for_cuda=True),
    "speed": Part(speed, 14),
    "profile": Part(profile, 4, "a trace has no kernels of it"),
}
