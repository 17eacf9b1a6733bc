"""What a person sees of a plan: `table` (terminal), `html` (notebook), `compare` (differences).

Every view takes the plain dictionary of `Plan.to_dict()`, so a plan read from a saved file prints
like a live one.
"""
