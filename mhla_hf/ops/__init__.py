"""The operator: tensors in, tensors out. Knows torch and triton, nothing else."""
