"""Compiled functions kept on disk, one file each. A cache that cannot be used costs time, never a run.

Numba's own cache raises where its folder cannot be made, read or written, unpickles whatever it finds,
and lets two processes that compile at once write under one name. It also keys by the path of the source,
and looks at no source but the function's own. Ours differs in four ways:

    a function is known by its module and by the text of all sources it calls: a second checkout compiles
        nothing again, and a change of a called function in another file is not missed
    a file holds one compiled signature, behind its SHA-256: what is cut or changed is compiled again
    a file appears whole, by a rename, under a name of its own signature: processes may fill it together
    what cannot be read or written is told once, and the process compiles for itself
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
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps

from paceline.home import paceline_home, tell_unusable

logger = logging.getLogger(__name__)

SUFFIX = ".kernel"
WHAT = "compiled kernels"
_DIGEST_BYTES = 32


def kernels_folder(name: str) -> Path:
    """The folder of a group of compiled functions."""
    return paceline_home() / "kernels" / name


def kept_files(folder: Path) -> list[Path]:
    """The compiled signatures in a folder; none if it cannot be read."""
    try:
        return [path for path in folder.rglob(f"*{SUFFIX}") if path.is_file()]
    except OSError:
        return []


def jitted(function: Callable[..., Any], folder: Path, **options: Any) -> Any:
    """A numba function whose compiled signatures are kept in this folder."""
    dispatcher = numba.njit(**options)(function)
    dispatcher._cache = _KernelCache(function, folder)
    return dispatcher


def c_function(function: Callable[..., Any], signature: Any, folder: Path) -> Any:
    """A C function of this numba signature, compiled now or read from this folder."""
    types = (signature.args, signature.return_type)
    made: Any = CFunc(function, types, locals={}, options={"nopython": True})
    made._cache = _KernelCache(function, folder)
    made.compile()
    return made


def source_digest(function: Callable[..., Any]) -> str:
    """The SHA-256 of the sources of a function and of all compiled functions that it calls."""
    found, pending = {function}, [function]
    while pending:
        for called in _called(pending.pop()):
            if called not in found:
                found.add(called)
                pending.append(called)
    digests = {_file_digest(each.__code__.co_filename) for each in found}
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


class _Locator(UserProvidedCacheLocator):  # type: ignore[misc]
    """Says of which source a function is; where its files are, the cache knows."""

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator:
        return cls(py_func, py_file)


class _CacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    """What numba knows of writing down a compiled function."""

    _locator_classes = (_Locator,)


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """Where numba looks for a compiled function, and leaves it."""

    _impl_class = _CacheImpl

    def __init__(self, function: Callable[..., Any], folder: Path) -> None:
        super().__init__(function)
        self._cache_path: Path = folder / function.__module__

    @cached_property
    def _stamp(self) -> str:
        """Not at decoration: what a function calls may be defined after it."""
        return source_digest(self._py_func)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled for this signature; None if that is not there, or of no use."""
        target_context.refresh()
        key = self._index_key(sig, target_context.codegen())
        path = self._path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            tell_unusable(WHAT, self._cache_path, error)
            return None
        digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            logger.warning("%s is damaged: it is compiled again, and replaced", path)
            return None
        stamp, kept_key, data = pickle.loads(payload)
        if (stamp, kept_key) != (self._stamp, key):  # of another version of the source
            return None
        return self._impl.rebuild(target_context, data)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled for this signature, if that is possible."""
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
            tell_unusable(WHAT, self._cache_path, error)
            try:
                temporary.unlink(missing_ok=True)
            except OSError:
                return

    def flush(self) -> None:
        raise NotImplementedError("files of other functions lie beside ours")

    def _path(self, key: Any) -> Path:
        """The file of a signature: an older version of the same function has the same one."""
        signature, machine, (_, closure) = key
        told_apart = f"{numba.__version__} {signature} {machine} {closure}"
        name = hashlib.sha256(told_apart.encode()).hexdigest()[:16]
        return self._cache_path / f"{self._impl.filename_base}.{name}{SUFFIX}"
