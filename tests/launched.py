"""CPU processes: `accelerate launch -m mhla_hf.cli` as a user runs it, killed where a test wants it; and forks of a test."""

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
SETUPS = ROOT / "conversion" / "accelerate"


def command_of(place, setup, processes, script=None):
    """The line up to mhla_hf's own arguments. setup: None: no launcher; "ddp", or the name of a file of conversion/."""
    module = ["-m", "mhla_hf.cli"] if script is None else [script]
    if setup is None:
        return [sys.executable, *module]
    config = place / f"{setup}.yaml"
    if setup == "ddp":
        config.write_text("distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\nmixed_precision: 'no'\n")
    else:
        values = yaml.safe_load((SETUPS / config.name).read_text())
        config.write_text(yaml.safe_dump(values | {"mixed_precision": "no"}))
    options = ["--config_file", config, "--num_processes", processes, "--main_process_port", 0]
    return [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *options, *module]


def start(place, setup, processes, *arguments, script=None):
    """The command as a process group of its own, in `place`."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    line = list(map(str, (*command_of(place, setup, processes, script), *arguments)))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(line, cwd=place, env=env, start_new_session=True, **pipes)


def launch(place, setup, processes, *arguments, seconds=120, script=None):
    """(exit code, what was printed) of the whole command."""
    process = start(place, setup, processes, *arguments, script=script)
    try:
        text, _ = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            for victim in [process.pid, *ranks(process)]:
                os.kill(victim, signal.SIGKILL)
    return process.returncode, text


def ranks(process):
    """Process ids of the launcher's processes, in the order they were started."""
    return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def kill(place, setup, processes, until, one, *arguments, seconds=120, script=None):
    """kill -9 of one process or of everything as soon as `until()`; how many seconds the rest took to end."""
    process, limit = start(place, setup, processes, *arguments, script=script), time.monotonic() + seconds
    while not until() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.002)
    assert process.poll() is None and time.monotonic() < limit, process.communicate()[0]
    own = ranks(process)
    for victim in own[-1:] if one else [process.pid, *own]:  # the launcher's processes are groups of their own
        os.kill(victim, signal.SIGKILL)
    begun = time.monotonic()
    process.communicate(timeout=seconds)
    assert process.returncode != 0
    return time.monotonic() - begun


def compare(one, other, bound=1e-5):
    """Losses and norms of gradients, entry by entry, and weights of two finished runs are equal to `bound`."""
    histories = [json.loads((folder / "train.json").read_text())["history"] for folder in (one, other)]
    assert len(histories[0]) == len(histories[1])
    for a, b in zip(*histories, strict=True):
        for key in {"loss", "ce", "match", "accuracy", "grad_norm"} & set(a):
            assert abs(a[key] - b[key]) <= bound * abs(a[key]), (a["stage"], a["step"], key, a[key], b[key])
    pipeline = (one / "model_index.json").exists()
    file = "transformer/diffusion_pytorch_model.safetensors" if pipeline else "model.safetensors"
    first, second = (load_file(folder / file) for folder in (one, other))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.linalg.norm(value - second[name]) <= bound * torch.linalg.norm(value), name


def fork(function, count, *arguments):
    """`function(rank, *arguments)` in `count` processes that `torchrun` might have started; an error in one is raised."""
    listener = dist.TCPStore("127.0.0.1", 0, is_master=True)
    port = listener.port
    del listener
    everything = (function, count, port, arguments)
    torch.multiprocessing.start_processes(joined, everything, nprocs=count, start_method="fork")


def joined(rank, function, count, port, arguments):
    """What `fork` runs."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    store = dist.TCPStore("127.0.0.1", port, count, rank == 0, timeout=datetime.timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    function(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
