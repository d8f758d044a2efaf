"""Evaluate a language model on tasks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.fields import Config, flag
from fairseq.config.parser import Parser
from fairseq_cli import command, program


@dataclass(frozen=True)
class HarnessConfig(Config):
    """Evaluation harness: settings of ``fairseq-harness``."""

    data: str | None = flag(None, "data folder or dict.txt (default: next to the checkpoint)", metavar="DATA")
    tasks: str | None = flag(None, "comma-separated names of tasks", metavar="NAME,…")
    pairs: str | None = flag(None, "minimal pairs: JSON lines, or a folder of them such as BLiMP", metavar="PATH")
    within_words: bool = flag(False, "encoders: also mask the rest of a token's word")
    include_path: str | None = flag(None, "folder with your own task files", metavar="DIR")
    num_fewshot: int | None = flag(None, "examples in the prompt (default: the task's)", low=0)
    limit: int | None = flag(None, "examples per task (default: all)", low=1)
    batch_size: int = flag(8, "rows read at once", low=1)
    max_gen_toks: int = flag(256, "maximum tokens to generate, unless the task names a number", low=1)
    bootstrap_iters: int = flag(1000, "samples for standard errors (0: none)", low=0)
    cpu: bool = flag(False, "use the CPU even if a GPU is available")
    results_path: str | None = flag(None, "folder for results.json", aliases=("--out",), metavar="DIR")


def get_harness_parser() -> Parser:
    examples = [
        "fairseq-harness checkpoints --tasks lambada_openai,hellaswag",
        "fairseq-harness checkpoints --pairs blimp.jsonl",
    ]
    description = "Evaluate a language model on tasks of EleutherAI's lm-evaluation-harness."
    parser = Parser(description, [HarnessConfig], examples=examples)
    parser.add_user_dir()
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint of a language model, or its folder")
    return parser


main = program("harness")
cli_main = command(main, get_harness_parser)

if __name__ == "__main__":
    cli_main()
