"""BackendOptions: the user's choice of backend, device, dtype, quantization and parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paceline.errors import ConfigError
from paceline.machine import find_gpu
from paceline.models.quantizations import QUANTIZATIONS
from paceline.options import check_bool, check_choice, check_integer, check_text, refuse_unknown

BACKENDS = ("auto", "cpu", "torch", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
ONE_DEVICE = {"cpu": "one CPU"}  # backends without tensor parallelism


@refuse_unknown(ConfigError)
@dataclass(frozen=True)
class BackendOptions:
    """The user's options of the backend. See `choice` for how "auto" is resolved."""

    backend: str = "auto"  # auto: cuda if there is a usable GPU, else cpu; torch where cpu is not supported
    dtype: str = "auto"  # torch: auto is float32; cuda: auto is bfloat16; not used by cpu
    quantization: str = "auto"  # one of quantizations.QUANTIZATIONS; auto: native on cpu, else none
    device: str = "auto"  # cpu | cuda | cuda:N; auto: the backend's default
    threads: int | None = None  # CPU threads of each rank; None: one per core
    tensor_parallel_size: int = 1  # ranks, one process each; torch and cuda only
    exact: bool = False  # refuse options that are not bitwise batch-invariant

    def __post_init__(self) -> None:
        check_choice(ConfigError, "backend", self.backend, BACKENDS)
        check_choice(ConfigError, "dtype", self.dtype, DTYPES)
        check_text(ConfigError, "quantization", self.quantization, "Use 'auto' or 'none'.")
        check_text(ConfigError, "device", self.device, "Use 'auto', 'cpu' or 'cuda'.")
        if self.threads is not None:
            check_integer(ConfigError, "threads", self.threads, 1, 1024)
        check_bool(ConfigError, "exact", self.exact)
        check_integer(ConfigError, "tensor_parallel_size", self.tensor_parallel_size, 1, None)
        if self.tensor_parallel_size > 1 and self.name in ONE_DEVICE:
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor_parallel_size}, but the {self.name} backend runs on "
                f"{ONE_DEVICE[self.name]}; leave it out, or use backend='torch'."
            )
        if self.backend == "cpu" and self.device not in ("auto", "cpu"):
            raise ConfigError(
                f"the cpu backend cannot run on device {self.device!r}; use backend='cuda', or leave one out."
            )
        if self.backend == "cuda" and self.device != "auto" and not self.device.startswith("cuda"):
            raise ConfigError(f"the cuda backend cannot run on device {self.device!r}; use device='cuda'.")
        if self.dtype == "float16" and self.name != "cuda":
            raise ConfigError("dtype 'float16' is for the cuda backend; use backend='cuda' or 'bfloat16'.")
        if self.backend == "cpu" and self.dtype not in ("auto", "float32"):
            raise ConfigError(
                f"dtype {self.dtype!r} is for the torch backend; the cpu backend takes quantization instead."
            )
        supported = ("auto", *QUANTIZATIONS[self.name])
        check_choice(ConfigError, f"quantization of the {self.name} backend", self.quantization, supported)
        if self.exact and self.name == "torch":
            raise ConfigError(
                "exact: on the torch backend a request's bytes may depend on what runs beside it; use "
                "backend='cpu' or backend='cuda', which are always exact."
            )

    @property
    def name(self) -> str:
        """The backend that runs."""
        return self.choice.name

    @cached_property
    def choice(self) -> Choice:
        """The backend and the device that run, and why. Backend and device are inferred from each other."""
        if self.backend != "auto":
            default = "cuda" if self.backend == "cuda" else "cpu"
            return Choice(self.backend, default if self.device == "auto" else self.device, "as asked for")
        if self.device.startswith("cuda"):
            return Choice("cuda", self.device, f"device {self.device} was asked for")
        if self.device not in ("auto", "cpu"):
            return Choice("torch", self.device, f"device {self.device} was asked for")
        if self.device == "cpu":
            why = "device cpu was asked for"
        else:
            gpu = find_gpu()
            if gpu.usable and self.dtype != "float32":
                return Choice("cuda", "cuda", f"found {gpu.name}")
            why = gpu.missing or "dtype float32 was asked for, which the cuda backend does not have"
        if self.dtype == "bfloat16":
            return Choice("torch", "cpu", f"{why}, and only torch computes in bfloat16 on a CPU")
        if self.tensor_parallel_size > 1:
            return Choice("torch", "cpu", f"{why}, and only torch has tensor parallelism on a CPU")
        return Choice("cpu", "cpu", why)


@dataclass(frozen=True)
class Choice:
    """The backend and device that run the model, and why they were chosen."""

    name: str  # of the backend: cpu, torch or cuda
    device: str
    why: str
