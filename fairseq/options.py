"""``fairseq.options``: parsers of the commands."""

from fairseq.config.literals import csv_str_list as csv_str_list
from fairseq.config.literals import eval_bool as eval_bool
from fairseq.config.literals import eval_str_dict as eval_str_dict
from fairseq.config.literals import eval_str_list as eval_str_list
from fairseq.config.options import parse_args_and_arch as parse_args_and_arch
from fairseq_cli.common import get_training_parser as get_training_parser
from fairseq_cli.eval_lm import get_eval_lm_parser as get_eval_lm_parser
from fairseq_cli.interactive import get_generation_parser as get_generation_parser
from fairseq_cli.interactive import get_interactive_generation_parser as get_interactive_generation_parser
from fairseq_cli.preprocess import get_preprocessing_parser as get_preprocessing_parser
from fairseq_cli.validate import get_validation_parser as get_validation_parser
