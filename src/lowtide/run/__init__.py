"""Running a graph: the reference executor, the arena executor, measuring and checking."""
