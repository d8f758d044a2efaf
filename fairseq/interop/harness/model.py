"""Model class of lm-evaluation-harness, which must be installed;
:mod:`fairseq.interop.harness.requests` does without.

Releases of the harness with plug-ins find it
by the entry point ``lm_eval.models`` of pyproject.toml.
"""

from __future__ import annotations

import logging
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from fairseq.errors import UserError
from fairseq.hub import MaskedLanguageModel, load_scorer
from fairseq.interop.harness.requests import EncoderRequests, Requests
from fairseq.modules import devices

logger = logging.getLogger(__name__)

ARGUMENTS = "path, data, batch_size, device, max_gen_toks, within_words"


@register_model("fairseq")
class FairseqLM(LM):
    """A language model, with the harness's three kinds of requests; an encoder, without generation.

    Raises:
        UserError: an argument is unknown or invalid, or the model cannot be read.
    """

    def __init__(
        self,
        path: str = "",  # checkpoint
        data: str | None = None,  # data folder or ``dict.txt`` (None: next to the checkpoint)
        batch_size: int | str = 8,  # rows read at once
        device: str | None = None,  # of the model (None and auto: a GPU if there is one)
        max_gen_toks: int | str = 256,  # most generated tokens of a request that names no number
        within_words: bool | str = False,  # whether an encoder masks the rest of a token's word, too
        max_batch_size: object = None,  # not used; the harness gives it to every model
        **unknown: object,
    ) -> None:
        super().__init__()
        if unknown or not path:
            what = f"{next(iter(unknown))}: unknown" if unknown else "path=CHECKPOINT is missing"
            raise UserError(f"--model_args: {what}; the arguments are {ARGUMENTS}")
        # The harness passes arguments as text or number, depending on whether they come from
        # `--model_args` or from a flag.
        if not str(batch_size).isdecimal() or not int(batch_size):
            raise UserError(f"batch_size {batch_size}: expected a number of rows, at least 1")
        device = device or "auto"
        if device != "auto" and not devices.is_present(device):
            logger.warning("device %s: there is no GPU, the CPU is used", device)  # the harness's default is a GPU
            device = "cpu"
        if str(within_words).lower() not in ("true", "false"):
            raise UserError(f"within_words {within_words}: expected true or false")
        model = load_scorer(path, data, device=device)
        within = str(within_words).lower() == "true"
        self.requests: Requests | EncoderRequests
        if isinstance(model, MaskedLanguageModel):
            self.requests = EncoderRequests(model, int(batch_size), within)
        elif within:
            raise UserError("`within_words`: the model is a decoder, which masks nothing; leave it out")
        else:
            self.requests = Requests(model, int(batch_size), int(max_gen_toks))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether it is the most probable."""
        return self.requests.log_likelihoods([_plain(request.args, 2) for request in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text."""
        return self.requests.rolling(_plain(request.args, 1)[0] for request in requests)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context."""
        return self.requests.generations(_plain(request.args, 2) for request in requests)

    def apply_chat_template(self, chat_history: object, add_generation_prompt: bool = True) -> str:
        """Refuse."""
        raise UserError("apply_chat_template: the model has no chat template; choose tasks of plain text")


def _plain(args: tuple[object, ...], count: int) -> Any:
    """Return the arguments of a request, if they are text."""
    # Tasks with images or sound pass a third argument.
    if len(args) != count:
        raise UserError("the task asks for images or sound; choose tasks of plain text")
    return args
