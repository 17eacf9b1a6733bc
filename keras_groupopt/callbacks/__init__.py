"""Callbacks: what only they can put into logs, and checks before a fit starts."""

from keras_groupopt.callbacks.backup import BackupAndRestore as BackupAndRestore
from keras_groupopt.callbacks.group_logger import GroupLogger as GroupLogger
