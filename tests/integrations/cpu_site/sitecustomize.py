"""What SGLang 0.5.14 and 0.5.16 lack to run on a CPU; put on the path of their processes by sglang_texts.py alone."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib import metadata
from types import ModuleType

META = "torchvision._meta_registrations"  # fails beside a torch it was not built for, and nothing here needs it
KERNELS = "sgl_kernel"  # of which 0.5.16 imports what its CPU package has


def _slots(module: ModuleType) -> None:
    """The slots of a block, which exist as a GPU kernel only."""
    import torch

    def assign(req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device):
        columns = start_offset.long()[:, None] + torch.arange(draft_token_num)
        return req_to_token[req_pool_indices.long()[:, None], columns].flatten().long()

    module.assign_extend_cache_locs_func = assign


def _float32(module: ModuleType) -> None:
    """SGLang's eager pass hands the drafter bfloat16 embeddings whatever its dtype is."""
    plain = module.DFlashDraftModel.forward

    def forward(self, input_ids, positions, forward_batch, input_embeds=None, **named):
        return plain(self, input_ids, positions, forward_batch, input_embeds.to(self.fc.weight.dtype), **named)

    module.DFlashDraftModel.forward = forward


def _any_device(module: ModuleType) -> None:
    """0.5.16 refuses DFLASH on any device but CUDA."""
    plain = module._handle_dflash

    def handle(server_args):
        device, server_args.device = server_args.device, "cuda"
        try:
            plain(server_args)
        finally:
            server_args.device = device

    module._handle_dflash = handle


MENDED = {
    "sglang.srt.speculative.dflash_worker_v2": _slots,
    "sglang.srt.models.dflash": _float32,
    "sglang.srt.arg_groups.speculative_hook": _any_device,
}
EMPTY = {META} if metadata.version("sglang") == "0.5.14" else {META, KERNELS}


def _kernel(name):  # type: ignore[no-untyped-def]
    """A kernel of the CPU package: one of the two that are called here; the others can be imported."""
    if not name.endswith("_cpu"):
        raise AttributeError(name)
    return {"assign_req_to_token_pool_cpu": _assign, "copy_all_layer_kv_cache_cpu": _copy}.get(name)


def _assign(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):  # type: ignore[no-untyped-def]
    """Slots that were allocated go to the rows of their requests."""
    at = 0
    for row, first, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, first:end] = out_cache_loc[at : at + end - first].to(req_to_token.dtype)
        at += end - first


def _copy(data_ptrs, strides, tgt_loc, src_loc):  # type: ignore[no-untyped-def]
    """A pool copies its first slot to itself when it is made."""
    assert tgt_loc.tolist() == src_loc.tolist()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name in EMPTY:
            return importlib.util.spec_from_loader(name, _Empty())
        if name not in MENDED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        assert spec is not None
        assert spec.loader is not None
        plain = spec.loader.exec_module

        def run(module: ModuleType) -> None:
            plain(module)
            MENDED[name](module)

        spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


class _Empty(importlib.abc.Loader):
    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == KERNELS:
            module.__getattr__ = _kernel  # type: ignore[method-assign]


sys.meta_path.insert(0, _Finder())

import torch  # noqa: E402

torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]
