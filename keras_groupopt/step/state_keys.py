"""Names of state that no rule gives. They stand in saved files, each in one place here."""

from __future__ import annotations

# Of the whole optimizer.
ITERATIONS = "@iterations"
LEARNING_RATE = "@learning_rate"
RATIOS = "@ratios"
SKIPPED_STEPS = "@skipped_steps"
FIRST_NONFINITE_GROUP = "@first_nonfinite_group"
MICRO_BATCHES = "@micro_batches"
ACCUMULATED_WEIGHT = "@accumulated_weight"
TOTAL_STEPS = "@total_steps"
AVERAGES_MADE = "@averages_made"
EMA_MOMENTUM = "@ema_momentum"
STATISTICS_MADE = "@statistics_made"
# The layer path of a statistic follows.
STATISTICS = "@statistics:"

# Of a group, whose name follows after a slash.
CLIPPED_STEPS = "@clipped_steps"
LEARNING_RATE_RATIO = "@learning_rate_ratio"
WEIGHT_DECAY = "@weight_decay"

# In the place of a layer path: the rule as a whole.
RULE = "@rule"

# Beside a weight: `group/layer path/name`.
ANCHOR = "@anchor"
AVERAGE = "@average"
ACCUMULATOR = "@accumulator"

# Of the model's gradient rule: its name in a manifest, and what its scalars and slots begin with.
GRADIENT_RULE = "@gradient_rule"
GRADIENT_RULE_STATE = "@gradient_rule:"
