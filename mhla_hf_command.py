"""The console script `mhla-hf`. While this module is imported first, `import mhla_hf` leaves registration to the commands.

Registering the model types imports torch and transformers; `mhla-hf --help` needs neither.
"""

from mhla_hf.cli import main

__all__ = ["main"]
