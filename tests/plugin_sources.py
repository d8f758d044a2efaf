"""Small plug-ins in the manner of fairseq 0.9 to 0.12: by name, files of a ``--user-dir`` and the
flags to train it."""

from __future__ import annotations

LM = "--arch transformer_lm --criterion cross_entropy --tokens-per-sample 16"
BERT = "--arch bert_tiny --task masked_lm --criterion masked_lm --tokens-per-sample 16 --max-tokens 256"

CRITERIONS = {
    "loss_of_12": (
        """
import torch.nn.functional as F
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig

@register_criterion("loss_of_12", dataclass=CrossEntropyCriterionConfig)
class Loss(CrossEntropyCriterion):
    def compute_loss(self, model, net_output, sample, reduce=True):
        lprobs = model.get_normalized_probs(net_output, log_probs=True)
        target = model.get_targets(sample, net_output).view(-1)
        loss = F.nll_loss(lprobs.view(-1, lprobs.size(-1)), target, ignore_index=self.padding_idx,
                          reduction="sum" if reduce else "none")
        return loss, loss
""",
        f"{LM} --criterion loss_of_12",
    ),
    "loss_of_10": (
        """
import torch
from fairseq import metrics, utils
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion

@register_criterion("loss_of_10")
class Loss(CrossEntropyCriterion):
    def __init__(self, task, sentence_avg):
        super().__init__(task, sentence_avg)

    def forward(self, model, sample, reduce=True):
        net_output = model(**sample["net_input"])
        loss, _ = self.compute_loss(model, net_output, sample, reduce=reduce)
        assert self.compute_loss(model, net_output, sample, reduce=False)[0].dim() == 1
        loss = loss * (0.5 + torch.rand(()))  # in validation, too
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        return loss, sample_size, {"loss": loss.data, "ntokens": sample["ntokens"],
                                   "nsentences": sample["target"].size(0), "sample_size": sample_size}
""",
        f"{LM} --criterion loss_of_10",
    ),
    "smoothed_of_12": (
        """
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion, LabelSmoothedCrossEntropyCriterionConfig, label_smoothed_nll_loss,
)

@register_criterion("smoothed_of_12", dataclass=LabelSmoothedCrossEntropyCriterionConfig)
class Smoothed(LabelSmoothedCrossEntropyCriterion):
    def __init__(self, task, sentence_avg, label_smoothing, ignore_prefix_size=0, report_accuracy=False):
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)

    def compute_loss(self, model, net_output, sample, reduce=True):
        lprobs, target = self.get_lprobs_and_target(model, net_output, sample)
        return label_smoothed_nll_loss(lprobs, target, self.eps, ignore_index=self.padding_idx, reduce=reduce)
""",
        f"{LM} --criterion smoothed_of_12 --label-smoothing 0.1",
    ),
    "logits_of_9": (
        """
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion

@register_criterion("logits_of_9")
class Logits(FairseqCriterion):
    def __init__(self, args, task):
        super().__init__(args, task)

    @staticmethod
    def add_args(parser):
        parser.add_argument("--z-loss", default=0.0, type=float, metavar="D")

    def forward(self, model, sample, reduce=True):
        logits = model(**sample["net_input"])[0]
        assert logits.size(-1) == len(self.task.target_dictionary)
        loss = F.cross_entropy(logits.flatten(0, 1), sample["target"].view(-1), ignore_index=self.padding_idx,
                               reduction="sum")
        loss = loss + self.args.z_loss * logits.logsumexp(-1).pow(2).sum()
        return loss, sample["ntokens"], {"loss": loss.data, "ntokens": sample["ntokens"],
                                         "nsentences": sample["nsentences"]}
""",
        f"{LM} --criterion logits_of_9 --z-loss 0.001",
    ),
    "adaptive_of_12": (
        """
from dataclasses import dataclass, field
from fairseq.criterions import register_criterion
from fairseq.criterions.adaptive_loss import AdaptiveLoss, AdaptiveLossConfig

@dataclass
class Config(AdaptiveLossConfig):
    loss_factor: float = field(default=2.0, metadata={"help": "factor"})

@register_criterion("adaptive_of_12", dataclass=Config)
class Loss(AdaptiveLoss):
    def __init__(self, task, sentence_avg, loss_factor):
        super().__init__(task, sentence_avg)
        self.factor = loss_factor

    def compute_loss(self, model, net_output, sample):
        loss, size, log = super().compute_loss(model, net_output, sample)
        return loss * self.factor, size, log
""",
        f"{LM} --criterion adaptive_of_12 --adaptive-softmax-cutoff 100,300",
    ),
    "masked_of_10": (
        """
import torch.nn.functional as F
from fairseq import utils
from fairseq.criterions import register_criterion
from fairseq.criterions.masked_lm import MaskedLmLoss

@register_criterion("masked_of_10")
class Masked(MaskedLmLoss):
    def __init__(self, task, tpu=False):
        super().__init__(task, tpu)

    def forward(self, model, sample, reduce=True):
        masked = sample["target"].ne(self.padding_idx)
        logits = model(**sample["net_input"], masked_tokens=masked)[0]
        targets = model.get_targets(sample, [logits])[masked]
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), reduction="sum")
        return loss, int(masked.sum()), {"loss": utils.item(loss.data), "ntokens": sample["ntokens"],
                                         "nsentences": sample["nsentences"]}
""",
        f"{BERT} --criterion masked_of_10",
    ),
}

