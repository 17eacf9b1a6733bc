"""What is declared, resolved and shown before training."""
