"""Callbacks: what only they can put into logs, and checks before a fit starts."""

from keras_groupopt.training.callbacks.backup import BackupAndRestore as BackupAndRestore
from keras_groupopt.training.callbacks.group_logger import GroupLogger as GroupLogger
