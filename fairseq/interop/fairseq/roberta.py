"""``fairseq.models.roberta``: encoders for scripts, in the form that fairseq's ``RobertaModel`` returned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairseq import checkpoint
from fairseq.config.fields import typed
from fairseq.errors import UserError
from fairseq.hub import MaskedLanguageModel
from fairseq.inference.loading import load_models
from fairseq.interop.fairseq.encoders import FILES, Numbered
from fairseq.interop.fairseq.hub_utils import check_splitters, located
from fairseq.interop.fairseq.layers import init_bert_params as init_bert_params
from fairseq.interop.fairseq.modules import check_hooks
from fairseq.models.bert import BertConfig, BertModel, MaskedLMEncoder, MaskedLMHead
from fairseq.models.sentence import HEADS, ClassificationHead
from fairseq.system.lookup import is_file
from fairseq.text.text_corpus import TextReader, log_tokens
from fairseq.text.tokenizers import Tokenizer, find_tokenizer

IGNORED = ("load_checkpoint_heads", "tokenizer")  # arguments of fairseq's without meaning here
HEAD_OUTPUT = re.compile(rf"{re.escape(HEADS)}(\w+)\.out_proj\.weight")


class RobertaHubInterface(nn.Module):
    """An encoder under the method names of fairseq's hub; without a tokenizer text is tokens between white space."""

    def __init__(self, cfg: Any, task: Any, model: Any, tokenizer: Tokenizer | None = None) -> None:
        super().__init__()
        self.cfg = self.args = cfg
        self.task, self.model, self.bpe = task, model, tokenizer
        self._ids = TextReader(task.source_dictionary, tokenizer)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def encode(self, sentence: str, *addl_sentences: str, no_separator: bool = False) -> Tensor:
        """The ids of ``<s> a </s>``, with further sentences ``<s> a </s> </s> b </s>``: int64 [T].

        With *no_separator* there is one ``</s>`` between sentences.
        """
        dictionary = self.task.source_dictionary
        ids = [dictionary.bos()]
        for number, text in enumerate((sentence, *addl_sentences)):
            # fairseq's encoders were fine-tuned on pairs `<s> a </s> </s> b </s>`.
            separator = [dictionary.eos()] if number and not no_separator else []
            ids += [*separator, *self._ids(text).tolist(), dictionary.eos()]
        return torch.tensor(ids)

    def decode(self, tokens: Tensor) -> Any:
        """The text of ids [T]; a list of texts where separators divide them."""
        dictionary = self.task.source_dictionary
        ends = {dictionary.bos(), dictionary.pad(), dictionary.eos()}
        parts: list[list[str]] = [[]]
        for before, token in zip([None, *tokens.tolist()], tokens.tolist(), strict=False):
            # Two ends in a row are the separator of a pair; a single one ends the row.
            if token == before == dictionary.eos():
                parts.append([])
            elif token not in ends:
                parts[-1].append(dictionary[token])
        texts = [self.bpe.decode(part) if self.bpe is not None else " ".join(part) for part in parts]
        return texts[0] if len(texts) == 1 else texts

    def extract_features(self, tokens: Tensor, return_all_hiddens: bool = False) -> Any:
        """Hidden states of the last layer: [T] or [B, T] → [B, T, C]; or a list of the embeddings' and each layer's."""
        encoder, rows = self.model.encoder.sentence_encoder, torch.atleast_2d(tokens).to(self.device)
        return list(encoder.states(rows)) if return_all_hiddens else encoder(rows)

    def extract_features_aligned_to_words(self, sentence: str, return_all_hiddens: bool = False) -> Any:
        """Refused: words were spaCy's."""
        raise UserError("extract_features_aligned_to_words: not implemented; use encode() and extract_features()")

    def fill_mask(self, masked_input: str, topk: int = 5) -> list[tuple[str, float, str]]:
        """The *topk* best fillings of ``<mask>``: text, probability, text of the symbol.

        Raises:
            UserError: the model was fine-tuned, and has no output layer.
        """
        return MaskedLanguageModel(self.model, self.task.source_dictionary, self.bpe).fill(masked_input, topk)

    def register_classification_head(
        self, name: str, num_classes: int, pooler_dropout: float = 0.0, pooler_activation_fn: str = "tanh"
    ) -> None:
        """Add a new head over the first token."""
        if not hasattr(self.model, "classification_heads"):
            self.model.classification_heads = nn.ModuleDict()
        dim = self.model.encoder.sentence_encoder.cfg.encoder_embed_dim
        head = ClassificationHead(dim, num_classes, pooler_dropout, pooler_activation_fn)
        self.model.classification_heads[name] = head.to(self.device).train(self.training)

    def predict(self, head: str, tokens: Tensor, return_logits: bool = False) -> Tensor:
        """Log-probabilities of classes from a head, or logits, as for scores: [T] or [B, T] → [B, n].

        Raises:
            UserError: there is no such head.
        """
        heads = getattr(self.model, "classification_heads", {})
        if head not in heads:
            raise UserError(f"predict: no head {head}; there are {', '.join(heads) or 'none: register one'}")
        logits = heads[head](self.extract_features(tokens)[:, 0])
        return logits if return_logits else logits.log_softmax(-1)


