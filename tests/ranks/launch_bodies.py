"""Bodies for the tests of the launcher, most of which misbehave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist


def total(x):
    value = torch.tensor(float(x + dist.get_rank()))
    dist.all_reduce(value)
    return value.item()


def facts():
    return {
        "pid": os.getpid(),
        "rank": dist.get_rank(),
        "env": {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        "word": os.environ.get("CPCOMPAT_WORD"),
        "threads": torch.get_num_threads(),
        "draw": torch.rand(1).item(),
        "cwd": os.getcwd(),
        "started": os.environ.get("TORCHELASTIC_RUN_ID"),
    }


def pid():
    return os.getpid()


def on(rank, kind, *args):
    """Do something bad on one rank; the others wait for it in a collective."""
    if dist.get_rank() == rank:
        kind(*args)
    dist.barrier()


def alone(rank, kind, *args):
    """Do something bad on one rank; the others just return."""
    return kind(*args) if dist.get_rank() == rank else None


def boom(text="boom"):
    raise ValueError(text)


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.hold = lambda: None


class TwoArguments(Exception):
    """Pickles, but cannot be read back."""

    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


def locked():
    raise Locked("no pickle")


def two_arguments():
    raise TwoArguments(1, 2)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def leave(code=0):
    os._exit(code)


def quit_politely():
    sys.exit(3)


def hang():
    while True:
        time.sleep(0.1)


def give_lambda():
    return lambda: None


def talk(text):
    print(f"python {text}")
    os.write(2, f"raw {text}\n".encode())
    subprocess.run([sys.executable, "-c", f"print('child {text}')"], check=True)


def talk_and_boom():
    for line in range(60):
        print(f"line {line}")
    boom()


def grandchild():
    """Leave a process behind and tell its pid; then hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return child.pid


def grandchild_and_hang(path):
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            file.write(f"{os.getpid()} {grandchild()}")
    hang()


def destroy_group():
    dist.destroy_process_group()


def use_accelerate():
    """Accelerator states must start anew in every call, on the same group."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    assert not PartialState._shared_state
    assert not AcceleratorState._shared_state
    acc = Accelerator(cpu=True, gradient_accumulation_steps=2)
    return acc.num_processes, acc.process_index, acc.device.type, str(acc.distributed_type), dist.get_backend()


def tensor():
    return torch.full((3,), float(dist.get_rank()))


def big():
    return b"x" * 5_000_000


def die_later():
    import threading

    threading.Timer(0.05, os._exit, [1]).start()


def workers():
    """A body may start processes of its own."""
    data = torch.utils.data.DataLoader(torch.arange(4), num_workers=1)
    return [int(x) for x in data]


class OnlyThere:
    """Pickles on a rank, but cannot be read in the parent."""

    def __reduce__(self):
        return _only_on_ranks, (os.getpid(),)


def _only_on_ranks(pid):
    if pid != os.getpid():
        raise LookupError("not on this process")


def give_only_there():
    return OnlyThere()
