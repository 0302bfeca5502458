"""The name under which this copy of the code registers things in tables that the whole process shares.

Two bundles and the installed package may live in one process. `checkpoints/bundle.py` replaces the value by the bundle's
content hash, so that custom operators, attention functions and cache layers of different versions never meet.
"""

NAMESPACE = "package"
