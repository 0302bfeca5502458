"""Windowed attention: softmax over a window and salient tokens (causal), or over a window with MHLA beyond (both ways)."""
