"""Compiling generated C++ and keeping the result on disk.

Problem.  A plan's kernels take a compiler a second or more; the same text on the same machine must compile
once.  A machine may have no compiler at all: then plans run unfused, and say so.

Method.  The file name is a digest of everything that decides the bytes: source, flags, compiler version,
processor and torch version.  A file is written under a temporary name and renamed, so concurrent processes
never load half a library.  The library is loaded after torch and must share its OpenMP runtime.

Not done here: what the source says (`c`), cross compilation, eviction of old files.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import platformdirs
import torch

from lowtide.errors import LowtideError

__all__ = ["CompileError", "cache_folder", "compile_source", "digest_of", "find_compiler", "load_library"]

FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fwrapv",
    "-shared",
    "-fPIC",
)


class CompileError(LowtideError):
    """The compiler refused generated code, or the library does not fit into this process."""


@cache
def find_compiler() -> str | None:
    """The C++ compiler: ``$CXX`` or g++, if it is there and can make a shared library."""
    for name in (os.environ.get("CXX"), "g++"):
        path = shutil.which(name) if name else None
        if path is not None:
            return path
    return None


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


@cache
def _processor() -> str:
    """The processor's model and features, as the operating system names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "vendor_id"))})
    )


def _torch_flags() -> tuple[str, ...]:
    folder = Path(torch.__file__).parent / "lib"
    return (f"-L{folder}", "-ltorch_cpu", "-lc10")


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(platformdirs.user_cache_dir("lowtide")) / "kernels"


def digest_of(*texts: str) -> str:
    """A name for what the compiler of this machine makes of `texts`."""
    compiler = find_compiler() or ""
    parts = (
        *texts,
        *FLAGS,
        compiler,
        _version(compiler) if compiler else "",
        _processor(),
        torch.__version__,
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def compile_source(source: str, uses_torch: bool) -> Path:
    """The shared library of `source`, compiled unless it is on disk; raises CompileError.

    `uses_torch` links against libtorch, which must be loaded already when the library is.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompileError("no C++ compiler was found: install g++ or set CXX")
    flags = FLAGS + (_torch_flags() if uses_torch else ())
    target = cache_folder() / f"{digest_of(source, str(uses_torch))}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _compile(compiler, source, flags, target)
    return target


def _compile(compiler: str, source: str, flags: tuple[str, ...], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        text, made = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
        text.write_text(source)
        command = [compiler, str(text), "-o", str(made), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"{compiler} failed on generated code: {done.stderr[:2000]}")
        made.replace(target)


def load_library(path: Path) -> ctypes.CDLL:
    """Load a compiled library; raises CompileError if it brings a second OpenMP runtime."""
    library = ctypes.CDLL(str(path))
    runtimes = _openmp_runtimes()
    if len(runtimes) > 1:
        raise CompileError(
            f"two OpenMP runtimes in one process ({', '.join(runtimes)}): kernels are not used"
        )
    return library


def _openmp_runtimes() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split()[-1] for line in lines if "libgomp" in line or "libiomp" in line}
    return sorted({os.path.realpath(path) for path in paths})
