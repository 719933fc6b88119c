"""The decoder: RMSNorm, grouped-query attention, SwiGLU, rotary position, a loss as sum and count.

May import `minimind.config` and below; independent of data and training. A model variant starts in
`configuration.py` and `layers.py`. Exports include these modules as remote code.

activation_checkpointing  recomputation in the backward pass
attention_kernels         blockwise attention on a CPU, flex attention within documents
attention_mask            masks and positions: causal, padding, documents, caches
bf16_matmul               matrix products in bfloat16, also on CPUs without instructions for it
configuration             the model configuration
decoder                   the whole model
experts                   mixture of experts
layers                    norm, attention, feed-forward, block
loss                      next-token cross-entropy
rope_scaling              rotary frequencies of a longer context
rotary                    pos_cis and rotary position embedding
sizes                     default feed-forward width, chunk of the loss
"""
