"""What plug-ins call of fairseq has the arguments and results of fairseq."""

from __future__ import annotations

import argparse
import collections
import copy
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import runs
import torch
from user_folders import user_folder

from fairseq import checkpoint_utils, utils
from fairseq.config import options
from fairseq.data import Dictionary, ListDataset, TokenBlockDataset
from fairseq.errors import UserError
from fairseq.hub import LanguageModel
from fairseq.models.transformer import TransformerDecoder
from fairseq.modules import TransformerSentenceEncoder
from fairseq.tasks import setup_task
from fairseq_cli.common import get_training_parser


def dictionary(*words: str) -> Dictionary:
    made = Dictionary()
    for word in words:
        made.add_symbol(word)
    return made


def test_a_dictionary_writes_text_as_fairseqs_does() -> None:
    words = dictionary("▁a", "b", "▁c", "x##")
    ids = torch.tensor([4, 5, 6, 2])
    assert words.string(ids, "sentencepiece") == "ab c"
    assert words.string(ids, extra_symbols_to_ignore=None) == "▁a b ▁c"
    assert words.string(ids, extra_symbols_to_ignore={5}) == "▁a ▁c"
    assert words.string([3, 4], escape_unk=True) == "<<unk>> ▁a" and words.string([3, 4], unk_string="?") == "? ▁a"
    assert words.string(torch.stack([ids, ids]), include_eos=True, separator="-") == "\n".join(["▁a-b-▁c-</s>"] * 2)
    assert words.string([7, 5], "##") == "xb"  # a mark of the dictionary's own
    with pytest.raises(NotImplementedError):
        words.string(ids, "nonsense")


