"""The decoder: RMSNorm, grouped-query attention, SwiGLU, rotary position, a loss as sum and count.

May import `minimind.config` and below; knows neither data nor training. A model variant begins in
`configuration.py` and `layers.py`. Exports carry these modules along as remote code.

activation_checkpointing  recomputation in the backward pass
attention_kernels         compiled attention: by blocks on a CPU, within documents by flex attention
attention_mask            which positions a query attends to
bf16_matmul               matrix products in bfloat16, also on CPUs without instructions for it
caches                    the key/value cache interface of transformers
configuration             the shape of a model as a transformers configuration
decoder                   the whole model
experts                   mixture of experts
layers                    norm, attention, feed-forward, block
loss                      next-token cross-entropy
rotary                    pos_cis and the rotation of queries and keys
widths                    widths that follow from others
"""
