"""Saved models: loading, saving, fingerprints, and the single source file that each checkpoint carries."""
