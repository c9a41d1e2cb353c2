"""SGLang's plug-in: `--speculative-algorithm DSCALE` runs the method of this project on SGLang (docs/sglang.md).

plugin.py registers it, settings.py says what can be set, worker.py is the decode step on SGLang's objects, attention.py
the attention backend, compat.py what differs between SGLang's versions, launch.py starts a server for `dscale serve
--engine sglang`. Kernels and policies are the project's own; what is here turns SGLang's objects into their arguments.
"""
