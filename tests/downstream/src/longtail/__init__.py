"""Trains a small language model on long texts, with context parallelism where there are ranks for it."""

from .model import Model
from .training import train

__all__ = ["Model", "train"]
