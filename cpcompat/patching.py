"""`patch`: for loops that somebody else wrote, the Trainer's, TRL's or a command line's.

They call ``Accelerator.maybe_context_parallel``, a public method, which is replaced for the whole process by one that runs on
`get_cp_context`; and ``gather_for_metrics``, whose cut of the last batch throws all cp ranks but the first away. An
accelerator without context parallelism meets the original methods, and so does one whose owner put a method of his own on
the instance.

All copies of cpcompat in a process share one replacement: each holds it by its name, and the last to let go puts the
originals back.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from .errors import EvaluationWarning, ForeignOwner, VersionTooOld
from .layouts import TRAINER_EVALUATES_SINCE
from .resolve import get_cp_context
from .versions import Installed, installed

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

__all__ = ["patch", "unpatch"]

# How many batches of each kind are looked at: it costs the device a wait, and a collator does the same with every batch.
LOOKS = 8

_held: list[_Replacement] = []
_looks: weakref.WeakKeyDictionary[Accelerator, Counter[str]] = weakref.WeakKeyDictionary()


def patch() -> AbstractContextManager[None]:
    """Let ``Accelerator.maybe_context_parallel`` run on `get_cp_context`, in the whole process.

    Call it before the Trainer is made; whether transformers is imported already makes no difference. Calling it again
    changes nothing.

    Returns:
        A context manager that takes back at its end what this call changed: ``with patch(): ...``. Ignore it to patch
        for good.

    Raises:
        VersionTooOld: this accelerate (1.9 and older) has no such method.
    """
    from accelerate.accelerator import Accelerator  # the package itself may still be importing it, see running

    _check_accelerate(Accelerator)
    _warn_evaluation(installed("transformers"))
    if any(__name__ in replacement.holders for replacement in _held):
        return _Patched(mine=False)
    replacement = getattr(vars(Accelerator)["maybe_context_parallel"], "__cpcompat__", None)
    if replacement is None:
        replacement = _Replacement(Accelerator)
    replacement.holders.add(__name__)
    _held.append(replacement)
    return _Patched(mine=True)


def unpatch() -> None:
    """Put the very same methods back, once no other copy of cpcompat in this process wants them replaced.

    Where somebody replaced a method after `patch`, his stays; what he keeps of ours then only passes calls on.
    """
    for replacement in _held:
        replacement.release(__name__)
    _held.clear()


class _Patched(AbstractContextManager[None]):
    """What `patch` returns: takes back its own change at the end."""

    def __init__(self, mine: bool) -> None:
        self._mine = mine

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mine:
            unpatch()


class _Replacement:
    """The replaced methods of one class. Other copies find it on each method as ``__cpcompat__``.

    Attributes:
        holders: the names of those who want it; without any it passes calls on.
    """

    def __init__(self, owner: type) -> None:
        self.holders: set[str] = set()
        self._owner = owner
        self._methods: dict[str, Any] = {}
        for name, make in (("maybe_context_parallel", _block), ("gather_for_metrics", _gather)):
            method: Any = make(vars(owner)[name], self.holders)
            method.__cpcompat__ = self
            self._methods[name] = method
            setattr(owner, name, method)

    def release(self, holder: str) -> None:
        """Put the originals back with the last holder, where nobody came after us."""
        self.holders.discard(holder)
        if not self.holders:
            for name, method in self._methods.items():
                if vars(self._owner)[name] is method:
                    setattr(self._owner, name, method.__wrapped__)


def _check_accelerate(owner: type) -> None:
    if not hasattr(owner, "maybe_context_parallel"):
        found = installed("accelerate")
        raise VersionTooOld(
            "there is nothing to patch: this accelerate has no Accelerator.maybe_context_parallel, and so no trainer calls it",
            f"{found}",
            "pip install 'accelerate>=1.10'; or, in a loop of your own, call get_cp_context(acc, cp_size=...)",
            package="accelerate",
            needed="1.10",
            installed=found.version if found else None,
        )


def _is_ours(acc: Accelerator, holders: Collection[str]) -> bool:
    """Whether a call is for us: CP is on, as accelerate itself asks, and nobody put another method on the instance."""
    config = getattr(acc, "parallelism_config", None)
    return bool(
        holders
        and config
        and getattr(config, "cp_enabled", False)
        and getattr(config, "cp_backend", "torch") == "torch"
        and "maybe_context_parallel" not in vars(acc)
    )


def _block(original: Callable[..., Any], holders: Collection[str]) -> Callable[..., Any]:
    @functools.wraps(original)
    def maybe_context_parallel(
        self: Accelerator,
        buffers: list[Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> Any:
        keywords: dict[str, Any] = {
            "buffers": buffers,
            "buffer_seq_dims": buffer_seq_dims,
            "no_restore_buffers": no_restore_buffers,
        }
        if not _is_ours(self, holders):
            return original(self, **keywords)
        _look_at_trainer(self, sys._getframe(1))
        try:
            return get_cp_context(self)(**keywords)
        except ForeignOwner:
            return original(self, **keywords)

    return maybe_context_parallel


def _gather(original: Callable[..., Any], holders: Collection[str]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gather_for_metrics(self: Accelerator, input_data: Any, use_gather_object: bool = False) -> Any:
        state = self.gradient_state
        if (
            use_gather_object
            or not (_is_ours(self, holders) and state.end_of_dataloader and state.remainder > 0)
            or not _all_tensors(input_data)
        ):
            return original(self, input_data, use_gather_object)
        from accelerate.utils import recursively_apply

        # accelerate keeps the first `remainder` rows of all, which are cp rank 0's. Keep each cp rank's.
        copies: int = self.parallelism_config.non_data_parallel_size

        def cut(gathered: Tensor) -> Tensor:
            rows = len(gathered) // self.num_processes
            keep = [
                rank // copies * rows + row < state.remainder
                for rank in range(self.num_processes)
                for row in range(rows)
            ]
            return gathered[keep]

        return recursively_apply(cut, self.gather(input_data))

    return gather_for_metrics


def _all_tensors(data: Any) -> bool:
    """As accelerate asks it: what is no tensor is gathered as an object."""
    from accelerate.utils import recursively_apply

    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


# --- what a Trainer's user must know ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _warn_evaluation(transformers: Installed | None) -> None:
    if transformers is not None and transformers.older_than(TRAINER_EVALUATES_SINCE):
        warnings.warn(
            EvaluationWarning(
                "with context parallelism the Trainer of this transformers release reports an eval_loss that is cp_size times "
                "the true one (transformers #48167); training is right, and so is a trainer with a loss of its own (SFTTrainer)",
                f"{transformers}; {TRAINER_EVALUATES_SINCE} brought the repair",
                f"pip install 'transformers>={TRAINER_EVALUATES_SINCE}', or divide eval_loss by cp_size",
            ),
            stacklevel=3,
        )


@functools.cache
def _warn_prediction() -> None:
    warnings.warn(
        EvaluationWarning(
            "with context parallelism Trainer.predict() and compute_metrics get logits that are shards of the sequence, and "
            "each row once for every cp rank (transformers #48842)",
            "the Trainer asked for logits inside a context-parallel block",
            "trainer.preprocess_logits_for_metrics = lambda logits, labels: "
            "get_cp_context(trainer.accelerator).unshard([logits], [1])[0] makes every row whole and in order; with "
            "per_device_eval_batch_size=1 take predictions[::cp_size] and label_ids[::cp_size] to have each once",
        ),
        stacklevel=4,
    )


def _look_at_trainer(acc: Accelerator, frame: FrameType) -> None:
    """Warn or refuse by what the Trainer's frame, if it is one, has in hand: it knows what each buffer means."""
    inputs, step = frame.f_locals.get("inputs"), frame.f_code.co_name
    if step not in ("training_step", "prediction_step") or not isinstance(inputs, Mapping):
        return
    if frame.f_locals.get("prediction_loss_only") is False:
        _warn_prediction()
    looks = _looks.setdefault(acc, Counter())
    looks[step] += 1
    if looks[step] <= LOOKS:
        from . import batch

        batch.refuse(inputs)
