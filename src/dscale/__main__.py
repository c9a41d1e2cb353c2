"""python -m dscale: the same as `dscale`, for torchrun."""

from dscale.cli.main import run

run()
