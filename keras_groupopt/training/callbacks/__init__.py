"""Callbacks for `fit`, and the search for learning rates."""
