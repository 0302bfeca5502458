"""The name under which this copy of the code registers operators and attention functions for the whole process.

`checkpoints/bundle.py` replaces it with the hash of the bundle, so that several versions can live in one process.
"""

NAMESPACE = "package"
