"""What a user would pick instead of Lowtide for a training step, measured beside it."""
