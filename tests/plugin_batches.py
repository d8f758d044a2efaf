"""Plug-ins that use the lengths of rows, or make the batches themselves."""

from __future__ import annotations

from plugin_sources import LM

BATCHES = {  # name: the source of the plug-in, flags that use it
    "lengths_of_10": (
        """
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion

@register_criterion("lengths_of_10")
class Lengths(CrossEntropyCriterion):
    def __init__(self, task, sentence_avg=False):
        super().__init__(task, sentence_avg)

    def forward(self, model, sample, reduce=True):
        inputs = sample["net_input"]
        assert inputs["src_lengths"].tolist() == inputs["src_tokens"].ne(1).sum(1).tolist()
        return super().forward(model, sample, reduce)
""",
        f"{LM} --criterion lengths_of_10",
    ),
    "monolingual_of_12": (
        """
import os
from fairseq.data import MonolingualDataset, TokenBlockDataset, data_utils
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer_lm import (
    DEFAULT_MAX_TARGET_POSITIONS, TransformerLanguageModel, TransformerLanguageModelConfig, transformer_lm_gpt2_tiny,
)
from fairseq.tasks import TASK_REGISTRY, register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

@register_model("decoder_of_12", dataclass=TransformerLanguageModelConfig)
class Model(TransformerLanguageModel):
    pass

@register_model_architecture("decoder_of_12", "decoder_of_12_tiny")
def tiny(args):
    assert DEFAULT_MAX_TARGET_POSITIONS == 1024
    transformer_lm_gpt2_tiny(args)

@register_task("monolingual_of_12", dataclass=LanguageModelingConfig)
class Task(LanguageModelingTask):
    def load_dataset(self, split, epoch=1, combine=False, **kwargs):
        file = os.path.join(self.args.data, {"other": "test"}.get(split, split))
        words = data_utils.load_indexed_dataset(file, self.dictionary, combine=combine)
        blocks = TokenBlockDataset(
            words, words.sizes, self.args.tokens_per_sample, pad=self.dictionary.pad(), eos=self.dictionary.eos(),
            break_mode="none", include_targets=True,
        )
        self.datasets[split] = MonolingualDataset(
            dataset=blocks, sizes=blocks.sizes, src_vocab=self.dictionary, tgt_vocab=self.output_dictionary,
            add_eos_for_other_targets=False, shuffle=True, targets=self.targets,
        )
        assert "monolingual_of_12" in TASK_REGISTRY
""",
        "--task monolingual_of_12 --arch decoder_of_12_tiny --tokens-per-sample 16 --criterion cross_entropy "
        "--valid-subset other",
    ),
}