RobertaLMHead = MaskedLMHead
RobertaClassificationHead = ClassificationHead


class RobertaEncoder(MaskedLMEncoder):
    """An encoder with its output layer, made of a plug-in's settings."""

    def __init__(self, args: Any, dictionary: Any) -> None:
        check_hooks(self, "write an encoder of own layers on FairseqEncoder", "build_encoder", "build_lm_head")
        super().__init__(typed(BertConfig, args), len(dictionary), dictionary.pad())
        self.args, self.dictionary = args, dictionary

    def forward(
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        masked_tokens: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Logits [B, T, V], at *masked_tokens* [N, V], or hidden states [B, T, C]; and ``inner_states``."""
        features, extra = self.extract_features(src_tokens, return_all_hiddens)
        return features if features_only else self.output_layer(features, masked_tokens), extra

    def extract_features(self, src_tokens: Tensor, return_all_hiddens: bool = False, **unused: Any) -> Any:
        """Hidden states [B, T, C] of the last layer; ``inner_states`` are those after each layer [T, B, C], or None."""
        if not return_all_hiddens:
            return self.sentence_encoder(src_tokens), {"inner_states": None}
        states = list(self.sentence_encoder.states(src_tokens))
        return states[-1], {"inner_states": [state.transpose(0, 1) for state in states]}

    def output_layer(self, features: Tensor, masked_tokens: Tensor | None = None, **unused: Any) -> Tensor:
        """Logits of hidden states, all of them or those at *masked_tokens*."""
        return self.lm_head(features if masked_tokens is None else features[masked_tokens])

    def max_positions(self) -> int:
        return self.sentence_encoder.cfg.max_positions


class RobertaModel(BertModel):
    """BERT and RoBERTa, under the name and with the constructor that scripts and plug-ins know."""

    def __init__(self, args: Any, encoder: Any) -> None:
        super().__init__(encoder, typed(BertConfig, args))
        self.args, self.classification_heads = args, nn.ModuleDict()

    @classmethod
    def build_model(cls, args: Any, task: Any) -> RobertaModel:
        return cls(args, RobertaEncoder(args, task.source_dictionary))

    def forward(  # type: ignore[override]
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        classification_head_name: str | None = None,
        **inputs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """The encoder's output, or logits [B, n] of a head; see :class:`RobertaEncoder`."""
        head = classification_head_name
        x, extra = self.encoder(src_tokens, features_only or head is not None, return_all_hiddens, **inputs)
        return x if head is None else self.classification_heads[head](x[:, 0]), extra

    def upgrade_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        prefixes = tuple(f"{HEADS}{name}." for name in self.classification_heads)
        heads = {name: value for name, value in state.items() if name.startswith(prefixes)}
        return {**super().upgrade_state_dict(state), **heads}

    def register_classification_head(
        self, name: str, num_classes: int, inner_dim: int | None = None, **unused: Any
    ) -> None:
        """Add a head over the first token, with the settings ``pooler_…``."""
        dim, rate = self.cfg.encoder_embed_dim, getattr(self.args, "pooler_dropout", 0.0)
        head = ClassificationHead(dim, num_classes, rate, getattr(self.args, "pooler_activation_fn", "tanh"))
        self.classification_heads[name] = head

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str,
        checkpoint_file: str = "model.pt",
        data_name_or_path: str = ".",
        bpe: str | None = "gpt2",
        **settings: Any,
    ) -> RobertaHubInterface:
        """The encoder in the folder *model_name_or_path*, in evaluation mode, with the heads of its checkpoint.

        The folder of the dictionary, or of fine-tuning, is inside the model's or anywhere. Without a tokenizer beside
        the dictionary *bpe* splits text: ``gpt2`` are numbers in files, ``gpt2_encoder_json`` and ``gpt2_vocab_bpe``,
        by default *encoder.json* and *vocab.bpe* in the folder. Other *settings* change the checkpoint's.

        Raises:
            UserError: a file is missing or invalid, several are named, one is no encoder, a setting does not exist,
                or there is no tokenizer for *bpe*.
        """
        check_splitters({"bpe": bpe, **settings})
        [path, *others], data = located(model_name_or_path, checkpoint_file, data_name_or_path)
        if others:
            raise UserError(f"`checkpoint_file` {checkpoint_file}: several checkpoints; give one, an encoder")
        files = {name: Path(settings.get(name, path.parent / file)) for name, file in FILES.items()}
        overrides = {name: value for name, value in settings.items() if name not in (*IGNORED, *FILES)}
        state = checkpoint.load(path)
        heads = {match[1]: len(value) for name, value in state["model"].items() if (match := HEAD_OUTPUT.match(name))}
        stored, name = state["args"], "classification_head_name"
        # The task builds the head that its settings name; a checkpoint of fairseq may hold one under another name.
        if heads and stored.get("task") == "sentence_prediction" and stored.get(name) not in heads:
            overrides[name] = next(iter(heads))
        [model], task, used = load_models([path], data, overrides, states=[state])
        if model.predicts_next_token:
            raise UserError(f"{path}: {type(model).__name__} is a decoder; give an encoder, such as roberta")
        dictionary = task.source_dictionary
        # A tokenizer beside the dictionary is the one that the data were made with, and comes before `bpe`.
        tokenizer = find_tokenizer(dictionary.path or data, dictionary.symbols)
        file_settings = settings.keys() & FILES.keys()
        if tokenizer is None and bpe == "gpt2" and (file_settings or all(is_file(file) for file in files.values())):
            tokenizer = Tokenizer(subwords=Numbered.load(**files))
        if tokenizer is None:
            if bpe not in (None, "gpt2"):
                raise UserError(f"`bpe` {bpe}: no tokenizer beside {dictionary.path}; give None for text of tokens")
            log_tokens(dictionary)
        roberta = RobertaHubInterface(used.namespace, task, model, tokenizer)
        # Heads that the task did not build: their names and sizes are in the checkpoint alone.
        for name in heads.keys() - set(getattr(model, "classification_heads", ())):
            roberta.register_classification_head(name, heads[name])
            prefix = f"{HEADS}{name}."
            parameters = {k.removeprefix(prefix): v for k, v in state["model"].items() if k.startswith(prefix)}
            roberta.model.classification_heads[name].load_state_dict(parameters)
        return roberta.eval()


XLMRModel = CamembertModel = GottbertModel = RobertaModel
