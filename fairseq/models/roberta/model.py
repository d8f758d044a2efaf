"""Names that fairseq has in this module."""

from fairseq.models.registries import roberta_base_architecture as roberta_base_architecture
from fairseq.models.registries import roberta_large_architecture as roberta_large_architecture
from fairseq.models.registries import xlm_architecture as xlm_architecture
from fairseq.models.roberta import RobertaClassificationHead as RobertaClassificationHead
from fairseq.models.roberta import RobertaEncoder as RobertaEncoder
from fairseq.models.roberta import RobertaLMHead as RobertaLMHead
from fairseq.models.roberta import RobertaModel as RobertaModel
from fairseq.models.roberta import init_bert_params as init_bert_params
from fairseq.models.roberta import roberta_prenorm_architecture as roberta_prenorm_architecture
