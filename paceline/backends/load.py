"""Loads models and draft heads on the backend that the options name: the table of backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.backends.base import Backend
from paceline.backends.heads import AssistantRunner, BlockRunner, HeadRunner, MedusaRunner
from paceline.backends.options import BackendOptions
from paceline.errors import BackendError
from paceline.extras import needs_extra
from paceline.models.checkpoint import Checkpoint
from paceline.models.heads.assistant import AssistantCheckpoint
from paceline.models.heads.checkpoint import HeadCheckpoint
from paceline.models.heads.medusa import MedusaCheckpoint, NumpyMedusa
from paceline.models.lora import Adapter
from paceline.models.needs import missing_blocks
from paceline.models.quantizations import DEFAULTS

NOT_THE_TARGETS = "the options name the backend that the target runs on"


def load_backend(
    checkpoint: Checkpoint,
    options: BackendOptions,
    max_rows: int,
    beside: Backend | None = None,
    adapters: Sequence[Adapter] = (),
) -> Backend:
    """The backend that the options name, with the checkpoint's weights.

    `beside`: the loaded target, if this is its draft model. Passes of the two never overlap.
    """
    if blocks := missing_blocks(checkpoint.config, options.name):
        raise BackendError(
            f"This {checkpoint.config.family} model has {', '.join(blocks)}, for which the {options.name} "
            "backend has no kernels. Use the torch backend: --backend torch."
        )
    return _LOADERS[options.name](checkpoint, options, max_rows, beside, adapters)


def load_head_runner(
    checkpoint: HeadCheckpoint, options: BackendOptions, max_rows: int, beside: Backend
) -> HeadRunner:
    """A runner of the head, on the backend that the options name.

    `beside` is the loaded target. The head shares some of its weights, and passes of the two never overlap.
    """
    if options.name == "cpu":
        from paceline.backends.cpu import CpuBackend, CpuHeadRunner

        assert isinstance(beside, CpuBackend), NOT_THE_TARGETS
        return CpuHeadRunner(checkpoint, beside, max_rows, options.quantization)
    if options.name == "cuda":
        from paceline.backends.cuda.backend import CudaBackend
        from paceline.backends.cuda.heads.head_runner import CudaHeadRunner

        assert isinstance(beside, CudaBackend), NOT_THE_TARGETS
        return CudaHeadRunner.load(checkpoint, beside, max_rows)
    from paceline.backends.torch.backend import TorchBackend
    from paceline.backends.torch.head_runner import TorchHeadRunner, TorchLayerHeadRunner

    assert isinstance(beside, TorchBackend), NOT_THE_TARGETS
    runner = TorchHeadRunner if checkpoint.config.layer is None else TorchLayerHeadRunner
    return runner.load(checkpoint, beside, max_rows)


def load_block_runner(
    checkpoint: HeadCheckpoint, options: BackendOptions, max_rows: int, beside: Backend
) -> BlockRunner:
    """A runner of the parallel head beside the loaded target."""
    if options.name == "cpu":
        from paceline.backends.cpu import CpuBackend
        from paceline.backends.cpu.heads.block_runner import CpuBlockRunner

        assert isinstance(beside, CpuBackend), NOT_THE_TARGETS
        return CpuBlockRunner(checkpoint, beside, max_rows, options.quantization)
    if options.name == "cuda":
        from paceline.backends.cuda.backend import CudaBackend
        from paceline.backends.cuda.heads.block_runner import CudaBlockRunner

        assert isinstance(beside, CudaBackend), NOT_THE_TARGETS
        return CudaBlockRunner.load(checkpoint, beside, max_rows)
    from paceline.backends.torch.backend import TorchBackend
    from paceline.backends.torch.block_runner import TorchBlockRunner

    assert isinstance(beside, TorchBackend), NOT_THE_TARGETS
    return TorchBlockRunner.load(checkpoint, beside, max_rows)


def load_medusa_runner(
    checkpoint: MedusaCheckpoint, options: BackendOptions, beside: Backend
) -> MedusaRunner:
    """A runner of Medusa heads beside the loaded target, on the backend that the options name."""
    if options.name == "cpu":
        return NumpyMedusa(checkpoint)
    from paceline.backends.torch.backend import TorchBackend
    from paceline.models.heads.torch_medusa import TorchMedusa

    if options.name == "cuda":
        from paceline.backends.cuda.backend import CudaBackend

        assert isinstance(beside, CudaBackend), NOT_THE_TARGETS
    else:
        assert isinstance(beside, TorchBackend), NOT_THE_TARGETS
    return TorchMedusa.load(checkpoint, beside.device, beside.dtype)


def load_assistant_runner(checkpoint: AssistantCheckpoint, beside: Backend) -> AssistantRunner:
    """A runner of the assistant beside its target."""
    if beside.name == "cpu":
        from paceline.backends.cpu import CpuBackend
        from paceline.backends.cpu.heads.assistant_runner import CpuAssistantRunner

        assert isinstance(beside, CpuBackend)
        return CpuAssistantRunner(checkpoint, beside)
    if beside.name == "cuda":
        from paceline.backends.cuda.backend import CudaBackend
        from paceline.backends.cuda.heads.assistant_runner import CudaAssistantRunner

        assert isinstance(beside, CudaBackend)
        return CudaAssistantRunner.load(checkpoint, beside)
    from paceline.backends.torch.assistant_runner import TorchAssistantRunner
    from paceline.backends.torch.backend import TorchBackend

    assert isinstance(beside, TorchBackend)
    return TorchAssistantRunner.load(checkpoint, beside)


def _load_cpu(
    checkpoint: Checkpoint,
    options: BackendOptions,
    max_rows: int,
    beside: Backend | None,
    adapters: Sequence[Adapter],
) -> Backend:
    from paceline.backends.cpu import CpuBackend

    return CpuBackend.load(
        checkpoint,
        quantization=options.quantization,
        threads=options.threads,
        max_rows=max_rows,
        beside=beside if isinstance(beside, CpuBackend) else None,
        adapters=adapters,
    )


def _load_torch(
    checkpoint: Checkpoint,
    options: BackendOptions,
    max_rows: int,
    beside: Backend | None,
    adapters: Sequence[Adapter],
) -> Backend:
    chosen = "" if options.backend == "torch" else f", chosen because {options.choice.why},"
    with needs_extra("torch", f"the torch backend{chosen}", BackendError):
        import torch  # imported here: it takes seconds, and the cpu backend does not need it

        from paceline.backends.torch.backend import TorchBackend

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    dtype = "float32" if options.dtype == "auto" else options.dtype
    return TorchBackend.load(
        checkpoint,
        device=options.choice.device,
        dtype=dtype,
        quantization=DEFAULTS["torch"] if options.quantization == "auto" else options.quantization,
        max_rows=max_rows,
        tensor_parallel_size=options.tensor_parallel_size,
        adapters=adapters,
    )


def _load_cuda(
    checkpoint: Checkpoint,
    options: BackendOptions,
    max_rows: int,
    beside: Backend | None,
    adapters: Sequence[Adapter],
) -> Backend:
    with needs_extra("gpu", "the cuda backend", BackendError):
        from paceline.backends.cuda.backend import CudaBackend
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    quantization = DEFAULTS["cuda"] if options.quantization == "auto" else options.quantization
    if isinstance(beside, CudaBackend) and beside.ranks is not None:
        is_shared = options.tensor_parallel_size > 1
        return CudaBackend.load_beside(beside, checkpoint, dtype, quantization, max_rows, is_shared)
    return CudaBackend.load(
        checkpoint,
        device=options.choice.device,
        dtype=dtype,
        quantization=quantization,
        max_rows=max_rows,
        tensor_parallel_size=options.tensor_parallel_size,
        adapters=adapters,
    )


_Loader = Callable[[Checkpoint, BackendOptions, int, Backend | None, Sequence[Adapter]], Backend]
_LOADERS: dict[str, _Loader] = {
    "cpu": _load_cpu,
    "torch": _load_torch,
    "cuda": _load_cuda,
}
