"""Names that fairseq has in this module."""

from fairseq.data.token_block_utils_fast import PlasmaArray as PlasmaArray
from fairseq.data.token_block_utils_fast import PlasmaView as PlasmaView
