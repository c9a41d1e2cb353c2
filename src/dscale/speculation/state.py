"""What a decode step reads and writes: models with their caches, and one row of device state per running request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dscale.config import CACHE_DTYPES, PAGE_SIZE, DecoderConfig, EngineConfig, SamplingParams, require
from dscale.kernels import triton
from dscale.kernels.attention import AttentionOptions
from dscale.layers.ranks import ALONE, Ranks
from dscale.layers.rotary import rotary_table
from dscale.models.decoder import Target
from dscale.models.drafter import Drafter
from dscale.speculation.edits import LogitEdits
from dscale.speculation.sampling import RowParams
from dscale.speculation.simulated import Simulation
from dscale.speculation.transfer import place

MAX_END_TOKENS = 16  # end and stop tokens a request may have on the device


class CacheTypes(NamedTuple):
    """Dtypes of the keys and values of target and drafter."""

    target: torch.dtype
    draft: torch.dtype

    @classmethod
    def of(cls, config: EngineConfig, target: Target) -> CacheTypes:
        """As configured; auto is the dtype of the target's rows, which are the drafter's too. InputError for a GPU
        whose kernels know no eight bits."""
        for name in ("kv_cache_dtype", "draft_kv_cache_dtype"):
            given = getattr(config, name)
            if given != "auto" and target.embedding.is_cuda:
                have = torch.cuda.get_device_capability(target.embedding.device)
                require(
                    have >= (8, 9), f"{name}: {given} needs compute capability 8.9; this GPU has {have[0]}.{have[1]}"
                )
        own = target.embedding.dtype
        return cls(*(CACHE_DTYPES.get(one, own) for one in (config.kv_cache_dtype, config.draft_kv_cache_dtype)))

    def page_bytes(self, target: DecoderConfig, drafter: DecoderConfig | None) -> int:
        """Bytes of one page of both caches."""
        kinds = [(target, self.target)] + ([(drafter, self.draft)] if drafter is not None else [])
        numbers = 2 * PAGE_SIZE
        return sum(numbers * c.num_layers * c.num_kv_heads * c.head_dim * kind.itemsize for c, kind in kinds)


@dataclass
class Models:
    """Target and drafter with rotary tables and paged caches [layers, 2, pages, kv, page, d] under one page table.

    ranks: those that share them; a rank's caches hold its own key/value heads. reader: the target whose head reads the
    drafter's rows, where that is not the very target (models/fp8.py).
    """

    target: Target
    target_table: Tensor
    target_cache: Tensor
    drafter: Drafter | None = None
    draft_table: Tensor | None = None
    draft_cache: Tensor | None = None
    attention: AttentionOptions = field(default_factory=AttentionOptions)
    ranks: Ranks = ALONE
    reader: Target | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs the drafter reads; none without a drafter."""
        return self.drafter.config.taps if self.drafter is not None else ()

    @classmethod
    def allocate(
        cls,
        target: Target,
        drafter: Drafter | None,
        num_pages: int,
        positions: int,
        types: CacheTypes | None = None,
    ) -> Models:
        """Caches of num_pages pages and rotary tables for `positions` positions, on the target's device; types None:
        the caches have the target's dtype."""
        device, own = target.embedding.device, target.embedding.dtype
        types = types or CacheTypes(own, own)

        def cache(config: DecoderConfig, dtype: torch.dtype) -> Tensor:
            shape = (config.num_layers, 2, num_pages, config.num_kv_heads, PAGE_SIZE, config.head_dim)
            return torch.zeros(shape, dtype=dtype, device=device)

        def table(config: DecoderConfig) -> Tensor:
            return rotary_table(config.rope, config.head_dim, positions, device)

        decoder = target.config.decoder
        models = cls(target, table(decoder), cache(decoder, types.target), ranks=target.stack.ranks)
        if drafter is not None:
            models.drafter = drafter
            models.draft_table = table(drafter.config.decoder)
            models.draft_cache = cache(drafter.config.decoder, types.draft)
        return models


