"""Run by the interpreter that has vbench, never imported here: where it is, and one dimension judged by it.

    PYTHON -c SOURCE info                                         prints a JSON object about the installation
    PYTHON -c SOURCE judge VIDEOS INFO OUT NAME DIMENSION DEVICE  writes OUT/NAME_eval_results.json

It knows nothing of mhla_hf and runs on a CPU too, which vbench's own command line does not.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys


def find_vbench():
    """Folder, version and prompts of the vbench that this interpreter has; SystemExit with one sentence without one."""
    found = importlib.util.find_spec("vbench")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("vbench is not installed for this interpreter: pip install vbench==0.1.5")
    folder = next(iter(found.submodule_search_locations))
    try:
        version = importlib.metadata.version("vbench")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return {"version": version, "prompts": os.path.join(folder, "VBench_full_info.json")}


def judge(videos, info, out, name, dimension, device):
    """Run one dimension of vbench on the videos that `info` names."""
    import torch
    from vbench import VBench

    bench = VBench(torch.device(device), info, out)
    bench.evaluate(videos_path=videos, name=name, dimension_list=[dimension], mode="vbench_standard")


if __name__ == "__main__":
    if sys.argv[1:] == ["info"]:
        print(json.dumps(find_vbench()))
    elif sys.argv[1:2] == ["judge"] and len(sys.argv) == 8:
        judge(*sys.argv[2:])
    else:
        raise SystemExit("expected: info, or judge VIDEOS INFO OUT NAME DIMENSION DEVICE")
