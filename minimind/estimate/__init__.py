"""What a run needs before it runs: parameters, memory per ZeRO stage, FLOPs, time.

May import `minimind.model` and below; arithmetic alone, without torch. A term of the memory model
begins in `costs.py`.

costs            parameters, bytes, FLOPs and seconds
plan             `minimind plan`: which stage and micro-batch fit
shape            the numbers that decide how large a model is
"""
