"""The built-in parts, one declaration each: name, class, dataclass of its settings, architectures
of a model.

A class is given with its module, which is imported when the part is used. Settings are imported
here, so that command lines are parsed without torch. A class whose settings are in its own file is
declared without them: a command line that chooses it imports torch.
"""

from fairseq.config.registry import (
    BPES,
    CRITERIONS,
    EXTENSIONS,
    LR_SCHEDULERS,
    OPTIMIZERS,
    TASKS,
    TOKENIZERS,
    declare_model,
)
from fairseq.config.shared import AdaptiveCriterionConfig, LanguageModelingTaskConfig
from fairseq.criterions.settings import (
    CrossEntropyConfig,
    ElectraLossConfig,
    LabelSmoothedCrossEntropyConfig,
    NoSettings,
    SentenceRankingCriterionConfig,
)
from fairseq.models.architectures.bert import BERT, ELECTRA
from fairseq.models.architectures.lstm_lm import LSTM_LM
from fairseq.models.architectures.transformer_lm import TRANSFORMER_LM
from fairseq.models.architectures.transformer_xl import TRANSFORMER_XL
from fairseq.models.encoder_settings import BertConfig, ElectraConfig
from fairseq.models.lstm_lm_settings import LSTMLMConfig
from fairseq.models.recipes import OBJECTIVES, OF_MODELS
from fairseq.models.transformer_lm_settings import TransformerLMConfig
from fairseq.models.transformer_xl_settings import TransformerXLConfig
from fairseq.notes.settings import (
    TNF_BERT,
    TNF_ELECTRA,
    TNF_OBJECTIVES,
    TNF_RECIPES,
    CausalNoteConfig,
    TNFBertConfig,
    TNFElectraConfig,
    TNFMaskedLMConfig,
)
from fairseq.optim.lr_scheduler.settings import (
    CosineConfig,
    FixedConfig,
    InverseSqrtConfig,
    PolynomialDecayConfig,
    ReduceLROnPlateauConfig,
    TriangularConfig,
    TriStageConfig,
    WSDConfig,
)
from fairseq.optim.settings import (
    AdafactorConfig,
    AdagradConfig,
    AdamConfig,
    LAMBConfig,
    MuonConfig,
    NAGConfig,
    SGDConfig,
)
from fairseq.tasks.settings import MaskedLMTaskConfig, SentencePredictionTaskConfig, SentenceRankingTaskConfig

declare_model(
    "transformer_lm", "fairseq.models.transformer_lm:TransformerLanguageModel", TransformerLMConfig, TRANSFORMER_LM
)
declare_model("transformer_xl", "fairseq.models.transformer_xl:TransformerXL", TransformerXLConfig, TRANSFORMER_XL)
declare_model("lstm_lm", "fairseq.models.lstm_lm:LSTMLanguageModel", LSTMLMConfig, LSTM_LM)
declare_model("bert", "fairseq.models.bert:BertModel", BertConfig, BERT)
declare_model("electra", "fairseq.models.electra:ElectraModel", ElectraConfig, ELECTRA)
declare_model("tnf_bert", "fairseq.notes.tnf:TNFBert", TNFBertConfig, TNF_BERT)
declare_model("tnf_electra", "fairseq.notes.tnf:TNFElectra", TNFElectraConfig, TNF_ELECTRA)
OF_MODELS.update(TNF_RECIPES)
OBJECTIVES.update(TNF_OBJECTIVES)

EXTENSIONS.declare("notes", "fairseq.notes.extension:Notes", CausalNoteConfig)

TASKS.declare("language_modeling", "fairseq.tasks.language_modeling:LanguageModelingTask", LanguageModelingTaskConfig)
TASKS.declare("truncated_bptt_lm", "fairseq.tasks.language_modeling:TruncatedBPTTLMTask", LanguageModelingTaskConfig)
TASKS.declare("masked_lm", "fairseq.tasks.masked_lm:MaskedLMTask", MaskedLMTaskConfig)
TASKS.declare(
    "sentence_prediction", "fairseq.tasks.sentence_prediction:SentencePredictionTask", SentencePredictionTaskConfig
)
TASKS.declare("sentence_ranking", "fairseq.tasks.sentence_ranking:SentenceRankingTask", SentenceRankingTaskConfig)
TASKS.declare("tnf_masked_lm", "fairseq.notes.extension:TNFMaskedLMTask", TNFMaskedLMConfig)

