"""What CP needs of a model: attention modules that drop their mask, and no layer that CP cannot express.

CP knows full causal attention only (or, on CPU, full attention). A mask that a model builds for itself has to be dropped in
front of each attention module, as accelerate's own hook does; a layer whose mask means more than "causal" must be refused.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from .block import is_active
from .errors import AttentionWarning, ModelUnsupported

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["Models", "attention_modules", "has_mask_hook", "layer_limits"]

# The name of accelerate's own hook function (1.10 on, big_modeling.py).
_ACCELERATE_HOOK = "_self_attn_pre_forward_hook"


class _MaskHook:
    """Drops ``attention_mask`` and asks for causal attention instead, inside a block; outside of it the mask counts.

    accelerate's own hook drops the mask everywhere, so that generating from left-padded prompts goes wrong.
    """

    __cpcompat__ = "mask-hook"
    handle: RemovableHandle

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "attention_mask" in kwargs and is_active():
            kwargs = {**kwargs, "attention_mask": None, "is_causal": True}
        return args, kwargs


def _hooks(module: nn.Module) -> tuple[bool, list[Any]]:
    """Whether accelerate's hook is there, and the hooks of any copy of cpcompat."""
    hooks = list(module._forward_pre_hooks.values())
    theirs = any(getattr(hook, "__name__", "") == _ACCELERATE_HOOK for hook in hooks)
    return theirs, [hook for hook in hooks if getattr(hook, "__cpcompat__", "") == "mask-hook"]


def has_mask_hook(module: nn.Module) -> bool:
    """Whether a module drops its mask already, whoever saw to it.

    Args:
        module: an attention module.

    Returns:
        True for accelerate's hook and for that of any copy of cpcompat.
    """
    theirs, ours = _hooks(module)
    return theirs or bool(ours)


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Find the innermost modules that take an attention mask.

    Args:
        model: any model, wrapped or not.

    Yields:
        Name and module: whatever is called ``self_attn``, as accelerate has it, and every class of transformers'
        naming (``*Attention*``) whose forward has ``attention_mask`` (GPT-2's ``attn``, GPT-NeoX's ``attention``).
    """
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if name.endswith("self_attn") or (
            "Attention" in type(module).__name__ and "attention_mask" in inspect.signature(module.forward).parameters
        ):
            found.append((name, module))
    for name, module in found:
        if not any(other.startswith(name + ".") for other, _ in found):
            yield name, module


def _attach(model: nn.Module) -> None:
    unhooked: list[str] = []
    for name, module in attention_modules(model):
        causal = getattr(module, "is_causal", None)
        theirs, ours = _hooks(module)
        if theirs and ours:  # accelerate's prepare() came after us: its hook does the work
            for hook in ours:
                hook.handle.remove()
        if theirs or ours:
            if causal is False:
                unhooked.append(f"{name} (not causal, and accelerate's hook makes it so)")
        elif causal is True or (name.endswith("self_attn") and causal is not False):
            hook = _MaskHook()
            # First, so that no other hook works on a mask that will be dropped.
            hook.handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        elif causal is None:
            unhooked.append(name)
    if unhooked:
        warnings.warn(
            AttentionWarning(
                f"{type(model).__name__} has attention modules that cpcompat cannot give a mask hook",
                ", ".join(unhooked[:8]) + (f" and {len(unhooked) - 8} more" if len(unhooked) > 8 else ""),
                "pass no attention mask to the model inside the block, and compare with verify()",
            ),
            stacklevel=4,
        )


def _config(model: nn.Module) -> Any:
    """The text model's config of a possibly wrapped model, or None."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and not isinstance(config, dict):
            text = getattr(config, "get_text_config", None)
            return text() if callable(text) else config
    return None


def _window(config: Any, layer_type: str) -> int | None:
    """How far back a layer type sees, in tokens; None where it is not a causal window at all."""
    name = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(layer_type)
    window = getattr(config, name, None) if name else None
    return window if isinstance(window, int) else None


def layer_limits(model: nn.Module) -> dict[str, int]:
    """Find the layer types of a model that are not full attention.

    Args:
        model: any model, wrapped or not.

    Returns:
        For each type the longest sequence for which it still is full causal attention, in tokens; 0 where there is none.
    """
    config = _config(model)
    types = getattr(config, "layer_types", None)
    if types is None:
        # Models older than layer_types give every layer a window as soon as one is set (Mistral).
        windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        types = ["sliding_attention"] if windowed else []
        if getattr(config, "alibi", False) is True:
            types = [*types, "alibi"]
    return {kind: _window(config, kind) or 0 for kind in sorted(set(types) - {"full_attention"})}


class Models:
    """The models that an accelerator holds, hooked once each and checked against a sequence length."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[nn.Module]] = []
        self._limits: list[tuple[str, str, int]] = []
        self._longest: float = float("inf")

    def refresh(self, models: Sequence[nn.Module]) -> None:
        """Hook the models that are new; nothing where none is.

        Args:
            models: the accelerator's models, also those prepared since the last call.

        Raises:
            ModelUnsupported: a model has layers that no sequence length makes full attention, such as linear attention.
        """
        models = [model for model in models if isinstance(model, nn.Module)]
        refs = list(map(weakref.ref, models))  # one object a model for as long as it lives, so this compares identities
        if refs == self._seen:
            return
        limits = [(type(m).__name__, kind, longest) for m in models for kind, longest in layer_limits(m).items()]
        for name, kind, longest in limits:
            if not longest:
                raise self._refusal(name, kind, longest, None)
        for model in models:
            _attach(model)
        self._limits = limits
        self._longest = min((longest for _, _, longest in limits), default=float("inf"))
        self._seen = refs

    def check(self, length: int | None) -> None:
        """Refuse layers that see less than the sequence.

        Args:
            length: global sequence length in tokens; None where it is not known before the first attention call.

        Raises:
            ModelUnsupported: naming model, layer type and window (accelerate #4177).
        """
        if self._longest == float("inf") or (length is not None and length <= self._longest):
            return
        raise self._refusal(*min(self._limits, key=lambda limit: limit[2]), length)

    @staticmethod
    def _refusal(model: str, kind: str, longest: int, length: int | None) -> ModelUnsupported:
        sees = f"sees {longest} tokens back" if longest else "is not causal attention over the whole sequence"
        asked = f" and the sequence has {length} tokens" if length is not None else ""
        return ModelUnsupported(
            f"{model} has layers of type {kind}, which context parallelism would silently train as full causal attention",
            f"a layer of type {kind} {sees}{asked}",
            f"use sequences of at most {longest} tokens, or train this model without CP"
            if longest
            else "train this model without CP, or use a model of full attention layers only",
            model=model,
            layer_type=kind,
            window=longest or None,
            length=length,
        )
