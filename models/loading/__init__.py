"""Finding a model, checking what is there, and putting its weights on the device."""

from paged.models.loading.checkpoint import CheckpointError, ModelNotFoundError
from paged.models.loading.source import ModelSource, resolve_model

__all__ = ["CheckpointError", "ModelNotFoundError", "ModelSource", "resolve_model"]
