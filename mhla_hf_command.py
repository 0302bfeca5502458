"""The console script `mhla-hf`.

If this module is imported before `mhla_hf`, registering the model types is left to the command that runs, because it imports
torch and transformers, which `mhla-hf --help` does not need.
"""

from mhla_hf.cli.main import main

__all__ = ["main"]
