"""Choices of settings."""

from fairseq.dataclass import DATASET_IMPL_CHOICES as DATASET_IMPL_CHOICES
from fairseq.dataclass import DDP_BACKEND_CHOICES as DDP_BACKEND_CHOICES
from fairseq.dataclass import DDP_COMM_HOOK_CHOICES as DDP_COMM_HOOK_CHOICES
from fairseq.dataclass import LOG_FORMAT_CHOICES as LOG_FORMAT_CHOICES
from fairseq.dataclass import ZERO_SHARDING_CHOICES as ZERO_SHARDING_CHOICES
from fairseq.dataclass import ChoiceEnum as ChoiceEnum
from fairseq.dataclass import StrEnum as StrEnum
