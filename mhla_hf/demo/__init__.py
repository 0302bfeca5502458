"""The whole journey on two CPU cores: its steps, its text, its report, and the visitor who loads the result."""
