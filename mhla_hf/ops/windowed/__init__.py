"""Windowed attention: softmax over a window, sinks, and the past tokens that got most attention (causal, `salient.py`), or
softmax over a window with MHLA beyond it (bidirectional, `two_way.py`).
"""
