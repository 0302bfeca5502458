"""Training: one Accelerate loop (`loop.distill`); stages are losses and parameter groups, not copies of the loop."""
