"""Frozen placement problems with a known optimum, hard for greedy placement, and a table of ours."""
