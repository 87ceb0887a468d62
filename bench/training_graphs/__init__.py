"""Training graphs in files of the format ``training-graph-v1``: rewritten, split, optimised, written back."""
