"""Estimates before a run: parameters, memory per ZeRO stage, FLOPs, time.

May import `minimind.model` and below, but not torch. A term of the memory model
begins in `costs.py`.

costs            parameters, bytes, FLOPs and seconds
gpus             peak and bandwidth of known GPUs
plan             `minimind plan`: the stage and micro-batch that fit
shape            the sizes of a model
step_time        the time of a step on one GPU, and what bounds it
tensor_parallel  what a tensor-parallel rank holds and sends
"""