_DECODER = """
import torch, torch.nn as nn, torch.nn.functional as F
from fairseq import utils
from fairseq.models import (
    FairseqIncrementalDecoder, FairseqLanguageModel, register_model, register_model_architecture,
)
from fairseq.modules import (
    FairseqDropout, LayerDropModuleList, LayerNorm, MultiheadAttention, PositionalEmbedding,
)
from fairseq.modules.quant_noise import quant_noise

class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.self_attn = MultiheadAttention(dim, 2, dropout=0.1, self_attention=True)
        self.norm, self.drop = LayerNorm(dim), FairseqDropout(0.1, module_name=self.__class__.__name__)
        self.fc = quant_noise(nn.Linear(dim, dim), 0, 8)

    def forward(self, x, mask):
        y, _ = self.self_attn(query=x, key=x, value=x, attn_mask=mask, need_weights=False)
        return x + self.drop(self.fc(self.norm(x + y)))

class Decoder(FairseqIncrementalDecoder):
    def __init__(self, dictionary, dim, learned):
        super().__init__(dictionary)
        self.embed_tokens = nn.Embedding(len(dictionary), dim, dictionary.pad())
        self.embed_positions = PositionalEmbedding(64, dim, dictionary.pad(), learned=learned)
        self.layers = LayerDropModuleList(0.2, [Layer(dim) for _ in range(2)])

    def forward(self, prev_output_tokens, encoder_out=None, incremental_state=None, **kwargs):
        x = (self.embed_tokens(prev_output_tokens) + self.embed_positions(prev_output_tokens)).transpose(0, 1)
        mask = torch.triu(utils.fill_with_neg_inf(x.new(x.size(0), x.size(0))), 1)
        for layer in self.layers:
            x = layer(x, mask)
        return F.linear(x.transpose(0, 1), self.embed_tokens.weight), {"inner_states": [x]}

    def max_positions(self):
        return 64
"""

