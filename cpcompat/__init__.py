"""One call for accelerate's context-parallel context, on every release: ``get_cp_context(acc)``."""

__version__ = "0.1.0"
