"""The name under which this copy of the code registers things in process-wide tables.

`checkpoints/bundle.py` replaces the value with the content hash of the bundle, so that several versions may live in one
process and custom operators, attention functions, and cache layers never collide.
"""

NAMESPACE = "package"
