"""The built-in parts are declared in one file at the top, and no layer names a module above it."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest
import runs

import fairseq.models
from fairseq.config import registry
from fairseq.criterions.settings import NoSettings

ROOT = Path(fairseq.__file__).parents[1]
REGISTRIES = {**registry.CHOICES, "model": registry.MODELS, "extension": registry.EXTENSIONS}
ONE_FILE = """
from dataclasses import dataclass
from torch import nn
from fairseq.config.fields import flag
from fairseq.config.shared import BlockModelConfig
from fairseq.models.base import BaseFairseqModel
from fairseq.modules.output_layer import LinearOutput

@dataclass(frozen=True)
class BigramConfig(BlockModelConfig):
    '''Settings of a bigram model.'''

    width: int = flag(8, "width of the embeddings", low=1)

class Bigram(BaseFairseqModel):
    config_class = BigramConfig

    def __init__(self, cfg, dictionary):
        super().__init__()
        self.embed = nn.Embedding(len(dictionary), cfg.width)
        self.head = LinearOutput(self.embed.weight)

    @property
    def output_layer(self):
        return self.head

    @classmethod
    def build_model(cls, args, task):
        return cls(args, task.source_dictionary)

    def forward(self, src_tokens, memory=None):
        return self.embed(src_tokens), {}
"""


def test_classes_have_the_settings_that_they_are_declared_with() -> None:
    for one in REGISTRIES.values():
        one.parts()
        for name, declared in one._declared.items():
            expected = None if declared.settings is NoSettings else declared.settings
            assert declared.load().config_class is expected, name
    assert all(one._declared for kind, one in REGISTRIES.items() if kind != "arch")


def test_every_architecture_has_a_model_that_is_declared() -> None:
    assert len(registry.ARCHITECTURES.parts()) > 60
    models = {registry.ARCHITECTURES[name].model for name in registry.ARCHITECTURES}
    assert registry.MODELS._declared.keys() <= models and all(model in registry.MODELS for model in models)


def test_parts_are_declared_without_torch_or_numpy_and_at_the_first_lookup() -> None:
    code = (
        "import sys, fairseq.models as models; print('fairseq.parts' in sys.modules); "
        "print(len(list(models.ARCHITECTURES)) > 60, 'fairseq.parts' in sys.modules); "
        "print({'torch', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=runs.environment())
    assert done.stdout.split() == ["False", "True", "True", "set()"], done.stderr


def test_a_model_is_one_file_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bigram.py").write_text(ONE_FILE)
    monkeypatch.setattr(fairseq.models, "__path__", [*fairseq.models.__path__, str(tmp_path)])
    for one in (registry.MODELS, registry.ARCHITECTURES):
        monkeypatch.setattr(one, "_parts", {**one.parts()})
        monkeypatch.setattr(one, "_declared", {**one._declared})
    registry.declare_model("bigram", "fairseq.models.bigram:Bigram")
    flags = "--cpu --train-subset valid --valid-subset test --criterion cross_entropy --max-update 2 --width 4"
    runs.train(tmp_path / "run", f"--arch bigram --tokens-per-sample 16 --batch-size 4 {flags}")
    assert runs.checkpoint.read(tmp_path / "run" / "checkpoint_last.pt")["model"]["embed.weight"].shape[1] == 4
    del sys.modules["fairseq.models.bigram"]


@functools.cache
def layers() -> list[list[str]]:
    """The layers of the import contract, from the top."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[[tool.importlinter.contracts]]")[2]
    return [row.split(" | ") for row in ast.literal_eval(text[text.index("layers = [") + 9 :].strip())]


def height(module: str) -> int | None:
    """The number of the layer of *module*, counted from the top; None: it is in none."""
    for number, names in enumerate(layers()):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return number
    return None


def modules_named_above(module: str, source: str) -> set[str]:
    """The modules in the strings of *source* that are in a higher layer than *module*; docstrings
    do not count."""
    tree = ast.parse(source)
    own = height(module)
    documentation = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in documentation]
    names = {text.partition(":")[0] for text in texts if isinstance(text, str) and text.startswith("fairseq")}
    heights = {name: height(name) for name in names if is_module(name)}
    return {name for name, number in heights.items() if None not in (own, number) and number < own}


def is_module(name: str) -> bool:
    """Whether *name*, such as ``fairseq.hub``, is a module of the project."""
    path = ROOT / name.replace(".", "/")
    is_name = "." in name and all(map(str.isidentifier, name.split(".")))
    return is_name and (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file())


def test_no_string_names_a_module_of_a_higher_layer() -> None:
    found = {}
    for path in sorted((ROOT / "fairseq").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if above := modules_named_above(module, path.read_text(encoding="utf-8")):
            found[module] = above
    assert found == {}


def test_modules_of_higher_layers_are_found_in_strings() -> None:
    source = (
        '"""fairseq.hub"""\nx = "fairseq.hub", "fairseq.models.bert:BertModel", "fairseq.errors", "fairseq.no_such"'
    )
    assert modules_named_above("fairseq.config.registry", source) == {"fairseq.hub", "fairseq.models.bert"}
    assert modules_named_above("fairseq.models.base", source) == {"fairseq.hub"}
    assert modules_named_above("fairseq.parts", source) == set()
