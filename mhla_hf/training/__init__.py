"""Training of all kinds of models with one loop, `loop.distill`."""
