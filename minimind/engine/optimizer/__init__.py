"""Parameter groups, optimizers, and their state as named slices that fit any ZeRO stage.

May import `minimind.config` and below; imports no deepspeed. A DeepSpeed wrapper starts in
`adapters.py`, an optimizer with checkpoints in `state.py`.

adapters        where each DeepSpeed wrapper stores weights and moments
groups          parameter groups, and the optimizer where the JSON names none
lion            Lion, which torch does not have
muon            Muon for hidden matrices beside AdamW, on whole matrices or shards
mup             muP: initialization and learning rates by width
state           weights and moments as named flat slices
tensor_split    parts of weights under tensor parallelism, and their places in the whole
weight_average  exponential moving average of the weights
"""
