"""Training: `loop.distill`, one loop for all models, in which a stage is a loss and the parameters that it trains."""