class DeviceState:
    """Per-request device tensors; the last row is scratch, for inactive lanes.

    page_table int32 [rows, pages]; length int64 [rows], committed tokens; anchor int64 [rows], the token at position
    `length`; remaining int64 [rows], output tokens left; initial bool [rows], no decode step was made yet; end_ids
    int64 [rows, MAX_END_TOKENS], unused ones -1; sampling parameters [rows].
    """

    def __init__(self, max_requests: int, max_pages: int, device: torch.device | str = "cpu") -> None:
        rows = max_requests + 1

        def integers(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=device)

        self.page_table = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)
        self.length, self.anchor, self.seed = integers(rows), integers(rows), integers(rows)
        self.remaining = integers(rows, fill=1 << 40)
        self.end_ids = integers(rows, MAX_END_TOKENS, fill=-1)
        self.temperature = torch.zeros(rows, device=device)
        self.top_k = integers(rows)
        self.top_p = torch.ones(rows, device=device)
        self.min_p = torch.zeros(rows, device=device)
        self.initial = torch.zeros(rows, dtype=torch.bool, device=device)
        self.edits: dict[int, LogitEdits] = {}
        self._sampling: dict[int, tuple[float, ...]] = {}  # what `admit` wrote last to a row, its seed aside
        self.simulation: Simulation | None = None  # what is accepted, where that is made up

    @property
    def scratch_row(self) -> int:
        """The row that inactive lanes point to."""
        return self.length.shape[0] - 1

    def admit(self, row: int, params: SamplingParams, seed: int, end_ids: Sequence[int]) -> None:
        """Sampling parameters of a request that starts on this row; most are like those of the row's last request."""
        # fill_ passes its number to the kernel; an assignment copies it from the host and waits for that
        self.seed[row].fill_(seed)
        sampling = (params.temperature, params.top_k, params.top_p, params.min_p, *end_ids)
        if self._sampling.get(row) == sampling:
            return
        self._sampling[row] = sampling
        self.temperature[row].fill_(params.temperature)
        self.top_k[row].fill_(params.top_k)
        self.top_p[row].fill_(params.top_p)
        self.min_p[row].fill_(params.min_p)
        self.end_ids[row].fill_(-1)
        if end_ids:
            self.end_ids[row, : len(end_ids)] = place(list(end_ids), torch.int64, self.end_ids.device)

    def set_pages(self, row: int, pages: Sequence[int], start: int = 0) -> None:
        """Pages of a request from index `start` on."""
        fresh = torch.tensor(pages[start:], dtype=torch.int32)
        self.page_table[row, start : len(pages)] = fresh.to(self.page_table.device)

    def set_page_entries(self, rows: Sequence[int], columns: Sequence[int], pages: Sequence[int]) -> None:
        """page_table[rows, columns] = pages, for entries of any requests at once."""
        entries = place([rows, columns, pages], torch.int64, self.page_table.device)
        self.page_table[entries[0], entries[1]] = entries[2].int()

    def set_anchor(self, row: int, length: int, anchor: int, remaining: int, initial: bool) -> None:
        """Committed length, the token that follows it, how many output tokens are left, and whether none was made."""
        self.length[row].fill_(length)
        self.anchor[row].fill_(anchor)
        self.remaining[row].fill_(remaining)
        self.initial[row].fill_(initial)

    def row_params(self, lanes: Tensor, lane_of_row: Tensor, positions: Tensor) -> RowParams:
        """How the rows [M] of a step are sampled: lane_of_row [M] int64, and their own positions [M] int64."""
        temperature, top_k, top_p, min_p, seed = self.temperature, self.top_k, self.top_p, self.min_p, self.seed
        if triton.usable(lanes):
            from dscale.kernels.triton import sample

            return RowParams(*sample.row_params(lanes, lane_of_row, positions, temperature, top_k, top_p, min_p, seed))
        row = lanes[lane_of_row]
        return RowParams(temperature[row], top_k[row], top_p[row], min_p[row], seed[row], positions + 1)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Cache slots of positions [...] of state rows [...], of shapes that broadcast."""
        pages = self.page_table[rows, positions // PAGE_SIZE].long()
        return pages * PAGE_SIZE + positions % PAGE_SIZE
