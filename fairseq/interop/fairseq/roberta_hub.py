"""``fairseq.interop.fairseq.roberta_hub``: encoders for scripts, in the form that fairseq's
``RobertaModel.from_pretrained`` returned."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairseq import checkpoint
from fairseq.config.namespaces import namespace_of
from fairseq.data.encoders import FILES, SETTINGS, LineEncoder, Numbered, subwords_of
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.errors import UserError
from fairseq.hub import MaskedLanguageModel
from fairseq.hub_utils import OF_COMMANDS, located, splitting_of
from fairseq.inference.loading import load_models
from fairseq.models.fairseq_decoder import FairseqEncoderModel
from fairseq.models.roberta import RobertaModel
from fairseq.models.sentence import HEADS, ClassificationHead
from fairseq.models.views import logits_model, plain
from fairseq.system.plugins import import_user_module
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.text.text_corpus import TextReader, log_tokens
from fairseq.text.tokenizers import Tokenizer, find_tokenizer
from fairseq.utils import model_eval

IGNORED = ("load_checkpoint_heads",)  # arguments of fairseq's without meaning here
WORDS = (None, "", "moses", "nltk", "space")  # accepted, without effect
HEAD_OUTPUT = re.compile(rf"{re.escape(HEADS)}(\w+)\.out_proj\.weight")


class RobertaHubInterface(nn.Module):
    """An encoder under the method names of fairseq's hub; without a tokenizer text is tokens
    between white space."""

    def __init__(self, cfg: Any, task: FairseqTask, model: Any, tokenizer: Tokenizer | None = None) -> None:
        super().__init__()
        self.cfg: Any = convert_namespace_to_omegaconf(cfg)
        self.args, self.task, self.model = self.cfg, task, logits_model(plain(model))
        self.bpe = LineEncoder(tokenizer) if tokenizer is not None else None
        self._tokenizer, self._ids = tokenizer, TextReader(task.source_dictionary, tokenizer)

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
        texts = [" ".join(part) if self.bpe is None else self.bpe.decode(" ".join(part)) for part in parts]
        return texts[0] if len(texts) == 1 else texts

    def extract_features(self, tokens: Tensor, return_all_hiddens: bool = False) -> Any:
        """Hidden states of the last layer: [T] or [B, T] → [B, T, C]; or a list of the embeddings'
        and each layer's."""
        rows = torch.atleast_2d(tokens).to(self.device)
        if isinstance(self.model, FairseqEncoderModel):
            features, extra = self.model(rows, features_only=True, return_all_hiddens=return_all_hiddens)
            return [state.transpose(0, 1) for state in extra["inner_states"]] if return_all_hiddens else features
        encoder = self.model.encoder.sentence_encoder
        return list(encoder.states(rows)) if return_all_hiddens else encoder(rows)

    def extract_features_aligned_to_words(self, sentence: str, return_all_hiddens: bool = False) -> Any:
        """Refused: words were spaCy's."""
        raise UserError("extract_features_aligned_to_words: not implemented; use encode() and extract_features()")

    def fill_mask(self, masked_input: str, topk: int = 5) -> list[tuple[str, float, str]]:
        """The *topk* best fillings of ``<mask>``: text, probability, text of the symbol.

        Raises:
            UserError: the model was fine-tuned, and has no output layer.
        """
        model = MaskedLanguageModel(plain(self.model), self.task.source_dictionary, self._tokenizer)
        return model.fill(masked_input, topk)

    def register_classification_head(
        self,
        name: str,
        num_classes: int,
        pooler_dropout: float = 0.0,
        pooler_activation_fn: str = "tanh",
        **unused: object,
    ) -> None:
        """Add a new head over the first token."""
        model: Any = self.model
        if isinstance(model, RobertaModel):
            model.register_classification_head(name, num_classes)  # with the model's own pooler
            model.to(self.device).train(self.training)
            return
        if not hasattr(model, "classification_heads"):
            model.classification_heads = nn.ModuleDict()
        dim = model.encoder.sentence_encoder.cfg.encoder_embed_dim
        head = ClassificationHead(dim, num_classes, pooler_dropout, pooler_activation_fn)
        model.classification_heads[name] = head.to(self.device).train(self.training)

    def predict(self, head: str, tokens: Tensor, return_logits: bool = False) -> Tensor:
        """Log-probabilities of classes from a head, or logits, as for scores: [T] or [B, T] →
        [B, n].

        Raises:
            UserError: there is no such head.
        """
        heads: Any = getattr(self.model, "classification_heads", {})
        if head not in heads:
            raise UserError(f"predict: no head {head}; there are {', '.join(heads) or 'none: register one'}")
        features = self.extract_features(tokens)
        # Heads of this package read the first token's state, fairseq's pick it themselves.
        logits = heads[head](features[:, 0] if isinstance(heads[head], ClassificationHead) else features)
        return logits if return_logits else logits.log_softmax(-1)

    def disambiguate_pronoun(self, sentence: str) -> Any:
        """The answer of the task, such as fairseq's ``wsc``, on the pronoun in brackets in
        *sentence*.

        Raises:
            UserError: the task has no such method.
        """
        if not hasattr(self.task, "disambiguate_pronoun"):
            raise UserError("disambiguate_pronoun: the checkpoint's task has no such method; give one trained with wsc")
        with model_eval(self.model), torch.no_grad():
            return self.task.disambiguate_pronoun(self.model, sentence, use_cuda=self.device.type == "cuda")


