"""What SGLang 0.5.14 lacks to run on a CPU; put on the path of its processes by sglang_texts.py and nothing else."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from types import ModuleType

META = "torchvision._meta_registrations"  # fails beside a torch it was not built for, and nothing here needs it


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


MENDED = {"sglang.srt.speculative.dflash_worker_v2": _slots, "sglang.srt.models.dflash": _float32}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name == META:
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
        return None


sys.meta_path.insert(0, _Finder())

import torch  # noqa: E402

torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]
