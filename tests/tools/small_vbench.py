"""A stand-in for VBench in a separate Python interpreter. It computes a video's score from the size of its file."""

import json
import sys

PROMPTS = [
    {"prompt_en": "a cat walks", "dimension": ["temporal_flickering", "motion_smoothness"]},
    {"prompt_en": "a dog, running", "dimension": ["scene"], "auxiliary_info": {"scene": {"scene": {"scene": "park"}}}},
    {"prompt_en": "a red bus", "dimension": ["scene", "color"]},
    {"prompt_en": "a dog, running", "dimension": ["temporal_flickering"]},
]
STAND_IN = """
import json, os


class VBench:
    def __init__(self, device, full_info_dir, output_path):
        self.device, self.info, self.out = device, full_info_dir, output_path

    def evaluate(self, videos_path, name, dimension_list, mode):
        assert mode == "vbench_standard" and str(self.device) == "cpu"
        files = set(os.listdir(videos_path))
        assert all(file.endswith(".mp4") for file in files)
        names = [f"{entry['prompt_en']}-{index}.mp4" for entry in json.load(open(self.info)) for index in range(5)]
        sizes = {name: os.path.getsize(os.path.join(videos_path, name)) for name in names if name in files}
        results = [{"video_path": name, "video_results": sizes[name] % 89 / 100} for name in names if name in files]
        average = sum(result["video_results"] for result in results) / len(results)
        with open(os.path.join(self.out, f"{name}_eval_results.json"), "w") as file:
            json.dump({dimension_list[0]: [average, results]}, file)
"""


def make_python(folder):
    """Make an interpreter that imports the stand-in as vbench, and return its path."""
    (folder / "vbench").mkdir(parents=True)
    (folder / "vbench" / "__init__.py").write_text(STAND_IN)
    (folder / "vbench-0.1.5.dist-info").mkdir()
    (folder / "vbench-0.1.5.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vbench\nVersion: 0.1.5\n")
    (folder / "vbench" / "VBench_full_info.json").write_text(json.dumps(PROMPTS))
    (folder / "torch.py").write_text("def device(name):\n    return name\n")  # torch takes seconds to import
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)
