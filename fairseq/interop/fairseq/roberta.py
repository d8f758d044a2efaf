"""``fairseq.models.roberta``: encoders for scripts, in the form that fairseq's ``RobertaModel``
returned."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq import checkpoint
from fairseq.config.fields import add_flags, defaults, flag_name
from fairseq.errors import UserError
from fairseq.hub import MaskedLanguageModel
from fairseq.inference.loading import load_models
from fairseq.interop.fairseq.decoders import FairseqEncoder, FairseqEncoderModel, normalized
from fairseq.interop.fairseq.encoders import FILES, Numbered
from fairseq.interop.fairseq.hub_utils import check_splitters, located
from fairseq.interop.fairseq.layers import init_bert_params
from fairseq.interop.fairseq.modules import LayerNorm, quant_noise
from fairseq.interop.fairseq.namespaces import ReadsNamespace, namespace_of
from fairseq.interop.fairseq.transformer import TransformerEncoder
from fairseq.interop.fairseq.utils import get_activation_fn, model_eval
from fairseq.models.encoder_settings import BertConfig
from fairseq.models.sentence import HEADS, ClassificationHead
from fairseq.system.lookup import is_file
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.text.dictionary import Dictionary
from fairseq.text.text_corpus import TextReader, log_tokens
from fairseq.text.tokenizers import Tokenizer, find_tokenizer

IGNORED = ("load_checkpoint_heads", "tokenizer")  # arguments of fairseq's without meaning here
ARCHITECTURE = {  # of RoBERTa's base architecture in fairseq 0.12
    "encoder_layers": 12,
    "encoder_embed_dim": 768,
    "encoder_ffn_embed_dim": 3072,
    "encoder_attention_heads": 12,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.0,
    "pooler_dropout": 0.0,
    "max_positions": 512,
    "no_token_positional_embeddings": False,
    "encoder_learned_pos": True,
    "layernorm_embedding": True,
    "no_scale_embedding": True,
    "activation_fn": "gelu",
    "encoder_normalize_before": False,
    "pooler_activation_fn": "tanh",
    "untie_weights_roberta": False,
    "adaptive_input": False,
    "encoder_layerdrop": 0.0,
    "encoder_layers_to_keep": None,
    "quant_noise_pq": 0.0,
    "quant_noise_pq_block_size": 8,
    "quant_noise_scalar": 0.0,
    "spectral_norm_classification_head": False,
}


def completed(args: Any) -> Any:
    """*args* with the settings of :data:`ARCHITECTURE` that it lacks."""
    for name, value in ARCHITECTURE.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.max_source_positions = args.max_positions
    return args


def roberta_prenorm_architecture(args: object) -> None:
    """Set on *args* the defaults of an encoder with norms before its parts."""
    vars(args).setdefault("layernorm_embedding", False)
    vars(args).setdefault("encoder_normalize_before", True)
    completed(args)


HEAD_OUTPUT = re.compile(rf"{re.escape(HEADS)}(\w+)\.out_proj\.weight")


class RobertaHubInterface(nn.Module):
    """An encoder under the method names of fairseq's hub; without a tokenizer text is tokens
    between white space."""

    def __init__(self, cfg: Any, task: FairseqTask, model: Any, tokenizer: Tokenizer | None = None) -> None:
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
        return MaskedLanguageModel(self.model, self.task.source_dictionary, self.bpe).fill(masked_input, topk)

    def register_classification_head(
        self, name: str, num_classes: int, pooler_dropout: float = 0.0, pooler_activation_fn: str = "tanh"
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


class RobertaLMHead(nn.Module):
    """Dense layer, activation, layer norm, and a projection with a bias to all words."""

    def __init__(self, embed_dim: int, output_dim: int, activation_fn: str, weight: Any = None) -> None:
        super().__init__()
        self.dense = nn.Linear(embed_dim, embed_dim)
        self.activation_fn = get_activation_fn(activation_fn)
        self.layer_norm = LayerNorm(embed_dim)
        self.weight = nn.Linear(embed_dim, output_dim, bias=False).weight if weight is None else weight
        self.bias = nn.Parameter(torch.zeros(output_dim))

    def forward(self, features: Tensor, masked_tokens: Tensor | None = None, **options: object) -> Tensor:
        """Logits of hidden states, all of them or those at *masked_tokens*."""
        x = features if masked_tokens is None else features[masked_tokens, :]
        return F.linear(self.layer_norm(self.activation_fn(self.dense(x))), self.weight, self.bias)


class RobertaClassificationHead(nn.Module):
    """Dropout, dense layer, activation, dropout, projection to classes, over the first token."""

    def __init__(
        self,
        input_dim: int,
        inner_dim: int,
        num_classes: int,
        activation_fn: str,
        pooler_dropout: float,
        q_noise: float = 0,
        qn_block_size: int = 8,
        do_spectral_norm: bool = False,
    ) -> None:
        super().__init__()
        self.dense = nn.Linear(input_dim, inner_dim)
        self.activation_fn = get_activation_fn(activation_fn)
        self.dropout = nn.Dropout(pooler_dropout)
        self.out_proj: nn.Module = quant_noise(nn.Linear(inner_dim, num_classes), q_noise, qn_block_size)
        if do_spectral_norm:
            self.out_proj = nn.utils.spectral_norm(self.out_proj)

    def forward(self, features: Tensor, **options: object) -> Tensor:
        """Logits: [B, T, C] → [B, n]."""
        return self.out_proj(self.dropout(self.activation_fn(self.dense(self.dropout(features[:, 0])))))


class RobertaEncoder(FairseqEncoder):
    """An encoder with its output layer, made of a plug-in's settings."""

    def __init__(self, args: Any, dictionary: Dictionary) -> None:
        super().__init__(dictionary)
        completed(args)
        self.args = args
        embed_tokens = self.build_embedding(len(dictionary), args.encoder_embed_dim, dictionary.pad())
        self.sentence_encoder = self.build_encoder(args, dictionary, embed_tokens)
        self.lm_head = self.build_lm_head(
            embed_dim=args.encoder_embed_dim,
            output_dim=len(dictionary),
            activation_fn=args.activation_fn,
            weight=None if args.untie_weights_roberta else self.sentence_encoder.embed_tokens.weight,
        )

    def build_embedding(self, vocab_size: int, embedding_dim: int, padding_idx: int) -> nn.Module:
        """The embeddings; plug-ins override it."""
        return nn.Embedding(vocab_size, embedding_dim, padding_idx)

    def build_encoder(self, args: object, dictionary: object, embed_tokens: nn.Module) -> Any:
        """The layers; plug-ins override it."""
        encoder = TransformerEncoder(args, dictionary, embed_tokens)
        encoder.apply(init_bert_params)
        return encoder

    def build_lm_head(self, embed_dim: int, output_dim: int, activation_fn: str, weight: object) -> nn.Module:
        """The output layer; plug-ins override it."""
        return RobertaLMHead(embed_dim, output_dim, activation_fn, weight)

    def forward(  # type: ignore[override]
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        masked_tokens: Tensor | None = None,
        **inputs: object,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Logits [B, T, V], at *masked_tokens* [N, V], or hidden states [B, T, C]; and
        ``inner_states``."""
        features, extra = self.extract_features(src_tokens, return_all_hiddens, **inputs)
        return features if features_only else self.output_layer(features, masked_tokens=masked_tokens), extra

    def extract_features(
        self, src_tokens: Tensor, return_all_hiddens: bool = False, **inputs: object
    ) -> tuple[Tensor, dict[str, Any]]:
        """Hidden states [B, T, C] of the last layer; ``inner_states`` are those after each layer
        [T, B, C], or None."""
        embeddings = inputs.get("token_embeddings")
        output = self.sentence_encoder(src_tokens, return_all_hiddens=return_all_hiddens, token_embeddings=embeddings)
        states = output["encoder_states"] if return_all_hiddens else None
        return output["encoder_out"][0].transpose(0, 1), {"inner_states": states}

    def output_layer(self, features: Tensor, masked_tokens: Tensor | None = None, **options: object) -> Tensor:
        """Logits of hidden states, all of them or those at *masked_tokens*."""
        return self.lm_head(features, masked_tokens)

    def max_positions(self) -> int:
        return self.args.max_positions


class RobertaModel(ReadsNamespace, FairseqEncoderModel):
    """BERT and RoBERTa, under the name and with the constructor and hooks that scripts and plug-ins
    know."""

    def __init__(self, args: Any, encoder: nn.Module) -> None:
        super().__init__(encoder)
        self.args = args
        # The initial values of all parts, those that a plug-in put in included, are BERT's.
        self.apply(init_bert_params)
        self.classification_heads = nn.ModuleDict()

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        """Add the flags of encoders, and of the settings that only plug-ins can change."""
        add_flags(parser, BertConfig)
        for name, value in ARCHITECTURE.items():
            if name not in defaults(BertConfig):
                kind: Any = {"action": "store_true"} if isinstance(value, bool) else {"type": type(value or "")}
                parser.add_argument(flag_name(name), **kind)

    @classmethod
    def build_model(cls, args: Any, task: FairseqTask) -> RobertaModel:
        completed(args)
        return cls(args, RobertaEncoder(args, task.source_dictionary))

    def forward(  # type: ignore[override]
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        classification_head_name: str | None = None,
        **inputs: object,
    ) -> tuple[Tensor, dict[str, Any]]:
        """The encoder's output, or logits [B, n] of a head; see :class:`RobertaEncoder`."""
        head = classification_head_name
        x, extra = self.encoder(src_tokens, features_only or head is not None, return_all_hiddens, **inputs)
        return x if head is None else self.classification_heads[head](x), extra

    def register_classification_head(
        self, name: str, num_classes: int | None = None, inner_dim: int | None = None, **options: object
    ) -> None:
        """Add a head over the first token, with the settings ``pooler_…``."""
        args = completed(self.args)
        self.classification_heads[name] = RobertaClassificationHead(
            args.encoder_embed_dim,
            inner_dim or args.encoder_embed_dim,
            num_classes or 2,
            args.pooler_activation_fn,
            args.pooler_dropout,
            args.quant_noise_pq,
            args.quant_noise_pq_block_size,
            do_spectral_norm=args.spectral_norm_classification_head,
        )

    @property
    def supported_targets(self) -> set[str]:
        """What the model predicts: the tokens themselves."""
        return {"self"}

    def get_normalized_probs(self, net_output: Any, log_probs: bool, sample: object = None) -> Tensor:
        return normalized(net_output[0], log_probs)

    def upgrade_state_dict_named(self, state_dict: dict[str, object], name: str) -> Any:
        """Rename what former versions called otherwise, and keep the heads that the model has."""
        prefix = f"{name}." if name else ""
        for key in list(state_dict):
            renamed = key
            if key.startswith(f"{prefix}decoder."):
                renamed = f"{prefix}encoder.{key.removeprefix(f'{prefix}decoder.')}"
            renamed = renamed.replace(".emb_layer_norm.", ".layernorm_embedding.")
            if renamed != key:
                state_dict[renamed] = state_dict.pop(key)
        super().upgrade_state_dict_named(state_dict, name)
        present = self.state_dict()
        for key in [key for key in state_dict if key.startswith(f"{prefix}classification_heads.")]:
            if key.removeprefix(prefix) not in present:
                del state_dict[key]
        # A file of before fine-tuning has no heads: they begin anew.
        for key, value in self.classification_heads.state_dict(prefix="classification_heads.").items():
            state_dict.setdefault(prefix + key, value)
        for key, value in present.items():
            # Markers of fairseq's versions, which files of this package lack.
            if key.endswith(".version"):
                state_dict.setdefault(prefix + key, value)
        return state_dict

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str,
        checkpoint_file: str = "model.pt",
        data_name_or_path: str = ".",
        bpe: str | None = "gpt2",
        **settings: Any,
    ) -> RobertaHubInterface:
        """The encoder in the folder *model_name_or_path*, in evaluation mode, with the heads of its
        checkpoint.

        The folder of the dictionary, or of fine-tuning, is inside the model's or anywhere. Without
        a tokenizer next to the dictionary *bpe* splits text: ``gpt2`` are numbers in files,
        ``gpt2_encoder_json`` and ``gpt2_vocab_bpe``, by default the checkpoint's, or *encoder.json*
        and *vocab.bpe* in the folder. Other *settings* change the checkpoint's.

        Raises:
            UserError: a file is missing or invalid, several are named, one is no encoder, a setting
                does not exist, or there is no tokenizer for *bpe*.
        """
        check_splitters({"bpe": bpe, **settings})
        [path, *others], data = located(model_name_or_path, checkpoint_file, data_name_or_path)
        if others:
            raise UserError(f"`checkpoint_file` {checkpoint_file}: several checkpoints; give one, an encoder")
        state = checkpoint.load(path)
        trained = {name: file for name in FILES if (file := state["args"].get(name)) and is_file(file)}
        files = {name: Path({**trained, **settings}.get(name, path.parent / file)) for name, file in FILES.items()}
        overrides = {name: value for name, value in settings.items() if name not in (*IGNORED, *FILES)}
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
        known_files = (settings | trained).keys() & FILES.keys()
        if tokenizer is None and bpe == "gpt2" and (known_files or all(is_file(file) for file in files.values())):
            tokenizer = Tokenizer(subwords=Numbered.load(**files))
        if tokenizer is None:
            if bpe not in (None, "gpt2"):
                raise UserError(f"`bpe` {bpe}: no tokenizer next to {dictionary.path}; give None for text of tokens")
            log_tokens(dictionary)
        roberta = RobertaHubInterface(namespace_of(used), task, model, tokenizer)
        # Heads that the task did not build: their names and sizes are in the checkpoint alone.
        for name in heads.keys() - set(getattr(model, "classification_heads", ())):
            roberta.register_classification_head(name, heads[name])
            prefix = f"{HEADS}{name}."
            parameters = {k.removeprefix(prefix): v for k, v in state["model"].items() if k.startswith(prefix)}
            roberta.model.classification_heads[name].load_state_dict(parameters)
        return roberta.eval()


XLMRModel = CamembertModel = GottbertModel = RobertaModel
