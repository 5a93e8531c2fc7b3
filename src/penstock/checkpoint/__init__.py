"""Checkpoints: a state to a file and back, at the speed of the disk, whole or not at all.

A checkpoint is a `safetensors` file; what that format cannot express stands in its metadata
(`header`, `tree`). Every tensor has a checksum. `save` and `load` take the place of torch.save and
torch.load.
"""

from penstock.checkpoint.background import SaveHandle
from penstock.checkpoint.conversion import convert
from penstock.checkpoint.inspection import CheckpointInfo, TensorInfo, info, verify
from penstock.checkpoint.loading import load
from penstock.checkpoint.saving import save

__all__ = ["CheckpointInfo", "SaveHandle", "TensorInfo", "convert", "info", "load", "save", "verify"]
