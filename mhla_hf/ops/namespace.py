"""The name under which this copy of the code registers things in process-wide tables.

Several bundles and the installed package may live in one process. `checkpoints/bundle.py` replaces the value with the
content hash of the bundle, so that custom operators, attention functions, and cache layers of different versions never
collide.
"""

NAMESPACE = "package"
