#!/usr/bin/env bash
# What the sdist and the wheel install, on a torch of your choice: tests/archives.sh 2.11.0.
# The environment, .venv-torch-VERSION, holds torch, NumPy, safetensors and pytest alone. The
# checkout is not on the path: copies of the tests are, of what they read, and of the
# application's reader of checkpoints.
set -euo pipefail
cd "$(dirname "$0")/.."
torch=${1:?got no version of torch, expected one: tests/archives.sh 2.11.0}
venv=$PWD/.venv-torch-$torch
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [ ! -e "$venv/ready" ]; then
    echo "torch $torch into $venv: 0.8 GB, or 5 GB with CUDA (minutes)"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install "torch==$torch" numpy safetensors pytest build
    touch "$venv/ready"
fi
PATH=$venv/bin:$PATH
rm -rf build/installed
mkdir -p build/installed
cp -r tests train benchmarks docs README.md pyproject.toml build/installed
python -m build --outdir build/installed/dist
cd build/installed
for archive in dist/*.tar.gz dist/*.whl; do
    pip install --force-reinstall --no-deps "$archive"
    pip check
    python -m pytest tests/library/test_guide.py
done
python -m marsopt.profile --model gpt2-small --rule mars-adamw
python -m pytest \
    tests/library/test_{rules,identities,golden,newton_schulz,against_torch,flat}.py \
    tests/library/test_{optimizer,changes_from_outside,saving}.py \
    tests/library/test_{torch_optim_contract,torch_suite}.py \
    tests/processes/test_{collectives,sharding,checkpoint}.py
