"""Saved models: their one source file, loading and saving whole, fingerprints, and a load where mhla_hf is missing."""
