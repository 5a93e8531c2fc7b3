"""torch's functions to have accesses to a storage raise a text.

Only builds of torch for CUDA have them in Python (torch/csrc/cuda/Module.cpp); what they call is in every
build's headers, and works for storages of every device. Here they are built from those.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

SET, CLEAR = "_set_storage_data_ptr_access_error_msg", "_clear_storage_data_ptr_access_error_msg"

SOURCE = """
#include <c10/core/StorageImpl.h>
extern "C" void set(std::size_t storage, const char* text) {
  reinterpret_cast<c10::StorageImpl*>(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(text);
}
extern "C" void clear(std::size_t storage) {
  reinterpret_cast<c10::StorageImpl*>(storage)->clear_data_ptr_access_error_msg_();
}
"""


class AccessErrors:
    """Built in that directory. Skips the test where there is no compiler, or torch's headers are older."""

    def __init__(self, directory: Path) -> None:
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
        if compiler is None:
            pytest.skip("needs a C++ compiler: set CXX, or install g++")
        source, library = directory / "access_errors.cpp", directory / "access_errors.so"
        source.write_text(SOURCE, encoding="utf-8")
        root = Path(torch.__file__).parent
        abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
        flags = ["-std=c++20", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
        paths = [f"-I{root / 'include'}", f"-L{root / 'lib'}"]
        command = [compiler, *flags, str(source), *paths, "-lc10", "-o", str(library)]
        built = subprocess.run(command, check=False, capture_output=True, text=True)
        if "clear_data_ptr_access_error_msg_" in built.stderr:
            pytest.skip(f"torch {torch.__version__} cannot end these errors")
        assert built.returncode == 0, built.stderr
        self._library = ctypes.CDLL(str(library))
        self._library.set.argtypes = (ctypes.c_size_t, ctypes.c_char_p)
        self._library.clear.argtypes = (ctypes.c_size_t,)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In the place where a build for CUDA has them."""
        monkeypatch.setattr(torch._C, SET, self.set, raising=False)
        monkeypatch.setattr(torch._C, CLEAR, self.clear, raising=False)

    def set(self, storage: int, text: str) -> None:
        self._library.set(storage, text.encode())

    def clear(self, storage: int) -> None:
        self._library.clear(storage)