CRITERIONS.declare("cross_entropy", "fairseq.criterions.cross_entropy:CrossEntropyCriterion", CrossEntropyConfig)
CRITERIONS.declare(
    "label_smoothed_cross_entropy",
    "fairseq.criterions.cross_entropy:LabelSmoothedCrossEntropyCriterion",
    LabelSmoothedCrossEntropyConfig,
)
CRITERIONS.declare("adaptive_loss", "fairseq.criterions.cross_entropy:AdaptiveLoss", AdaptiveCriterionConfig)
CRITERIONS.declare("electra", "fairseq.criterions.electra:ElectraCriterion", ElectraLossConfig)
CRITERIONS.declare("masked_lm", "fairseq.criterions.masked_lm:MaskedLMCriterion", NoSettings)
CRITERIONS.declare(
    "sentence_prediction", "fairseq.criterions.sentence_prediction:SentencePredictionCriterion", NoSettings
)
CRITERIONS.declare(
    "sentence_ranking",
    "fairseq.criterions.sentence_ranking:SentenceRankingCriterion",
    SentenceRankingCriterionConfig,
)

OPTIMIZERS.declare("adafactor", "fairseq.optim.adafactor:FairseqAdafactor", AdafactorConfig)
OPTIMIZERS.declare("adagrad", "fairseq.optim.sgd:Adagrad", AdagradConfig)
OPTIMIZERS.declare("adam", "fairseq.optim.adam:FairseqAdam", AdamConfig)
OPTIMIZERS.declare("lamb", "fairseq.optim.adam:FairseqLAMB", LAMBConfig)
OPTIMIZERS.declare("muon", "fairseq.optim.muon:FairseqMuon", MuonConfig)
OPTIMIZERS.declare("nag", "fairseq.optim.sgd:FairseqNAG", NAGConfig)
OPTIMIZERS.declare("sgd", "fairseq.optim.sgd:SGD", SGDConfig)

LR_SCHEDULERS.declare("cosine", "fairseq.optim.lr_scheduler.cycles:CosineSchedule", CosineConfig)
LR_SCHEDULERS.declare("fixed", "fairseq.optim.lr_scheduler.decays:FixedSchedule", FixedConfig)
LR_SCHEDULERS.declare("inverse_sqrt", "fairseq.optim.lr_scheduler.decays:InverseSqrtSchedule", InverseSqrtConfig)
LR_SCHEDULERS.declare(
    "polynomial_decay", "fairseq.optim.lr_scheduler.decays:PolynomialDecaySchedule", PolynomialDecayConfig
)
LR_SCHEDULERS.declare(
    "reduce_lr_on_plateau", "fairseq.optim.lr_scheduler.decays:ReduceLROnPlateau", ReduceLROnPlateauConfig
)
LR_SCHEDULERS.declare("tri_stage", "fairseq.optim.lr_scheduler.decays:TriStageSchedule", TriStageConfig)
LR_SCHEDULERS.declare("triangular", "fairseq.optim.lr_scheduler.cycles:TriangularSchedule", TriangularConfig)
LR_SCHEDULERS.declare("wsd", "fairseq.optim.lr_scheduler.decays:WSDSchedule", WSDConfig)

TOKENIZERS.declare("moses", "fairseq.text.tokenizers.moses:Moses")
TOKENIZERS.declare("space", "fairseq.text.tokenizers.base:Space")
BPES.declare("gpt2", "fairseq.text.tokenizers.hf:GPT2")
BPES.declare("hf", "fairseq.text.tokenizers.hf:HuggingFace")
BPES.declare("sentencepiece", "fairseq.text.tokenizers.sentencepiece:SentencePiece")
BPES.declare("subword_nmt", "fairseq.text.tokenizers.subword_nmt:SubwordNMT")
