"""Entry point `sglang.srt.plugins`: makes DSCALE known to SGLang, in every one of its processes.

SGLang logs a plug-in that fails and goes on without it. Then no process knows the name DSCALE, so a server that was
asked for it ends with "Unknown speculative algorithm": it never comes up as plain DFLASH or without speculation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dscale.config import InputError, require
from dscale.integrations.sglang import compat

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

ALGORITHM = "DSCALE"


def register() -> None:
    """Called by SGLang: the algorithm, the attention backend, and two places that look for DFLASH by its name."""
    compat.check_version()
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    if get_spec(ALGORITHM) is not None:  # two installations of the plug-in
        return
    add_attention_backend_choices(["dscale"])
    register_attention_backend("dscale")(_attention)
    algorithm = SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=_algorithm_class())
    algorithm(_worker)
    HookRegistry.register("sglang.srt.speculative.dflash_utils.validate_dflash_request", _refuse, HookType.AFTER)
    HookRegistry.register("sglang.srt.speculative.spec_utils.spec_need_hidden_states", _no_hidden, HookType.AFTER)
    barrier = "sglang.srt.managers.scheduler.Scheduler._apply_war_barrier"
    HookRegistry.register(barrier, _hold_back, HookType.AFTER)


def _attention(runner: Any) -> Any:
    from dscale.integrations.sglang import attention

    return attention.build(runner)


def _worker(server_args: ServerArgs) -> type:
    from dscale.integrations.sglang.worker import DScaleWorker

    return DScaleWorker


def _refuse(error: str | None, request: Any, *_: Any) -> str | None:
    """A message for requests that cannot be served losslessly."""
    from dscale.integrations.sglang.verify import refusal

    return error or (refusal(request) if _is_served() else None)


def _no_hidden(needed: bool, server_args: ServerArgs | None = None) -> bool:
    """Nothing but tokens and lengths passes from a step to the next, as with DFLASH."""
    return needed and not _is_served(server_args)


def _hold_back(result: None, scheduler: Any) -> None:
    """See fence.py: where the host does not wait for a step, the scheduler's stream must.

    0.5.16 lets it go on once a captured pass has copied its batch; this backend reads the request table until the end.
    """
    if getattr(scheduler.model_worker, "ahead", False):
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)


def _is_served(server_args: ServerArgs | None = None) -> bool:
    from sglang.srt.server_args import get_global_server_args

    return (server_args or get_global_server_args()).speculative_algorithm == ALGORITHM


def prepare(server_args: ServerArgs) -> None:
    """What DFLASH asks of the arguments; then this backend verifies, and prompts keep the one that was chosen."""
    from dscale.integrations.sglang.settings import Settings

    settings = Settings.read()
    waits = settings.ahead == 1 or not compat.newer()
    require(waits, "ahead: 0; the scheduler of SGLang 0.5.16 never waits for a step, allowed is 1")
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    SpeculativeAlgorithm.DFLASH.handle_server_args(server_args)
    settings.rows(int(server_args.speculative_num_draft_tokens))
    compat.assign(
        server_args,
        prefill_attention_backend=compat.prompts_backend(server_args),
        decode_attention_backend="dscale",
        speculative_attention_mode="decode",
        speculative_draft_attention_backend="triton",  # a name the DFLASH worker takes; see DScaleWorker
    )
    if server_args.enable_multi_layer_eagle or server_args.speculative_draft_window_size is not None:
        raise InputError("DSCALE: --enable-multi-layer-eagle and --speculative-draft-window-size are not supported")


def _algorithm_class() -> type:
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class DScaleAlgorithm(CustomSpecAlgo):
        """Taken for DFLASH wherever SGLang asks, but for the rows a target verifies."""

        def is_dflash(self) -> bool:
            return True

        def is_dflash_family(self) -> bool:
            return True

        def supports_target_verify_for_draft(self) -> bool:
            return True

        def need_topk(self) -> bool:
            return False

        def carries_draft_hidden_states(self) -> bool:
            return False

        def create_future_map(
            self, device: Any, req_to_token_pool: Any, needs_cpu_seq_lens: bool = True, *further: Any, **named: Any
        ) -> Any:
            from sglang.srt.managers.overlap_utils import FutureMap

            return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, *further, **named)

        def handle_server_args(self, server_args: ServerArgs) -> None:
            prepare(server_args)

        def get_num_tokens_per_bs_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
            from dscale.integrations.sglang.settings import Settings

            return num_draft_tokens if is_draft_worker else Settings.read().rows(num_draft_tokens)

        get_num_tokens_per_req_for_target_verify = get_num_tokens_per_bs_for_target_verify  # its name in 0.5.16

    return DScaleAlgorithm
