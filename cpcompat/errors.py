"""Everything that cpcompat raises or warns: one family, facts as attributes, messages that say what to do.

A message has up to three parts: what went wrong, the evidence that was seen, the next step. Every kind has a code that
never changes its meaning, so that it can be searched for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

__all__ = [
    "AttentionUnsupported",
    "AttentionWarning",
    "BackwardOutside",
    "BatchInvalid",
    "BatchUnsupported",
    "BufferInvalid",
    "CPError",
    "CPNotReady",
    "CPNotRequested",
    "CPWarning",
    "Contradiction",
    "CreationFailed",
    "EvaluationWarning",
    "ForeignOwner",
    "LengthInvalid",
    "LossWarning",
    "ModelUnsupported",
    "NestedContext",
    "RankFailed",
    "RanksDiffer",
    "SequenceParallel",
    "StaleContext",
    "UntestedVersion",
    "VendorRefused",
    "VersionTooOld",
]


def _sentence(code: str, what: str, evidence: str, next_step: str) -> str:
    lines = [f"[{code}] {what}"]
    if evidence:
        lines.append(f"  seen: {evidence}")
    if next_step:
        lines.append(f"  do:   {next_step}")
    return "\n".join(lines)


def shown(value: object) -> str:
    """Somebody's value for a message; also one whose repr fails or has no end."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__} without repr"
    return text if len(text) <= 300 else f"{text[:300]}..."


class CPError(RuntimeError):
    """The base of every error of cpcompat.

    Args:
        what: what went wrong, one sentence.
        evidence: what was seen where, with values.
        next_step: what the reader should do.
        facts: the values behind the sentence; each becomes an attribute. They must pickle for the error to cross a
            process boundary.

    Attributes:
        code: the stable code of the kind, such as ``CP101``.
    """

    code: ClassVar[str] = "CP100"

    def __init__(self, what: str, evidence: str = "", next_step: str = "", **facts: Any) -> None:
        super().__init__(_sentence(self.code, what, evidence, next_step))
        self.what = what
        self.evidence = evidence
        self.next_step = next_step
        self.facts = facts
        self.__dict__.update(facts)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.evidence, self.next_step, self.facts)


def _rebuild(kind: type[CPError], what: str, evidence: str, next_step: str, facts: dict[str, Any]) -> CPError:
    return kind(what, evidence, next_step, **facts)


class CPNotRequested(CPError):
    """Nobody asked for context parallelism, or a gate kept the wish from accelerate."""

    code = "CP101"


class CPNotReady(CPError):
    """The process group or the cp mesh does not exist yet."""

    code = "CP102"


class CreationFailed(CPError):
    """The context could not be made, or did not pass the check right after; the cause is chained."""

    code = "CP103"


class StaleContext(CPError):
    """The context's process group was destroyed or accelerate's state was reset."""

    code = "CP104"


class Contradiction(CPError):
    """An argument says one thing and the accelerator another."""

    code = "CP105"


class VersionTooOld(CPError):
    """The installed accelerate or torch cannot do this."""

    code = "CP106"


class SequenceParallel(CPError):
    """Sequence parallelism (DeepSpeed Ulysses) is on; it has no context (accelerate #3817)."""

    code = "CP107"


class ForeignOwner(CPError):
    """Another library owns context parallelism on this accelerator and left nothing to pass calls on to."""

    code = "CP108"


class BufferInvalid(CPError):
    """The buffers cannot be sharded; none of them was touched."""

    code = "CP201"


class LengthInvalid(BufferInvalid):
    """The sequence length is no multiple of 2 x cp size (pytorch #159706, #183968)."""

    code = "CP202"


class NestedContext(CPError):
    """A context was entered while another one is active in this process."""

    code = "CP203"


class RanksDiffer(BufferInvalid):
    """The ranks of one cp group hold different buffers, or one of them cannot enter (SimpleTuner #2313)."""

    code = "CP204"


class BatchInvalid(BufferInvalid):
    """A batch, or a value that goes with one, has not the form that `CPContext.batch` and its like need."""

    code = "CP205"


class BatchUnsupported(BatchInvalid):
    """A batch says something that context parallelism cannot express: left padding, packed rows, pixels (trl #6843)."""

    code = "CP206"


class BackwardOutside(CPError):
    """A backward pass computes again, outside the block, what was computed inside it (trl #4314)."""

    code = "CP208"


class AttentionUnsupported(CPError):
    """An attention call inside the block that context parallelism cannot compute."""

    code = "CP301"


class ModelUnsupported(CPError):
    """The model has layers that context parallelism cannot express (accelerate #4177)."""

    code = "CP302"


class RankFailed(CPError):
    """A rank started by cpcompat failed, died or did not end in time."""

    code = "CP501"


class VendorRefused(CPError):
    """A copy cannot be made or checked; what stands in its place was not touched."""

    code = "CP601"


class CPWarning(UserWarning):
    """The base of every warning of cpcompat.

    Args:
        what, evidence, next_step: as for `CPError`.
    """

    code: ClassVar[str] = "CP400"

    def __init__(self, what: str, evidence: str = "", next_step: str = "") -> None:
        super().__init__(_sentence(self.code, what, evidence, next_step))
        self.what = what
        self.evidence = evidence
        self.next_step = next_step

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.evidence, self.next_step)


class AttentionWarning(CPWarning):
    """No attention call went through CP, or a mask reaches attention modules without a hook."""

    code = "CP303"


class LossWarning(CPWarning):
    """A loss is divided by more tokens than the batch has labels (axolotl #3026, transformers #39648)."""

    code = "CP207"


class EvaluationWarning(CPWarning):
    """The Trainer's evaluation or prediction gives other values under CP (transformers #48167, #48842)."""

    code = "CP402"


class UntestedVersion(CPWarning):
    """The installed release is newer than any that cpcompat was run against."""

    code = "CP401"
