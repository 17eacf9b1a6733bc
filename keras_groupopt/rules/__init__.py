"""Update rules of this package, and what is known about those of Keras."""

from keras_groupopt.rules import keras_rules as keras_rules
