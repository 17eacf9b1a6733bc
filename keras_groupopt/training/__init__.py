"""The training step with gradient rules, averages in use, and callbacks."""
