"""fairseq's groups of settings: a type, not to be extended."""

from fairseq.dataclass import FairseqDataclass as FairseqDataclass
from fairseq.dataclass.omegaconf import DictConfig

CommonConfig = CommonEvalConfig = DistributedTrainingConfig = DatasetConfig = OptimizationConfig = DictConfig
CheckpointConfig = FairseqBMUFConfig = GenerationConfig = EvalLMConfig = InteractiveConfig = DictConfig
EMAConfig = FairseqConfig = DictConfig
