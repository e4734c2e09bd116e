"""Every code that cpcompat prints, in one table: what is seen, why, what to do, and where it was reported.

Errors and warnings carry a code, `diagnose` makes its findings of them, notes on torch's exceptions name them, and
docs/troubleshooting.md is this table as text (``python -m cpcompat.codes``). A code never changes its meaning.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

__all__ = ["CODES", "Code", "link", "troubleshooting"]

_HOMES = {
    "accelerate": "huggingface/accelerate",
    "Automodel": "NVIDIA-NeMo/Automodel",
    "axolotl": "axolotl-ai-cloud/axolotl",
    "LlamaFactory": "hiyouga/LlamaFactory",
    "Model-Optimizer": "NVIDIA/Model-Optimizer",
    "pytorch": "pytorch/pytorch",
    "SimpleTuner": "bghira/SimpleTuner",
    "torchtitan": "pytorch/torchtitan",
    "transformers": "huggingface/transformers",
    "trl": "huggingface/trl",
    "unsloth": "unslothai/unsloth",
}


@dataclass(frozen=True)
class Code:
    """One thing that goes wrong.

    Attributes:
        code: ``CP1xx`` finding the context, ``CP2xx`` buffers, batches and losses, ``CP3xx`` attention and models, ``CP4xx``
            versions, ``CP5xx`` ranks and numbers, ``CP6xx`` vendoring.
        title: a few words.
        symptom: what a user sees, with the exact words of an error where there is one.
        reason: why it matters.
        remedy: what to do.
        reports: public issues and pull requests, such as ``"accelerate #3856"``.
    """

    code: str
    title: str
    symptom: str
    reason: str
    remedy: str
    reports: tuple[str, ...] = ()


_TABLE = (
    # --- finding the context ---
    Code(
        "CP100",
        "An error without a code of its own",
        "A `CPError` that is none of the kinds below.",
        "It is the base of the family; `except CPError` catches them all.",
        "Read the message: it says what was seen and what to do.",
    ),
    Code(
        "CP101",
        "Context parallelism was not asked for",
        "Training runs, with the speed and the memory of a run without context parallelism; or `get_cp_context` raises "
        "`CPNotRequested`.",
        "accelerate reads `PARALLELISM_CONFIG_CP_SIZE` only where `ACCELERATE_USE_PARALLELISM_CONFIG=true` stands beside it, and "
        "says nothing otherwise: every rank then trains on the whole sequence.",
        "`Accelerator(parallelism_config=ParallelismConfig(cp_size=2))`, or `accelerate launch --use_parallelism_config "
        "--parallelism_config_cp_size 2`.",
        ("transformers #48663",),
    ),
    Code(
        "CP102",
        "The process group or the cp mesh does not exist yet",
        "`CPNotReady`, or `acc.torch_device_mesh` is None although `cp_size` is set.",
        "The mesh is cut out of the process group, which `Accelerator()` starts under a launcher.",
        "Start under torchrun or accelerate launch; make the Accelerator first, then call `get_cp_context(acc)`.",
    ),
    Code(
        "CP103",
        "The context could not be made",
        "`CreationFailed`, with the cause chained.",
        "Something replaced what accelerate or torch need, such as `scaled_dot_product_attention` by a function of another name.",
        "Read the cause; `python -m cpcompat verify` shows whether context parallelism works here at all.",
    ),
    Code(
        "CP104",
        "The context is stale",
        "`StaleContext`, after `destroy_process_group()` or `AcceleratorState._reset_state()`.",
        "A mesh over a destroyed group still answers `size()` and still shards; only its collectives fail, or hang.",
        "Make a new Accelerator after `init_process_group()`, and call `get_cp_context` with it.",
    ),
    Code(
        "CP105",
        "An argument contradicts the accelerator",
        "`Contradiction`.",
        "A value that was overridden silently would train with another topology than you think.",
        "Leave the argument out, or make the Accelerator with the other value.",
    ),
    Code(
        "CP106",
        "The installed release cannot do it",
        "`VersionTooOld`; or settings for context parallelism that an old accelerate does not read.",
        "accelerate has ParallelismConfig from 1.10 on; torch has a usable `context_parallel` from 2.6 on.",
        "Upgrade what the message names; with accelerate 1.9 and older call `get_cp_context(acc, cp_size=...)`.",
        ("accelerate #3626",),
    ),
    Code(
        "CP107",
        "Sequence parallelism was taken for context parallelism",
        "`sp_size` is above 1; accelerate has no context, and `get_cp_context` raises `SequenceParallel`.",
        "`sp_size` is DeepSpeed's Ulysses: it shards in the data loader and has no context at all. Together with `cp_size` it is "
        "refused by accelerate 1.13 and later, and silently wrong before.",
        "For context parallelism set `cp_size`, and leave `sp_size` at 1.",
        ("accelerate #3817",),
    ),
    Code(
        "CP108",
        "Another library owns context parallelism",
        "`ForeignOwner`, or a context whose `origin` is `delegated`.",
        "axolotl, unsloth, SimpleTuner and optimum-habana bring a context parallelism of their own. Two layers that both shard "
        "train on a shard of a shard.",
        "Use that library's own interface, or turn its context parallelism off.",
        ("axolotl #3498",),
    ),
    Code(
        "CP109",
        "The sizes do not multiply to the number of processes",
        "`ParallelismConfig total_size (2) does not match num_processes (8)` or `Mesh should not be bigger than default world "
        "size`, at the start of every rank.",
        "dp_replicate x dp_shard x cp x sp x tp must be the number of processes of all machines together.",
        "Change `dp_shard_size`, or the number of processes.",
    ),
    Code(
        "CP110",
        "Context parallelism without FSDP2",
        "`cp_size > 1 specified in the parallelism_config, but no fsdp_plugin was provided`, or `requires FSDP2, but the "
        "provided fsdp_plugin is using FSDP1`.",
        "On GPUs accelerate runs context parallelism together with FSDP2 only; FSDP1 and DeepSpeed know no cp mesh.",
        "`fsdp_version: 2` in the config, `FSDP_VERSION=2`, or `FullyShardedDataParallelPlugin(fsdp_version=2)`. For DDP set "
        "`ACCELERATE_ALLOW_CP_STANDALONE=true`.",
    ),
    Code(
        "CP111",
        "A setting is not understood",
        "A variable or an entry of the config has a value that accelerate cannot read.",
        "accelerate ends with a ValueError of `int()`, or falls back on a default.",
        "Sizes are whole numbers from 1 on; the rotate method is `allgather` or `alltoall`.",
    ),
    # --- buffers, batches, losses ---
    Code(
        "CP201",
        "A buffer cannot be sharded",
        "`BufferInvalid`. Without cpcompat: `IndexError: list index out of range` for an empty list, `cannot resize variables "
        "that require grad`, or silently corrupted tensors for two views of one.",
        "Buffers are changed in place. torch's own context overwrites what a view looks at, and up to 2.12 leaves buffers "
        "short after an error.",
        "See the message; every buffer is as it was. Views, expanded rows and an empty list are fine here.",
        ("pytorch #159634", "pytorch #170200", "Automodel #2931"),
    ),
    Code(
        "CP202",
        "The sequence cannot be cut into 2 x cp size chunks",
        "`LengthInvalid`. Without cpcompat: an AssertionError without text, and from torch 2.13 on another layout, or a hang.",
        "Each rank holds one chunk of the head and one of the tail, so that all have equal work.",
        "Pad to the length that the message names; `cp.batch` does it for you.",
        ("pytorch #159706", "pytorch #183968"),
    ),
    Code(
        "CP203",
        "A block inside a block",
        "`NestedContext`.",
        "Leaving the inner block of torch's own context switches the outer one off: attention is then silently local.",
        "Leave the first block before you enter another; `cp.disabled()` gives ordinary attention for a while.",
    ),
    Code(
        "CP204",
        "The ranks of one cp group hold different batches",
        "`RanksDiffer` on all ranks at the first entry. Without cpcompat: no error, and gradients that are off by 75 % and more.",
        "The ranks share one sequence. Where each brings its own, every rank's attention reads the keys of another text.",
        "`set_seed` before the loader is prepared, or `cp.broadcast_batch(batch)`; `CPCOMPAT_FINGERPRINT=always` compares "
        "at every entry.",
        ("SimpleTuner #2313", "LlamaFactory #10559", "accelerate #3626"),
    ),
    Code(
        "CP205",
        "A batch, or a value that goes with it, has the wrong form",
        "`BatchInvalid`.",
        "What belongs to a token must be cut with it; labels that are not are wrong at every border of a shard.",
        "See the message; it names the entry of the batch and the form that is needed.",
        ("transformers #36607", "transformers #37993"),
    ),
    Code(
        "CP206",
        "A batch says what context parallelism cannot express",
        "`BatchUnsupported`. Without cpcompat: the mask is dropped, and real tokens attend to padding or to another document.",
        "Context parallelism has one causal mask. Left padding, packed rows, pixels and encoders need another.",
        "Pad on the right; give each sample a row of its own. `cp.batch` and `patch()` look at what a batch says; a block "
        "over plain tensors has no names for them and cannot.",
        ("trl #6843", "accelerate #4177"),
    ),
    Code(
        "CP207",
        "The loss is divided by the wrong number of tokens",
        "`LossWarning`; or a loss that changes with cp_size, or NaN where all labels of a shard are ignored.",
        "Ranks hold unequally many labels, so that the mean of their means is not the mean.",
        "`cp.reduce_loss(loss_sum, num_tokens)` with this rank's own count.",
        ("axolotl #3026", "transformers #39648", "unsloth #4257"),
    ),
    Code(
        "CP208",
        "Backward or a recomputation ran outside the block",
        "`BackwardOutside`, with reentrant checkpointing. Otherwise torch itself says `one of the variables needed for gradient "
        "computation has been modified by an inplace operation`, or `CheckpointError: torch.utils.checkpoint: Recomputed "
        "values for the following tensors have different metadata` (or: `A different number of tensors was saved`). "
        "Without cpcompat, reentrant checkpointing is silent, and gradients are off by 20 %.",
        "After the block the buffers are whole again and attention is ordinary: what is computed a second time is another thing.",
        "Call `acc.backward(loss)` inside the block; keep checkpointed layers out of `cp.disabled()`, or wholly in it.",
        ("trl #4314",),
    ),
    Code(
        "CP209",
        "A loader may give the ranks of a cp group different batches",
        "`diagnose` names the loader; at the first entry CP204 follows.",
        "A shuffled loader without a common seed draws another order on every rank; an IterableDataset is dealt out to the ranks "
        "by accelerate's dispatcher; accelerate 1.9 and older know no cp ranks at all.",
        "`accelerate.utils.set_seed(...)` before `prepare()`, or `batch = cp.broadcast_batch(batch)` in the loop.",
        ("SimpleTuner #2313", "LlamaFactory #10559"),
    ),
    # --- attention and models ---
    Code(
        "CP301",
        "An attention call that context parallelism cannot compute",
        "`AttentionUnsupported`, naming the call's shapes, mask and dropout.",
        "A mask, dropout, cross-attention or a key-value cache has no meaning over shards.",
        "`attention_dropout` 0, `use_cache=False`, no mask; what has a sequence of its own goes inside `cp.disabled()`.",
        ("pytorch #141429",),
    ),
    Code(
        "CP302",
        "Layers that see less than the whole sequence",
        "`ModelUnsupported`. Without cpcompat, up to accelerate 1.14: silently trained as full causal attention.",
        "Sliding-window, chunked and linear attention are not full causal attention, and context parallelism knows nothing else.",
        "Sequences no longer than the window, a model of full attention layers, or no context parallelism.",
        ("accelerate #4177",),
    ),
    Code(
        "CP303",
        "No attention went through context parallelism, or a mask reaches attention",
        "`AttentionWarning`. Without cpcompat: nothing, and every rank attends to its own shard only.",
        "Only calls of `F.scaled_dot_product_attention` by that name are seen, and only masks passed by keyword can be dropped.",
        '`attn_implementation="sdpa"`; no mask in the call of the model; compare with `verify`.',
        ("axolotl #3173", "torchtitan #2808", "Automodel #2918", "accelerate #4177"),
    ),
    Code(
        "CP304",
        "The attention implementation is not sdpa",
        "Nothing, or CP303 at the end of the first block: each rank attends to its own shard.",
        "Flash attention of its own package, eager and flex attention never call `scaled_dot_product_attention`.",
        '`from_pretrained(..., attn_implementation="sdpa")`, or `model.set_attn_implementation("sdpa")`.',
        ("axolotl #3173",),
    ),
    Code(
        "CP305",
        "scaled_dot_product_attention was captured or replaced",
        "CP303, or nothing where other layers of the model are fine.",
        "`from torch.nn.functional import scaled_dot_product_attention` binds the function that stood there at import; what the "
        "block puts in its place is never called.",
        "Call it as `F.scaled_dot_product_attention`.",
        ("pytorch #152261",),
    ),
    Code(
        "CP306",
        "Attention dropout is on",
        "`AttentionUnsupported` at the first call in training.",
        "Each rank and each step of the ring would drop differently, forward and backward.",
        "`attention_dropout=0.0` in the model's config.",
    ),
    Code(
        "CP307",
        "Activation checkpointing is reentrant",
        "Nothing, as long as backward runs inside the block; else CP208.",
        "Reentrant checkpointing computes the layer again in the backward pass, with whatever attention stands there then.",
        'Backward inside the block; or `gradient_checkpointing_kwargs={"use_reentrant": False}`, which notices.',
        ("trl #4314",),
    ),
    Code(
        "CP308",
        "A plain tensor met a DTensor",
        "`got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling distributed operators!`",
        "torch's CP attention works on DTensors. Where no fused kernel takes the call (float32 or an old GPU) it falls to the "
        "math kernel, which mixes both; so does a sharded parameter that is used without its module.",
        "Use bfloat16 or float16 on a GPU with flash attention; on CPU use cpcompat's block, whose ring needs no DTensor. Call "
        "FSDP2 modules, not their parameters.",
        ("pytorch #147793", "torchtitan #3340"),
    ),
    Code(
        "CP309",
        "No kernel takes this attention call",
        "`No available kernel. Aborting execution.`",
        "Context parallelism needs a fused kernel: flash, memory-efficient or cuDNN. The math kernel cannot be sharded.",
        "bfloat16 or float16, a head size that the kernel takes, and no `sdpa_kernel(...)` that leaves only one.",
        ("pytorch #147793",),
    ),
    Code(
        "CP310",
        "torch cannot shard this operator",
        "`Operator aten... does not have a sharding strategy registered.`",
        "torch's CP attention serves the fused GPU kernels only; the CPU kernel, and any other operator on DTensors, is refused.",
        "On CPU run through `get_cp_context`; elsewhere let only attention see the cp mesh.",
        ("pytorch #147793",),
    ),
    Code(
        "CP311",
        "Attention that is not causal, with load balancing",
        "`Load balancing requires is_causal=True.`",
        "Head and tail chunks balance causal work; torch's ring cannot do anything else in that order.",
        "Pass `is_causal=True`; on CPU, cpcompat's ring does non-causal attention.",
        ("pytorch #141429",),
    ),
    Code(
        "CP312",
        "A tensor of the whole sequence met a shard",
        "`The size of tensor a (16) must match the size of tensor b (32)`, where one is cp size times the other.",
        "Inside the block the buffers are this rank's shard. A mask, bias or position that was not among them is still whole.",
        "Put it among the buffers, or index it with `cp.positions(length)`; a mask leave out.",
        ("accelerate #4177",),
    ),
    # --- versions ---
    Code(
        "CP400",
        "A warning without a code of its own",
        "A `CPWarning` that is none of the kinds below.",
        "It is the base of the warnings; a filter for `CPWarning` catches them all.",
        "Read the message: it says what was seen and what to do.",
    ),
    Code(
        "CP401",
        "A release newer than any that was tried",
        "`UntestedVersion`, once.",
        "Nothing is known to be wrong; nobody has compared the numbers.",
        "`python -m cpcompat verify` compares them.",
    ),
    Code(
        "CP402",
        "The Trainer evaluates wrongly under context parallelism",
        "`EvaluationWarning`. `eval_loss` is cp_size times the true one; `predict` returns shards, and rows twice.",
        "transformers before 5.16 adds the losses of the cp ranks; logits stay sharded on every release.",
        "`pip install 'transformers>=5.16.0'`; for logits `cp.unshard` or `cp.gather`, and `patch()` for rows that are gathered.",
        ("transformers #48167", "transformers #48663", "transformers #48842"),
    ),
    Code(
        "CP403",
        "This accelerate makes no context",
        "`AttributeError: 'Accelerator' object has no attribute '_cp_context'`.",
        "1.12.0 leaves `_prepare_cp` at once; context, rotate method and mask hooks are all lost. Every release makes the "
        "context in `prepare()` only, never in `prepare_model()` for evaluation.",
        "`get_cp_context(acc)`, or `patch()` where the loop is somebody else's.",
        ("accelerate #3856", "accelerate #3867", "accelerate #3858", "Model-Optimizer #745", "Model-Optimizer #2086"),
    ),
    Code(
        "CP404",
        "This torch's own context has a known fault",
        "2.10.0: position ids made by `expand` are in the wrong order. Up to 2.12: an exception leaves attention patched and "
        "buffers short.",
        "cpcompat shards and restores by itself and is not concerned; a loop that calls torch's context directly is.",
        "Run through `get_cp_context` or `patch()`, or use torch 2.13 or later.",
        ("pytorch #170200",),
    ),
    Code(
        "CP405",
        "A package under another name",
        "Nothing.",
        "A fork brings the import name; which fixes it has, its version does not tell.",
        "`python -m cpcompat verify` asks what it does.",
    ),
    # --- ranks and numbers ---
    Code(
        "CP501",
        "A rank failed",
        "`RankFailed`, with the traceback of the first rank that failed.",
        "A rank raised, died or did not end in time; the others were ended too.",
        "Read the traceback in the message.",
    ),
    Code(
        "CP502",
        "What context parallelism computes differs from the same without it",
        "A row of `verify` has failed.",
        "Training with context parallelism here gives plausible, wrong numbers.",
        "Do not train; report the table that `python -m cpcompat verify` prints.",
    ),
    Code(
        "CP503",
        "A rank that this one was waiting for is gone",
        "In a block, `RuntimeError` with `Connection closed by peer`, `Connection reset by peer` or `Broken pipe`.",
        "Its process ended: an exception on that rank, a crash, or the system's memory killer (exit code -9, signal 9).",
        "Read that rank's own log, which has the cause; this rank's error is its consequence. The group cannot be used again.",
    ),
    Code(
        "CP504",
        "A rank that this one was waiting for did not come in time",
        "In a block, `RuntimeError` with `Timed out waiting`, or `Application timeout caused pair closure`.",
        "Each attention call needs every rank of the cp group. That rank hangs, is much slower, or left the block by an "
        "exception that its program caught (out of memory, a bad sample), so that the ranks are at different batches.",
        "Read that rank's log. An exception that is caught must be acted on by all ranks of the cp group; "
        "`CPCOMPAT_FINGERPRINT=always` makes a refusal at the entry one on every rank.",
    ),
    # --- vendoring ---
    Code(
        "CP601",
        "A copy cannot be made or checked",
        "`VendorRefused`, from `python -m cpcompat vendor`.",
        "The name is none, files of the copy were edited, or what stands there was not made by `vendor`. Nothing was touched.",
        "Read the message; `--force` overwrites edited files.",
    ),
)

CODES: dict[str, Code] = {row.code: row for row in _TABLE}


def link(report: str) -> str:
    """The address of a report.

    Args:
        report: such as ``"accelerate #3856"``.
    """
    project, _, number = report.partition(" #")
    return f"https://github.com/{_HOMES[project]}/issues/{number}"


_HEAD = """\
# Troubleshooting

One section for each code that cpcompat prints: in errors and warnings, in notes on torch's own exceptions, in the findings of
`python -m cpcompat doctor` and `cpcompat.diagnose`, and in the rows of `verify`. Search for the code, or for the words of an
error.

<!-- made by `python -m cpcompat.codes`; edit the table there -->
"""


def troubleshooting() -> str:
    """The table as Markdown: docs/troubleshooting.md."""
    parts = [_HEAD]
    for row in _TABLE:
        links = ", ".join(f"[{report}]({link(report)})" for report in row.reports)
        parts.append(
            f"## {row.code}: {row.title}\n\n**What you see.** {row.symptom}\n\n**Why.** {row.reason}\n\n"
            f"**What to do.** {row.remedy}\n" + (f"\n**Reported as** {links}\n" if links else "")
        )
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(troubleshooting())
