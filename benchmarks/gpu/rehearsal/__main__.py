"""The GPU path, rehearsed without a GPU: steps of MARS over fake CUDA tensors are lowered
to Triton, and every kernel over stacks is compiled for an H100. Nothing is run.

    python -m benchmarks.gpu.rehearsal [--rules RULE ...] [--corrections ...]
        [--models MODEL ...] [--dtypes ...] [--no-binaries] [--out FOLDER] [--json FILE]

Needed is Triton beside torch: `make gpu-rehearsal` installs it apart. What has been
rehearsed already is read from --out, as long as no source has changed; a fault ends in
an exit status of 1.
"""
