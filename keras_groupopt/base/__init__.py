"""What every other folder stands on: Keras internals, checks, text and files."""
