"""Recipes return ordinary lists of groups or of ratios, which can be printed and edited.

Everything that a recipe does can be written with the public names.
"""

from keras_groupopt.recipes.backbone_and_head import backbone_and_head as backbone_and_head
from keras_groupopt.recipes.discriminative import discriminative as discriminative
from keras_groupopt.recipes.gradual_unfreezing import gradual_unfreezing as gradual_unfreezing
from keras_groupopt.recipes.layerwise_decay import layerwise_decay as layerwise_decay
from keras_groupopt.recipes.lora import lora as lora
from keras_groupopt.recipes.muon_with_adamw import muon_with_adamw as muon_with_adamw
