"""The sub-commands of `mhla-hf`: their options, and the functions that run them."""
