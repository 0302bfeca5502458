"""The paper's comparisons on a small machine: classifiers of digits, and the rank and the time of attention."""
