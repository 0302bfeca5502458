"""The name under which this copy of the code registers operators and attention functions for the whole process.

In a checkpoint's copy of the code, `checkpoints/bundle.py` sets this name to a hash, so that versions can share a process.
"""

NAMESPACE = "package"
