"""The sub-commands of `mhla-hf`: their options, and functions that import what they need when they run."""
