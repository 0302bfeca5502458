"""The paper's comparisons on a small machine: classifiers of digits side by side, the rank of attention, its time."""