def from_pretrained(
    model_name_or_path: str,
    checkpoint_file: str = "model.pt",
    data_name_or_path: str = ".",
    bpe: str | None = "gpt2",
    user_dir: str | None = None,
    **settings: Any,
) -> RobertaHubInterface:
    """The encoder in the folder *model_name_or_path*, in evaluation mode, with the heads of its
    checkpoint.

    The folder of the dictionary, or of fine-tuning, is inside the model's or anywhere. Without
    a tokenizer next to the dictionary *bpe* splits text: ``gpt2`` are numbers in files,
    ``gpt2_encoder_json`` and ``gpt2_vocab_bpe``, by default *encoder.json*
    and *vocab.bpe* in the folder; others are in the folder or at ``bpe_codes``. Other
    *settings* change the checkpoint's. *user_dir* is imported first.

    Raises:
        UserError: a file is missing or invalid, several are named, one is no encoder, a setting
            does not exist, or there is no tokenizer for *bpe*.
    """
    if (words := settings.get("tokenizer")) not in WORDS:
        raise UserError(f"`tokenizer` {words}: unknown; choose from {', '.join(filter(None, WORDS))}")
    if user_dir is not None:
        import_user_module(user_dir)
    [path, *others], data = located(model_name_or_path, checkpoint_file, data_name_or_path)
    if others:
        raise UserError(f"`checkpoint_file` {checkpoint_file}: several checkpoints; give one, an encoder")
    state = checkpoint.load(path, only="model")
    files = {name: Path(settings.get(name, path.parent / file)) for name, file in FILES.items()}
    overrides = {k: v for k, v in settings.items() if k not in (*IGNORED, *SETTINGS, *OF_COMMANDS - {"seed"})}
    heads = {match[1]: len(value) for name, value in state["model"].items() if (match := HEAD_OUTPUT.match(name))}
    stored, name = state["args"], "classification_head_name"
    # The task builds the head that its settings name; a checkpoint of fairseq may hold one
    # under another name.
    if heads and stored.get("task") == "sentence_prediction" and stored.get(name) not in heads:
        overrides[name] = next(iter(heads))
    [model], task, used = load_models([path], data, overrides, states=[state])
    if model.predicts_next_token:
        raise UserError(f"{path}: {type(model).__name__} is a decoder; give an encoder, such as roberta")
    dictionary = task.source_dictionary
    # A tokenizer next to the dictionary is the one that the data were made with, and comes
    # before `bpe`.
    tokenizer = find_tokenizer(dictionary.path or data, dictionary.symbols)
    is_given = settings.keys() & FILES.keys()
    if tokenizer is None and bpe == "gpt2" and (is_given or all(os.path.isfile(file) for file in files.values())):
        tokenizer = Tokenizer(subwords=Numbered.load(**files))
    if tokenizer is None:
        if bpe not in (None, "", "gpt2"):
            tokenizer = Tokenizer(subwords=subwords_of(bpe, splitting_of(model_name_or_path, settings)))
        else:
            log_tokens(dictionary)
    roberta = RobertaHubInterface(namespace_of(used), task, model, tokenizer)
    # Heads that the task did not build: their names and sizes are in the checkpoint alone.
    for name in heads.keys() - set(getattr(model, "classification_heads", ())):
        roberta.register_classification_head(name, heads[name])
        prefix = f"{HEADS}{name}."
        parameters = {k.removeprefix(prefix): v for k, v in state["model"].items() if k.startswith(prefix)}
        roberta.model.classification_heads[name].load_state_dict(parameters)
    return roberta.eval()
