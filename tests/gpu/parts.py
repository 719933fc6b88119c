"""The parts by name, in the order in which they run, with their weights.

The weights share out the time: with all parts and 20 minutes, one is half a minute.
"""

from __future__ import annotations

from tests.gpu.kernels import kernels
from tests.gpu.losses import compiled, losses
from tests.gpu.memory import memory, out_of_memory, saves
from tests.gpu.ranks import ranks
from tests.gpu.resume import elastic, resume
from tests.gpu.runner import Part
from tests.gpu.speed import profile, speed
from tests.gpu.waits import marked, waits

PARTS = {
    "losses": Part(losses, 3),
    "compiled": Part(compiled, 4),
    "resume": Part(resume, 3),
    "elastic": Part(elastic, 3),
    "kernels": Part(kernels, 2),
    "tests": Part(marked, 2),
    "waits": Part(waits, 1),
    "memory": Part(memory, 4),
    "saves": Part(saves, 2),
    "out_of_memory": Part(out_of_memory, 2),
    "speed": Part(speed, 12),
    "profile": Part(profile, 4),
    "ranks": Part(ranks, 5),
}
