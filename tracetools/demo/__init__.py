"""The demo: one tiny Megatron-Core GPT trained in two stacks, on whatever device is there, under the profiler.

In: an output folder and, if wanted, delays to plant. Out: two run folders, one per stack, ready for `tracetools diff`.
Both halves run the same `train_step` on the same documents with the same seeds; only what surrounds it differs: a plain loop
per rank (`rank.py`, started by torchrun), or a Ray driver with one actor per rank (`driver.py`).
Knows nothing of analysis. Nothing here is simulated: every number comes from a training step that ran.
"""
