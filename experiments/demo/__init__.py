"""The whole journey on two CPU cores: its steps, its text and its report."""
