"""One optimizer step on built groups."""