def test_a_text_is_counted_by_an_instance_as_by_the_class(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("b a b\na\n")
    for count in (Dictionary().add_file_to_dictionary, Dictionary.add_file_to_dictionary):
        counted = Dictionary()
        count(str(tmp_path / "text"), counted, str.split, 1)
        assert {word: counted.get_count(counted.index(word)) for word in ("a", "b", "</s>")} == {
            "a": 2,
            "b": 2,
            "</s>": 2,
        }


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


def test_a_function_is_applied_to_the_tensors_of_any_sample() -> None:
    one = torch.tensor(1)
    changed = utils.apply_to_sample(lambda tensor: tensor + 1, {"pair": Pair(one, 3), "tuple": (one, "x")})
    assert changed == {"pair": (2, 3), "tuple": (2, "x")} and isinstance(changed["pair"], Pair)
    ordered = collections.OrderedDict(a=one)
    vars(ordered)["note"] = "kept"
    assert vars(utils.apply_to_sample(lambda tensor: tensor, ordered)) == {"note": "kept"}
    assert utils.apply_to_sample(lambda tensor: tensor, []) == {}


@pytest.mark.parametrize(
    "name, value", [("unkpen", 1.5), ("diverse_beam_groups", 2), ("match_source_len", True), ("diversity_rate", 0.5)]
)
def test_a_search_that_is_not_implemented_is_refused_and_not_replaced(name: str, value: object) -> None:
    task: Any = setup_task(runs.arguments(runs.BASELINE))
    model = runs.model_of(runs.BASELINE)
    task.build_generator([model], argparse.Namespace(beam=2, diverse_beam_groups=-1, diversity_rate=-1.0, unkpen=0))
    with pytest.raises(UserError, match=f"(unk_penalty|{name}) {value}: not implemented"):
        task.build_generator([model], argparse.Namespace(**{name: value}))


def test_a_search_without_settings_has_fairseqs_width_and_half_of_a_choice_is_refused() -> None:
    task: Any = setup_task(runs.arguments(runs.BASELINE))
    model = runs.model_of(runs.BASELINE)
    sample = {"net_input": {"src_tokens": torch.tensor([[2, 5, 6]])}}
    generator = task.build_generator([model], argparse.Namespace(max_len_b=4))
    assert len(task.inference_step(generator, [model], sample)[0]) == 5
    with pytest.raises(UserError, match="sampling_topk 3: needs sampling"):
        task.build_generator([model], argparse.Namespace(sampling_topk=3, sampling=False))
    with pytest.raises(UserError, match="constraints.*not implemented"):
        task.inference_step(generator, [model], sample, constraints=torch.tensor([[1, 5]]))


@pytest.mark.parametrize("name, value", [("embed_scale", 2.0), ("freeze_embeddings", True), ("q_noise", 0.1)])
def test_an_encoder_refuses_what_would_change_its_training(name: str, value: object) -> None:
    sizes: dict[str, Any] = {
        "num_encoder_layers": 1,
        "embedding_dim": 4,
        "ffn_embedding_dim": 4,
        "num_attention_heads": 1,
    }
    TransformerSentenceEncoder(1, 8, **sizes, embed_scale=None, freeze_embeddings=False, export=True)
    with pytest.raises(UserError, match=f"{name}.* {value} is not implemented"):
        TransformerSentenceEncoder(1, 8, **sizes, **{name: value})


def test_documents_that_are_separated_otherwise_are_refused() -> None:
    rows = ListDataset([torch.tensor([4, 2])], np.array([2]))
    TokenBlockDataset(rows, [2], 4, 1, 2, "complete", document_sep_len=0)
    with pytest.raises(UserError, match="document_sep_len.* 0"):
        TokenBlockDataset(rows, [2], 4, 1, 2, "complete_doc", document_sep_len=0)


def test_models_are_loaded_with_the_arguments_of_fairseqs_scripts_and_parts_are_refused() -> None:
    path, task = str(runs.GOLDEN / "baseline.pt"), setup_task(runs.arguments(runs.BASELINE))
    load = checkpoint_utils.load_model_ensemble
    assert len(load([path], {}, task, suffix="", strict=True, num_shards=1)[0]) == 1
    with pytest.raises(UserError, match="num_shards"):
        load([path], {}, task, num_shards=2)


def test_a_decoder_reads_a_padded_row_token_by_token() -> None:
    sizes = {"layers": 2, "embed_dim": 8, "ffn_embed_dim": 8, "attention_heads": 2}
    args = SimpleNamespace(
        **{f"decoder_{name}": size for name, size in sizes.items()}, dropout=0.0, decoder_output_dim=8
    )
    words = dictionary("a", "b", "c")
    torch.manual_seed(1)
    decoder: Any = TransformerDecoder(args, words, torch.nn.Embedding(len(words), 8, 1), no_encoder_attn=True).eval()
    tokens = torch.tensor([[2, 4, 5, 6], [2, 4, 1, 1]])
    whole, state = decoder(tokens)[0], {}
    steps = [decoder(tokens[:, : end + 1], incremental_state=state)[0][:, -1] for end in range(4)]
    read = tokens.ne(1)
    torch.testing.assert_close(torch.stack(steps, 1)[read], whole[read], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arch", ["latent_lm", "bart_of_mine", "hubert_lm", "fconvolution"])
def test_an_architecture_may_begin_like_one_that_is_refused(arch: str, tmp_path: Path) -> None:
    source = (
        "from fairseq.models import register_model_architecture\n"
        f"@register_model_architecture('transformer_lm', '{arch}')\n"
        "def fill(args):\n    args.decoder_layers = getattr(args, 'decoder_layers', 1)\n"
    )
    with user_folder(tmp_path, f"named_{arch}", source) as flags:
        words = runs.words([str(runs.DATA), *map(str, flags), "--arch", arch])
        assert options.parse_args_and_arch(get_training_parser(), words).decoder_layers == 1
    with pytest.raises(UserError, match="bart_base: models of translation are not implemented"):
        runs.arguments("--arch bart_base")


TASK = """
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

@register_task("own_dictionary")
class Task(LanguageModelingTask):
    @classmethod
    def build_dictionary(cls, filenames, workers=1, threshold=-1, nwords=-1, padding_factor=8):
        raise NotImplementedError
"""


def test_a_task_with_its_own_dictionary_trains_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with user_folder(tmp_path, "own_dictionary", TASK) as flags:
        assert runs.updates(runs.train(tmp_path / "run", flags, runs.SHORT, "--task own_dictionary"))
    said = [record for record in caplog.records if "build_dictionary" in record.message]
    assert [record.levelno for record in said] == [logging.WARNING]


COOLED = """
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer_lm import TransformerLanguageModel

@register_model("cooled")
class Cooled(TransformerLanguageModel):
    def {method}(self, net_output, log_probs, sample=None):
        return super().{method}(net_output, log_probs, sample)

@register_model_architecture("cooled", "cooled_tiny")
def fill(args):
    args.decoder_layers = getattr(args, "decoder_layers", 1)
"""


def test_probabilities_of_a_models_own_that_nothing_calls_are_refused(tmp_path: Path) -> None:
    for method in ("get_normalized_probs", "a_method_of_its_own"):
        source = COOLED.replace("{method}", method).replace("cooled", f"cooled_{method[:3]}")
        with user_folder(tmp_path, f"cooled_{method[:3]}", source) as flags:
            words = [flags, runs.SHORT.replace("transformer_lm_tiny", f"cooled_{method[:3]}_tiny"), "--no-save"]
            if method == "get_normalized_probs":
                with pytest.raises(UserError, match="Cooled.get_normalized_probs is not called"):
                    runs.train(tmp_path, *words, "--criterion cross_entropy")
            else:
                assert runs.updates(runs.train(tmp_path, *words, "--criterion cross_entropy"))


CLIPS = """
from fairseq.optim import register_optimizer
from fairseq.optim.adam import FairseqAdam

@register_optimizer("clips")
class Clips(FairseqAdam):
    def clip_grad_norm(self, max_norm, aggregate_norm_fn=None):
        return 0.0
"""


def test_an_optimizers_clipping_that_nothing_calls_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match="optimizer clips: its clip_grad_norm is not called")
    with user_folder(tmp_path, "clips", CLIPS) as flags, refused:
        runs.train(tmp_path, flags, runs.SHORT, "--optimizer clips --no-save")


WORDS = """
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

@register_task("own_words")
class Task(LanguageModelingTask):
    @classmethod
    def setup_dictionary(cls, args, **kwargs):
        dictionary, _ = super().setup_dictionary(args, **kwargs)
        dictionary.add_symbol("<image>")
        return dictionary, dictionary
"""


def test_a_task_may_set_up_its_dictionary(tmp_path: Path) -> None:
    with user_folder(tmp_path, "own_words", WORDS) as flags:
        runs.train(tmp_path / "run", flags, runs.SHORT, "--task own_words")
    [*_, band] = [
        value
        for name, value in runs.content(tmp_path / "run" / "checkpoint_last.pt")["model"].items()
        if "embed_tokens.embeddings" in name and name.endswith("0.weight")
    ]
    assert len(band) + 600 == len(Dictionary.load(runs.DATA / "dict.txt")) + 1


def test_a_language_model_that_has_generated_can_be_copied_and_pickled() -> None:
    model = LanguageModel.from_pretrained(runs.GOLDEN / "baseline.pt", runs.DATA)
    text = model.sample("", 5, seed=3)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.sample("", 5, seed=3) == text
