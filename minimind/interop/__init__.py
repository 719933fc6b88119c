"""Weights in and out: Hugging Face, Llama, MiniMind2, GGUF.

May import `minimind.checkpoint` and below. A new format starts in `export.py` and
`weight_names.py`.

auto             the model as code: Auto classes of transformers, files for trust_remote_code
consolidate      a checkpoint as whole tensors
export           `minimind export` and `minimind import`
foreign_config   the shape of a model made elsewhere
gguf             a model as one GGUF file
grow_vocabulary  rows for special tokens that a model has none for
hf_folder        `export --format transformers`
hf_weights       weights under the names of a model of transformers
model_card       README.md of an export
tensor_sources   named tensors of checkpoints, safetensors and .pth files
weight_names     tensor names and layouts of other formats
weights          a model from any source, under our tensor names
write_folder     tensors -> a new folder of safetensors
"""
