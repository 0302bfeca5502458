"""The operator's kernels in Triton, which run on GPUs and, on CPU tensors, in Triton's interpreter."""
