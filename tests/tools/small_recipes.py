"""The demo's recipes for models of 30,000 parameters."""

TEACHER = """
settings: {vocab_size: 440, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 3, num_attention_heads: 2,
  num_key_value_heads: 2, max_position_embeddings: 256, tie_word_embeddings: true, attention_bias: true}
stages:
  - {name: language model, loss: lm, steps: 6, lr: 3e-3, batch_size: 2, seq_len: 64}
run: {save_every: 6}
"""
STUDENT = """
settings: {layers: all, block_size: 16}
stages:
  - {name: transfer, loss: transfer, trainable: mhla, steps: 2, lr: 1e-2, batch_size: 2, seq_len: 64}
  - {name: distill, loss: logits, steps: 4, lr: 1e-3, lr_mhla: 1e-2, batch_size: 2, seq_len: 256}
run: {save_every: 1}
"""
