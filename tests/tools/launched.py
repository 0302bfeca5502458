"""Start CPU processes: `accelerate launch -m mhla_hf.cli.main`, which may be killed, forks of a test, or a server."""

import contextlib
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

from mhla_hf.cli.main import main

ROOT = Path(__file__).parents[2]
SETUPS = ROOT / "conversion" / "accelerate"


def command_of(place, setup, processes, script=None):
    """Return the command line up to the arguments of mhla_hf, or of `script`, with the launcher's configuration in `place`.

    `setup` is "ddp", the name of a file of `conversion/accelerate`, or None for no launcher.
    """
    module = ["-m", "mhla_hf.cli.main"] if script is None else [script]
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
    """Start a command in `place`, in a new process group; see `command_of`."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = list(map(str, (*command_of(place, setup, processes, script), *arguments)))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=place, env=env, start_new_session=True, **pipes)


def launch(place, setup, processes, *arguments, seconds=120, script=None):
    """Run a command to its end, and return its exit code and output; see `command_of`."""
    process = start(place, setup, processes, *arguments, script=script)
    try:
        text, _ = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            for pid in [process.pid, *ranks(process)]:
                os.kill(pid, signal.SIGKILL)
    return process.returncode, text


def fork_launched(place, setup, count, *arguments):
    """Run mhla_hf in `count` forks of this process, each with the environment that `accelerate launch` would give it."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    options = launch_command_parser().parse_args(list(map(str, command_of(place, setup, count)[4:])))
    environment = prepare_multi_gpu_env(_validate_launch_command(options)[0])

    def run_main(rank):
        os.environ.update(environment)
        os.chdir(place)
        assert main(list(arguments)) == 0

    fork(run_main, count)


def ranks(process):
    """Return the process ids of the launcher's processes, in the order in which they were started."""
    if not Path("/proc").exists():
        pytest.skip("the children of a process are read in /proc, which this system lacks")
    return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def kill(place, setup, processes, is_time, last_only, *arguments, seconds=120, script=None):
    """Kill a command once `is_time()`, or only its last process, and return the seconds that the others took to end."""
    process = start(place, setup, processes, *arguments, script=script)
    deadline = time.monotonic() + seconds
    while not is_time() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
    pids = ranks(process)
    for pid in pids[-1:] if last_only else [process.pid, *pids]:  # each process of the launcher has its own group
        os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    process.communicate(timeout=seconds)
    assert process.returncode != 0
    return time.monotonic() - killed_at


@contextlib.contextmanager
def serving(command, path="health", **options):
    """Run the command that `command(port)` returns, and yield the address of its server as soon as it answers at `path`."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    server = subprocess.Popen(command(port), start_new_session=True, **options)
    try:
        for _ in range(480):  # at most eight minutes
            assert server.poll() is None
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://localhost:{port}/{path}", timeout=5)
                break
            time.sleep(1)
        yield f"http://localhost:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def ask(address, **body):
    """Return what a server answers to a request, as JSON; the list of its events if it is a stream."""
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        text = answer.read().decode()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return events or json.loads(text)


def compare(one, other, bound=1e-5):
    """Check that two finished runs have the same losses, gradient norms, and weights."""
    histories = [json.loads((folder / "train.json").read_text())["history"] for folder in (one, other)]
    assert len(histories[0]) == len(histories[1])
    for a, b in zip(*histories, strict=True):
        for key in {"loss", "ce", "match", "accuracy", "grad_norm"} & set(a):
            assert abs(a[key] - b[key]) <= bound * abs(a[key]), (a["stage"], a["step"], key, a[key], b[key])
    files = [file for name in ("model.safetensors", "transformer*/*.safetensors") for file in one.glob(name)]
    assert files
    for file in files:
        first, second = (load_file(folder / file.relative_to(one)) for folder in (one, other))
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert torch.linalg.norm(value - second[name]) <= bound * torch.linalg.norm(value), name


def fork(function, count, *arguments):
    """Run `function(rank, *arguments)` in `count` processes as `torchrun` does, and raise their errors."""
    listener = dist.TCPStore("127.0.0.1", 0, is_master=True)
    port = listener.port
    del listener

    def joined(rank):
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        store = dist.TCPStore("127.0.0.1", port, count, rank == 0, timeout=datetime.timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
        function(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()

    torch.multiprocessing.start_processes(joined, nprocs=count, start_method="fork")
