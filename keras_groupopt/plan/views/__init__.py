"""Views of a plan: `table` (terminal), `html` (notebook), `plot` and `compare` (differences).

The views take the plain dictionary of `Plan.to_dict()`, so a plan that was read from a file prints
like a live one.
"""
