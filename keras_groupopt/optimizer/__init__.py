"""GroupedOptimizer and LossScaleOptimizer: their config, their files and their life."""