MODELS = {
    "arch_of_9": (
        """
from fairseq.models import register_model_architecture
from fairseq.models.transformer_lm import base_lm_architecture

@register_model_architecture("transformer_lm", "arch_of_9")
def arch_of_9(args):
    args.decoder_layers = getattr(args, "decoder_layers", 1)
    args.decoder_embed_dim = getattr(args, "decoder_embed_dim", 16)
    args.decoder_attention_heads = getattr(args, "decoder_attention_heads", 2)
    base_lm_architecture(args)
""",
        "--arch arch_of_9 --criterion cross_entropy --tokens-per-sample 16 --decoder-ffn-embed-dim 16",
    ),
    "attention_of_10": (
        _DECODER
        + """
@register_model("attention_of_10")
class Model(FairseqLanguageModel):
    @staticmethod
    def add_args(parser):
        parser.add_argument("--width", type=int, metavar="N")

    @classmethod
    def build_model(cls, args, task):
        return cls(Decoder(task.target_dictionary, args.width, True))

@register_model_architecture("attention_of_10", "attention_of_10_small")
def small(args):
    args.width = getattr(args, "width", 8)
""",
        "--arch attention_of_10_small --criterion cross_entropy --tokens-per-sample 16 --width 16",
    ),
    "sinusoids_of_9": (
        _DECODER
        + """
from fairseq.modules import AdaptiveSoftmax

class Banded(Decoder):
    def __init__(self, dictionary, positions):
        super().__init__(dictionary, 8, False)
        assert positions == 64
        self.adaptive_softmax = AdaptiveSoftmax(len(dictionary), 8, [100, 300])

    def forward(self, prev_output_tokens, **kwargs):
        extra = super().forward(prev_output_tokens, **kwargs)[1]
        return extra["inner_states"][0].transpose(0, 1), extra

    def upgrade_state_dict_named(self, state_dict, name):
        state_dict[f"{name}.embed_positions._float_tensor"] = torch.FloatTensor(1)
        return state_dict

@register_model("sinusoids_of_9")
class Model(FairseqLanguageModel):
    @staticmethod
    def add_args(parser):
        pass

    @classmethod
    def build_model(cls, args, task):
        return cls(Banded(task.target_dictionary, args.max_target_positions))

    def forward(self, src_tokens, src_lengths, **kwargs):
        assert src_lengths.shape == src_tokens.shape[:1]
        return self.decoder(src_tokens, **kwargs)

@register_model_architecture("sinusoids_of_9", "sinusoids_of_9")
def base(args):
    pass
""",
        "--arch sinusoids_of_9 --criterion adaptive_loss --tokens-per-sample 16 --max-target-positions 64",
    ),
    "config_of_12": (
        """
from dataclasses import dataclass, field
from fairseq.models import register_model
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig

@dataclass
class Config(TransformerLanguageModelConfig):
    decoder_embed_dim: int = field(default=16, metadata={"help": "width"})
    decoder_input_dim: int = field(default=16, metadata={"help": "width"})
    decoder_output_dim: int = field(default=16, metadata={"help": "width"})
    decoder_layers: int = field(default=1, metadata={"help": "layers"})
    decoder_attention_heads: int = field(default=2, metadata={"help": "heads"})
    scale_output: float = field(default=0.5, metadata={"help": "factor"})

@register_model("config_of_12", dataclass=Config)
class Model(TransformerLanguageModel):
    @classmethod
    def build_model(cls, cfg, task):
        model = super().build_model(cfg, task)
        model.decoder.embed_tokens.weight.data.mul_(cfg.scale_output)
        return model
""",
        "--arch config_of_12 --criterion cross_entropy --tokens-per-sample 16 --scale-output 0.2",
    ),
    "lstm_of_9": (
        """
from fairseq.models import FairseqLanguageModel, register_model, register_model_architecture
from fairseq.models.lstm import LSTMDecoder

@register_model("lstm_of_9")
class Model(FairseqLanguageModel):
    @classmethod
    def build_model(cls, args, task):
        return cls(LSTMDecoder(task.dictionary, 8, 8, 8, attention=False, encoder_output_units=0))

@register_model_architecture("lstm_of_9", "lstm_of_9")
def base(args):
    pass
""",
        "--arch lstm_of_9 --criterion cross_entropy --tokens-per-sample 16",
    ),
    "sentence_encoder_of_10": (
        """
import torch.nn as nn
from fairseq.models import BaseFairseqModel, FairseqEncoder, register_model, register_model_architecture
from fairseq.models.fairseq_encoder import FairseqEncoderModel
from fairseq.modules import MultiheadAttention, TransformerSentenceEncoder, TransformerSentenceEncoderLayer
from fairseq.modules.transformer_sentence_encoder import init_bert_params

class Attention(MultiheadAttention):
    pass

class Layer(TransformerSentenceEncoderLayer):
    def build_self_attention(self, embed_dim, num_attention_heads, **kwargs):
        return Attention(embed_dim, num_attention_heads, **kwargs)

class Sentence(TransformerSentenceEncoder):
    def build_transformer_sentence_encoder_layer(self, *args, **kwargs):
        return Layer(*args, **kwargs)

class Encoder(FairseqEncoder):
    def __init__(self, args, dictionary):
        super().__init__(dictionary)
        self.sentence_encoder = Sentence(
            padding_idx=dictionary.pad(), vocab_size=len(dictionary), num_encoder_layers=1, embedding_dim=8,
            ffn_embedding_dim=8, num_attention_heads=2, max_seq_len=64, num_segments=0,
            encoder_normalize_before=True, apply_bert_init=True, activation_fn="gelu",
        )
        self.lm_head = nn.Linear(8, len(dictionary))

    def forward(self, src_tokens, features_only=False, return_all_hiddens=False, masked_tokens=None, **unused):
        inner_states, _ = self.sentence_encoder(src_tokens, last_state_only=not return_all_hiddens)
        features = inner_states[-1].transpose(0, 1)
        return self.lm_head(features if masked_tokens is None else features[masked_tokens]), {}

    def max_positions(self):
        return 64

@register_model("sentence_encoder_of_10")
class Model(FairseqEncoderModel):
    def __init__(self, args, encoder):
        super().__init__(encoder)
        self.args = args
        self.apply(init_bert_params)

    @classmethod
    def build_model(cls, args, task):
        return cls(args, Encoder(args, task.source_dictionary))

    def forward(self, src_tokens, features_only=False, classification_head_name=None, **kwargs):
        return self.encoder(src_tokens, features_only, **kwargs)

@register_model_architecture("sentence_encoder_of_10", "sentence_encoder_of_10")
def base(args):
    pass
""",
        f"{BERT} --arch sentence_encoder_of_10",
    ),
    "masked_model_of_12": (
        """
from dataclasses import dataclass, field
import torch.nn as nn
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import fsdp_wrap
from fairseq.models import BaseFairseqModel, register_model
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.layer_norm import LayerNorm
from omegaconf import II

@dataclass
class Config(FairseqDataclass):
    width: int = field(default=8, metadata={"help": "width"})
    max_source_positions: int = II("task.tokens_per_sample")

@register_model("masked_model_of_12", dataclass=Config)
class Model(BaseFairseqModel):
    def __init__(self, cfg, words, pad):
        super().__init__()
        self.embed = nn.Embedding(words, cfg.width, pad)
        self.layer = fsdp_wrap(checkpoint_wrapper(nn.Sequential(nn.Linear(cfg.width, cfg.width), LayerNorm(cfg.width))))
        self.out = nn.Linear(cfg.width, words)
        self.positions = cfg.max_source_positions

    @classmethod
    def build_model(cls, cfg, task):
        return cls(cfg, len(task.source_dictionary), task.source_dictionary.pad())

    def forward(self, src_tokens, masked_tokens=None, **unused):
        x = self.embed(src_tokens)
        x = self.layer(x + x.mean(1, keepdim=True))
        return self.out(x), {}

    def max_positions(self):
        return self.positions
""",
        f"{BERT} --arch masked_model_of_12",
    ),
    "roberta_of_10": (
        """
from dataclasses import dataclass, field
from fairseq.models import register_model, register_model_architecture
from fairseq.models.roberta import RobertaEncoder, RobertaModel, roberta_prenorm_architecture
from fairseq.models.transformer.transformer_config import TransformerConfig
from fairseq.models.transformer.transformer_encoder import TransformerEncoderBase
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from fairseq.tasks import register_task
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask

@dataclass
class Config(MaskedLMConfig):
    mask_prob: float = field(default=0.3, metadata={"help": "share"})

@register_task("masked_of_10", dataclass=Config)
class Task(MaskedLMTask):
    pass

@dataclass
class LayerConfig(TransformerConfig):
    factor: float = field(default=1.0, metadata={"help": "factor"})

class Layers(TransformerEncoderBase):
    def build_encoder_layer(self, cfg):
        assert cfg.encoder.normalize_before and cfg.factor == 0.5 and cfg.encoder.layers == 1
        return TransformerEncoderLayerBase(cfg)

class Encoder(RobertaEncoder):
    def build_encoder(self, args, dictionary, embed_tokens):
        return Layers(LayerConfig.from_namespace(args), dictionary, embed_tokens)

    def extract_features(self, src_tokens, return_all_hiddens=False, **kwargs):
        features, extra = super().extract_features(src_tokens, return_all_hiddens, **kwargs)
        return features * self.args.factor, extra

@register_model("roberta_of_10")
class Model(RobertaModel):
    def __init__(self, args, encoder):
        super().__init__(args, encoder)
        self.apply(init_bert_params)
        self.register_classification_head("other", num_classes=2)

    @staticmethod
    def add_args(parser):
        RobertaModel.add_args(parser)
        parser.add_argument("--factor", type=float, default=0.5)

    @classmethod
    def build_model(cls, args, task):
        assert task.cfg.mask_prob == 0.3
        return cls(args, Encoder(args, task.source_dictionary))

@register_model_architecture("roberta_of_10", "roberta_of_10")
def small(args):
    for name in ("embed_dim", "ffn_embed_dim", "layers", "attention_heads"):
        setattr(args, f"encoder_{name}", 8 if "dim" in name else 1)
    roberta_prenorm_architecture(args)
""",
        f"{BERT} --arch roberta_of_10 --task masked_of_10 --encoder-normalize-before",
    ),
    "layers_of_12": (
        """
import torch, torch.nn as nn
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel, register_model
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.optim.amp_optimizer import AMPOptimizer

class Decoder(FairseqIncrementalDecoder):
    def __init__(self, cfg, dictionary):
        super().__init__(dictionary)
        self.embed = nn.Embedding(len(dictionary), cfg.decoder.embed_dim, dictionary.pad())
        self.layers = nn.ModuleList(TransformerDecoderLayerBase(cfg, no_encoder_attn=True) for _ in range(2))

    def forward(self, prev_output_tokens, encoder_out=None, incremental_state=None, **kwargs):
        x = self.embed(prev_output_tokens).transpose(0, 1)
        mask = torch.full((len(x), len(x)), float("-inf")).triu(1)
        for layer in self.layers:
            x, _, _ = layer(x, self_attn_mask=mask, self_attn_padding_mask=prev_output_tokens.eq(1))
        return torch.nn.functional.linear(x.transpose(0, 1), self.embed.weight), None

    def max_positions(self):
        return 64

@register_model("layers_of_12", dataclass=TransformerLanguageModelConfig)
class Model(FairseqLanguageModel):
    @classmethod
    def build_model(cls, args, task):
        return cls(Decoder(TransformerConfig.from_namespace(args), task.target_dictionary))
""",
        "--arch layers_of_12 --criterion cross_entropy --tokens-per-sample 16 --decoder-embed-dim 8 "
        "--decoder-ffn-embed-dim 8 --decoder-attention-heads 2",
    ),
}
