"""The sub-commands of `mhla-hf`: the options of each, and a call. What one needs is imported when it runs."""
