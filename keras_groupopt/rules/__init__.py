"""Update rules that Keras lacks, each a plain `keras.optimizers.Optimizer`."""

from keras_groupopt.rules.radam import RAdam as RAdam
