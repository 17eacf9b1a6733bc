"""The training step of a model, and the rules that say which gradient it gives the optimizer."""
