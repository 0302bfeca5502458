"""What attention does, measured: rank, entropy, maps, mixing, and the paper's own comparisons on a small machine."""
