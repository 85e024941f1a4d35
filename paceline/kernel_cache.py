"""Compiled functions cached on disk, one file each. An unusable cache costs time but never fails a run.

Numba's own cache raises if its folder cannot be created, read or written, unpickles whatever it finds,
and lets two processes that compile at once write to one name. It also uses the path of the source as its
key, and ignores changes in called functions of other files. Ours differs in four ways:

    the key is the function's module and the text of all sources that it calls: a second checkout compiles
        nothing again, and a change in a called function is noticed
    a file holds one compiled signature after its SHA-256: a truncated or changed file is compiled again
    a file is renamed into place, named by its signature: several processes can fill the cache at once
    what cannot be read or written is reported once, and the process compiles for itself
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
from numba import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher
from numba.core.registry import CPUDispatcher
from numba.core.serialize import dumps

from paceline.home import paceline_home, warn_unusable

logger = logging.getLogger(__name__)

SUFFIX = ".kernel"
WHAT = "compiled kernels"
_DIGEST_BYTES = 32


def kernels_folder(name: str) -> Path:
    """The folder for a group of compiled functions."""
    return paceline_home() / "kernels" / name


def cached_kernels(folder: Path) -> list[Path]:
    """The cached kernels in a folder; empty if it cannot be read."""
    try:
        return [path for path in folder.rglob(f"*{SUFFIX}") if path.is_file()]
    except OSError:
        return []


def jitted(function: Callable[..., Any], folder: Path, **options: Any) -> Any:
    """A numba function whose compiled signatures are cached in this folder."""
    dispatcher = IntegerDispatcher(function, {}, {"nopython": True, "no_cfunc_wrapper": True, **options})
    dispatcher._cache = _KernelCache(function, folder)
    return dispatcher


def c_function(function: Callable[..., Any], signature: Any, folder: Path) -> Any:
    """A C function with this numba signature, compiled now or read from this folder."""
    kinds = (signature.args, signature.return_type)
    compiled: Any = CFunc(function, kinds, locals={}, options={"nopython": True})
    compiled._cache = _KernelCache(function, folder)
    compiled.compile()
    return compiled


def source_digest(function: Callable[..., Any]) -> str:
    """SHA-256 of the sources of a function and of all compiled functions that it calls."""
    functions, pending = {function}, [function]
    while pending:
        for called in _called(pending.pop()):
            if called not in functions:
                functions.add(called)
                pending.append(called)
    digests = {_file_digest(function.__code__.co_filename) for function in functions}
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def _called(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    names = function.__code__.co_names
    used = [function.__globals__.get(name) for name in names]
    modules = [value for value in used if isinstance(value, ModuleType)]
    used += [getattr(module, name, None) for module in modules for name in names]
    used += [cell.cell_contents for cell in function.__closure__ or ()]
    return (value.py_func for value in used if isinstance(value, Dispatcher))


@cache
def _file_digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class IntegerDispatcher(CPUDispatcher):  # type: ignore[misc]
    """A numba function that is compiled once for all integers that compiled code passes to it.

    Numba would compile another for each literal, so for `f(..., 0)` and for `f(..., count)`.
    """

    def get_call_template(self, args: Any, named: Any) -> Any:
        named = {name: types.unliteral(kind) for name, kind in named.items()}
        return super().get_call_template(tuple(map(types.unliteral, args)), named)


class _Locator(UserProvidedCacheLocator):  # type: ignore[misc]
    """Tells numba the source of a function; the cache itself decides where files are."""

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator:
        return cls(py_func, py_file)


class _CacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    """Numba's serialization of a compiled function."""

    _locator_classes = (_Locator,)


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """Numba's interface to the cache: load and save a compiled signature."""

    _impl_class = _CacheImpl

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        super().__init__(function)
        self._cache_path: Path = folder / function.__module__

    @cached_property
    def _stamp(self) -> str:
        """Digest of the sources. Computed late: a called function may be defined after its caller."""
        return source_digest(self._py_func)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function of this signature; None if it is not cached or not usable."""
        target_context.refresh()
        key = self._index_key(sig, target_context.codegen())
        path = self._path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            warn_unusable(WHAT, self._cache_path, error)
            return None
        digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            logger.warning("%s is damaged: it is compiled again, and replaced", path)
            return None
        stamp, stored_key, data = pickle.loads(payload)
        if (stamp, stored_key) != (self._stamp, key):  # compiled from other sources
            return None
        return self._impl.rebuild(target_context, data)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store the compiled function of this signature, if possible."""
        if not self._impl.check_cachable(data):
            return
        key = self._index_key(sig, data.codegen)
        payload = dumps((self._stamp, key, self._impl.reduce(data)))
        path = self._path(key)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(hashlib.sha256(payload).digest() + payload)
            temporary.replace(path)
        except OSError as error:
            warn_unusable(WHAT, self._cache_path, error)
            try:
                temporary.unlink(missing_ok=True)
            except OSError:
                return

    def flush(self) -> None:
        raise NotImplementedError("the folder also has files of other functions")

    def _path(self, key: Any) -> Path:
        """The file of a signature. Other versions of the function's source share it."""
        signature, machine, (_, closure) = key
        identity = f"{numba.__version__} {signature} {machine} {closure}"
        name = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return self._cache_path / f"{self._impl.filename_base}.{name}{SUFFIX}"
