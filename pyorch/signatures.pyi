# Written by `python -m scripts.write_signatures` from the options in pyorch/settings/settings.py, for editors.

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyorch.llama import interception
from pyorch.llama.model import Model
from pyorch.runtime.callbacks import Source
from pyorch.settings.budget import Budget
from pyorch.settings.mirrors import Mirrors
from pyorch.settings.pools import Pools
from pyorch.settings.prefetch import Prefetch
from pyorch.settings.reads import Reads
from pyorch.settings.substitution import Substitution

def load(
    path: str | os.PathLike[str],
    budget: Budget | int | str = "auto",
    *,
    n_batch: int | None = None,
    managed: bool = False,
    placed: bool = False,
    source: Source | None = None,
    use_extra_bufts: bool = True,
    verbose: bool = False,
    policy: str | None = None,
    prefetch: str | Prefetch = "auto",
    reads: str | Reads = "auto",
    mirror: str | Path | Sequence[str | Path] | Mirrors | None = None,
    direct_io: bool = True,
    packed: bool = True,
    pools: str | Pools | None = None,
    recovery: str = "kernels",
    kernels: str = "auto",
    device: str = "none",
    vram_budget: int | str | Budget = "auto",
    device_misses: str | None = None,
    device_ahead: int = 0,
    n_ctx: int = 0,
    n_ubatch: int = 0,
    n_threads: int = 0,
    cpus: str = "auto",
    maps: str | Path | None = None,
    warm: bool = True,
    tuned: str | Path | None = None,
    substitution: str | Substitution | None = None,
    buddies: Any = None,
    speculate: bool = False,
    n_gpu_layers: int = ...,
    split_mode: int = ...,
    main_gpu: int = ...,
    tensor_split: Any = ...,
    vocab_only: bool = ...,
    use_mmap: bool = ...,
    use_mlock: bool = ...,
    kv_overrides: Any = ...,
    seed: int = ...,
    n_threads_batch: int | None = ...,
    rope_scaling_type: int | None = ...,
    pooling_type: int = ...,
    attention_type: int = ...,
    rope_freq_base: float = ...,
    rope_freq_scale: float = ...,
    yarn_ext_factor: float = ...,
    yarn_attn_factor: float = ...,
    yarn_beta_fast: float = ...,
    yarn_beta_slow: float = ...,
    yarn_orig_ctx: int = ...,
    logits_all: bool = ...,
    embedding: bool = ...,
    offload_kqv: bool = ...,
    flash_attn: bool = ...,
    op_offload: bool | None = ...,
    swa_full: bool | None = ...,
    no_perf: bool = ...,
    last_n_tokens_size: int = ...,
    lora_base: str | None = ...,
    lora_scale: float = ...,
    lora_path: str | None = ...,
    numa: Any = ...,
    chat_format: str | None = ...,
    chat_handler: Any = ...,
    draft_model: Any = ...,
    tokenizer: Any = ...,
    type_k: int | None = ...,
    type_v: int | None = ...,
    spm_infill: bool = ...,
) -> Model:
    """Loads a GGUF whose experts may occupy at most `budget`.

    Args:
        path: The file, or "hf:ORG/NAME[:QUANT|/FILE]" for a file of the Hugging Face hub, downloaded if needed.
        budget: "auto" (the memory that the limit leaves; it follows free memory while no lossy option is on), a share
            of the experts such as "40%", a size such as "1.5GiB" or "800MB", or bytes.
        n_batch: Tokens of one call of llama_decode. Default: the widest n_ubatch.
        managed: Make an engine, to observe and control experts, even if the whole model fits on a device, where
            llama.cpp would keep it.
        placed: Other servers will compute experts (Engine.connect, Engine.set_placement), as a share requires.
        source: Reads in place of the file, see Engine.
        use_extra_bufts: Repack weights of some types for faster kernels, dense ones and experts, as llama.cpp does.
        verbose: Print the log of llama.cpp.
        policy: eviction policy: lru, lfu, finemoe or learned (default: learned)
        prefetch: predictor of the experts to prefetch while decoding: none, auto, or
            NAME[:DISTANCE:PRECISION] of none, quasi-hidden, hybrid or expert-map
        reads: how experts are read: auto, or READER[:DEPTH:SIZE] such as io_uring:8:512KiB or threads:4:4MiB
        mirror: read also from this copy of the model on another disk, or from the copy in this folder
        direct_io: False: read through the page cache
        packed: False: read the model even if it has a pack
        pools: shares of memory for the forms of a compressed pack: full, compressed, signs and mantissas,
            exponents (default: MODEL.plan.json, else planned)
        recovery: order of recovery from a compressed pack: kernels (by matrix), affinity (by expert),
            exponents-first (the paper's)
        kernels: order of experts in memory: auto, plain, repacked, or stock (llama.cpp's)
        device: compute dense layers, and experts in their memory, on these devices: none, auto (GPUs that are
            faster than the processor), names such as CUDA0, or rpc:HOST:PORT
        vram_budget: memory of the devices for experts: a share such as 60%, a size such as 6GiB, or auto: the
            rest
        device_misses: who computes experts that the devices lack: the processor, or the device after an
            upload (default: the faster one, as measured; processor for rpc:)
        device_ahead: upload up to N predicted experts of a layer ahead; needs a predictor in --prefetch
            (default: 0)
        n_ctx: context of N tokens, rounded up to a multiple of 256 (default: as trained, at most 4096)
        n_ubatch: compute N tokens at once (default: 2048 if experts are read from disk, else 512)
        n_threads: compute with N threads (default: the fast physical cores)
        cpus: compute only on these processors, such as 0-5,8, or any (default: auto: the fast cores)
        maps: start with the expert maps of FILE, and store the maps of expert-map in it (default:
            MODEL.maps.gguf, not written)
        warm: False: start with no expert in memory, and store nothing for the next start; by default the next
            start first reads the experts that were resident at the end
        tuned: use the lossy setting and the budget that pyorch tune found
        substitution: replace or omit absent experts: heaviest, ghosts, buddies, or KEY=VALUE,...; `pyorch run
            --lossy help` lists all keys
        buddies: the lists of buddies (default: MODEL.buddies.gguf)
        speculate: True: compute with the experts that quasi-hidden or hybrid predicts (--prefetch) in place
            of the router's
        llama_kwargs: Further arguments of llama_cpp.Llama.

    Returns:
        The loaded model.

    Raises:
        FormatError: The file is missing, damaged, incomplete or no GGUF.
        BudgetError: The budget is below the floor, or the model does not fit under the memory limit.
        PyorchError: An option is invalid, or the model lacks data that an option needs.
        TypeError: No option has this name.
    """

class manage(interception.manage):
    def __init__(
        self,
        budget: Budget | int | str = "auto",
        *,
        policy: str | None = None,
        prefetch: str | Prefetch = "auto",
        reads: str | Reads = "auto",
        mirror: str | Path | Sequence[str | Path] | Mirrors | None = None,
        direct_io: bool = True,
        packed: bool = True,
        pools: str | Pools | None = None,
        recovery: str = "kernels",
        kernels: str = "auto",
        device: str = "none",
        vram_budget: int | str | Budget = "auto",
        device_misses: str | None = None,
        device_ahead: int = 0,
        n_ubatch: int = 0,
        n_threads: int = 0,
        cpus: str = "auto",
        maps: str | Path | None = None,
        warm: bool = True,
        tuned: str | Path | None = None,
        substitution: str | Substitution | None = None,
        buddies: Any = None,
        speculate: bool = False,
    ) -> None:
        ...
