"""Image classifiers from scratch, and converted vision towers."""
