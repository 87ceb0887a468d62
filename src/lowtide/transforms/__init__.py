"""Graph transformations: match, legality, rewrite and predicted effect, one idea a file."""
